"""Load a checkpoint into a model: every key and shape is checked before a weight is assigned.

At the end, whether a model still is the one that its `ModelSpec` describes, before another one is built from this
description. The layers and connections are compared, which costs little. Where they differ, the outputs decide: a
Dropout or another class of dense layer changes nothing, another pooling does.
"""

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from keras_vit.checkpoints.checkpoint import Checkpoint, open_checkpoint
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.checkpoints.formats.layout import Layout
from keras_vit.checkpoints.infer_config import has_norm_after_pooling
from keras_vit.checkpoints.key_mapping import POSITIONS, Rule, Weight, heads_in, key_of, refuse_keys
from keras_vit.checkpoints.stored_positions import fit_positions
from keras_vit.errors import UserError, check_integers, refuse_first
from keras_vit.files.hdf5 import open_keras_weights
from keras_vit.files.kinds import kind_of
from keras_vit.files.lazy_array import check_all
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.build import classifier_head, config_of, has_own_call, model_spec, preprocessing_of
from keras_vit.models.config import ModelConfig, ViTConfig
from keras_vit.models.layers import ModelSpec, TokenDense, no_init_weights, zero_copy
from keras_vit.models.positions import PositionEmbedding
from keras_vit.models.weight_resizing import Resampler, check_resampler

# Settings of a layer that do not change what it computes from given weights, up to rounding.
_NOT_COMPUTED = {
    *("dtype", "lora_alpha", "lora_rank", "quantization_config", "seed", "stddev", "trainable"),
    *("build_config", "module"),
}
_FOR_TRAINING = ("_constraint", "_initializer", "_regularizer")
_NUM_IMAGES = 3
# Weights in files of models that do not have them any more, because training annealed them away.
_OF_TRAINING = {"mask_attention/probabilities"}
# Largest difference that rounding explains, relative to the largest output, by the dtype of the computation.
_TOLERANCES = {"float32": 1e-5, "float64": 1e-5}
_HALF_TOLERANCE = 2e-2


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """The use of every array of a checkpoint and of every weight of a model.

    Weights have the keys of the released files: vit_jax's pre-Linen keys, for BiT big_transfer's.
    """

    loaded: Mapping[str, str]
    """Loaded weights -> keys in the file."""
    resized: tuple[str, ...]
    """Loaded weights that were resampled to another grid."""
    dropped: tuple[str, ...]
    """Keys that were not loaded: those of `drop`, and arrays that are not weights (optimizer, counters)."""
    kept: tuple[str, ...]
    """Weights that were not changed: those of `keep`."""


def load_checkpoint(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    resampler: Resampler | None = None,
    stored_grid: tuple[int, int] | None = None,
    drop: str | Iterable[str] = (),
    keep: str | Iterable[str] = (),
) -> LoadReport:
    """Load a checkpoint of any layout into a model; all keys must match, except for those in `drop` and `keep`.

    The model stays unchanged if this raises UserError, which names missing keys, unexpected keys and wrong shapes. GELU
    and epsilons stay the model's own; `from_checkpoint` takes those of the file.

    Args:
        model: built by `keras_vit.build`.
        path: file, folder, address or official name, see `find_checkpoint`; also a .weights.h5 file, which Keras'
            `save_weights` wrote for such a model.
        resampler: of position embeddings; default: that of the code that wrote the file.
        stored_grid: (rows, columns) of the stored position embeddings, if they are not square.
        drop: prefixes of keys that are not loaded, such as "head/"; names of the model's weights or keys of the file.
        keep: prefixes of weight names that are not changed.
    """
    if resampler is not None:
        check_resampler(resampler)
    check_integers("stored_grid", stored_grid, length=2)
    drop, keep = ((each,) if isinstance(each, str) else tuple(each) for each in (drop, keep))
    file = find_checkpoint(path)
    is_keras = kind_of(file) == "h5"
    checkpoint = _keras_weights(file, model, stored_grid) if is_keras else open_checkpoint(file, stored_grid)
    weights, report = match_weights(model, config_of(model), checkpoint, resampler, drop=drop, keep=keep)
    check_all({weight.source.key: weight.source for weight in weights.values()}.values())
    assign(model, weights)
    return report


