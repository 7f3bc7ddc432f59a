"""Checkpoints in and out of models: read the architecture and build it, merge strictly, write for the other code.

What a file holds is settled from its headers (`recognition.py`); only then are numbers read, one array at a time, so
that a model and its file are never in memory together.
"""

import concurrent.futures
import dataclasses
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Mapping

import keras
import numpy as np

from keras_vit.config import Classifier, Gelu, ModelConfig, PositionEmbeddingKind, ViTConfig
from keras_vit.declared import Declared, huggingface_config, preprocessor_config
from keras_vit.embedding import ChannelRule, adapt_channels, resize_patch_kernel
from keras_vit.errors import UserError
from keras_vit.layers import PositionEmbedding, weights_will_be_loaded
from keras_vit.layouts import LAYOUTS, POSITIONS, Layout, layout_of
from keras_vit.models import build, config_of, preprocessing_of
from keras_vit.npz import write_npz
from keras_vit.posemb import Resampler, resize_position_embedding
from keras_vit.preprocess import Preprocessing
from keras_vit.recognition import (
    Checkpoint,
    declared_grid,
    infer_config,
    open_checkpoint,
    square_grid,
    stored_image_size,
    stored_value_range,
)
from keras_vit.rules import Weight, untranslate
from keras_vit.stored import Stored, check_all
from keras_vit.tensors import write_json, write_safetensors

# The kernels that see the image's channels.
_FIRST_KERNELS = (
    "conv_stem/0/conv/kernel",
    "conv_root/kernel",
    "resnet/root_block/standardized_conv2d/kernel",
    "embedding/kernel",
)

