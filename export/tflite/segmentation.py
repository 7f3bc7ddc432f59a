"""Exports a model that segments as TFLite files of a fixed size, and verifies each against the Keras model.

Input: image (1, H, W, C) float32 in the value range of the model. Outputs: those of `export.segmentation` at the size
of the input, by the names of the signature.
"""

import pathlib
from collections.abc import Sequence

from export import report
from export.options import CALIBRATED, TFLiteFormat
from export.preprocessing_code import preprocessing_section
from export.segmentation import Outputs, SegmentReference, compared, facts_of, reference_of, segments_model, table_of
from export.source import ExportedModel
from export.tflite import quantize, tflite_file
from export.tflite.export import convert
from keras_vit import UserError, preprocessing_of
from keras_vit.files.atomic import staged
from keras_vit.files.tables import short_name


def export_segmenter(
    exported: ExportedModel, output: pathlib.Path, formats: Sequence[TFLiteFormat]
) -> dict[TFLiteFormat, tuple[pathlib.Path, float]]:
    """Write segmentation-FORMAT.tflite for each format. Returns its path and the share of equal pixels.

    Raises ParityError, and writes nothing, if float32 differs by more than rounding, or another format in more than a
    tenth of the pixels.
    """
    if calibrated := [kind for kind in formats if kind in CALIBRATED]:
        raise UserError(
            f"{calibrated[0]} is calibrated for classes; take float32, float16, int8-dynamic or int8-weights."
        )
    expected, preprocessing, origin = reference_of(exported), preprocessing_of(exported.model), exported.origin
    written: dict[TFLiteFormat, tuple[pathlib.Path, float]] = {}
    files = dict[str, dict]()
    with staged(output) as stage:
        float_file = stage / "float32.tflite"
        float_file.write_bytes(convert(exported.model, all_tokens=True, finish=segments_model))
        for kind in formats:
            content = float_file.read_bytes() if kind == "float32" else quantize.quantize(float_file, kind)
            file = stage / f"segmentation-{kind}.tflite"
            file.write_bytes(content)
            row = compared(f"{kind} TFLite file", expected.outputs, _run(file, expected), exact=kind == "float32")
            files[kind] = row | {"bytes": file.stat().st_size}
            written[kind] = (output / file.name, row["equal_pixels"])
        float_file.unlink()
        title = f"Segmentation {short_name(origin.name)} as TFLite"
        facts = facts_of(origin, "TFLite of a segmentation", files)
        panels: dict = {"bytes": {kind: row["bytes"] for kind, row in files.items()}}
        section = preprocessing_section(preprocessing, raw_pixels=False)
        report.write(stage, title, facts, [table_of(files)], panels, section)
    return written


def _run(file: pathlib.Path, expected: SegmentReference) -> list[Outputs]:
    runner = tflite_file.interpreter(file, 1).get_signature_runner("serving_default")
    return [{name: value[0] for name, value in runner(image=image).items()} for image in expected.images()]
