"""How other codes make the images of their models: resize, crop, and the range of the values."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from keras_vit.errors import UserError

if TYPE_CHECKING:
    from keras_vit.images.preprocessing import Preprocessing

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
ValueRange = tuple[float | tuple[float, ...], float | tuple[float, ...]]


@dataclasses.dataclass(frozen=True)
class ImageProcessing:
    """The preprocessing of a library for images of any size; the defaults are that of vit_jax."""

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of Preprocessing: how images of `size` are resized."""
    size: tuple[int, int] | None = None
    """Height and width to which it leads, if it says so; the image size of DINOv2's weights is another."""
    crop_shares: Mapping[tuple[int, int] | None, float] = dataclasses.field(default_factory=dict)
    """timm's crop_pct of an image size, and of all others under None: the share of the resized image in the crop."""
    value_range: ValueRange | None = None
    """See Preprocessing; None for the official [-1, 1]."""

    def at(self, image_size: int | tuple[int, int], channels: int) -> "Preprocessing":
        """The preprocessing for images of a size; with another number of channels, of the official range."""
        from keras_vit.images.preprocessing import Preprocessing  # imported here: it imports Keras, which takes seconds

        size = (image_size, image_size) if isinstance(image_size, int) else image_size
        fits = self.value_range is not None and self.num_channels in (None, channels)
        fields = {"channels": channels, "value_range": self.value_range if fits else (-1.0, 1.0), **self.fields}
        if not self.crop_shares:
            return Preprocessing(self.size or size, **fields).for_image_size(size)
        share = self.crop_shares.get(size, self.crop_shares[None])
        full = math.floor(size[0] / share), math.floor(size[1] / share)
        if fields["resize"] == "resize-small":
            fields["crop_from"] = full[0] if full[0] == full[1] else full
        elif full != size:
            fields["crop_from"] = full
        return Preprocessing(size, **fields)

    @property
    def num_channels(self) -> int | None:
        """The channels that the value range is for; None for any."""
        low = self.value_range and self.value_range[0]
        return len(low) if isinstance(low, tuple) else None


def value_range_of(mean: Any, std: Any, white: float = 1.0) -> ValueRange | None:
    """(mean, std) of images in [0, white] -> `Preprocessing.value_range`."""
    if mean is None or std is None:
        return None
    channels = [mean, std]
    if not all(isinstance(part, list) and all(_is_moderate(n) for n in part) for part in channels):
        raise UserError(
            f"The mean and standard deviation of the images should be lists of numbers, but are {mean!r}, {std!r}."
        )
    if len(mean) != len(std) or not mean or min(std) <= 0:
        raise UserError(
            f"The images' mean {mean} and standard deviation {std} should have one positive number per channel."
        )
    low = tuple(-m / s for m, s in zip(mean, std, strict=True))
    high = tuple((white - m) / s for m, s in zip(mean, std, strict=True))
    if len(set(low)) == len(set(high)) == 1:
        return low[0], high[0]
    return low, high


def _is_moderate(number: object) -> bool:
    return isinstance(number, int | float) and -1e6 < number < 1e6
