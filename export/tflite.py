"""A model as TFLite files for phones and small boards, each checked against the Keras model before it is there.

    python -m export.tflite --run runs/demo --output phone --formats float32 int8-dynamic

Input: image (1, H, W, C) float32 in the model's range. Output: logits (1, K). Batch is fixed to 1, so that no shape is
computed on the device. int8-dynamic stores weights in 8 bits, one scale per output channel, and computes each product
in 8 bits with activations quantised as they come; everything else stays float.
"""

import contextlib
import dataclasses
import hashlib
import io
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
from export.saved_model import save
from keras_vit import UserError, cli, preprocessing_of, run_directory
from keras_vit.quiet import native_stderr_silenced
from keras_vit.run_directory import LABELS, Samples

# Tells of which model the files beside it are.
_NOTE = "export.sha256"

Format = Literal["float32", "int8-dynamic"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Export the model of a run as TFLite files, and check them."""

    run: str
    """Run directory."""
    output: str
    """Directory of the files model-FORMAT.tflite and labels.txt, new or with those of the same model."""
    formats: tuple[Format, ...] = ("float32", "int8-dynamic")
    """What to write."""


def export_tflite(
    model: keras.Model, labels: Sequence[str], samples: Samples, output: pathlib.Path, formats: Sequence[Format]
) -> dict[Format, tuple[pathlib.Path, parity.Parity]]:
    """Write one file for each format and return its path and its differences from the Keras model.

    Each file is loaded afresh and run on all samples; float32 must equal the model to float rounding, int8-dynamic
    must agree on nearly all classes, else UserError is raised and none of the files is put in place. It is raised as
    well for an output with files of another model.
    """
    if not formats:
        raise UserError(f"--formats takes at least one of {', '.join(Format.__args__)}, but none is given.")
    run_directory.check_classes(model, labels)
    run_directory.check_output(output)
    texts = {_NOTE: f"{fingerprint(model, labels)}\n", LABELS: run_directory.labels_text(labels)}
    _require_own(output, texts)
    expected = parity.reference(model, preprocessing_of(model), samples)
    weight_bytes = 4 * model.count_params()
    written = {}
    with run_directory.staged(output) as stage:
        float_file = stage / _file_name("float32")
        float_file.write_bytes(convert(model))
        _require_weights(float_file, weight_bytes, 1.0)
        for kind in formats:
            file = stage / _file_name(kind)
            if kind == "int8-dynamic":
                quantize_dynamic(float_file, file)
                _require_weights(file, weight_bytes, 0.25)
            difference = parity.compare(expected, run_tflite(file, expected))
            require = parity.require_equal if kind == "float32" else parity.require_agreement
            require(f"{kind} TFLite file", difference)
            written[kind] = (output / file.name, difference)
        if "float32" not in formats:
            float_file.unlink()
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
    return written


def fingerprint(model: keras.Model, labels: Sequence[str]) -> str:
    """SHA-256 of the weights and the labels: another one for every training."""
    digest = hashlib.sha256(run_directory.labels_text(labels).encode())
    for weight in model.weights:
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()


def _require_own(output: pathlib.Path, texts: dict[str, str]) -> None:
    """Raise UserError for a directory with files of another model, which would lie beside the labels of this one."""
    models = [] if (output / _NOTE).is_file() else [_file_name(kind) for kind in Format.__args__]
    there = [name for name in (*texts, *models) if (output / name).is_file()]
    foreign = [name for name in there if (output / name).read_bytes() != texts.get(name, "").encode()]
    if foreign:
        raise UserError(
            f"{output} already holds the export of another model ({', '.join(foreign)}); give another --output, or "
            "remove that one."
        )


def _file_name(kind: Format) -> str:
    return f"model-{kind}.tflite"


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
        signatures = {"serving_default": classify.get_concrete_function()}
        save(module, pathlib.Path(directory), signatures)
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


def run_tflite(file: pathlib.Path, expected: parity.Reference) -> np.ndarray:
    """Logits (n, K) of the reference's images, one by one, through a fresh interpreter on two threads."""
    interpreter = Interpreter(model_path=str(file), num_threads=2)
    with native_stderr_silenced():  # it announces its delegate
        interpreter.allocate_tensors()
    runner = interpreter.get_signature_runner("serving_default")
    images = (image for _, batch in expected.batches() for image in batch)
    progress = tqdm.tqdm(images, f"Running {file.name}", len(expected.logits), unit="image", disable=None)
    return np.concatenate([runner(image=image[None])["logits"] for image in progress])


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR --formats …`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m export.tflite")
    model, labels = run_directory.load(parsed.run)
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
