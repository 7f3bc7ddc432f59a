"""Exports a model as TFLite files for mobile devices, and verifies each file against the Keras model.

    python -m export.tflite --run runs/demo --output phone --formats float32 int8-dynamic

Input: image (1, H, W, C) float32 in the value range of the model, or uint8 pixels with --uint8-input. Output: logits
(1, K). The batch is fixed to 1, so that the device computes no shapes. `quantize.py` describes the formats. Each file
stores its labels and its normalization as TFLite Metadata.
"""

from collections.abc import Sequence

from export.options import CALIBRATED, TFLiteOptions, check_calibration, check_source
from keras_vit import cli, parser, run_directory
from keras_vit.files.remote import to_path


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR --formats …`"""
    options = parser.parse(TFLiteOptions, arguments, prog="python -m export.tflite")
    check_calibration(options)
    check_source(options.source, options.output)
    cli.require_tensorflow()

    from export import parity
    from export.source import open_source
    from export.tflite.export import export_tflite, read_calibration, summary

    parity.check_share(options.max_disagreement)
    source, calibration = open_source(**vars(options.source)), None
    is_needed = any(kind in CALIBRATED for kind in options.formats)
    is_there = options.calibration is not None or _has_images(options.source.run)
    if is_needed or ("int8-dynamic" in options.formats and is_there):
        calibration = read_calibration(
            options.source.run,
            options.calibration,
            options.calibration_images,
            source.labels,
            fewer_are_enough=not is_needed,
        )
    written = export_tflite(
        source.model,
        source.labels,
        source.samples,
        to_path(options.output),
        options.formats,
        calibration=calibration,
        origin=source.origin,
        target=options.target,
        uint8_input=options.uint8_input,
        dynamic_batch=options.dynamic_batch,
        max_disagreement=options.max_disagreement,
    )
    print(summary(written))


def _has_images(run: str | None) -> bool:
    return run is not None and (to_path(run) / run_directory.CALIBRATION).is_file()


if __name__ == "__main__":
    cli.run(main)
