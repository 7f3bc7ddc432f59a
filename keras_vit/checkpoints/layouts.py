"""The list of the formats of checkpoint files, and which of them a file or a model is for."""

import pathlib
from collections.abc import Mapping

from keras_vit.checkpoints.formats.jax import BIG_TRANSFER, BIG_VISION, VIT_JAX, VIT_JAX_LINEN
from keras_vit.checkpoints.formats.keras_hub import KERAS_HUB
from keras_vit.checkpoints.formats.kmodels_writing import KMODELS, KMODELS_TASKS
from keras_vit.checkpoints.formats.layout import Format, Layout
from keras_vit.checkpoints.formats.meta import META
from keras_vit.checkpoints.formats.open_clip import OPEN_CLIP
from keras_vit.checkpoints.formats.timm import TIMM
from keras_vit.checkpoints.formats.torchvision import TORCHVISION
from keras_vit.checkpoints.formats.transformers.clip import CLIP, OWL
from keras_vit.checkpoints.formats.transformers.dino import DINOV2, DINOV3
from keras_vit.checkpoints.formats.transformers.eomt import EOMT
from keras_vit.checkpoints.formats.transformers.vit import BIT, VIT
from keras_vit.checkpoints.formats.vit_keras import VIT_KERAS
from keras_vit.errors import UserError, check_choice
from keras_vit.files.kinds import MODEL_SUFFIXES
from keras_vit.files.lazy_array import LazyArray
from keras_vit.files.remote import is_remote
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import ResNetConfig

# ResNets of timm and transformers have an output stride of at most 32: they dilate later stages, ResNets here do not.
TORCH_STAGES = 4
# Groups of GroupNorm in all codes; only config.json of transformers has others.
NUM_GROUPS = 32
HEADS = ("head/", "head_distillation/", "resnet/head/")
# A new format is a module and its name here. Of those with one name, the first that is for a kind of model writes it.
FORMATS: tuple[Format, ...] = (
    *(META, OPEN_CLIP, VIT_JAX, BIG_TRANSFER, VIT_JAX_LINEN, BIG_VISION),
    *(EOMT, OWL, DINOV3, DINOV2, CLIP, VIT, BIT),  # transformers
    *(TIMM, TORCHVISION, KERAS_HUB, VIT_KERAS, KMODELS, KMODELS_TASKS),
)
_SUFFIXES = {each.name: each.suffixes for each in FORMATS if each.suffixes}
LAYOUTS = tuple(_SUFFIXES)


class UnknownLayout(UserError):
    """The arrays are those of no known layout."""


def identify_format(arrays: Mapping[str, LazyArray]) -> tuple[Format, Layout]:
    """The format of arrays whose keys have been normalized, and its layout. Raises UnknownLayout."""
    for each in FORMATS:
        if (layout := each.identify(arrays)) is not None:
            return each, layout
    raise UnknownLayout(
        f"The file is not a Vision Transformer, hybrid or BiT of a known layout: its {len(arrays)} arrays begin with "
        f"{', '.join(sorted(arrays)[:3]) or 'nothing'}."
    )


def format_for(model: Blueprint, name: str) -> tuple[Format, Layout]:
    """The format that a model is written in. Raises UserError for settings that it cannot express."""
    able: dict[str, tuple[Format, Layout, dict]] = {}
    for each in FORMATS:
        if each.layout_for is None or each.name in able or each.has_task != (model.task is not None):
            continue
        if (fields := each.expressible(model)) is not None:
            able[each.name] = each, each.layout_for(model), fields
    resnet = model.config if isinstance(model.config, ResNetConfig) else model.config.stem
    own_groups = isinstance(resnet, ResNetConfig) and resnet.num_groups != NUM_GROUPS
    others = [other for other, (_, layout, _) in able.items() if not own_groups or layout.stores_groups]
    others = others or ["only .keras"]
    if name in able:
        chosen, layout, fields = able[name]
        problem = _inexpressible(model, layout, fields, resnet if isinstance(resnet, ResNetConfig) else None)
        if not problem:
            return chosen, layout
        advice = f"choose {' or '.join(others) if own_groups else 'another'}"
    else:
        problem = "this ResNet" if model.task is None else "a model that segments or detects"
        advice = f"{' or '.join(others)} can"
    raise UserError(f"The layout {name} cannot express {problem}; {advice}.")


def _inexpressible(
    model: Blueprint, layout: Layout, fields: Mapping[str, tuple | None], resnet: ResNetConfig | None
) -> str:
    """Return the parts of a model that a layout cannot express; empty if it can."""
    for field, values in fields.items():
        value = getattr(model.config, field)
        if values is not None and value not in values and type(value) not in values:
            return f"{field}={value!r:.80}" + ("" if values else " and a head")
    if resnet is None:
        return ""
    stages = len(resnet.block_units)
    if resnet.axial_heads is not None:
        return "axial attention"
    if layout.torch and stages > TORCH_STAGES:
        return f"a ResNet of {stages} stages, only of up to {TORCH_STAGES}"
    if resnet.num_groups != NUM_GROUPS and not layout.stores_groups:
        return f"GroupNorm with {resnet.num_groups} groups, because its files are read with {NUM_GROUPS}"
    return ""


def check_target(path: pathlib.Path, layout: str, *, is_new: bool = False) -> None:
    """Raise UserError for an unknown layout, another suffix, a missing folder around it, and what exists already."""
    check_choice("The layout", layout, LAYOUTS)
    suffix, is_a_folder = _SUFFIXES[layout][0], is_folder(path, layout)
    problem = ""
    if (is_new or is_a_folder) and path.exists():
        problem = "already exists; give the name of a new one"
    elif not is_remote(path) and not path.parent.is_dir():
        problem = f"cannot be written, because there is no folder {path.parent}"
    elif not is_a_folder and path.suffix != suffix:
        problem = f"should end in {suffix}, as files of the layout {layout} do; name it so"
    if problem:
        raise UserError(f"{path} {problem}.")


def is_folder(path: pathlib.Path, layout: str) -> bool:
    """Whether the layout is written as a folder with configs."""
    suffixes = _SUFFIXES[layout]
    return suffixes == ("",) or ("" in suffixes and path.suffix not in MODEL_SUFFIXES)


def num_classes_of(weights: Mapping) -> int:
    """Width of the head among weights (anything with a shape) by name; 0 without a head."""
    leaves = ("head/bias", "resnet/head/conv2d/bias", "head/kernel")  # a projection has no bias
    shape = next((weights[key].shape for key in leaves if key in weights), (0,))
    return shape[-1] if shape else 1
