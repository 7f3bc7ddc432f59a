"""The configs beside the weights, in the terms of the models here, and how other codes make the images."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from keras_vit.errors import UserError
from keras_vit.models.config import Classifier, Gelu
from keras_vit.models.weight_resizing import Resampler

if TYPE_CHECKING:
    from keras_vit.images.preprocessing import Preprocessing

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
ValueRange = tuple[float | tuple[float, ...], float | tuple[float, ...]]
# Field of ViTConfig, ResNetConfig or a task -> (name in config.json, value).
Sizes = dict[str, tuple[str, object]]


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


def torch_images(interpolation: str) -> ImageProcessing:
    """Return the images of torchvision's ImageClassification, and of Meta's make_classification_eval_transform."""
    fields = {"library": "timm", "background": None, "resize": "resize-small", "crop_from": 256}
    value_range = value_range_of(IMAGENET_MEAN, IMAGENET_STD)
    return ImageProcessing({**fields, "interpolation": interpolation}, size=(224, 224), value_range=value_range)


def value_range_of(mean: Any, std: Any, white: float = 1.0) -> ValueRange | None:
    """(mean, std) of images in [0, white] -> `Preprocessing.value_range`."""
    if mean is None or std is None:
        return None
    channels = [mean, std]
    is_right = all(isinstance(part, list) for part in channels)
    is_right = is_right and all(isinstance(n, int | float) and -1e6 < n < 1e6 for n in (*mean, *std))
    is_right = is_right and len(mean) == len(std) > 0 and min(std) > 0
    check_field(is_right, "mean and std", "lists of one number per channel, those of std positive", channels)
    low = tuple(-m / s for m, s in zip(mean, std, strict=True))
    high = tuple((white - m) / s for m, s in zip(mean, std, strict=True))
    if len(set(low)) == len(set(high)) == 1:
        return low[0], high[0]
    return low, high


def mean_and_std(preprocessing: "Preprocessing") -> tuple[list[float], list[float]]:
    """The inverse of `value_range_of` for images in [0, 1], one number per channel."""
    lows, highs = preprocessing.channel_ranges()
    scales = [high - low for low, high in zip(lows, highs, strict=True)]
    return [-low / scale for low, scale in zip(lows, scales, strict=True)], [1 / scale for scale in scales]


@dataclasses.dataclass(frozen=True)
class FileConfig:
    """Settings of a config.json; None where it has none."""

    num_heads: int | None = None
    num_groups: int | None = None
    gelu: Gelu | None = None
    """Also says whether the model is named, which determines all settings."""
    layer_norm_epsilon: float | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of ViTConfig that the arrays do not show."""
    layer_scale: float | None = None
    image_size: tuple[int, int] | None = None
    position_size: tuple[int, int] | None = None
    """Size of the images that the position embeddings are for, if it is another one."""
    image_size_is_exact: bool = True
    """Whether the position embeddings must have the grid of this size."""
    classifier: Classifier | None = None
    images: ImageProcessing | None = None
    """How the original makes its images."""
    sizes: Mapping[str, tuple[str, object]] = dataclasses.field(default_factory=dict)
    """Values that the arrays must agree with: ViTConfig field -> (name in config.json, value)."""
    resnet_sizes: Mapping[str, tuple[str, object]] = dataclasses.field(default_factory=dict)
    """The same for a ResNet or the stem of a hybrid."""
    heads: tuple[str, ...] = ()
    """The heads that it says there are, as far as it says so."""
    channels: tuple[str, int] | None = None
    """(name in config.json, channels of the images), if it says so."""
    num_classes: tuple[str, int] | None = None
    """(name in config.json, width of the head), if it says so."""
    task_sizes: Mapping[str, tuple[str, object]] = dataclasses.field(default_factory=dict)
    """The same for the further task of the model, by field of its configuration."""
    task_settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Fields of that configuration that the arrays do not tell; None for its default."""
    classifier_activation: str | None = None
    """Activation of the head, in codes where it is a part of the model."""
    resampler: Resampler | None = None
    """How the original resizes position embeddings, if not as others of its layout."""


def check_field(is_right: object, field: str, what: str, value: object, file: str = "config.json") -> None:
    """Raise UserError unless the value of a field in a config is what it should be."""
    if not is_right:
        raise UserError(f"{file} should give {field!r} as {what}, but gives {value!r:.80}.")


def check_supported(field: str, value: object, supported: Collection[object], file: str = "config.json") -> None:
    """Raise UserError unless a value of a config is one of those that models here can have."""
    if value not in [*supported]:  # the value may have no hash
        listed = ", ".join(str(each) for each in supported if each is not None)[:300]
        raise UserError(f"{file} has the unsupported {field:.80}={value!r:.80}; supported: {listed or 'none'}.")


def number(config: dict, field: str, kind: type[int] | type[float] = int) -> Any:
    """A positive number of a config; None if it has none."""
    value: Any = config.get(field)
    if value is None:
        return None
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)
    check_field(is_number and 0 < value < 10**6, field, "a positive number", value)
    return kind(value)


def named_number(config: dict, field: str) -> tuple[str, int] | None:
    """(field, number), if the config has it."""
    value = number(config, field)
    return None if value is None else (field, value)


def pair(config: dict, field: str) -> tuple[int, int] | None:
    """(height, width) of a config; None if it has none."""
    size = config.get(field)
    if size is None:
        return None
    sides: Any = [size, size] if isinstance(size, int) else size
    if field in ("input_size", "test_input_size") and isinstance(size, list) and len(size) == 3:  # channels come first
        sides = size[1:]
    is_pair = isinstance(sides, list) and len(sides) == 2 and all(is_side(side) for side in sides)
    check_field(is_pair, field, "one or two numbers of pixels", size)
    return sides[0], sides[1]


def is_side(side: Any) -> bool:
    """Whether a value of a config is a number of pixels, or of layers."""
    return isinstance(side, int) and not isinstance(side, bool) and 0 < side < 10**5


def part(config: dict, field: str, file: str = "config.json") -> dict:
    """An object inside a config; empty if it has none."""
    value = config.get(field) or {}
    check_field(isinstance(value, dict), field, "an object", value, file)
    return value


def sizes_in(config: dict, names: Mapping[str, str]) -> Sizes:
    """The sizes that a config has and the arrays have as well; `names` is by field of ViTConfig."""
    sizes: Sizes = {field: (name, number(config, name)) for field, name in names.items()}
    sizes["patch"] = ("patch_size", pair(config, "patch_size"))
    return {field: (name, value) for field, (name, value) in sizes.items() if value is not None}


def same_fields(config: dict, names: Mapping[str, str]) -> Sizes:
    """Fields that a config of here has as well, with the same meaning; `names`: in the file -> here."""
    return {field: (name, config[name]) for name, field in names.items() if name in config}
