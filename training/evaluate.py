"""Evaluate a model on the evaluation images of a data set, each exactly once.

    keras-vit evaluate --run runs/pictures
    keras-vit evaluate --run phone/model-int8.tflite --data folder:pictures --output report

writes report.html, with the mistakes as images, predictions.csv, evaluation.json, evaluation.md and plots into the
run directory, or into --output. Without --data, a run is evaluated on the evaluation images of its own data. Instead of
a run, --run also takes a .keras file, a checkpoint with a head, a SavedModel or a TFLite file.
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.evaluate import EvaluateOptions

_PROG = "keras-vit evaluate"


def main(arguments: Sequence[str]) -> None:
    """`--run DIR [--data …]`"""
    given = parser.read(EvaluateOptions, arguments, prog=_PROG, about=__doc__)

    from keras_vit.text.classes import classes_of_labels
    from training.checks import check_measured, next_commands, open_measured, with_data
    from training.loop.devices.backend import prepare_tpu

    options = parser.options_from(EvaluateOptions, with_data(given), prog=_PROG)
    run = open_measured(options)
    check_measured(run, options.source, options.output)
    prepare_tpu(options.devices)
    cli.require_tensorflow()

    from training.data.sources import open_source
    from training.evaluation.evaluate import evaluate
    from training.evaluation.predictors import open_predictor

    source = open_source(options.source, multi_label=True) if options.classes == () else None
    if source is not None:  # the names of the data's classes are the texts
        run = dataclasses.replace(run, texts=classes_of_labels(source.labels, options.templates))
    predictor = open_predictor(run, options.input, options.devices)  # whose mistakes are found before data are read
    evaluate(predictor, source or open_source(options.source, multi_label=True), options)
    if not predictor.is_export:
        cli.print_next(next_commands(options, run))


if __name__ == "__main__":
    cli.run(main)
