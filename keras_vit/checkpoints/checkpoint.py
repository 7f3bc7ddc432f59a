"""Open a checkpoint: identify its layout and map its keys to the model's weight names; and options to build it with.

Only the headers of the file are read here, and buffers that training may have changed.
"""

import contextlib
import dataclasses
import functools
import math
import numbers
import pathlib
import re
import typing
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from keras_vit.checkpoints.formats import keras_hub, kmodels, vit_keras
from keras_vit.checkpoints.formats.file_config import FileConfig
from keras_vit.checkpoints.formats.layout import Format, Layout
from keras_vit.checkpoints.key_mapping import (
    POSITIONS,
    Weight,
    check_array,
    check_rank,
    in_halves,
    same_weight,
    translate,
)
from keras_vit.checkpoints.layouts import UnknownLayout, identify_format
from keras_vit.errors import UserError, check_choice, check_integers, reading
from keras_vit.files.hdf5 import WEIGHTS, weights_file
from keras_vit.files.kinds import kind_of, readable_kind
from keras_vit.files.lazy_array import LazyArray
from keras_vit.files.npz import open_npz
from keras_vit.files.safetensors import json_files, open_folder, open_safetensors, stored_image_size
from keras_vit.models.config import Classes, Classifier, Gelu, PositionEmbeddingKind, ViTConfig, convert_fields
from keras_vit.models.weight_resizing import ChannelRule, Resampler, check_resampler, square_grid

_PREFIXES = ("opt/target/", "params/img/", "params/")
# TimmWrapper of transformers: timm's model and config.json.
_TIMM_WRAPPER = "timm_model."
# Files that belong to the config.json beside them.
IN_FOLDER = ("model.safetensors", "model.keras", WEIGHTS)
# What training keeps beside a model, by the beginning of its keys.
_OF_TRAINING = ("epoch", "global_step", "iteration", "lr_scheduler", "n_averaged", "optim", "scaler", "step")

_REFERENCE = "rotary_reference"
_RATES = ("dropout_rate", "attention_dropout_rate", "stochastic_depth_rate")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers have been read: its format, and its weights under the model's names."""

    format: Format | None
    """None for the weights of a model."""
    layout: Layout
    weights: Mapping[str, Weight]
    unexpected_keys: tuple[str, ...] = ()
    """Keys that the layout does not know."""
    unused: tuple[str, ...] = ()
    """Keys of arrays that are not weights, such as an optimizer's state and counters."""
    path: pathlib.Path | None = None
    """Path of the file or folder; None for the weights of a model."""
    stored_grid: tuple[int, int] | None = None
    """(rows, columns) of the position embeddings, where the caller knows it."""

    @functools.cached_property
    def file_config(self) -> FileConfig:
        """The settings in its configs. Raises UserError for unsupported ones."""
        if self.format is None or self.path is None:
            return FileConfig()
        names, files = self.format.config_files, self.format.open_configs(self.path)
        if not names or names[0] in files:
            malformed = TypeError, LookupError, AttributeError, ArithmeticError  # of a value of another kind
            with reading(f"The config of {self.path.name}", "that of a model", *malformed):
                return self.format.read_config(files, self.layout)
        is_safetensors = kind_of(self.path) == "safetensors"
        return FileConfig(image_size=stored_image_size(self.path) if is_safetensors else None)

    @functools.cached_property
    def classes(self) -> Classes | None:
        """The class names in config.json, in the order of the logits; None without any but placeholders."""
        config = {} if self.path is None else config_beside(self.path)
        names = config.get("id2label") or config.get("label_names")
        if isinstance(names, dict):
            names = [names.get(str(index)) for index in range(len(names))]
        if not isinstance(names, list) or not all(isinstance(name, str) and name.isprintable() for name in names):
            return None
        has_names = any(name != f"LABEL_{index}" for index, name in enumerate(names))
        return Classes(tuple(names)) if has_names else None

    @property
    def is_preprocessing_known(self) -> bool:
        """Whether its files contain the preprocessing, or all models of its format have the same."""
        return self.format is None or not self.format.config_files or self.file_config.images is not None


