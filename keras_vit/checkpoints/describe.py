"""What a checkpoint holds, told from its headers."""

import dataclasses
import math
import os
from collections.abc import Mapping

from keras_vit.checkpoints.formats import num_classes_of
from keras_vit.checkpoints.hf_config import FileConfig
from keras_vit.checkpoints.infer_config import (
    Checkpoint,
    UnknownNumHeads,
    file_config_grid,
    infer_config,
    known_image_size,
    known_num_heads,
    open_checkpoint,
    untold,
)
from keras_vit.errors import check_integers
from keras_vit.models.config import MODELS, ModelConfig, ResNetConfig, ViTConfig

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
    config: ModelConfig | None
    """As `from_checkpoint` would build it; None where it would ask for num_heads."""
    fields: Mapping[str, object]
    """The fields of the configuration by name; num_heads None where the file does not tell them."""
    image_size: tuple[int, int] | None
    """Height and width in pixels that the file is for; None where it does not tell them."""
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
    untold: tuple[str, ...]
    """What a timm file without config.json leaves open: "block" (before or after which the norms stand), "gelu",
    "num_heads"; `from_checkpoint` asks for the latter two."""
    unexpected_keys: tuple[str, ...]
    """Keys of arrays that no model built here has; `from_checkpoint` refuses such a file."""

    other_resize: str | None = None
    """How the original resizes images, if the preprocessing of `from_checkpoint` does it otherwise."""

    def __str__(self) -> str:
        lines = {
            "layout": self.layout,
            "model": self.name
            or f"a {'ViTConfig' if 'hidden_size' in self.fields else 'ResNetConfig'} of its own size",
            "image size": "x".join(map(str, self.image_size)) if self.image_size else _NOT_IN_FILE,
            "classes": str(self.num_classes or "none, it ends with the features"),
            "parameters": f"{self.num_parameters:,} in {len(self.shapes)} arrays of {', '.join(self.types)}",
        }
        for field, value in self.fields.items():
            lines[field] = str(value)
        if self.fields.get("num_heads", 0) is None:
            assumed = self.config and f"; taken are the {self.config.num_heads} of the official model of this width"
            lines["num_heads"] = _NOT_IN_FILE + (assumed or "")
        if "block" in self.untold:
            lines["norms"] = (
                f"{_NOT_IN_FILE}; taken are norms before each branch, not after it (timm's residual post-norm)"
            )
        if "gelu" in self.untold:
            lines["gelu"] = f"{_NOT_IN_FILE}; timm has models with these arrays and either form"
        if self.other_resize:
            lines["resize"] = f"{self.other_resize} in the original; another one here"
        if self.unexpected_keys:
            lines["not built here"] = f"{len(self.unexpected_keys)} arrays: {', '.join(self.unexpected_keys[:4])}"
        if self.unused:
            lines["left out"] = f"{len(self.unused)} arrays: {', '.join(self.unused[:4])}"
        width = max(map(len, lines)) + 2
        return "\n".join(f"{name:{width}}{value}" for name, value in lines.items())


_NOT_IN_FILE = "not told by the file"


def describe(
    path: str | os.PathLike,
    *,
    stored_grid: tuple[int, int] | None = None,
    num_heads: int | None = None,
    num_groups: int | None = None,
) -> Description:
    """Say what a checkpoint holds without reading its numbers.

    Args:
        path: of a file or folder that `from_checkpoint` reads; or an address or official name, see `find_checkpoint`.
        stored_grid, num_heads, num_groups: what is known beyond the file, as for `from_checkpoint`.
    """
    check_integers("stored_grid", stored_grid, length=2)
    check_integers("num_heads", num_heads)
    check_integers("num_groups", num_groups)
    checkpoint = open_checkpoint(path)
    weights, file_config = checkpoint.weights, checkpoint.file_config
    given = {"num_heads": num_heads, "num_groups": num_groups}
    file_config = dataclasses.replace(file_config, **{name: n for name, n in given.items() if n is not None})
    config, heads_told = _config(checkpoint, file_config)
    grid = stored_grid or file_config_grid(checkpoint, config)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    known = heads_told is not False
    sources = {weight.source.key: weight.source for weight in weights.values()}
    return Description(
        layout=checkpoint.layout,
        name=official_name(config) if known else None,
        config=config if known else None,
        fields=fields if heads_told else fields | {"num_heads": None},
        untold=tuple(name for name in untold(checkpoint, config) if given.get(name) is None),
        image_size=known_image_size(checkpoint, config, grid),
        num_classes=num_classes_of(weights),
        num_parameters=sum(math.prod(weight.shape) for weight in weights.values()),
        shapes={key: stored.shape for key, stored in sorted(sources.items())},
        types=tuple(sorted({"bfloat16" if s.dtype.kind == "V" else s.dtype.name for s in sources.values()})),
        unused=checkpoint.unused,
        unexpected_keys=checkpoint.unexpected_keys,
        other_resize=file_config.other_resize,
    )


def _config(checkpoint: Checkpoint, file_config: FileConfig) -> tuple[ModelConfig, bool | None]:
    """The configuration, and whether its heads are told (or it has none); None: taken are the official ones, False:
    one is taken, for there are none.
    """
    try:
        config = infer_config(checkpoint, file_config)
    except UnknownNumHeads:
        return infer_config(checkpoint, dataclasses.replace(file_config, num_heads=1)), False
    return config, isinstance(config, ResNetConfig) or known_num_heads(
        checkpoint.weights, file_config
    ) is not None or None


def official_name(config: ModelConfig) -> str | None:
    """The name in MODELS of this architecture, whatever its dropout and numerics; None where it has none."""
    return next((name for name, model in MODELS.items() if _alike(config, model)), None)


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
