"""The configs beside the weights, in the terms of the models here."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from keras_vit.checkpoints.formats.images import ImageProcessing
from keras_vit.errors import UserError
from keras_vit.models.config import Classifier, Gelu
from keras_vit.models.weight_resizing import Resampler

# Field of ViTConfig or ResNetConfig -> (name in config.json, value).
Sizes = dict[str, tuple[str, object]]


@dataclasses.dataclass(frozen=True)
class FileConfig:
    """Settings of a config.json; None where it has none."""

    num_heads: int | None = None
    num_groups: int | None = None
    gelu: Gelu | None = None
    """Also says whether the model is named, which determines all settings."""
    layer_norm_epsilon: float | None = None
    layer_scale: float | None = None
    image_size: tuple[int, int] | None = None
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
    resampler: Resampler | None = None
    """How the original resizes position embeddings, if not as others of its layout."""


def number(config: dict, field: str, kind: type[int] | type[float] = int) -> Any:
    """A positive number of a config; None if it has none."""
    value: Any = config.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | kind) or not 0 < value < 10**6:
        raise UserError(f"config.json should give a positive number for {field!r}, but gives {value!r:.80}.")
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
    if not (isinstance(sides, list) and len(sides) == 2 and all(is_side(side) for side in sides)):
        raise UserError(f"config.json should give {field!r} as one or two numbers of pixels, but gives {size!r:.80}.")
    return sides[0], sides[1]


def is_side(side: Any) -> bool:
    """Whether a value of a config is a number of pixels, or of layers."""
    return isinstance(side, int) and not isinstance(side, bool) and 0 < side < 10**5


def part(config: dict, field: str) -> dict:
    """An object inside a config; empty if it has none."""
    value = config.get(field) or {}
    if not isinstance(value, dict):
        raise UserError(f"config.json should give {field} as an object, but gives {value!r:.80}.")
    return value


def check_supported(field: str, value: object, supported: Iterable[object]) -> None:
    """Raise UserError unless a value of a config is one of those that models here can have."""
    supported = [*supported]  # the value may have no hash
    if value not in supported:
        listed = ", ".join(str(each) for each in supported if each is not None)
        raise UserError(f"config.json has the unsupported {field}={value!r:.80}; supported: {listed}.")


def sizes_in(config: dict, names: Mapping[str, str]) -> Sizes:
    """The sizes that a config has and the arrays have as well; `names` is by field of ViTConfig."""
    sizes: Sizes = {field: (name, number(config, name)) for field, name in names.items()}
    sizes["patch"] = ("patch_size", pair(config, "patch_size"))
    return {field: (name, value) for field, (name, value) in sizes.items() if value is not None}