_SUFFIXES = {"npz": ".npz", "npz-linen": ".npz", "big_vision": ".npz"}
_SUFFIXES |= {"timm": ".safetensors", "torchvision": ".safetensors"}
_TORCH = ("huggingface", "timm", "torchvision")
_FLAX = ("npz", "npz-linen", "big_vision")


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What happened to every array of a file and every weight of a model.

    Weights have the keys of the released files: vit_jax's pre-Linen numbering, for BiT big_transfer's.
    """

    loaded: Mapping[str, str]
    """Weights that were filled, and the key of the file that filled them."""
    resized: tuple[str, ...]
    """Those of them that were resampled to another grid first."""
    dropped: tuple[str, ...]
    """What was left in the file: weights, as declared, and arrays that are no weights (optimizer, counters)."""
    kept: tuple[str, ...]
    """Weights that stayed as they were, as declared."""


def from_checkpoint(
    path: str | os.PathLike,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    channel_rule: ChannelRule = "mean",
    resampler: Resampler | None = None,
    stored_grid: tuple[int, int] | None = None,
    classifier: Classifier | None = None,
    position_embedding: PositionEmbeddingKind | None = None,
    num_heads: int | None = None,
    num_groups: int | None = None,
    conv_stem_strides: tuple[int, ...] | None = None,
    gelu: Gelu | None = None,
    layer_norm_epsilon: float | None = None,
    dropout_rate: float = 0.0,
    attention_dropout_rate: float = 0.0,
    stochastic_depth_rate: float = 0.0,
    keep_pre_logits: bool = False,
) -> keras.Model:
    """Read the architecture out of a checkpoint, build it, and load it.

    Read are .npz files of vit_jax, big_vision and big_transfer, folders and .safetensors files of transformers, timm
    and torchvision. Numerics are those of the code that wrote the file.

    Args:
        path: of the file or folder.
        image_size: pixels, or (height, width); None takes the size that config.json or the position embeddings tell,
            else 224. Another size resamples position embeddings.
        num_classes: None keeps the head as stored. A number drops head and pre_logits and gives a head of zeros;
            0 gives the features.
        patch_size: another patch size, by FlexiViT's pseudo-inverse resize; None keeps the stored one.
        channels: another number of image channels; None keeps the stored one.
        channel_rule: "mean" spreads the sum over the old channels, "repeat" cycles through them.
        resampler: of position embeddings; None takes the origin's own.
        stored_grid: rows and columns of the stored position embeddings, where they are not square.
        classifier: "gap" (the default where the file has no class token) or "unpooled"; "token" and "map" are seen.
        position_embedding: of files without a table: "sincos-2d" (the default for big_vision) or "none" (for others).
        num_heads: where neither arrays nor config.json tell it; default: that of the official model of this width.
        num_groups: of GroupNorm, likewise; the default is 32.
        conv_stem_strides: of early convolutions; default: 2, or, of more than four, 1 for those that do not widen.
        gelu, layer_norm_epsilon: other numerics than the origin's ("tanh" and 1e-6 for JAX files; config.json's, else
            "erf" and 1e-12, for transformers; "erf" and 1e-6 for timm and torchvision).
        dropout_rate, attention_dropout_rate, stochastic_depth_rate: for training on.
        keep_pre_logits: keep the tanh layer though num_classes is given (vit_jax: an equal representation_size).
    """
    checkpoint = open_checkpoint(path)
    given = {"num_heads": num_heads, "num_groups": num_groups, "gelu": gelu, "layer_norm_epsilon": layer_norm_epsilon}
    declared = dataclasses.replace(checkpoint.declared, **{k: v for k, v in given.items() if v is not None})
    config = infer_config(checkpoint, declared, classifier, position_embedding, conv_stem_strides)
    if isinstance(config, ViTConfig):
        rates = {"dropout_rate": dropout_rate, "attention_dropout_rate": attention_dropout_rate}
        config = dataclasses.replace(config, **rates, stochastic_depth_rate=stochastic_depth_rate)
    grid = stored_grid or declared_grid(checkpoint, config)
    if image_size is None:
        image_size = stored_image_size(checkpoint, config, grid)
    stored_channels = next(checkpoint.weights[key] for key in _FIRST_KERNELS if key in checkpoint.weights).shape[2]
    preprocessing = Preprocessing(image_size, stored_channels, **stored_value_range(checkpoint, stored_channels))
    return _build_and_fill(
        checkpoint,
        config,
        preprocessing,
        grid,
        num_classes=num_classes,
        patch_size=patch_size,
        channels=channels,
        channel_rule=channel_rule,
        resampler=resampler,
        keep_pre_logits=keep_pre_logits,
    )


def adapt(
    model: keras.Model,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    channel_rule: ChannelRule = "mean",
    resampler: Resampler = "bilinear-aligned",
    keep_pre_logits: bool = False,
) -> keras.Model:
    """A new model with the weights of another one, for other images or classes; as `from_checkpoint` does with a file.

    Args:
        model: built by `keras_vit.build`; it stays as it is.
        image_size, num_classes, patch_size, channels: None keeps the model's own.
        channel_rule, resampler, keep_pre_logits: as `from_checkpoint`.
    """
    config, preprocessing = config_of(model), preprocessing_of(model)
    weights = {}
    for key, variable in weights_by_key(model).items():
        stored = Stored(key, tuple(variable.shape), np.dtype(np.float32), lambda _, v=variable: np.array(v, np.float32))
        weights[key] = Weight(stored, stored.shape, np.asarray)
    checkpoint = Checkpoint("keras", Layout(()), weights, (), (), Declared())
    grid = config.grid(preprocessing.image_size) if POSITIONS in weights else None
    if image_size is not None:
        preprocessing = dataclasses.replace(preprocessing, image_size=image_size)
    return _build_and_fill(
        checkpoint,
        config,
        preprocessing,
        grid,
        num_classes=num_classes,
        patch_size=patch_size,
        channels=channels,
        channel_rule=channel_rule,
        resampler=resampler,
        keep_pre_logits=keep_pre_logits,
    )


def _build_and_fill(
    checkpoint: Checkpoint,
    config: ModelConfig,
    preprocessing: Preprocessing,
    stored_grid: tuple[int, int] | None,
    *,
    num_classes: int | None,
    patch_size: int | tuple[int, int] | None,
    channels: int | None,
    channel_rule: ChannelRule,
    resampler: Resampler | None,
    keep_pre_logits: bool,
) -> keras.Model:
    """The model of a checkpoint whose architecture is known, with the changes that are asked for (None: none)."""
    weights = checkpoint.weights
    head = next((key for key in ("head/bias", "resnet/head/conv2d/bias") if key in weights), None)
    drop: tuple[str, ...] = ()
    if num_classes is None:
        num_classes = math.prod(weights[head].shape) if head else 0
    else:
        drop = ("head/", "resnet/head/") if keep_pre_logits else ("head/", "resnet/head/", "pre_logits/")
    if isinstance(config, ViTConfig):
        if "pre_logits/" in drop:
            config = dataclasses.replace(config, representation_size=None)
        if patch_size is not None:
            config = dataclasses.replace(config, patch_size=patch_size)
            weights = _with_patch(weights, config)
    if channels is not None:
        weights = _with_channels(weights, channels, channel_rule)
        preprocessing = _for_channels(preprocessing, channels)
    with weights_will_be_loaded():
        model = build(config, preprocessing=preprocessing, num_classes=num_classes)
    checkpoint = dataclasses.replace(checkpoint, weights=weights)
    plan = _plan(model, checkpoint, resampler, stored_grid, drop=drop, keep=drop[:2])
    _assign(model, plan.weights)
    return model


def _for_channels(preprocessing: Preprocessing, channels: int) -> Preprocessing:
    """The same preprocessing for another number of channels; a range for each becomes their mean for all."""
    value_range = preprocessing.value_range
    if channels != preprocessing.channels:
        value_range = tuple(float(np.mean(end)) for end in value_range)
    return dataclasses.replace(preprocessing, channels=channels, value_range=value_range)


def load_checkpoint(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    resampler: Resampler | None = None,
    stored_grid: tuple[int, int] | None = None,
    drop: str | Iterable[str] = (),
    keep: str | Iterable[str] = (),
) -> LoadReport:
    """Load a checkpoint of any layout into a model, strictly: nothing is left over on either side unless declared.

    The model is untouched when this raises UserError, whose text names the keys that are missing, left over or of
    another shape. Its numerics (GELU, epsilons) stay the model's own; `from_checkpoint` takes the file's.

    Args:
        model: built by `keras_vit.build`.
        path: of the file or folder.
        resampler: of position embeddings; None takes that of the file's origin.
        stored_grid: rows and columns of the stored position embeddings, where they are not square.
        drop: beginnings of keys that may stay in the file, such as "head/"; by our names, or by the file's own.
        keep: beginnings of weight names that may stay as they are.
    """
    drop, keep = ((names,) if isinstance(names, str) else tuple(names) for names in (drop, keep))
    plan = _plan(model, open_checkpoint(path), resampler, stored_grid, drop=drop, keep=keep)
    check_all({weight.source.key: weight.source for weight in plan.weights.values()}.values())
    _assign(model, plan.weights)
    return plan.report


def save_checkpoint(model: keras.Model, path: str | os.PathLike, *, layout: str) -> None:
    """Write the weights of a model so that the other code loads them.

    Args:
        model: built by `keras_vit.build`.
        path: of the file, written under a temporary name and renamed; for "huggingface" a folder, which must not be
            there yet.
        layout: "npz" (vit_jax, big_transfer), "npz-linen", "big_vision", "huggingface", "timm" or "torchvision".
            UserError says what a layout cannot express. big_vision adds the class token's position to the token.
    """
    path, config = pathlib.Path(path), config_of(model)
    if layout not in LAYOUTS:
        raise UserError(f"The layout must be one of {', '.join(LAYOUTS)}, but is {layout!r}.")
    weights = {key: keras.ops.convert_to_numpy(weight) for key, weight in weights_by_key(model).items()}
    num_classes = next((weights[key].shape[0] for key in ("head/bias", "resnet/head/conv2d/bias") if key in weights), 0)
    if layout == "big_vision":
        weights = _without_class_position(weights)
    num_heads = config.num_heads if isinstance(config, ViTConfig) else 1
    rules = layout_of(config, layout, num_classes).rules
    if path.suffix != (suffix := _SUFFIXES.get(layout, path.suffix)):
        raise UserError(f"A file of the layout {layout} should end in {suffix}, but is {path.name!r}; name it so.")
    arrays = untranslate(weights, rules, num_heads)
    if layout == "torchvision":
        norms = [key for key in arrays if key.endswith(".running_var")]
        arrays |= {key.replace("running_var", "num_batches_tracked"): np.zeros((), np.int64) for key in norms}
    if layout == "huggingface":
        _write_folder(path, arrays, config, preprocessing_of(model), num_classes)
    elif layout in ("timm", "torchvision"):
        write_safetensors(path, arrays)
    else:
        write_npz(path, arrays)


def _write_folder(
    folder: pathlib.Path, arrays: dict, config: ModelConfig, preprocessing: Preprocessing, num_classes: int
) -> None:
    if folder.exists():
        raise UserError(f"{folder.name} is there already; give the name of a new folder.")
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        write_safetensors(temporary / "model.safetensors", arrays)
        write_json(temporary / "config.json", huggingface_config(config, preprocessing, num_classes))
        write_json(temporary / "preprocessor_config.json", preprocessor_config(preprocessing))
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _without_class_position(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if "cls" not in weights or POSITIONS not in weights:
        return weights
    table = weights[POSITIONS]
    return weights | {"cls": weights["cls"] + table[:, :1], POSITIONS: table[:, 1:]}


def _with_patch(weights: Mapping[str, Weight], config: ViTConfig) -> dict[str, Weight]:
    kernel = weights["embedding/kernel"]
    shape = (*config.patch, *kernel.shape[2:])
    resized = Weight(kernel.source, shape, lambda array: resize_patch_kernel(kernel.convert(array), config.patch))
    return {**weights, "embedding/kernel": resized}


def _with_channels(weights: Mapping[str, Weight], channels: int, rule: ChannelRule) -> dict[str, Weight]:
    key = next(key for key in _FIRST_KERNELS if key in weights)
    kernel = weights[key]
    shape = (*kernel.shape[:2], channels, kernel.shape[3])
    adapted = Weight(kernel.source, shape, lambda array: adapt_channels(kernel.convert(array), channels, rule))
    return {**weights, key: adapted}


def weights_by_key(model: keras.Model) -> dict[str, keras.Variable]:
    """The weights of a model under the keys of the released checkpoints."""
    flax = {"gamma": "scale", "beta": "bias"}
    weights = {}
    for layer in model.layers:
        names = {} if layer.name.endswith(("group_norm", "batch_norm")) else flax  # BiT keeps TensorFlow's names
        for weight in layer.weights:
            key = f"{layer.name.replace('.', '/')}/{names.get(weight.name, weight.name)}"
            weights["cls" if key == "cls/cls" else key] = weight
    return weights


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Every weight that will be filled, all shapes checked, and what the report will say."""

    weights: Mapping[str, Weight]
    report: LoadReport