def config_beside(path: pathlib.Path) -> dict:
    """The config.json of a folder, or of a file that it belongs to; empty if there is none."""
    is_beside = path.is_dir() or path.name in IN_FOLDER
    return json_files(path, ("config.json",)).get("config.json", {}) if is_beside else {}


def open_checkpoint(path: pathlib.Path, stored_grid: tuple[int, int] | None = None) -> Checkpoint:
    """Read the headers of a file or folder. Raises UserError unless its layout is known."""
    arrays, ignored = normalize_keys(open_arrays(path))
    prefix, format_, layout = _identify(arrays)
    if prefix:
        if prefix != _TIMM_WRAPPER:
            warnings.warn(f"The keys of {path.name} are read without {prefix!r}.", stacklevel=2)
        ignored += tuple(key for key in arrays if not key.startswith(prefix))
        arrays = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
    weights, unused = translate(arrays, layout.rules)
    if "registers/tokens" in weights and weights["registers/tokens"].shape[1:2] == (0,):
        del weights["registers/tokens"]  # which DINOv3 of transformers has without registers, too
    if layout.prefix_positions is False:
        weights = _with_class_position(weights)
    ends, begins = (".num_batches_tracked", "embeddings.mask_token", ".bias_mask"), (*_OF_TRAINING, *layout.ignored)
    counters = {key for key in unused if key.endswith(ends) or key.startswith(begins)}
    unexpected, others = tuple(sorted(set(unused) - counters)), (*ignored, *sorted(counters))
    checkpoint = Checkpoint(format_, layout, weights, unexpected, others, path, stored_grid)
    rotates = layout.rotates_pairs or (layout.rotates_pairs is None and checkpoint.file_config.settings.get(_REFERENCE))
    if rotates and (num_heads := checkpoint.file_config.num_heads) is not None:
        checkpoint = dataclasses.replace(checkpoint, weights=in_halves(weights, num_heads))
    return checkpoint if layout.prefix_positions is not None else _without_register_positions(checkpoint)


def open_arrays(path: pathlib.Path) -> dict[str, LazyArray]:
    """The arrays of a file or folder by key, of all its networks."""
    file = weights_file(path)
    if file.name == WEIGHTS and keras_hub.is_preset(file.parent):
        return keras_hub.open_preset(file.parent)
    if file.is_file() and kind_of(file) == "h5":
        for module in (vit_keras, kmodels):
            if (arrays := module.open_model(file)) is not None:
                return arrays
    if path.is_dir():
        return open_folder(path)
    return open_safetensors(path) if readable_kind(path) == "safetensors" else open_npz(path)


def normalize_keys(arrays: Mapping[str, LazyArray]) -> tuple[dict[str, LazyArray], tuple[str, ...]]:
    """Return the model's arrays without prefixes and stacks, and the keys of others, such as an optimizer's state."""
    prefixes = [
        prefix
        for prefix in ("", *_PREFIXES)
        if f"{prefix}embedding/kernel" in arrays or any(key.startswith(f"{prefix}resnet/root_block/") for key in arrays)
    ]
    if len(prefixes) > 1:
        places = " and ".join(repr(prefix) if prefix else "no prefix" for prefix in prefixes)
        raise UserError(f"The file should hold one model, but holds one each under {places}; keep one of them.")
    prefix = prefixes[0] if prefixes else ""
    ignored = tuple(key for key in arrays if not key.startswith(prefix))
    normalized: dict[str, LazyArray] = {}
    for key, array in arrays.items():
        if not key.startswith(prefix):
            continue
        name = re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", key.removeprefix(prefix))
        unstacked = unstack_scan(name, array) if name.startswith("Transformer/encoderblock/") else {name: array}
        if duplicates := normalized.keys() & unstacked.keys():
            raise same_weight(normalized[min(duplicates)].key, key)
        normalized |= unstacked
    return normalized, ignored