def _keras_weights(path: pathlib.Path, model: keras.Model, stored_grid: tuple[int, int] | None) -> Checkpoint:
    """A .weights.h5 file, which has the variables of a layer in the order that the layer has, without their names."""
    arrays, weights = open_keras_weights(path), {}
    keys = {id(variable): key for key, variable in weights_by_key(model).items()}
    for layer in model.layers:
        for index, variable in enumerate(layer.weights):
            if (array := arrays.pop(f"{layer.name}/{index}", None)) is not None:
                weights[keys[id(variable)]] = Weight(array, array.shape, np.asarray)
    unexpected = tuple(sorted(arrays))
    return Checkpoint(None, Layout(()), weights, unexpected, path=path, stored_grid=stored_grid)


def weights_by_key(model: keras.Model) -> dict[str, keras.Variable]:
    """The weights of a model by their keys in the released checkpoints; those of a head of any name as of "head"."""
    flax = {"gamma": "scale", "beta": "bias"}
    weights = {}
    head = classifier_head(model)
    for layer in model.layers:
        names = {} if layer.name.endswith(("group_norm", "batch_norm")) else flax  # BiT has TensorFlow's names
        path = "head" if layer.name != "resnet.head.conv2d" and layer is head else layer.name.replace(".", "/")
        for weight in layer.weights:
            key = f"{path}/{names.get(weight.name, weight.name)}"
            weights["cls" if key == "cls/cls" else key] = weight
    return weights


def fill_from(model: keras.Model, source: keras.Model) -> None:
    """Copy the weights of another model that have the same key and shape here."""
    values = values_by_key(source)
    for key, variable in weights_by_key(model).items():
        if key in values and tuple(values[key].shape) == tuple(variable.shape):
            variable.assign(values[key])


def check_not_quantized(model: keras.Model) -> None:
    """Raise UserError for a model that Keras has quantized."""
    if any(layer.quantization_mode for layer in model.layers):
        raise UserError(f"The model {model.name!r} is quantized by Keras; use the model before `quantize`.")


def values_by_key(model: keras.Model) -> dict:
    """The values that a model computes with, by key; with LoRA the merged kernel. Not of a quantized model."""
    check_not_quantized(model)
    weights = weights_by_key(model)
    paths = {id(weight): key.rpartition("/")[0] for key, weight in weights.items()}
    for layer in model.layers:
        if isinstance(layer, TokenDense) and layer.lora_enabled:
            path = paths[id(layer.lora_kernel_a)]
            weights[f"{path}/kernel"] = layer.kernel
            del weights[f"{path}/lora_kernel_a"], weights[f"{path}/lora_kernel_b"]
    return weights


def match_weights(
    model: keras.Model,
    config: ModelConfig,
    checkpoint: Checkpoint,
    resampler: Resampler | None,
    *,
    drop: tuple[str, ...],
    keep: tuple[str, ...],
) -> tuple[dict[str, Weight], LoadReport]:
    """Return the weights that fit a model of this config, all of them checked; nothing is read or assigned yet."""
    weights = weights_by_key(model)
    left_out = {
        key for key, weight in checkpoint.weights.items() if key.startswith(drop) or weight.source.key.startswith(drop)
    }
    left_out |= _OF_TRAINING - weights.keys()
    matched = {key: weight for key, weight in checkpoint.weights.items() if key not in left_out}
    dropped = {
        *checkpoint.weights.keys() - matched.keys(),
        *(key for key in checkpoint.unexpected_keys if key.startswith(drop)),
    }
    kept = {key for key in weights.keys() - matched.keys() if key.startswith(keep)}
    needed = {key: weight for key, weight in weights.items() if key not in kept}
    check_keys(matched, needed, checkpoint.layout.rules, set(checkpoint.unexpected_keys) - dropped)
    resized: tuple[str, ...] = ()
    if checkpoint.format is not None and isinstance(config, ViTConfig):
        _check_settings(checkpoint, config)
    if POSITIONS in matched:
        layer = next(layer for layer in model.layers if isinstance(layer, PositionEmbedding))
        rows, columns = layer.grid
        fitted = fit_positions(checkpoint, config, (rows, columns), layer.num_prefix_tokens, resampler)
        resized = (POSITIONS,) if fitted is not matched[POSITIONS] else ()
        matched[POSITIONS] = fitted
    check_shapes(matched, weights, config.num_heads if isinstance(config, ViTConfig) else None)
    loaded = {key: weight.source.key for key, weight in sorted(matched.items())}
    report = LoadReport(loaded, resized, tuple(sorted((*dropped, *checkpoint.unused))), tuple(sorted(kept)))
    return matched, report


