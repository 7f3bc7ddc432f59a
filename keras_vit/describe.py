"""What a checkpoint holds, told from its headers."""

import dataclasses
import math
import os
from collections.abc import Mapping

from keras_vit.config import MODELS, ModelConfig, ResNetConfig, ViTConfig
from keras_vit.recognition import declared_grid, infer_config, open_checkpoint, stored_image_size

# What an official model is known by; dropout and numerics belong to training and to the code that wrote the file.
_SIZES = {
    ViTConfig: ("patch_size", "hidden_size", "num_layers", "num_heads", "mlp_dim", "classifier", "axial"),
    ResNetConfig: ("block_units", "root_channels", "stage_channels", "preactivation", "axial_heads"),
}


@dataclasses.dataclass(frozen=True)
class Description:
    """What `describe` found; `str` of it is a text of a few lines."""

    layout: str
    """npz, npz-linen, big_vision, huggingface, timm or torchvision."""
    name: str | None
    """The official model that has this architecture."""
    config: ModelConfig
    """As `from_checkpoint` would build it."""
    image_size: tuple[int, int]
    """Height and width in pixels that `from_checkpoint` would take."""
    num_classes: int
    """Width of the head; 0 without one."""
    num_parameters: int
    """Numbers in all weights."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape in the file of every weight, by the file's keys."""
    types: tuple[str, ...]
    """Types of the numbers; bfloat16 as such."""
    unused: tuple[str, ...]
    """Keys of arrays that are no weights of the model."""

    def __str__(self) -> str:
        lines = {
            "layout": self.layout,
            "model": self.name or f"a {type(self.config).__name__} of a size of its own",
            "image size": f"{self.image_size[0]}x{self.image_size[1]}",
            "classes": str(self.num_classes or "none, it ends with the features"),
            "parameters": f"{self.num_parameters:,} in {len(self.shapes)} arrays of {', '.join(self.types)}",
        }
        for field in dataclasses.fields(self.config):
            lines[field.name] = str(getattr(self.config, field.name))
        if self.unused:
            lines["left out"] = f"{len(self.unused)} arrays: {', '.join(self.unused[:4])}"
        width = max(map(len, lines)) + 2
        return "\n".join(f"{name:{width}}{value}" for name, value in lines.items())


def describe(
    path: str | os.PathLike,
    *,
    stored_grid: tuple[int, int] | None = None,
    num_heads: int | None = None,
    num_groups: int | None = None,
) -> Description:
    """Say what a checkpoint holds without reading its numbers.

    Args:
        path: of a file or folder that `from_checkpoint` reads.
        stored_grid, num_heads, num_groups: where the file cannot tell them, as for `from_checkpoint`.
    """
    checkpoint = open_checkpoint(path)
    given = {"num_heads": num_heads, "num_groups": num_groups}
    declared = dataclasses.replace(checkpoint.declared, **{name: n for name, n in given.items() if n is not None})
    config = infer_config(checkpoint, declared)
    weights = checkpoint.weights
    heads = (math.prod(weights[key].shape) for key in ("head/bias", "resnet/head/conv2d/bias") if key in weights)
    sources = {weight.source.key: weight.source for weight in weights.values()}
    return Description(
        layout=checkpoint.layout,
        name=next((name for name, model in MODELS.items() if _alike(config, model)), None),
        config=config,
        image_size=stored_image_size(checkpoint, config, stored_grid or declared_grid(checkpoint, config)),
        num_classes=next(heads, 0),
        num_parameters=sum(math.prod(weight.shape) for weight in weights.values()),
        shapes={key: stored.shape for key, stored in sorted(sources.items())},
        types=tuple(sorted({"bfloat16" if s.dtype.kind == "V" else s.dtype.name for s in sources.values()})),
        unused=(*checkpoint.strangers, *checkpoint.unused),
    )


def _alike(config: ModelConfig, model: ModelConfig) -> bool:
    if type(config) is not type(model) or any(getattr(config, f) != getattr(model, f) for f in _SIZES[type(config)]):
        return False
    if isinstance(config, ResNetConfig):
        return True
    if config.stem is None or model.stem is None:
        return config.stem is model.stem
    if type(config.stem) is not type(model.stem) or not isinstance(config.stem, ResNetConfig):
        return config.stem == model.stem
    return _alike(config.stem, model.stem)
