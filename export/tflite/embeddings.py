"""Exports the embeddings of a model as TFLite files, and verifies each against the Keras model.

Input: image (1, H, W, C) float32 in the value range of the model. Output: embeddings (1, D).
"""

import pathlib
from collections.abc import Sequence

import keras

from export import parity, report
from export.embeddings import embedding_model, facts_of, reference_of, require_same_direction
from export.options import TFLiteFormat
from export.source import Provenance
from export.tflite import quantize, tflite_file
from export.tflite.export import convert
from keras_vit import preprocessing_of
from keras_vit.files.atomic import staged
from keras_vit.files.tables import short_name
from keras_vit.run_directory import Samples


def export_embeddings(
    model: keras.Model,
    samples: Samples,
    output: pathlib.Path,
    formats: Sequence[TFLiteFormat],
    *,
    origin: Provenance | None = None,
    normalize: bool = False,
) -> dict[TFLiteFormat, tuple[pathlib.Path, parity.Parity]]:
    """Write embeddings-FORMAT.tflite for each format. Returns its path and its differences from the Keras model.

    Raises ParityError, and writes nothing, if float32 differs by more than rounding, or an embedding of another format
    points elsewhere.

    Args:
        model: with or without a head.
        samples: images to verify the files on.
        output: directory.
        formats: those without calibration.
        origin: of the model.
        normalize: whether embeddings have length 1.
    """
    quantize.refuse_calibrated(formats)
    origin = origin or Provenance()
    model = embedding_model(model, normalize=normalize)
    expected = reference_of(model, samples)
    written: dict[TFLiteFormat, tuple[pathlib.Path, parity.Parity]] = {}
    rows = []
    with staged(output) as stage:
        float_file = stage / "float32.tflite"
        float_file.write_bytes(convert(model, output="embeddings"))
        for kind in formats:
            content = float_file.read_bytes() if kind == "float32" else quantize.quantize(float_file, kind)
            file = stage / f"embeddings-{kind}.tflite"
            description = f"embeddings of {short_name(origin.name)}, {kind}; weights: {origin.weights}"
            terms, preprocessing = origin.license_text, preprocessing_of(model)
            file.write_bytes(
                tflite_file.with_metadata(content, model.name, description, (), preprocessing, False, terms)
            )
            embeddings = tflite_file.run(file, expected)
            found = parity.compare(expected, embeddings)
            if kind == "float32":
                parity.require_equal("float32 TFLite file", found)
            rows.append(
                (kind, found, require_same_direction(f"{kind} TFLite file", expected, embeddings), _bytes(file))
            )
            written[kind] = (output / file.name, found)
        float_file.unlink()
        table = [
            (kind, f"{found.max_abs_diff:.3g}", f"{cosine:.6f}", f"{size:,}") for kind, found, cosine, size in rows
        ]
        heading = "Differences from the Keras model"
        columns = ("format", "largest difference", "smallest cosine", "bytes")
        panels: dict = {"smallest cosine": {kind: cosine for kind, _, cosine, _ in rows}}
        title = f"Embeddings of {short_name(origin.name)} as TFLite"
        report.write(stage, title, facts_of(origin, "TFLite of embeddings", rows), [(heading, columns, table)], panels)
    return written


def _bytes(file: pathlib.Path) -> int:
    return file.stat().st_size
