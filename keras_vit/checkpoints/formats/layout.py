"""Definitions that the formats share: the keys and numerics of a code, how its files are read and written."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from keras_vit.checkpoints.formats.file_config import FileConfig, ImageProcessing
from keras_vit.checkpoints.key_mapping import ATTENTION, Rule
from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray
from keras_vit.files.safetensors import json_files, write_safetensors
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import Gelu, PositionEmbeddingKind, ViTConfig
from keras_vit.models.weight_resizing import Resampler

# Biases of heads, which most codes always have, and of the first query.
HEAD_BIASES = ("head/bias", "head_distillation/bias")
QUERY_BIAS = ATTENTION.replace("{i}", "0") + "query/bias"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The keys of a kind of model, and what the library computes where its files do not say it.

    The default epsilons are those of timm and transformers, the other defaults those of the JAX codes.
    """

    rules: tuple[Rule, ...]
    gelu: Gelu = "tanh"
    layer_norm_epsilon: float = 1e-6
    group_norm_epsilon: float = 1e-5
    variance_epsilon: float = 1e-8
    """Added to the variance of standardized kernels; transformers and timm do so for both BiT and hybrids."""
    deviation_epsilon: float = 0.0
    resampler: Resampler = "bilinear-aligned"
    """How the code resizes position embeddings."""
    patch_resampler: Resampler | None = None
    """The same where a class token has no row among them, if that means another model."""
    images: ImageProcessing = dataclasses.field(default_factory=ImageProcessing)
    """How the code makes its images where no file says it."""
    biases: tuple[str, ...] = HEAD_BIASES
    """Biases that a complete file has wherever it has their kernels."""
    patch_bias: bool = True
    """Whether the patch embedding has a bias wherever no norm precedes the blocks."""
    square_positions: bool = False
    """Whether the code takes the stored grid for a square whatever the images are."""
    prefix_positions: bool | None = True
    """Whether position embeddings have rows for class and distillation token; None for either."""
    default_positions: PositionEmbeddingKind = "none"
    """Position embeddings of a model without a table of them."""
    torch: bool = False
    """Whether the code is on PyTorch: it dilates the stages of a ResNet after the fourth, and takes a square number of
    position embeddings for a square grid."""
    rotates_pairs: bool | None = False
    """Whether rotary positions rotate neighboring channels of a head, instead of those of its two halves; None where
    config.json says whether there are any."""
    stores_groups: bool = False
    """Whether config.json has the number of groups of GroupNorm."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ViTConfig that the arrays do not show."""
    ambiguous: tuple[str, ...] = ()
    """Settings in which models with the same arrays differ, unless config.json names the model."""
    model_types: tuple[str, ...] = ()
    """Names of the model in config.json of transformers; empty for other codes."""
    ignored: tuple[str, ...] = ()
    """Beginnings of the keys of other networks in the file: a text encoder, a decoder."""
    constants: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Arrays by key that the library's files have beside the weights, for saving."""
    task: Literal["segmentation", "detection"] | None = None
    """Task of the model; None for a classifier or features."""
    notes: tuple[str, ...] = ()
    """Note for the user of a saved file."""


_UNRESTRICTED = {
    *("patch_size", "hidden_size", "num_layers", "mlp_dim"),  # in the shapes
    *("num_heads", "layer_norm_epsilon"),  # in the shapes, config.json or an option of from_checkpoint
    *("dropout_rate", "attention_dropout_rate", "stochastic_depth_rate"),  # of training alone
}
# Values by field of ViTConfig; None for any, a type for its instances. A format takes only the default of every other
# field, a new one too, unless its own table has more values.
DEFAULTS: Mapping[str, tuple | None] = {
    field.name: None if field.name in _UNRESTRICTED else (field.default,) for field in dataclasses.fields(ViTConfig)
} | {"gelu": ("tanh", "erf")}


def _write_safetensors(folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    write_safetensors(folder / "model.safetensors", arrays)


@dataclasses.dataclass(frozen=True)
class Format:
    """How one kind of files is read and, unless `layout_for` is None, written; a module of this package defines it."""

    name: str
    """In `save_checkpoint` and in messages; several formats may share it."""
    identify: Callable[[Mapping[str, LazyArray]], Layout | None]
    """Arrays by key -> the layout, or None for another format. Raises UserError for a model that is not supported."""
    config_files: tuple[str, ...] = ()
    """Names of the configs beside the weights; without the first one, the others say nothing."""
    own_configs: Callable[[pathlib.Path], Mapping[str, dict]] | None = None
    """The configs by name where they are not, or not only, such files."""
    read_config: Callable[[Mapping[str, dict], Layout], FileConfig] = lambda files, layout: FileConfig()
    """Its configs, by name of the file -> what they say. Raises UserError for unsupported settings."""
    suffixes: tuple[str, ...] = ()
    """Suffix of its files; "" is a folder with configs."""
    expressible: Callable[[Blueprint], dict[str, tuple | None] | None] = lambda model: None
    """The values that it can express, by field of ViTConfig; None if it is for other kinds of models."""
    layout_for: Callable[[Blueprint], Layout] | None = None
    """The rules and numerics for writing a model that it can express."""
    write_config: Callable[[Blueprint], dict[str, dict]] = lambda model: {}
    """The configs, by name of the file. Raises UserError for what they cannot express."""
    write_weights: Callable[[pathlib.Path, Mapping[str, np.ndarray]], None] = _write_safetensors
    """Writes the arrays into a folder; where its suffix is .h5, into that file."""
    has_task: bool = False
    """Whether it is for models with a further task, which no other format can write."""

    def open_configs(self, path: pathlib.Path) -> Mapping[str, dict]:
        """Read its configs in a folder, or beside a file of weights, by name."""
        return self.own_configs(path) if self.own_configs is not None else json_files(path, self.config_files)


def inexpressible(what: str, but: object) -> UserError:
    """Return the error for a model that a layout cannot express."""
    return UserError(f"{what}, but this model has {but}; adapt it, choose another layout, or save a .keras file.")


def unsupported(what: str, advice: str) -> UserError:
    """Return the error for a file of a model that is not supported."""
    return UserError(f"The file is {what}, which is not supported; {advice}.")


def check_square(name: str, *sizes: tuple[int, int]) -> None:
    """Raise UserError for images or patches that the config of a family takes for square ones."""
    if any(height != width for height, width in sizes):
        raise inexpressible(f"{name} has square images and patches", f"{' and '.join(map(str, sizes))}")
