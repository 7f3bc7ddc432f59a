"""Train a classifier on your images, evaluate it, and save it as a run.

    keras-vit auto --data folder:pictures

looks at the data and the machine: a linear classifier on the frozen features of a published checkpoint without a GPU,
fine-tuning with a GPU or with --minutes, and training from scratch if there is no checkpoint. It says why.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.evaluate import EvaluateOptions
from training.options.train import AutoOptions


def main(arguments: Sequence[str]) -> None:
    """`--data DATA [--checkpoint NAME]`"""
    options = parser.parse(AutoOptions, arguments, prog="keras-vit auto", about=__doc__)

    from keras_vit.run import Run
    from training.checks import check_new_workdir, check_outside
    from training.data.checks import check_data, unlabelled_path

    check_data(options.source)
    check_outside(options.workdir, options.source.data)
    check_new_workdir(options.workdir)
    if options.unlabelled is not None:
        unlabelled_path(options.unlabelled)
    if options.checkpoint is not None:
        Run.open(options.checkpoint)
    cli.require_tensorflow()

    from training.data.sources import open_source
    from training.evaluation.evaluate import evaluate
    from training.evaluation.predictors import open_predictor
    from training.experiments.auto import train, usable_checkpoint

    checkpoint = usable_checkpoint(options.checkpoint)
    source, baseline = train(options, checkpoint)
    measured = EvaluateOptions(run=options.workdir, source=options.source)
    trained = Run.open(measured.run)
    predictor = open_predictor(trained, measured.input, measured.devices)
    evaluate(predictor, source or open_source(options.source), measured)
    commands = trained.next_commands("evaluate")
    if checkpoint is not None and baseline is not None:  # the classes' names are a better start than zeros
        words = ("finetune", "--checkpoint", checkpoint, "--zero-shot-head", *options.source.arguments())
        commands[-1] = (*words, "--workdir", f"{options.workdir}-from-words")
    cli.print_next(commands)


if __name__ == "__main__":
    cli.run(main)
