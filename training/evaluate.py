"""Evaluate a model on the evaluation images of a data set, each exactly once.

    python -m training.evaluate --run runs/mnist-notes --data tfds:mnist

writes evaluation.json, evaluation.md, confusion.png, reliability.png and mistakes.png into the run directory, or into
--output. Instead of a run, --run also takes a .keras file, a checkpoint with a head, a SavedModel or a TFLite file.
"""

from collections.abc import Sequence

from keras_vit import cli, parser
from keras_vit.checkpoints.fetch.find import check_name
from training.devices.tpu import prepare_tpu
from training.options.checks import check_data, check_finished, check_output, check_run_classes
from training.options.evaluate import EvaluateOptions
from training.options.workdir import check_split


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    options = parser.parse(EvaluateOptions, arguments, prog="python -m training.evaluate")
    check_name(options.run)
    check_finished(options.run)
    check_data(options.source)
    check_output(options.run, options.output)
    check_split(options.run, options.source)
    check_run_classes(options.run, options.source)
    prepare_tpu(options.devices)
    cli.require_tensorflow()

    from training.evaluation.evaluate import evaluate

    evaluate(
        options.run,
        options.source,
        batch_size=options.batch_size,
        output=options.output,
        real_labels=options.real_labels,
        save_predictions=options.save_predictions,
        calibrate=options.calibrate,
        overrides=options.input,
        devices=options.devices,
    )


if __name__ == "__main__":
    cli.run(main)