def check_keys(
    matched: Mapping[str, Weight],
    needed: Mapping[str, keras.Variable],
    rules: Iterable[Rule],
    unexpected_keys: Iterable[str],
) -> None:
    """Raise UserError unless the weights of a file are those that a model needs, and all of them."""
    missing = {key_of(key, rules) for key in needed.keys() - matched.keys()}
    unexpected = {*unexpected_keys, *(matched[key].source.key for key in matched.keys() - needed.keys())}
    refuse_keys("does not fit the model", sorted(missing), sorted(unexpected))


def check_shapes(matched: Mapping[str, Weight], weights: Mapping[str, keras.Variable], num_heads: int | None) -> None:
    """Raise UserError unless the arrays have the shapes of the weights and, where it shows, the number of heads."""
    for key, weight in matched.items():
        if weight.shape != (needed := tuple(weights[key].shape)):
            read_as = "" if weight.shape == weight.source.shape else f", read as {weight.shape}"
            raise UserError(
                f"The array {weight.source.key!r} has shape {weight.source.shape}{read_as}, but the model needs "
                f"{needed}."
            )
        heads_in(key, weight, num_heads)


def _check_settings(checkpoint: Checkpoint, config: ViTConfig) -> None:
    """Raise UserError for differences between file and model that do not show in keys and shapes."""
    expected: dict[str, object] = {"position_injection": "input"}
    if "position_embedding" in checkpoint.layout.settings:  # rotary ones have no weights
        expected["position_embedding"] = checkpoint.layout.settings["position_embedding"]
    if "Transformer/encoder_norm/scale" in checkpoint.weights:
        expected["norm_after_pooling"] = has_norm_after_pooling(checkpoint, checkpoint.file_config)
    if checkpoint.file_config.num_heads is not None:
        expected["num_heads"] = checkpoint.file_config.num_heads
    own = {field: getattr(config, field) for field in expected}
    refuse_first(
        (own[field] != value, f"The file is of a model with {field}={value!r}, but this one has {own[field]!r}.")
        for field, value in expected.items()
    )


def assign(model: keras.Model, weights: Mapping[str, Weight]) -> None:
    """Read each array of the file once and assign the weights in it; uses all cores."""
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


def changed_layer(model: keras.Model) -> str | None:
    """Return the first layer by which a model differs from what its config describes; None for no such layer."""
    model_spec(model)  # raises UserError for a model of others
    if has_own_call(model):
        return model.name
    blueprint, values = dataclasses.replace(Blueprint.of(model), classes=None, name=None), values_by_key(model)
    name = _first_difference(model, *_described(blueprint))
    return None if name is None or (blueprint.task is None and _same_outputs(model, values, blueprint)) else name


@functools.lru_cache(maxsize=16)
def _described(blueprint: Blueprint) -> tuple[dict, dict[str, dict[str, Any]]]:
    """The config of a model as it is built; by layer its attributes: plain values, the class of variables, or None."""
    with no_init_weights():
        built = blueprint.build()
    attributes = {
        layer.name: {
            name: keras.Variable if isinstance(value, keras.Variable) else value if _is_plain(value) else None
            for name, value in vars(layer).items()
        }
        for layer in built.layers
    }
    return built.get_config(), attributes


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str)