def _plan(
    model: keras.Model,
    checkpoint: Checkpoint,
    resampler: Resampler | None,
    stored_grid: tuple[int, int] | None,
    *,
    drop: tuple[str, ...],
    keep: tuple[str, ...],
) -> _Plan:
    """Check every array against every weight; nothing is read or assigned yet."""
    weights = weights_by_key(model)
    offered = {key: weight for key, weight in checkpoint.weights.items() if not _declared_in(drop, key, weight)}
    dropped = {
        *checkpoint.weights.keys() - offered.keys(),
        *(key for key in checkpoint.strangers if key.startswith(drop)),
    }
    kept = {key for key in weights.keys() - offered.keys() if key.startswith(keep)}
    missing = sorted(weights.keys() - offered.keys() - kept)
    strangers = set(checkpoint.strangers) - dropped
    extra = sorted(strangers | {offered[key].source.key for key in offered.keys() - weights.keys()})
    if missing or extra:
        raise UserError(
            f"The checkpoint does not fit the model: missing in the file: {_listed(missing)}; "
            f"left over in it: {_listed(extra)}."
        )
    resized, config = (), config_of(model)
    if checkpoint.layout != "keras" and isinstance(config, ViTConfig):
        _require_same_kind(checkpoint, config)
    if POSITIONS in offered:
        layer = next(layer for layer in model.layers if isinstance(layer, PositionEmbedding))
        stored_grid = stored_grid or declared_grid(checkpoint, config)
        fitted = _fit_positions(checkpoint, layer, resampler or checkpoint.origin.resampler, stored_grid)
        resized = (POSITIONS,) if fitted is not offered[POSITIONS] else ()
        offered[POSITIONS] = fitted
    for key, weight in offered.items():
        if weight.shape != tuple(weights[key].shape):
            raise UserError(
                f"The array {weight.source.key!r} has shape {weight.source.shape}, but the model needs "
                f"{tuple(weights[key].shape)} for {key!r}."
            )
        heads = _heads_in_file(key, weight) if checkpoint.layout in _FLAX else None
        if heads is not None and heads != config.num_heads:
            raise UserError(f"The file has {heads} heads ({weight.source.key!r}), not {config.num_heads}.")
    loaded = {key: weight.source.key for key, weight in sorted(offered.items())}
    report = LoadReport(loaded, resized, tuple(sorted((*dropped, *checkpoint.unused))), tuple(sorted(kept)))
    return _Plan(offered, report)


