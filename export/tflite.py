"""A model as TFLite files for phones and small boards, each checked against the Keras model before it is there.

    python -m export.tflite --run runs/demo --output phone --formats float32 int8-dynamic

Input: image (1, H, W, C) float32 in the model's range. Output: logits (1, K). Batch is fixed to 1, so that no shape is
computed on the device. int8-dynamic stores weights in 8 bits, one scale per output channel, and computes each product
in 8 bits with activations quantised as they come; everything else stays float.
"""

import contextlib
import dataclasses
import io
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Literal

import keras
import numpy as np
import tensorflow as tf
import tqdm
from ai_edge_litert.interpreter import Interpreter
from ai_edge_quantizer import quantizer, recipe

from export import parity
from export.saved_model import check_classes
from keras_vit import UserError, cli, preprocessing_of, run_directory
from keras_vit.run_directory import Samples

Format = Literal["float32", "int8-dynamic"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Export the model of a run as TFLite files, and check them."""

    run: str
    """Run directory."""
    output: str
    """Directory of the files model-FORMAT.tflite and labels.txt."""
    formats: tuple[Format, ...] = ("float32", "int8-dynamic")
    """What to write."""


def export_tflite(
    model: keras.Model, labels: Sequence[str], samples: Samples, output: pathlib.Path, formats: Sequence[Format]
) -> dict[Format, tuple[pathlib.Path, parity.Parity]]:
    """Write one file for each format and return its path and its differences from the Keras model.

    Each file is loaded afresh and run on all samples; float32 must equal the model to float rounding, int8-dynamic
    must agree on nearly all classes, else UserError is raised and that file is not kept.
    """
    check_classes(model, labels)
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; --output takes a directory.")
    output.mkdir(parents=True, exist_ok=True)
    expected = parity.reference(model, preprocessing_of(model), samples)
    weight_bytes = 4 * model.count_params()
    written = {}
    with tempfile.TemporaryDirectory(prefix=".building-", dir=output) as building:
        float_file = pathlib.Path(building) / "model-float32.tflite"
        float_file.write_bytes(convert(model))
        _require_weights(float_file, weight_bytes, 1.0)
        (pathlib.Path(building) / "labels.txt").write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
        for kind in formats:
            file = float_file
            if kind == "int8-dynamic":
                file = pathlib.Path(building) / "model-int8-dynamic.tflite"
                quantize_dynamic(float_file, file)
                _require_weights(file, weight_bytes, 0.25)
            difference = parity.compare(expected, run_tflite(file, expected.images))
            require = parity.require_equal if kind == "float32" else parity.require_agreement
            require(f"{kind} TFLite file", difference)
            written[kind] = (output / file.name, difference)
        for file in ("labels.txt", *(path.name for path, _ in written.values())):
            os.replace(pathlib.Path(building) / file, output / file)
    return written


def convert(model: keras.Model) -> bytes:
    """The model as a float32 TFLite file of batch 1.

    Goes through a SavedModel: a concrete function converted directly keeps its variables outside, and the file would
    have no weights.
    """
    preprocessing = preprocessing_of(model)
    spec = tf.TensorSpec((1, *preprocessing.image_size, preprocessing.channels), tf.float32, name="image")

    @tf.function(input_signature=[spec])
    def classify(image):
        return {"logits": model(image, training=False)}

    module = tf.Module()
    module.weights = [weight.value for weight in model.weights]
    with tempfile.TemporaryDirectory() as directory:
        tf.saved_model.save(module, directory, signatures={"serving_default": classify.get_concrete_function()})
        return tf.lite.TFLiteConverter.from_saved_model(directory).convert()


def quantize_dynamic(float_file: pathlib.Path, file: pathlib.Path) -> None:
    """Write the dynamic-range int8 form of a float32 TFLite file."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # it reports at length
        quantized = quantizer.Quantizer(str(float_file), recipe.dynamic_wi8_afp32()).quantize()
    file.write_bytes(quantized.quantized_model)


def _require_weights(file: pathlib.Path, weight_bytes: int, share: float) -> None:
    """Raise UserError for a file too small to hold the weights, or too large to hold them in fewer bits."""
    size = file.stat().st_size
    if size < 0.9 * share * weight_bytes:
        raise UserError(f"{file.name} has {size} bytes, too few for its weights, so it was not kept.")
    if share < 1.0 and size > (share + 0.5) / 1.5 * weight_bytes + 2**20:
        raise UserError(f"{file.name} has {size} bytes: its weights were not quantised, so it was not kept.")


def run_tflite(file: pathlib.Path, images: np.ndarray) -> np.ndarray:
    """Logits (n, K) of images (n, H, W, C), one by one, through a fresh interpreter on two threads."""
    runner = Interpreter(model_path=str(file), num_threads=2).get_signature_runner("serving_default")
    progress = tqdm.tqdm(images, f"Running {file.name}", unit="image", disable=None)
    return np.concatenate([runner(image=image[None])["logits"] for image in progress])


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR --formats …`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m export.tflite")
    model, labels = run_directory.load_model(parsed.run), run_directory.load_labels(parsed.run)
    samples = Samples.load(run_directory.find(parsed.run, run_directory.SAMPLES))
    written = export_tflite(model, labels, samples, pathlib.Path(parsed.output), parsed.formats)
    rows = [
        (kind, str(path), f"{path.stat().st_size:,}", f"{found.max_abs_diff:.2g}", f"{found.agreement:.4f}",
         f"{found.accuracy:.4f}")
        for kind, (path, found) in written.items()
    ]  # fmt: skip
    print(parity.as_table(rows, ("format", "file", "bytes", "max |logit diff|", "agreement", "accuracy")))


if __name__ == "__main__":
    cli.run(main)
