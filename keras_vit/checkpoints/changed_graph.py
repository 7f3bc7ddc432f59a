"""Whether a model still is the one that its `ModelSpec` describes, before another one is built from this description.

The layers and connections are compared, which costs little. Where they differ, the outputs decide: a Dropout or another
class of dense layer changes nothing, another pooling does.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_vit.checkpoints.layouts import num_classes_of
from keras_vit.checkpoints.load import values_by_key, weights_by_key
from keras_vit.errors import UserError
from keras_vit.models.build import build, classifier_activation_of, config_of, preprocessing_of
from keras_vit.models.layers import ModelSpec, no_init_weights

# Settings of a layer that do not change what it computes from given weights, up to rounding.
_NOT_COMPUTED = ("dtype", "lora_alpha", "lora_rank", "quantization_config", "seed", "trainable")
_FOR_TRAINING = ("_constraint", "_initializer", "_regularizer")
_NUM_IMAGES = 3
# Largest difference that rounding explains, relative to the largest output, by the dtype of the computation.
_TOLERANCES = {"float32": 1e-5, "float64": 1e-5}
_HALF_TOLERANCE = 2e-2


def changed_layer(model: keras.Model) -> str | None:
    """The first layer by which a model differs from what `keras_vit.build` makes of its config; None for no such layer.

    Raises UserError for a model without ModelSpec layer.
    """
    spec = next((layer.dtype_policy.name for layer in model.layers if isinstance(layer, ModelSpec)), None)
    config, preprocessing = config_of(model), preprocessing_of(model)
    values = values_by_key(model)
    with no_init_weights():
        built = build(
            config,
            preprocessing=preprocessing,
            num_classes=num_classes_of(values),
            classifier_activation=classifier_activation_of(model),
            dtype=spec,
        )
    name = _first_difference(model, built)
    return None if name is None or _same_outputs(model, values, built) else name


def check_unchanged(model: keras.Model, way_out: str) -> None:
    """Raise UserError for a model with a changed graph; `way_out` says what to do instead."""
    if name := changed_layer(model):
        raise UserError(
            f"The model {model.name!r} was changed after keras_vit built it: its layer {name!r} differs from that of "
            f"its configuration, so that a model built from it would compute something else; {way_out}."
        )


def _first_difference(model: keras.Model, built: keras.Model) -> str | None:
    try:
        own = model.get_config()
    except NotImplementedError:  # a layer of the user's without get_config
        known = {operation.name for operation in built.operations}
        return next((operation.name for operation in model.operations if operation.name not in known), model.name)
    described = built.get_config()
    expected = {layer["name"]: layer for layer in described["layers"]}
    for layer in own["layers"]:
        if layer["name"] not in expected or _computation(layer) != _computation(expected.pop(layer["name"])):
            return layer["name"]
    if expected:
        return next(iter(expected))
    ends = [list(_tensors(config["output_layers"])) for config in (own, described)]
    return None if ends[0] == ends[1] else model.layers[-1].name


def _computation(layer: Mapping[str, Any]) -> object:
    """What a layer in the config of a model computes, and of which tensors."""
    config = {} if layer["class_name"] == ModelSpec.__name__ else layer["config"]
    settings = {
        name: value
        for name, value in config.items()
        if name not in _NOT_COMPUTED and not name.endswith(_FOR_TRAINING)
    }
    calls = [(list(_tensors(node["args"])), _plain(node["kwargs"])) for node in layer["inbound_nodes"]]
    return layer["registered_name"] or layer["class_name"], _plain(settings), calls


def _tensors(arguments: object) -> Iterator[object]:
    """The leaves of nested arguments; a tensor is the name of its layer with two numbers."""
    if isinstance(arguments, dict):
        if "keras_history" in arguments.get("config", {}):
            yield tuple(arguments["config"]["keras_history"])
        else:
            yield _plain(arguments)
    elif isinstance(arguments, list | tuple):
        for argument in arguments:
            yield from _tensors(argument)
    else:
        yield arguments


def _plain(value: object) -> object:
    """The value with lists for tuples, as JSON has them."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _same_outputs(model: keras.Model, values: Mapping[str, Any], built: keras.Model) -> bool:
    """Whether both models give the same outputs on random images, and not only the same constant."""
    variables = weights_by_key(built)
    if {key: tuple(value.shape) for key, value in values.items()} != {
        key: tuple(variable.shape) for key, variable in variables.items()
    } or (model.input_shape, model.output_shape) != (built.input_shape, built.output_shape):
        return False
    preprocessing = preprocessing_of(model)
    pixels = np.random.default_rng(0).uniform(
        0.0, 255.0, (_NUM_IMAGES, *preprocessing.image_size, preprocessing.channels)
    )
    images = preprocessing.normalize(pixels)
    expected = keras.ops.convert_to_numpy(keras.ops.cast(model(images, training=False), "float32"))
    with keras.StatelessScope([(variable, values[key]) for key, variable in variables.items()]):
        found = keras.ops.convert_to_numpy(keras.ops.cast(built(images, training=False), "float32"))
    if not np.ptp(expected, axis=0).any():  # a new head of zeros hides everything before it
        return False
    tolerance = max(_TOLERANCES.get(layer.compute_dtype, _HALF_TOLERANCE) for layer in model.layers)
    return bool(np.abs(found - expected).max() <= tolerance * np.abs(expected).max())