def _heads_in_file(key: str, weight: Weight) -> int | None:
    """Flax's projections have an axis for the heads: before the last one, of the output's kernel the first."""
    projection = re.search(r"/MultiHeadDotProductAttention_\d/(query|key|value|out)/(kernel|bias)$", key)
    if projection is None or projection[0].endswith("out/bias"):
        return None
    return weight.source.shape[0 if projection[1] == "out" else -2]


def _require_same_kind(checkpoint: Checkpoint, config: ViTConfig) -> None:
    """Refuse what equal keys and shapes would hide."""
    told, norm = {"position_injection": "input"}, checkpoint.weights.get("Transformer/encoder_norm/scale")
    if norm is not None:
        told["norm_after_pooling"] = norm.source.key == "fc_norm.weight"
    if checkpoint.declared.num_heads is not None:
        told["num_heads"] = checkpoint.declared.num_heads
    for field, value in told.items():
        if getattr(config, field) != value:
            raise UserError(
                f"The file is of a model with {field}={value!r}, but this one has {getattr(config, field)!r}."
            )


def _declared_in(beginnings: tuple[str, ...], key: str, weight: Weight) -> bool:
    return key.startswith(beginnings) or weight.source.key.startswith(beginnings)


def _listed(keys: list[str]) -> str:
    shown = ", ".join(keys[:8]) or "nothing"
    return f"{shown} and {len(keys) - 8} more" if len(keys) > 8 else shown


