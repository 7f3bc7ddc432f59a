"""Converts a model to a float32 TFLite file, by way of a SavedModel.

A file converted from a concrete function would have no weights.
"""

import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

from export import parity
from export.files import disk_errors
from export.inference_model import inference_model, inner_blocks
from export.source import ExportedModel
from export.tflite.delegate_model import delegate_model, with_four_axes
from export.tflite.flatbuffer import pack, unpack
from keras_vit import preprocessing_of
from keras_vit.cli.start import native_stderr_silenced
from keras_vit.models.build import class_token_only
from keras_vit.scores import UNKNOWN_SCORE, UnknownScorer, features_and_logits

SERVED = "model.tflite"  # the file beside a SavedModel, which TF Serving runs in its place with --prefer_tflite_model


def to_tflite(
    model: keras.Model,
    *,
    uint8_input: bool = False,
    dynamic_batch: bool = False,
    all_tokens: bool = False,
    finish: Callable[[keras.Model], keras.Model] | None = None,
    unknown: UnknownScorer | None = None,
) -> bytes:
    """Convert the `inference_model` of a model: image (B, h, w, C) -> logits (B, K), or the outputs of `finish`.

    B is 1, or dynamic.

    Args:
        uint8_input: take pixels and normalize them.
        all_tokens: compute all tokens of the last block.
        finish: adds what follows the model, and may give a dict of outputs.
        unknown: adds the output unknown_score (B,) to the logits, without `finish`.
    """
    preprocessing = preprocessing_of(model)
    network = inference_model(model, all_tokens=all_tokens)
    scored = None if unknown is None else features_and_logits(network)
    network = network if finish is None else finish(network)

    def classify(image):
        pixels = preprocessing.normalize(image) if uint8_input else image
        if unknown is not None:
            inside = scored(pixels, training=False)
            logits = inside["logits"]
            with tf.name_scope(UNKNOWN_SCORE):
                return {"logits": logits, UNKNOWN_SCORE: unknown.score(inside["pre_logits"], logits)}
        return _by_name(network(pixels, training=False))

    shape = (None if dynamic_batch else 1, *network.input_shape[1:])
    image = tf.TensorSpec(shape, tf.uint8 if uint8_input else tf.float32, name="image")
    return converted(classify, image, network.weights)


def to_delegate_tflite(
    model: keras.Model,
    images: np.ndarray,
    *,
    all_tokens: bool = False,
    finish: Callable[[keras.Model], keras.Model] | None = None,
    first_and_last_block: bool = False,
) -> bytes:
    """Convert the `delegate_model` of a model, with batch 1 and the shapes of the model's own outputs.

    images: some inputs (n, h, w, C). first_and_last_block: leave out all blocks of a Vision Transformer between them.
    The other arguments are those of `to_tflite`.
    """
    class_token = frozenset() if all_tokens else class_token_only(model)
    whole = model if finish is None else finish(model)
    left_out = inner_blocks(model) if first_and_last_block else frozenset()
    network = delegate_model(whole, images, class_token, left_out)
    shapes = {name: tensor.shape for name, tensor in _by_name(whole.output).items()}

    def compute(image):
        outputs = _by_name(network(image, training=False))
        return {name: tf.reshape(output, (1, *shapes[name][1:])) for name, output in outputs.items()}

    image = tf.TensorSpec((1, *network.input_shape[1:]), name="image")
    return with_four_axes(converted(compute, image, network.weights))


def _by_name(outputs: Any) -> Mapping[str, Any]:
    return outputs if isinstance(outputs, dict) else {"logits": outputs}


def converted(
    function: Callable[[tf.Tensor], Mapping[str, tf.Tensor]],
    image: tf.TensorSpec,
    weights: Sequence[keras.Variable] = (),
) -> bytes:
    """Convert a function from an image to outputs by name; `weights` are the variables that it reads."""
    compute = tf.function(function, autograph=False, input_signature=[image])
    module = tf.Module()
    module.weights = [weight.value for weight in weights]
    with tempfile.TemporaryDirectory() as directory, disk_errors(path := pathlib.Path(directory)):
        tf.saved_model.save(module, path, signatures=compute.get_concrete_function())
        return tf.lite.TFLiteConverter.from_saved_model(directory).convert()


def write_served_file(directory: pathlib.Path, exported: ExportedModel, expected: parity.Reference) -> dict[str, Any]:
    """Write model.tflite: image (B, h, w, C) float32 -> logits (B, K), probabilities (B, K). Returns its measurements.

    The file is loaded again, and run with several batch sizes. Raises ParityError if it differs from the model by more
    than rounding.
    """
    origin = exported.origin

    def with_probabilities(network: keras.Model) -> keras.Model:
        activation = keras.ops.sigmoid if origin.multi_label else keras.ops.softmax
        logits = network.output
        return keras.Model(network.input, {"logits": logits, "probabilities": activation(logits / origin.temperature)})

    file = directory / SERVED
    file.write_bytes(_named_as_signature(to_tflite(exported.model, dynamic_batch=True, finish=with_probabilities)))
    found = _run_served(file, expected)
    same = parity.compare(expected, found["logits"])
    parity.require_equal(f"file {SERVED}", same)
    parity.probability_difference(f"probabilities of {SERVED}", expected, origin.temperature, found["probabilities"])
    return {"tflite_bytes": file.stat().st_size, "tflite_max_abs_diff": same.max_abs_diff}


def _named_as_signature(content: bytes) -> bytes:
    """Return a TFLite file whose inputs and outputs have the names of its signature.

    TF Serving calls them by the names of their tensors, and cuts these at a colon (`tflite_session.cc` there). The
    converter writes names such as "serving_default_image:0".
    """
    model = unpack(content)
    [signature] = model.signatureDefs
    for end in (*signature.inputs, *signature.outputs):
        model.subgraphs[0].tensors[end.tensorIndex].name = end.name
    return pack(model)


def _run_served(file: pathlib.Path, expected: parity.Reference) -> dict[str, np.ndarray]:
    """The outputs of the sample images by name, as TF Serving takes them: the first image alone, then batches."""
    interpreter = Interpreter(model_path=str(file))
    [image] = interpreter.get_input_details()
    outputs = {details["name"]: details["index"] for details in interpreter.get_output_details()}
    found: dict[str, list[np.ndarray]] = {name: [] for name in outputs}
    batches = (images for _, images in expected.batches())
    first = next(batches)
    for images in (first[:1], first[1:], *batches):
        if len(images):
            interpreter.resize_tensor_input(image["index"], images.shape)
            with native_stderr_silenced():  # it prints the name of its delegate
                interpreter.allocate_tensors()
            interpreter.set_tensor(image["index"], images)
            interpreter.invoke()
            for name, index in outputs.items():
                found[name].append(interpreter.get_tensor(index))
    return {name: np.concatenate(parts) for name, parts in found.items()}
