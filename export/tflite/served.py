"""The file model.tflite beside a SavedModel, which TF Serving runs in its place with --prefer_tflite_model.

TF Serving calls the inputs and outputs of a TFLite file by the names of their tensors, and cuts these at a colon
(`tensorflow_serving/servables/tensorflow/tflite_session.cc`). The converter writes names such as
"serving_default_image:0", so the tensors are renamed to those of the signature "image_tensor".
"""

import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

from export import parity
from export.source import ExportedModel
from export.tflite.convert import to_tflite
from export.tflite.flatbuffer import pack, unpack
from keras_vit.cli.native_stderr import native_stderr_silenced

NAME = "model.tflite"


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

    file = directory / NAME
    file.write_bytes(_renamed(to_tflite(exported.model, dynamic_batch=True, finish=with_probabilities)))
    found = _run(file, expected)
    same = parity.compare(expected, found["logits"])
    parity.require_equal(f"file {NAME}", same)
    activation = tf.sigmoid if origin.multi_label else tf.nn.softmax
    difference = float(np.abs(found["probabilities"] - activation(expected.logits / origin.temperature)).max())
    parity.require_close(f"probabilities of {NAME}", difference, expected.tolerance)
    return {"tflite_bytes": file.stat().st_size, "tflite_max_abs_diff": same.max_abs_diff}


def _renamed(content: bytes) -> bytes:
    """A TFLite file whose inputs and outputs have the names of its signature."""
    model = unpack(content)
    [signature] = model.signatureDefs
    for end in (*signature.inputs, *signature.outputs):
        model.subgraphs[0].tensors[end.tensorIndex].name = end.name
    return pack(model)


def _run(file: pathlib.Path, expected: parity.Reference) -> dict[str, np.ndarray]:
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