def _assign(model: keras.Model, plan: Mapping[str, Weight]) -> None:
    """Read each array of the file once, and give the weights in it to the model; on all cores."""
    variables = weights_by_key(model)
    by_source: dict[str, list[str]] = {}
    for key, weight in plan.items():
        by_source.setdefault(weight.source.key, []).append(key)

    def assign(keys: list[str]) -> None:
        array = plan[keys[0]].source.read()
        for key in keys:
            variables[key].assign(plan[key].convert(array))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(assign, by_source.values()):
            pass


def _fit_positions(
    checkpoint: Checkpoint, layer: PositionEmbedding, resampler: Resampler, stored_grid: tuple[int, int] | None
) -> Weight:
    """The stored table for the grid of the model, unless stored_grid says otherwise: vit_jax takes an equal number of
    tokens as the same grid, the torch codes take a square number as a square.
    """
    table = checkpoint.weights[POSITIONS]
    if len(table.shape) != 3 or table.shape[0] != 1:
        raise UserError(f"The array {table.source.key!r} should be (1, tokens, width), but has shape {table.shape}.")
    rows, columns = layer.grid
    num_tokens = table.shape[1] - layer.num_prefix_tokens
    if stored_grid is None:
        square = math.isqrt(max(num_tokens, 0)) ** 2 == num_tokens and checkpoint.layout in _TORCH
        stored_grid = layer.grid if num_tokens == rows * columns and not square else square_grid(num_tokens)
    if stored_grid[0] * stored_grid[1] != num_tokens:
        raise UserError(f"The file has position embeddings for {num_tokens} patches, not for a grid of {stored_grid}.")
    if tuple(stored_grid) == layer.grid:
        return table
    shape = (1, layer.num_prefix_tokens + rows * columns, table.shape[2])

    def resize(array: np.ndarray) -> np.ndarray:
        return resize_position_embedding(
            table.convert(array), stored_grid, layer.grid, layer.num_prefix_tokens, resampler
        )

    return Weight(table.source, shape, resize)
