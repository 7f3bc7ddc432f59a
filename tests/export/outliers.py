"""Plants outliers in a model without changing its outputs, and measures what quantization loses by them.

    python -m tests.export.outliers RUN

exports the model of a run, as it is and with outliers, and prints which share of the evaluation images gets the same
class as in float32: for the formats with 8-bit activations, without and with what the export does against outliers.
"""

import pathlib
import tempfile
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from export.inference_model import float32_copy
from export.options import CALIBRATED, TFLiteFormat
from export.parity import Reference
from export.tflite import quantize
from export.tflite.convert import to_tflite
from export.tflite.gptq import round_kernels
from export.tflite.smooth_quant import scalable_activations, smooth_quant
from export.tflite.tflite_file import run_samples
from keras_vit import cli, preprocessing_of, run_directory
from keras_vit.files.tables import markdown_table
from keras_vit.run_directory import Samples
from keras_vit.runs import load

_FORMATS: tuple[TFLiteFormat, ...] = ("int8-dynamic", "int8", "int4-weights")


def with_outliers(model: keras.Model, seed: int = 1) -> keras.Model:
    """Make some channels of each activation 16 to 128 times as large, and their weights as much smaller.

    The outputs stay the same. At least two channels of an activation, one of 32, are chosen at random.
    """
    rng = np.random.default_rng(seed)
    for activation in scalable_activations(model):
        source, readers = model.get_layer(activation.source), [model.get_layer(name) for name in activation.products]
        factors = np.ones(readers[0].kernel.shape[0], np.float32)
        chosen = rng.choice(len(factors), max(2, len(factors) // 32), replace=False)
        factors[chosen] = 2.0 ** rng.integers(4, 8, len(chosen))
        source.set_weights([weight * factors for weight in source.get_weights()])
        for layer in readers:
            kernel, *bias = layer.get_weights()
            layer.set_weights([kernel / factors[:, None], *bias])
    return model


def agreement(model: keras.Model, kind: TFLiteFormat, calibration: Sequence[np.ndarray], expected: Reference) -> float:
    """The share of images with the same class in a format, from the model with its channels as they are."""
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "float.tflite"
        file.write_bytes(to_tflite(model, all_tokens=kind in CALIBRATED))
        if kind in quantize.STATIC:
            content, _ = quantize.quantize_static(file, kind, calibration)
        elif kind == "int4-weights":
            kept = quantize.kept_in_eight_bits(file, calibration)
            names = quantize.in_four_bits(file, kept, [layer.name for layer in model.layers])
            file.write_bytes(to_tflite(round_kernels(model, calibration, names), all_tokens=True))
            content = quantize.quantize_four_bits(file, kept)
        else:
            content = quantize.quantize(file, kind)
        file.write_bytes(content)
        found = run_samples(file, expected)
    return float(np.mean(found.argmax(axis=-1) == expected.logits.argmax(axis=-1)))


def main(arguments: Sequence[str]) -> None:
    """`RUN`"""
    [run] = arguments
    trained, _ = load(run)
    preprocessing = preprocessing_of(trained)
    samples = Samples.load(run_directory.find(run, run_directory.SAMPLES))
    stored = Samples.load(run_directory.find(run, run_directory.CALIBRATION))
    inputs = np.stack([np.asarray(preprocessing(tf.io.decode_image(data).numpy())) for data in stored.encoded[:256]])
    calibration = [image[None] for image in inputs]
    images = np.concatenate([batch for _, batch in Reference(samples, preprocessing, np.zeros(0)).batches()])
    rows = []
    for title, model in (("as trained", trained), ("with outliers", with_outliers(float32_copy(trained)))):
        expected = Reference(samples, preprocessing, model.predict(images, verbose=0))
        smoothed, _ = smooth_quant(model, np.split(inputs, 8))
        for kind in _FORMATS:
            shares = [agreement(network, kind, calibration, expected) for network in (model, smoothed)]
            rows.append((title, kind, *(f"{share:.2%}" for share in shares)))
    print(markdown_table(("model", "format", "channels as they are", "scaled channels"), rows, num_text_columns=2))


if __name__ == "__main__":
    cli.run(main)
