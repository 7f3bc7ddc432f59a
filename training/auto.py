"""Train a classifier on your pictures, evaluate it, and save it as a run.

    keras-vit auto --data folder:pictures

looks at the data and the machine: a linear classifier on the frozen features of a published checkpoint without a GPU,
fine-tuning with a GPU or with --minutes, and training from scratch if there is no checkpoint. It says why.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keras_vit import UserError, cli
from keras_vit.cli import parser
from keras_vit.images.geometry import Resize
from training import finetune, pretrain
from training.options.auto import AutoOptions
from training.options.evaluate import EvaluateOptions
from training.options.probes import LinearProbeOptions

if TYPE_CHECKING:
    from training.input.sources import DataSet


def main(arguments: Sequence[str]) -> None:
    """`--data DATA [--checkpoint NAME]`"""
    options = parser.parse(AutoOptions, arguments, prog="keras-vit auto", about=__doc__)

    from keras_vit.runs import open_run
    from training.input.checks import check_data, unlabelled_path
    from training.workdir import check_new_workdir, check_outside

    check_data(options.source)
    check_outside(options.workdir, options.source.data)
    check_new_workdir(options.workdir)
    if options.unlabelled is not None:
        unlabelled_path(options.unlabelled)
    if options.checkpoint is not None:
        open_run(options.checkpoint)
    cli.require_tensorflow()

    from training.evaluation.evaluate import evaluate
    from training.evaluation.predictors import open_predictor
    from training.experiments.auto import usable_checkpoint
    from training.input.sources import open_source

    checkpoint = usable_checkpoint(options.checkpoint)
    source, baseline = _train(options, checkpoint)
    measured = EvaluateOptions(run=options.workdir, source=options.source)
    trained = open_run(measured.run)
    predictor = open_predictor(trained, measured.input, measured.devices)
    evaluate(predictor, source or open_source(options.source), measured)
    commands = trained.next_commands("evaluate")
    if checkpoint is not None and baseline is not None:  # the classes' names are a better start than zeros
        words = ("finetune", "--checkpoint", checkpoint, "--zero-shot-head", *options.source.arguments())
        commands[-1] = (*words, "--workdir", f"{options.workdir}-from-words")
    cli.print_next(commands)


def _train(options: AutoOptions, checkpoint: str | None) -> tuple["DataSet | None", float | None]:
    """Train in one of three ways; return the data, if they were opened, and the accuracy of the classes' names."""
    from keras_vit.runs import open_run
    from training.experiments import auto
    from training.input.sources import open_source
    from training.probes.logistic_regression import probe

    training = [*options.source.arguments(), "--workdir", options.workdir, "--seed", str(options.seed)]
    more = [] if options.unlabelled is None else ["--unlabelled", options.unlabelled]
    tuned = ["--checkpoint", checkpoint or "", "--recipe", "auto", "--epochs"]
    if checkpoint is None:
        if more:
            raise UserError("--unlabelled fine-tunes a checkpoint; give one by --checkpoint, or leave it out.")
        pretrain.train(["auto", *training, *_resize(options.resize)])
        return None, None
    first = f"{options.workdir}-labels" if more else options.workdir  # of the fine-tuning with the labels alone
    if recipe := auto.unfinished_recipe(first):  # another timing might choose other epochs
        finetune.train([*tuned, str(recipe["epochs"]), *_resize(recipe["resize"]), *more, *training])
        return None, None
    run, source = open_run(checkpoint), open_source(options.source)
    baseline = auto.zero_shot_accuracy(checkpoint, source)
    epochs = auto.finetuning_epochs(run, source, options.minutes, options.resize)
    resize = options.resize or auto.resize_for(run, source)
    if more and not epochs:
        raise UserError("--unlabelled trains all weights; give them time by --minutes 30 or so, or leave it out.")
    if epochs:
        finetune.train([*tuned, str(epochs), *_resize(resize), *more, *training])
    else:
        probed = LinearProbeOptions(
            run=checkpoint, source=options.source, workdir=options.workdir, batch_size=auto.BATCH, resize=resize,
            folds=5 if source.train.num_examples < auto.FEW_IMAGES else None,
        )  # fmt: skip
        if (kept := auto.with_own_head(run, source, options.resize, resize)) is not None:
            auto.save_with_own_head(run, kept, source, dataclasses.replace(probed, resize=options.resize, folds=None))
        else:
            probe(run, source, probed)
    return source, baseline


def _resize(resize: Resize | None) -> list[str]:
    return [] if resize is None else ["--resize", resize]


if __name__ == "__main__":
    cli.run(main)
