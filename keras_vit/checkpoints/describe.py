"""Describe a checkpoint from its headers."""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Literal

from keras_vit.checkpoints.checkpoint import IN_FOLDER, Checkpoint, LoadOptions, config_beside, open_checkpoint
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.checkpoints.infer_config import UnknownNumHeads, ambiguous_settings, infer_config, known_num_heads
from keras_vit.checkpoints.layouts import num_classes_of
from keras_vit.checkpoints.stored_positions import known_image_size
from keras_vit.errors import UserError
from keras_vit.files.keras_model import is_keras_model, load_model
from keras_vit.files.remote import first_bytes, is_remote, to_path
from keras_vit.files.safetensors import folder_of
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import ModelConfig, ResNetConfig, ViTConfig
from keras_vit.models.named_models import MODELS

# The fields that identify an official model; dropout, GELU and epsilons vary with the code that wrote the file.
_RESNET_FIELDS = ("block_units", "root_channels", "stage_channels", "preactivation", "axial_heads")
_VIT_FIELDS = (
    *("patch_size", "hidden_size", "num_layers", "num_heads", "mlp_dim", "classifier", "axial", "pre_norm"),
    *("final_norm", "gated_mlp", "num_registers", "distillation", "prefix_positions", "mlp_norm", "attention_norm"),
)
# Bytes of a model card whose front matter is read.
_LONGEST_FRONT = 2**16
_BUCKET = r"(gs://|https://storage\.googleapis\.com/)"
# The repositories that publish the official checkpoints, by their names and addresses.
_REPOSITORIES = {
    "vision_transformer": rf"{_BUCKET}vit_models/|augreg:|(imagenet21k(\+imagenet2012)?|g?sam)/",
    "big_transfer": rf"{_BUCKET}bit_models/|bit:",
    "big_vision": rf"{_BUCKET}big_vision/|big_vision:",
}


@dataclasses.dataclass(frozen=True)
class Description:
    """The result of `describe`; `str` returns a text of a few lines."""

    layout: str
    """npz, npz-linen, big_vision, huggingface, timm, torchvision or keras."""
    name: str | None
    """Name of the official model with this architecture; None if there is none."""
    config: ModelConfig | None
    """The config that `from_checkpoint` uses; None if it needs num_heads from the caller."""
    fields: Mapping[str, object]
    """Fields of the config by name; num_heads is None if it is not in the file."""
    image_size: tuple[int, int] | None
    """(height, width) in pixels; None if it is not in the file."""
    num_classes: int
    """Width of the head; 0 without a head."""
    num_parameters: int
    """Number of parameters."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape in the file of every weight, by key of the file."""
    types: tuple[str, ...]
    """Names of the dtypes."""
    unused: tuple[str, ...] = ()
    """Keys of arrays that are not weights of the model."""
    ambiguous: tuple[str, ...] = ()
    """Settings that a timm file without config.json leaves open: "block" (norms before or after each branch), "gelu",
    "num_heads", "position_embedding"; `from_checkpoint` requires the latter three."""
    unexpected_keys: tuple[str, ...] = ()
    """Keys of arrays that no supported model has; `from_checkpoint` refuses such a file."""

    is_activation_known: bool = True
    """Whether a config.json names the activation. Arrays do not contain it, so that a customized one goes unnoticed."""
    is_preprocessing_known: bool = True
    """Whether the files contain the preprocessing, or all models of the format have the same."""
    original_size: tuple[int, int] | None = None
    """(height, width) of the images that the original's preprocessing makes, where a file beside the weights has it."""

    def __str__(self) -> str:
        lines = {
            "layout": self.layout,
            "model": self.name
            or f"a {'ViTConfig' if 'hidden_size' in self.fields else 'ResNetConfig'} of its own size",
            "image size": "x".join(map(str, self.image_size)) if self.image_size else _NOT_IN_FILE,
            "classes": str(self.num_classes or "none, the outputs are features"),
            "parameters": f"{self.num_parameters:,} in {len(self.shapes)} arrays of {', '.join(self.types)}",
        }
        for field, value in self.fields.items():
            lines[field] = str(value)
        lines |= self._unknown()
        if self.unexpected_keys:
            lines["unexpected"] = f"{len(self.unexpected_keys)} arrays: {', '.join(self.unexpected_keys[:4])}"
        if self.unused:
            lines["unused"] = f"{len(self.unused)} arrays: {', '.join(self.unused[:4])}"
        width = max(map(len, lines)) + 2
        return "\n".join(f"{name:{width}}{value}" for name, value in lines.items())

    def _unknown(self) -> dict[str, str]:
        """Settings that the file does not tell, with their defaults."""
        lines: dict[str, str] = {}
        if self.fields.get("num_heads", 0) is None:
            official = self.config.num_heads if isinstance(self.config, ViTConfig) else None
            assumed = official and f"; default: the {official} of the official model of this width"
            lines["num_heads"] = _NOT_IN_FILE + (assumed or "")
        if "block" in self.ambiguous:
            lines["norms"] = f"{_NOT_IN_FILE}; default: before each branch, not after it (timm's residual post-norm)"
        if "gelu" in self.fields and not self.is_activation_known:
            lines["gelu"] = f"{_NOT_IN_FILE}; default: {self.fields['gelu']}, as in the original code"
        if "gelu" in self.ambiguous:
            lines["gelu"] = f"{_NOT_IN_FILE}; timm has models with these arrays and either form"
        if "position_embedding" in self.ambiguous:
            lines["position_embedding"] = f"{_NOT_IN_FILE}: learned (CLIP), or also rotary (timm's Perception Encoder)"
        return lines


