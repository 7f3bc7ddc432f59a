"""Exports a model as TFLite files for mobile devices, and verifies each file against the Keras model.

    keras-vit tflite --run runs/demo --output phone --formats float32 int8-dynamic

Input: image (1, H, W, C) float32 in the value range of the model, or uint8 pixels with --uint8-input. Output: logits
(1, K). The batch is fixed to 1, so that the device computes no shapes. `quantize.py` describes the formats. Each file
stores its labels and its normalization as TFLite Metadata.
"""

from collections.abc import Sequence

from export.options import TFLiteOptions
from keras_vit import cli
from keras_vit.cli import parser


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR --formats …`"""
    options = parser.parse(TFLiteOptions, arguments, prog="keras-vit tflite", about=__doc__)

    from export.run import open_for_export

    run = open_for_export(options)

    from export.source import read_calibration
    from export.tasks import Classification, open_task
    from export.tflite.export import export_tflite, summary
    from keras_vit.files.documents import read_json
    from keras_vit.files.remote import to_path

    task = open_task(run, options.source, options.embeddings)
    is_classifier = isinstance(task, Classification)
    calibration = read_calibration(run, options, task.exported.labels) if is_classifier else None
    written = export_tflite(task, options, calibration)
    print(summary(task, written, options.target))
    for note in read_json(to_path(options.output) / "report.json")["notes"]:
        if "GPU accelerator" in note:
            print(note)
    artifacts = [str(path) for path, _ in written.values()] if run.data_options and is_classifier else []
    evaluations = [
        ("evaluate", "--run", file, *run.data_options, "--output", f"{file.removesuffix('.tflite')}-report")
        for file in artifacts[:2]
    ]
    embeddings = [] if options.embeddings is None else ["--embeddings", options.embeddings]
    cli.print_next([*evaluations, ("saved-model", *options.source.arguments(), *embeddings, "--output", "served")])


if __name__ == "__main__":
    cli.run(main)