def _identify(arrays: Mapping[str, LazyArray]) -> tuple[str, Format, Layout]:
    """Return what all keys begin with where a wrapper has added it, such as "module.", and the format behind it."""
    keys = [key for key, array in arrays.items() if array.shape and not key.startswith(_OF_TRAINING)]
    is_adapter, prefix = any(".lora_" in key for key in keys), ""
    for component in ("", *re.findall(r"[^./]*[./]", min(keys, default=""))):
        prefix += component
        if is_adapter or not all(key.startswith(prefix) for key in keys):
            break
        with contextlib.suppress(UnknownLayout):
            return prefix, *identify_format({key.removeprefix(prefix): arrays[key] for key in keys})
    if is_adapter or any(key.startswith("base_model.model.") for key in keys):
        raise UserError(
            "The file holds a PEFT adapter, not a whole model; merge it into its model (PEFT: merge_and_unload) and "
            "save that with save_pretrained."
        )
    return "", *identify_format(arrays)  # raises UnknownLayout


def unstack_scan(name: str, array: LazyArray) -> dict[str, LazyArray]:
    """An array of all blocks (big_vision's scan) as those of each block, by their names; `name` has "encoderblock/"."""
    is_stack = array.shape and array.shape[0] <= 1000
    check_array(is_stack, array.key, "begin with an axis for the blocks", f"has {array.shape}")
    return {
        name.replace("encoderblock/", f"encoderblock_{layer}/"): dataclasses.replace(array, part=layer)
        for layer in range(array.shape[0])
    }


def _with_class_position(weights: dict[str, Weight]) -> dict[str, Weight]:
    """Add the row of the class token, of zeros, to a table without it."""
    if "cls" not in weights or POSITIONS not in weights:
        return weights
    table = weights[POSITIONS]
    check_rank(table.source.key, table.shape, (3,))
    shape = (table.shape[0], table.shape[1] + 1, table.shape[2])
    return weights | {POSITIONS: table.mapped(shape, lambda array: np.pad(array, ((0, 0), (1, 0), (0, 0))))}


