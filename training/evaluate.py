"""Evaluate a model on the evaluation images of a data set, each exactly once.

    keras-vit evaluate --run runs/pictures
    keras-vit evaluate --run phone/model-int8.tflite --data folder:pictures --output report

It writes report.html, which shows the mistakes, predictions.csv, evaluation.json, evaluation.md and plots into the run
directory, or into --output. Without --data, a run is evaluated on the evaluation images of its own data. Instead of a
run, --run also accepts a .keras file, a checkpoint with a head, a SavedModel or a TFLite file.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.evaluate import EvaluateOptions

_PROG = "keras-vit evaluate"


def main(arguments: Sequence[str]) -> None:
    """`--run DIR [--data …]`"""
    given = parser.read(EvaluateOptions, arguments, prog=_PROG, about=__doc__)

    from training.checks import check_measured, next_commands, open_measured, with_data
    from training.loop.devices.backend import prepare_tpu

    options = parser.options_from(EvaluateOptions, with_data(given), prog=_PROG)
    run = open_measured(options)
    check_measured(run, options.source, options.output)
    prepare_tpu(options.devices)
    cli.require_tensorflow()

    from training.evaluation.evaluate import evaluate_run

    if not evaluate_run(run, options)[0].is_export:
        cli.print_next(next_commands(options, run))


if __name__ == "__main__":
    cli.run(main)
