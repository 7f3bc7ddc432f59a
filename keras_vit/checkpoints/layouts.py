"""The list of the formats of checkpoint files, and which of them a file or a model is for."""

import pathlib
from collections.abc import Mapping
from typing import Protocol

from keras_vit.checkpoints.formats import (
    big_transfer,
    big_vision,
    meta,
    open_clip,
    timm,
    timm_eva,
    torchvision,
    vit_jax,
    vit_jax_linen,
)
from keras_vit.checkpoints.formats.file_config import FileConfig
from keras_vit.checkpoints.formats.layout import Layout, WrittenModel
from keras_vit.checkpoints.formats.transformers import bit, clip, dinov2, dinov3, eomt, owl, vit
from keras_vit.errors import UserError, check_choice, refuse_first
from keras_vit.files.kinds import MODEL_SUFFIXES
from keras_vit.files.lazy_array import LazyArray
from keras_vit.files.remote import is_remote
from keras_vit.models.config import ModelConfig, ResNetConfig

# ResNets of timm and transformers have an output stride of at most 32: they dilate later stages, ResNets here do not.
TORCH_STAGES = 4
# Groups of GroupNorm in all codes; only config.json of transformers has others.
NUM_GROUPS = 32
HEADS = ("head/", "head_distillation/", "resnet/head/")


class Format(Protocol):
    """A module of `keras_vit/checkpoints/formats/`, such as meta.py: how one kind of files is read."""

    LAYOUT: str
    """Name in `save_checkpoint` and in messages; several formats may share it."""
    CONFIG_FILES: tuple[str, ...]
    """Names of the configs beside the weights."""

    def identify(self, arrays: Mapping[str, LazyArray], /) -> Layout | None:
        """Is a file with these arrays of this format? Then the rules of its keys, and the numerics of its code."""

    def read_config(self, files: Mapping[str, dict], layout: Layout, /) -> FileConfig:
        """Read its configs, by name of the file. Raises UserError for unsupported settings."""


class WrittenFormat(Format, Protocol):
    """A module such as timm.py, of files that are written, too."""

    SUFFIXES: tuple[str, ...]
    """Of its files; "" is a folder with configs."""

    def expressible(self, model: WrittenModel, /) -> dict[str, tuple | None] | None:
        """The values that it can express, by field of ViTConfig; None if it is for other kinds of models."""

    def layout_for(self, model: WrittenModel, /) -> Layout:
        """The rules and numerics for writing a model that it can express."""

    def write_config(self, model: WrittenModel, /) -> dict[str, dict]:
        """Its configs, by name of the file. Raises UserError for what they cannot express."""


# A new format is a module and its name here. Of those with one name, the first that is for a kind of model writes it.
_WRITTEN: tuple[WrittenFormat, ...] = (
    *(vit_jax, big_transfer, vit_jax_linen, big_vision),
    *(eomt, owl, dinov3, dinov2, clip, vit, bit),  # transformers
    *(timm_eva, timm, torchvision),
)
FORMATS: tuple[Format, ...] = (meta, open_clip, *_WRITTEN)
# Those of models with a further task, which no other format can write.
_OF_TASKS = (eomt, owl)
LAYOUTS = tuple(dict.fromkeys(module.LAYOUT for module in _WRITTEN))


class UnknownLayout(UserError):
    """The arrays are those of no known layout."""


def identify_format(arrays: Mapping[str, LazyArray]) -> tuple[Format, Layout]:
    """The format of the file with these arrays, whose keys have been normalized, and its layout.

    Raises UnknownLayout, or UserError for a layout that is known but not supported.
    """
    for module in FORMATS:
        if (layout := module.identify(arrays)) is not None:
            return module, layout
    raise UnknownLayout(
        f"The file is not a Vision Transformer, hybrid or BiT of a known layout: its {len(arrays)} arrays begin with "
        f"{', '.join(sorted(arrays)[:3]) or 'nothing'}."
    )


def format_for(model: WrittenModel, layout_name: str) -> tuple[WrittenFormat, Layout]:
    """The format that a model is written in. Raises UserError for settings that it cannot express."""
    able: dict[str, tuple[WrittenFormat, dict]] = {}
    for module in _WRITTEN:
        if (module in _OF_TASKS) != (model.task is not None):
            continue
        if (fields := module.expressible(model)) is not None:
            able.setdefault(module.LAYOUT, (module, fields))
    resnet = model.config if isinstance(model.config, ResNetConfig) else model.config.stem
    own_groups = isinstance(resnet, ResNetConfig) and resnet.num_groups != NUM_GROUPS
    if layout_name not in able:
        others = [
            name for name, (module, _) in able.items() if not own_groups or module.layout_for(model).stores_groups
        ]
        kind = "a model that segments or detects" if model.task is not None else "this ResNet"
        raise UserError(f"The layout {layout_name} cannot express {kind}; {' or '.join(others) or 'only .keras'} can.")
    module, fields = able[layout_name]
    _refuse_inexpressible(model.config, layout_name, fields)
    layout = module.layout_for(model)
    if isinstance(resnet, ResNetConfig):
        cannot, stages = f"The layout {layout_name} cannot express", len(resnet.block_units)
        too_deep = f"{cannot} a ResNet of {stages} stages, only of up to {TORCH_STAGES}; choose another."
        groups = f"{cannot} GroupNorm with {resnet.num_groups} groups, because its files are read with {NUM_GROUPS}"
        refuse_first(
            [
                (resnet.axial_heads is not None, f"{cannot} axial attention; save it as a .keras file."),
                (layout.torch and stages > TORCH_STAGES, too_deep),
                (own_groups and not layout.stores_groups, f"{groups}; choose huggingface."),
            ]
        )
    return module, layout


def _refuse_inexpressible(config: ModelConfig, layout: str, fields: Mapping[str, tuple | None]) -> None:
    for field, values in fields.items():
        value = getattr(config, field)
        if values is not None and value not in values and type(value) not in values:
            and_head = "" if values else " and a head"
            raise UserError(f"The layout {layout} cannot express {field}={value!r:.80}{and_head}; choose another.")


def check_target(path: pathlib.Path, layout: str) -> None:
    """Raise UserError for an unknown layout, and for a file with another suffix or in a missing folder."""
    check_choice("The layout", layout, LAYOUTS)
    if not is_remote(path) and not path.parent.is_dir():
        raise UserError(f"There is no folder {str(path.parent)!r} to write {path.name} into.")
    suffix = _suffixes(layout)[0]
    if not is_folder(path, layout) and path.suffix != suffix:
        raise UserError(f"A file of the layout {layout} should end in {suffix}, but is {path.name!r}; name it so.")


def check_new(path: pathlib.Path, layout: str) -> None:
    """As `check_target`, for what must not be there yet."""
    if path.exists():
        raise UserError(f"{path} already exists; give the name of a new one.")
    check_target(path, layout)


def _suffixes(layout: str) -> tuple[str, ...]:
    return next(module.SUFFIXES for module in _WRITTEN if layout == module.LAYOUT)


def is_folder(path: pathlib.Path, layout: str) -> bool:
    """Whether the layout is written as a folder with configs."""
    suffixes = _suffixes(layout)
    return suffixes == ("",) or ("" in suffixes and path.suffix not in MODEL_SUFFIXES)


def num_classes_of(weights: Mapping) -> int:
    """Width of the head among weights (anything with a shape) by name; 0 without a head."""
    leaves = ("head/bias", "resnet/head/conv2d/bias", "head/kernel")  # a projection has no bias
    found = next((weights[key] for key in leaves if key in weights), None)
    return 0 if found is None else found.shape[-1] if found.shape else 1