def _without_register_positions(checkpoint: Checkpoint) -> Checkpoint:
    """Add the rows of the registers in a table to the registers, where there are such rows: vit_so150m of timm.

    They are behind that of the class token, where the patches of the grid, or of the images that config.json names,
    leave as many. If neither is known, they are where the number of rows is a square only without them.
    """
    weights = checkpoint.weights
    if not {"registers/tokens", POSITIONS, "embedding/kernel"} <= weights.keys():
        return checkpoint
    registers, table, patch = weights["registers/tokens"], weights[POSITIONS], weights["embedding/kernel"].shape[:2]
    shapes = registers.shape, table.shape
    if 0 in patch or any(len(shape) != 3 for shape in shapes) or shapes[0][::2] != shapes[1][::2]:
        return checkpoint
    first, rows = int("cls" in weights), table.shape[1]
    last = first + registers.shape[1]
    size, without, grid = checkpoint.file_config.image_size, (rows, rows - first), checkpoint.stored_grid
    if grid is None and size is not None:
        grid = size[0] // patch[0], size[1] // patch[1]
    patches = None if grid is None else math.prod(grid)
    squares = [square_grid(number) is not None for number in (*without, rows - last)]
    if patches in without or (patches != rows - last and squares != [False, False, True]):
        return checkpoint

    shape = (table.shape[0], rows - registers.shape[1], table.shape[2])
    moved = {
        "registers/tokens": registers.mapped(registers.shape, lambda tokens: tokens + table.read()[:, first:last]),
        POSITIONS: table.mapped(shape, lambda array: np.delete(array, slice(first, last), axis=1)),
    }
    return dataclasses.replace(checkpoint, weights={**weights, **moved})


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """The arguments of `from_checkpoint`, which documents them; None: as the file says."""

    image_size: int | tuple[int, int] | None = None
    num_classes: int | None = None
    classes: tuple[str, ...] | None = None
    patch_size: int | tuple[int, int] | None = None
    channels: int | None = None
    channel_rule: ChannelRule = "mean"
    resampler: Resampler | None = None
    stored_grid: tuple[int, int] | None = None
    classifier: Classifier | None = None
    position_embedding: PositionEmbeddingKind | None = None
    num_heads: int | None = None
    num_groups: int | None = None
    conv_stem_strides: tuple[int, ...] | None = None
    gelu: Gelu | None = None
    layer_norm_epsilon: float | None = None
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    stochastic_depth_rate: float = 0.0
    keep_pre_logits: bool = False
    classifier_activation: str | None = None
    dtype: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", None if self.classes is None else tuple(self.classes))
        convert_fields(self)
        check_integers("num_classes", self.num_classes, least=0)
        for field in ("channels", "num_heads", "num_groups"):
            check_integers(field, getattr(self, field))
        check_integers("stored_grid", self.stored_grid, length=2)
        check_integers("conv_stem_strides", self.conv_stem_strides, length=0)
        if self.patch_size is not None and not isinstance(self.patch_size, numbers.Integral):
            check_integers("patch_size", self.patch_size, length=2)
        check_choice("channel_rule", self.channel_rule, typing.get_args(ChannelRule))
        if self.resampler is not None:
            check_resampler(self.resampler)
        if self.classes is not None:
            self.refuse({"num_classes": "classes has a name for each class"})
        if self.num_classes is None:
            self.refuse({"keep_pre_logits": "it is for a new head of num_classes"})

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) of the images."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def rates(self) -> dict[str, typing.Any]:
        """The rates for further training, by field of ViTConfig."""
        return {name: getattr(self, name) for name in _RATES}

    def for_classes(self, known: Classes | None) -> tuple["LoadOptions", Classes | None, list[int | None]]:
        """Return the options with `num_classes`, the classes of the model, and the row of each in a head that stays."""
        if self.classes is None:
            return self, known if self.num_classes is None else None, []
        rows = rows_of(self.classes, known.labels if known else ())
        print(_sentence_on_head(rows, self.classes, known))
        if known is None or not any(row is not None for row in rows):
            number = len(self.classes)
            return dataclasses.replace(self, classes=None, num_classes=number), Classes(self.classes), []
        return self, dataclasses.replace(known.selected(rows), labels=self.classes), rows

    def refuse(self, reasons: typing.Mapping[str, str]) -> None:
        """Raise UserError for an option that was given and does not apply; the reasons by its name."""
        given = {field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default}
        for name, reason in reasons.items():
            if name in given:
                raise UserError(f"{name}={getattr(self, name)!r:.80} does not apply, because {reason}; leave it out.")

    @property
    def overrides(self) -> dict[str, typing.Any]:
        """The settings that the caller gave instead of those of a config.json, by field of FileConfig."""
        names = ("num_heads", "num_groups", "gelu", "layer_norm_epsilon")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def with_patch(self, config: ViTConfig) -> ViTConfig:
        """The config with the new patch size."""
        return config if self.patch_size is None else dataclasses.replace(config, patch_size=self.patch_size)


def rows_of(names: Sequence[str], known: Sequence[str]) -> list[int | None]:
    """Return where each class is among the known ones, whatever its case and with underscores for spaces; else None."""
    rows: dict[str, int | None] = {}
    for row, name in enumerate(known):
        rows[_key(name)] = None if _key(name) in rows else row
    keys = [_key(name) for name in names]
    return [rows.get(key) if keys.count(key) == 1 else None for key in keys]


def _key(name: str) -> str:
    return name.casefold().replace("_", " ").strip()


def _sentence_on_head(rows: Sequence[int | None], names: Sequence[str], known: Classes | None) -> str:
    new = [name for name, row in zip(names, rows, strict=True) if row is None]
    if known is None:
        return f"The head is new, with {len(names)} classes, because the model that it begins with names none."
    if len(new) == len(names):
        return f"The head is new: none of its {len(names)} classes is among the {len(known.labels):,} of the model."
    if new:
        some = f"{', '.join(new[:5])}{' …' if new[5:] else ''}"
        return f"The head is kept for {len(names) - len(new)} of {len(names)} classes, and new for {some}."
    of_all = "" if len(known.labels) == len(names) else f", of the {len(known.labels):,} of the model"
    in_order = "" if list(rows) == list(range(len(rows))) else ", in the order of the data"
    return f"The head is kept: it knows all {len(names)} classes{of_all}{in_order}."
