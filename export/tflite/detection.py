"""Exports a detector as TFLite files of a fixed size, and verifies each against the Keras model.

Input: image (1, H, W, C) float32 in the value range of the model. Output: detections (1, N, 4 + K), see
`export.detection`.
"""

import pathlib
from collections.abc import Sequence

from export import report
from export.detection import detections_model, reference_of, require_agreement, require_equal, table_of
from export.options import TFLiteFormat
from export.preprocessing_code import preprocessing_section
from export.source import ExportedModel
from export.tflite import quantize, tflite_file
from export.tflite.export import convert
from keras_vit import preprocessing_of
from keras_vit.files.atomic import staged
from keras_vit.files.tables import short_name


def export_detector(
    exported: ExportedModel, output: pathlib.Path, formats: Sequence[TFLiteFormat]
) -> dict[TFLiteFormat, tuple[pathlib.Path, float]]:
    """Write detector-FORMAT.tflite for each format. Returns its path and its largest difference from the Keras model.

    Raises ParityError, and writes nothing, if float32 differs by more than rounding, or another format changes more
    than a tenth of the likeliest boxes.
    """
    quantize.refuse_calibrated(formats)
    expected, preprocessing, origin = reference_of(exported), preprocessing_of(exported.model), exported.origin
    written: dict[TFLiteFormat, tuple[pathlib.Path, float]] = {}
    files = dict[str, dict]()
    with staged(output) as stage:
        float_file = stage / "float32.tflite"
        float_file.write_bytes(convert(detections_model(exported.model), output="detections", all_tokens=True))
        for kind in formats:
            content = float_file.read_bytes() if kind == "float32" else quantize.quantize(float_file, kind)
            file = stage / f"detector-{kind}.tflite"
            about = f"detector {short_name(origin.name)}, {kind}; weights: {origin.weights}"
            name, terms = exported.model.name, origin.license_text
            file.write_bytes(
                tflite_file.with_metadata(content, name, about, exported.labels, preprocessing, False, terms)
            )
            found = tflite_file.run(file, expected)
            if kind == "float32":
                require_equal("float32 TFLite file", expected, found)
            difference = float(abs(found - expected.logits).max())
            share = require_agreement(f"{kind} TFLite file", expected, found)
            files[kind] = {"max_abs_diff": difference, "agreement": share, "bytes": file.stat().st_size}
            written[kind] = (output / file.name, difference)
        float_file.unlink()
        facts, title = origin.facts("TFLite of a detector", files), f"Detector {short_name(origin.name)} as TFLite"
        panels: dict = {"bytes": {kind: row["bytes"] for kind, row in files.items()}}
        section = preprocessing_section(preprocessing, raw_pixels=False)
        report.write(stage, title, facts, [table_of(files)], panels, section)
    return written