_NOT_IN_FILE = "not in the file"


def describe(
    path: str | os.PathLike,
    *,
    stored_grid: tuple[int, int] | None = None,
    num_heads: int | None = None,
    num_groups: int | None = None,
) -> Description:
    """Describe a checkpoint without reading its arrays; a .keras file or run directory is loaded.

    Args:
        path: file, folder, address or official name, see `find_checkpoint`.
        stored_grid, num_heads, num_groups: see `from_checkpoint`.
    """
    options = LoadOptions(stored_grid=stored_grid, num_heads=num_heads, num_groups=num_groups)
    file = find_checkpoint(path)
    if is_keras_model(file):
        return _of_keras_model(file)
    checkpoint = open_checkpoint(file, options.stored_grid)
    weights = checkpoint.weights
    config, heads = _config(checkpoint, options)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    is_complete = heads != "unknown"
    sources = {weight.source.key: weight.source for weight in weights.values()}
    return Description(
        layout=checkpoint.format.name if checkpoint.format else "keras",
        name=official_name(config) if is_complete else None,
        config=config if is_complete else None,
        fields=fields if heads == "known" else fields | {"num_heads": None},
        ambiguous=tuple(name for name in ambiguous_settings(checkpoint) if getattr(options, name, None) is None),
        image_size=known_image_size(checkpoint, config),
        num_classes=num_classes_of(weights),
        num_parameters=sum(math.prod(weight.shape) for weight in weights.values()),
        shapes={key: array.shape for key, array in sorted(sources.items())},
        types=tuple(sorted({"bfloat16" if s.dtype.kind == "V" else s.dtype.name for s in sources.values()})),
        unused=checkpoint.unused,
        unexpected_keys=checkpoint.unexpected_keys,
        is_activation_known=checkpoint.file_config.gelu is not None,
        is_preprocessing_known=checkpoint.is_preprocessing_known,
        original_size=images.size if (images := checkpoint.file_config.images) else None,
    )


def _of_keras_model(path: pathlib.Path) -> Description:
    import keras  # lazy, as the one below: importing Keras takes seconds

    from keras_vit.checkpoints.load import weights_by_key

    model = load_model(path)
    blueprint, weights = Blueprint.of(model), weights_by_key(model)
    config = blueprint.config
    return Description(
        layout="keras",
        name=official_name(config),
        config=config,
        fields={field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
        image_size=blueprint.preprocessing.image_size,
        num_classes=blueprint.num_classes,
        num_parameters=model.count_params(),
        shapes={key: tuple(variable.shape) for key, variable in sorted(weights.items())},
        types=tuple(sorted({keras.backend.standardize_dtype(variable.dtype) for variable in weights.values()})),
    )


def _config(
    checkpoint: Checkpoint, options: LoadOptions
) -> tuple[ModelConfig, Literal["known", "official", "unknown"]]:
    """The config, and where its num_heads comes from: the file, the official model, or neither (it is 1 then)."""
    try:
        config = infer_config(checkpoint, options)
    except UnknownNumHeads:
        return infer_config(checkpoint, dataclasses.replace(options, num_heads=1)), "unknown"
    known = isinstance(config, ResNetConfig) or known_num_heads(checkpoint, options) is not None
    return config, "known" if known else "official"


def official_name(config: ModelConfig) -> str | None:
    """The name in MODELS of this architecture, with any dropout, GELU and epsilons; None if there is none."""
    own = _architecture(config)
    return next((name for name, model in MODELS.items() if _architecture(model) == own), None)


def _architecture(config: ModelConfig) -> tuple:
    if isinstance(config, ResNetConfig):
        return tuple(getattr(config, field) for field in _RESNET_FIELDS)
    stem = _architecture(config.stem) if isinstance(config.stem, ResNetConfig) else config.stem
    return stem, config.layer_scale is None, config.is_rotary, *(getattr(config, field) for field in _VIT_FIELDS)


def license_of(checkpoint: str | os.PathLike) -> str | None:
    """The license of the weights of a checkpoint, as its publisher states it; None if nothing states it.

    Of a folder, or a file in it: "license" in config.json (timm: in its pretrained_cfg; a run: that of the checkpoint
    which it was fine-tuned from), else in the front matter of README.md, as on Hugging Face. Of an official name or
    address: the license of the repository that publishes it.

    Args:
        checkpoint: as `find_checkpoint` takes it, before the download.
    """
    name = os.fsdecode(checkpoint)
    if is_remote(name) or not os.path.exists(name):
        repository = next((each for each, pattern in _REPOSITORIES.items() if re.match(pattern, name)), None)
        return None if repository is None else f"Apache-2.0 (github.com/google-research/{repository})"
    path = to_path(name)
    try:
        config = config_beside(path)
    except UserError:  # a damaged file, which is reported where the model is read
        return None
    for place in (config, *(config.get(name) for name in ("pretrained_cfg", "weights"))):
        if isinstance(place, dict) and isinstance(place.get("license"), str):
            return place["license"]
    card = folder_of(path) / "README.md"
    if not (path.is_dir() or path.name in IN_FOLDER) or not card.is_file():
        return None
    front = re.match(r"---\n(.*?)\n---", first_bytes(card, _LONGEST_FRONT).decode("utf-8", "replace"), re.DOTALL)
    stated = front and re.search(r"^license: *([\w.+-]+) *$", front[1], re.MULTILINE)
    return stated[1] if stated else None
