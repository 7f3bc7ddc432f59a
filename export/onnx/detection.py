"""Exports a detector as ONNX and OpenVINO files, and verifies them against the Keras model.

Input: image (B, H, W, C) float32 in the value range of the model. Output: detections (B, N, 4 + K), see
`export.detection`.
"""

import pathlib

import numpy as np

from export import report
from export.detection import agreement, detections_model, reference_of, require_equal, table_of
from export.inference_model import inference_model
from export.onnx import runtimes
from export.onnx.runtimes import FILES
from export.options import OnnxOptions
from export.preprocessing_code import preprocessing_section
from export.source import ExportedModel
from keras_vit import UserError, preprocessing_of
from keras_vit.files.atomic import staged
from keras_vit.files.remote import to_path
from keras_vit.files.tables import short_name


def export_detector(exported: ExportedModel, options: OnnxOptions) -> list[tuple[pathlib.Path, float]]:
    """Write the files of each format. Returns the path of the file to load and its largest difference.

    Raises ParityError, and writes nothing, if boxes or logits differ from the Keras model's by more than rounding.
    """
    if options.web:
        raise UserError("The page of --web classifies pictures, but the model is a detector; leave --web out.")
    expected, origin, output = reference_of(exported), exported.origin, to_path(options.output)
    network = detections_model(inference_model(exported.model, for_onnx=True, all_tokens=True))
    files, written = dict[str, dict](), []
    with staged(output) as stage:
        for kind in options.formats:
            runtimes.check_size(kind, network)
            about = {"weights": origin.weights, "license": origin.license_text}
            runtimes.write(network, kind, stage, exported.labels, about, output="detections")
            file = stage / FILES[kind][0]
            runner = runtimes.open_file(file, kind, output="detections")
            found = np.concatenate([runner(images) for _, images in expected.batches()])
            difference = require_equal(f"{kind} file", expected, found)
            size = sum((stage / name).stat().st_size for name in FILES[kind])
            share = agreement(expected.logits, found)
            files[kind] = {"max_abs_diff": difference, "agreement": share, "bytes": size}
            written.append((output / file.name, difference))
        facts, title = origin.facts("ONNX of a detector", files), f"Detector {short_name(origin.name)} as ONNX"
        section = preprocessing_section(preprocessing_of(exported.model), raw_pixels=False)
        panels: dict = {"bytes": {kind: row["bytes"] for kind, row in files.items()}}
        report.write(stage, title, facts, [table_of(files)], panels, section)
    return written
