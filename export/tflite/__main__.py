"""Exports a model as TFLite files for mobile devices, and verifies each file against the Keras model.

    keras-vit tflite --run runs/demo --output phone --formats float32 int8-dynamic

Input: image (1, H, W, C) float32 in the value range of the model, or uint8 pixels with --uint8-input. Output: logits
(1, K). The batch is fixed to 1, so that the device computes no shapes. `quantize.py` describes the formats. Each file
stores its labels and its normalization as TFLite Metadata.
"""

from collections.abc import Sequence

from export.options import TFLiteOptions, check_calibration, check_output
from keras_vit import cli, parser
from keras_vit.files.remote import to_path


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR --formats …`"""
    options = parser.parse(TFLiteOptions, arguments, prog="keras-vit tflite")
    check_calibration(options)
    run = options.source.open_run()
    check_output(options.output)
    cli.require_tensorflow()

    if options.embeddings is not None:
        from export.source import open_without_classes
        from export.tflite.embeddings import export_embeddings

        exported, normalize = open_without_classes(run, options.source), options.embeddings == "unit-length"
        files = export_embeddings(
            exported.model,
            exported.samples,
            to_path(options.output),
            options.formats,
            origin=exported.origin,
            normalize=normalize,
        )
        for path, found in files.values():
            print(f"{path}: embeddings within {found.max_abs_diff:.2g} of the Keras model.")
        cli.print_next([("saved-model", *options.source.arguments(), "--embeddings", "features", "--output", "served")])
        return

    from export import parity
    from export.detection import is_detector, open_detector
    from export.segmentation import is_segmenter, open_segmenter
    from export.source import open_model
    from export.tflite.detection import export_detector
    from export.tflite.export import export_tflite, read_calibration, summary
    from export.tflite.segmentation import export_segmenter

    if is_detector(run):
        detector, output = open_detector(run, options.source), to_path(options.output)
        for path, difference in export_detector(detector, output, options.formats).values():
            print(f"{path}: boxes and logits within {difference:.2g} of the Keras model.")
        return
    if is_segmenter(run):
        segmenter, output = open_segmenter(run, options.source), to_path(options.output)
        for path, share in export_segmenter(segmenter, output, options.formats).values():
            print(f"{path}: {share:.2%} of the pixels are those of the Keras model.")
        return
    parity.check_share(options.max_disagreement)
    exported = open_model(run, options.source)
    written = export_tflite(exported, options, read_calibration(run, options, exported.labels))
    print(summary(written))
    artifacts = [str(path) for path, _ in written.values()] if run.data_options else []
    evaluations = [("evaluate", "--run", file, *run.data_options) for file in artifacts[:2]]
    cli.print_next([*evaluations, ("saved-model", *options.source.arguments(), "--output", "served")])


if __name__ == "__main__":
    cli.run(main)
