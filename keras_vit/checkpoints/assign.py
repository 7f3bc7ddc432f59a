"""The weights of a file and those of a model, against each other: all is checked before any is assigned."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Mapping

import keras
import numpy as np

from keras_vit.checkpoints.formats import POSITIONS, TORCH
from keras_vit.checkpoints.infer_config import Checkpoint, file_config_grid, heads_in, listed, no_square, square_grid
from keras_vit.checkpoints.key_mapping import Weight
from keras_vit.errors import UserError
from keras_vit.models.build import config_of
from keras_vit.models.config import ViTConfig
from keras_vit.models.layers import PositionEmbedding, TokenDense, zero_copy
from keras_vit.models.position_resizing import Resampler, resize_position_embedding


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


def values_by_key(model: keras.Model) -> dict:
    """What the model computes with, under the same keys: of a dense layer with LoRA the merged kernel.

    Raises:
        UserError: for a model that Keras has quantized, whose weights no other code knows.
    """
    if any(layer.quantization_mode for layer in model.layers):
        raise UserError(f"The model {model.name!r} is quantized by Keras; take it as it was before `quantize`.")
    weights = weights_by_key(model)
    for layer in model.layers:
        if isinstance(layer, TokenDense) and layer.lora_enabled:
            key = layer.name.replace(".", "/")
            weights[f"{key}/kernel"] = layer.kernel
            del weights[f"{key}/lora_kernel_a"], weights[f"{key}/lora_kernel_b"]
    return weights


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every weight that will be filled, all shapes checked, and what the report will say."""

    weights: Mapping[str, Weight]
    report: LoadReport


def plan_merge(
    model: keras.Model,
    checkpoint: Checkpoint,
    resampler: Resampler | None,
    stored_grid: tuple[int, int] | None,
    *,
    drop: tuple[str, ...],
    keep: tuple[str, ...],
) -> Plan:
    """Check every array against every weight; nothing is read or assigned yet."""
    weights = weights_by_key(model)
    offered = {key: weight for key, weight in checkpoint.weights.items() if not _begins_with(drop, key, weight)}
    dropped = {
        *checkpoint.weights.keys() - offered.keys(),
        *(key for key in checkpoint.unexpected_keys if key.startswith(drop)),
    }
    kept = {key for key in weights.keys() - offered.keys() if key.startswith(keep)}
    missing = sorted(weights.keys() - offered.keys() - kept)
    unexpected_keys = set(checkpoint.unexpected_keys) - dropped
    extra = sorted(unexpected_keys | {offered[key].source.key for key in offered.keys() - weights.keys()})
    if missing or extra:
        reasons = {"missing in the file": missing, "left over in it": extra}
        found = "; ".join(f"{reason}: {listed(keys)}" for reason, keys in reasons.items() if keys)
        raise UserError(f"The checkpoint does not fit the model: {found}.")
    resized, config = (), config_of(model)
    if checkpoint.layout != "keras" and isinstance(config, ViTConfig):
        _require_same_kind(checkpoint, config)
    if POSITIONS in offered:
        layer = next(layer for layer in model.layers if isinstance(layer, PositionEmbedding))
        stored_grid = stored_grid or file_config_grid(checkpoint, config)
        fitted = _fit_positions(checkpoint, layer, resampler or checkpoint.origin.resampler, stored_grid)
        resized = (POSITIONS,) if fitted is not offered[POSITIONS] else ()
        offered[POSITIONS] = fitted
    for key, weight in offered.items():
        if weight.shape != tuple(weights[key].shape):
            raise UserError(
                f"The array {weight.source.key!r} has shape {weight.source.shape}, but the model needs "
                f"{tuple(weights[key].shape)} for {key!r}."
            )
        heads = heads_in(key, weight)
        if heads is not None and heads != config.num_heads:
            raise UserError(f"The file has {heads} heads ({weight.source.key!r}), not {config.num_heads}.")
    loaded = {key: weight.source.key for key, weight in sorted(offered.items())}
    report = LoadReport(loaded, resized, tuple(sorted((*dropped, *checkpoint.unused))), tuple(sorted(kept)))
    return Plan(offered, report)


def _require_same_kind(checkpoint: Checkpoint, config: ViTConfig) -> None:
    """Refuse what equal keys and shapes would hide."""
    told, norm = {"position_injection": "input"}, checkpoint.weights.get("Transformer/encoder_norm/scale")
    if norm is not None:
        told["norm_after_pooling"] = norm.source.key == "fc_norm.weight"
    if checkpoint.file_config.num_heads is not None:
        told["num_heads"] = checkpoint.file_config.num_heads
    for field, value in told.items():
        if getattr(config, field) != value:
            raise UserError(
                f"The file is of a model with {field}={value!r}, but this one has {getattr(config, field)!r}."
            )


def _begins_with(beginnings: tuple[str, ...], key: str, weight: Weight) -> bool:
    return key.startswith(beginnings) or weight.source.key.startswith(beginnings)


def assign(model: keras.Model, weights: Mapping[str, Weight]) -> None:
    """Read each array of the file once, and give the weights in it to the model; on all cores."""
    variables = weights_by_key(model)
    by_source: dict[str, list[str]] = {}
    for key, weight in weights.items():
        by_source.setdefault(weight.source.key, []).append(key)

    def fill(keys: list[str]) -> None:
        if len(keys) == 1:
            variables[keys[0]].assign(zero_copy(weights[keys[0]].read()))
            return
        array = weights[keys[0]].source.read()
        for key in keys:
            variables[key].assign(zero_copy(weights[key].taken_from(array)))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(fill, by_source.values()):
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
        square = square_grid(num_tokens)
        same_number = num_tokens == rows * columns
        stored_grid = layer.grid if same_number and (square is None or checkpoint.layout not in TORCH) else square
    if stored_grid is None:
        raise no_square(num_tokens)
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
