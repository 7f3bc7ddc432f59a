"""Exports a model that segments as ONNX and OpenVINO files, and verifies them against the Keras model.

Input: image (B, H, W, C) float32 in the value range of the model. Outputs: those of `export.segmentation` at the size
of the input.
"""

import pathlib

from export import report
from export.inference_model import inference_model
from export.onnx import runtimes
from export.onnx.runtimes import FILES
from export.options import OnnxOptions
from export.preprocessing_code import preprocessing_section
from export.segmentation import compared, facts_of, reference_of, segments_model, table_of
from export.source import ExportedModel
from keras_vit import UserError, preprocessing_of
from keras_vit.files.atomic import staged
from keras_vit.files.remote import to_path
from keras_vit.files.tables import short_name


def export_segmenter(exported: ExportedModel, options: OnnxOptions) -> list[tuple[pathlib.Path, float]]:
    """Write the files of each format. Returns the path of the file to load and the share of equal pixels.

    Raises ParityError, and writes nothing, if the pixels differ by more than rounding.
    """
    if options.web:
        raise UserError("The page of --web classifies pictures, but the model segments them; leave --web out.")
    expected, origin, output = reference_of(exported), exported.origin, to_path(options.output)
    network = segments_model(inference_model(exported.model, for_onnx=True, all_tokens=True))
    names = sorted(network.output)
    files, written = dict[str, dict](), []
    with staged(output) as stage:
        for kind in options.formats:
            runtimes.check_size(kind, network)
            about = {"weights": origin.weights, "license": origin.license_text}
            runtimes.write(network, kind, stage, exported.labels, about)
            file = stage / FILES[kind][0]
            runners = {name: runtimes.open_file(file, kind, output=name) for name in names}
            found = [{name: run(image)[0] for name, run in runners.items()} for image in expected.images()]
            row = compared(f"{kind} file", expected.outputs, found, exact=True)
            files[kind] = row | {"bytes": sum((stage / name).stat().st_size for name in FILES[kind])}
            written.append((output / file.name, row["equal_pixels"]))
        title = f"Segmentation {short_name(origin.name)} as ONNX"
        facts = facts_of(origin, "ONNX of a segmentation", files)
        section = preprocessing_section(preprocessing_of(exported.model), raw_pixels=False)
        panels: dict = {"bytes": {kind: row["bytes"] for kind, row in files.items()}}
        report.write(stage, title, facts, [table_of(files)], panels, section)
    return written