def check_unchanged(model: keras.Model, way_out: str) -> None:
    """Raise UserError for a model with a changed graph; `way_out` says what to do instead."""
    if name := changed_layer(model):
        raise UserError(
            f"The model {model.name!r} was changed after keras_vit built it: its layer {name!r} differs from that of "
            f"its configuration, so that a model built from it would compute something else; {way_out}."
        )


def _first_difference(model: keras.Model, described: dict, attributes: Mapping[str, dict[str, Any]]) -> str | None:
    expected = {layer["name"]: layer for layer in described["layers"]}
    try:
        own = model.get_config()
    except NotImplementedError:  # a layer of the user's without get_config
        return next((operation.name for operation in model.operations if operation.name not in expected), model.name)
    for layer in own["layers"]:
        if layer["name"] not in expected or _computation(layer) != _computation(expected.pop(layer["name"])):
            return layer["name"]
    if expected:
        return next(iter(expected))
    own_ends, ends = (_computation(config["output_layers"]) for config in (own, described))
    if own_ends not in (ends, [ends]):  # model.outputs is a list of one output, too
        return model.layers[-1].name
    return next((layer.name for layer in model.layers if _was_set(layer, attributes[layer.name])), None)


def _was_set(layer: keras.layers.Layer, built: Mapping[str, Any]) -> bool:
    """Whether a layer has a call of its own, lost a weight, or has other settings than its config may tell."""
    own = vars(layer)
    lost = any(value is keras.Variable and own.get(name) is None for name, value in built.items())
    names = {name for name in own.keys() & built.keys() if not name.startswith(("_", "lora_"))}
    names -= {"name"} | _NOT_COMPUTED
    return "call" in own or lost or any(_is_plain(own[name]) and own[name] != built[name] for name in names)


def _computation(config: object) -> object:
    """Return the part of a model's config that decides its numbers, with lists for tuples, as JSON has them.

    A tensor is the name of its layer with two numbers.
    """
    if isinstance(config, list | tuple):
        return [_computation(item) for item in config]
    if not isinstance(config, dict):
        return config
    if "keras_history" in config:
        return [*config["keras_history"]]
    unread = _NOT_COMPUTED | ({"config"} if config.get("class_name") == ModelSpec.__name__ else set())
    parts = {name: value for name, value in config.items() if name not in unread and not name.endswith(_FOR_TRAINING)}
    return {name: _computation(value) for name, value in parts.items()}


def _same_outputs(model: keras.Model, values: Mapping[str, Any], blueprint: Blueprint) -> bool:
    """Whether the model and that of its blueprint give the same outputs on random images, and not one constant."""
    with no_init_weights():
        built = blueprint.build()
    variables = weights_by_key(built)
    if {key: tuple(value.shape) for key, value in values.items()} != {
        key: tuple(variable.shape) for key, variable in variables.items()
    } or (model.input_shape, model.output_shape) != (built.input_shape, built.output_shape):
        return False
    preprocessing = preprocessing_of(built)
    pixels = np.random.default_rng(0).uniform(
        0.0, 255.0, (_NUM_IMAGES, *preprocessing.image_size, preprocessing.channels)
    )
    images = preprocessing.normalize(pixels)
    expected = keras.ops.convert_to_numpy(keras.ops.cast(model(images, training=False), "float32"))
    with keras.StatelessScope([(variable, values[key]) for key, variable in variables.items()]):
        rebuilt = keras.ops.convert_to_numpy(keras.ops.cast(built(images, training=False), "float32"))
    if not np.ptp(expected, axis=0).any():  # a new head of zeros hides everything before it
        return False
    tolerance = max(_TOLERANCES.get(layer.compute_dtype, _HALF_TOLERANCE) for layer in model.layers)
    return bool(np.abs(rebuilt - expected).max() <= tolerance * np.abs(expected).max())
