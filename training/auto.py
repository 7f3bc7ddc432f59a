"""Train a classifier on your pictures, evaluate it, and save it as a run.

    keras-vit auto --data folder:pictures

looks at the data and the machine: a linear classifier on the frozen features of a published checkpoint without a GPU,
fine-tuning with a GPU or with --minutes, and training from scratch if there is no checkpoint. It says why.
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import UserError, cli, parser
from keras_vit.images.geometry import Resize
from keras_vit.runs import open_run
from training import finetune, pretrain
from training.options.auto import AutoOptions
from training.options.checks import check_data, unlabelled_path
from training.options.evaluate import EvaluateOptions
from training.options.probes import LinearProbeOptions
from training.workdir import check_new_workdir, check_outside


def main(arguments: Sequence[str]) -> None:
    """`--data DATA [--checkpoint NAME]`"""
    options = parser.parse(AutoOptions, arguments, prog="keras-vit auto")
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
    from training.experiments.auto import (
        BATCH,
        FEW_IMAGES,
        finetuning_epochs,
        resize_for,
        save_with_own_head,
        unfinished_recipe,
        usable_checkpoint,
        with_own_head,
        zero_shot_accuracy,
    )
    from training.input.sources import open_source
    from training.probes.logistic_regression import probe

    data = options.source.arguments()
    training = [*data, "--workdir", options.workdir, "--seed", str(options.seed)]
    checkpoint, baseline, source = usable_checkpoint(options.checkpoint), None, None
    more = [] if options.unlabelled is None else ["--unlabelled", options.unlabelled]
    first = f"{options.workdir}-labels" if more else options.workdir  # of the fine-tuning with the labels alone
    if checkpoint is None:
        if more:
            raise UserError("--unlabelled fine-tunes a checkpoint; give one by --checkpoint, or leave it out.")
        pretrain.train(["auto", *training, *_resize(options.resize)])
    elif recipe := unfinished_recipe(first):  # another timing might choose other epochs
        choice = ["--epochs", str(recipe["epochs"]), *_resize(recipe["resize"]), *more]
        finetune.train(["--checkpoint", checkpoint, "--recipe", "auto", *choice, *training])
    else:
        run, source = open_run(checkpoint), open_source(options.source)
        baseline = zero_shot_accuracy(checkpoint, source)
        epochs = finetuning_epochs(run, source, options.minutes, options.resize)
        resize = options.resize or resize_for(run, source)
        if more and not epochs:
            raise UserError("--unlabelled trains all weights; give them time by --minutes 30 or so, or leave it out.")
        if epochs:
            choice = ["--epochs", str(epochs), *_resize(resize), *more]
            finetune.train(["--checkpoint", checkpoint, "--recipe", "auto", *choice, *training])
        else:
            named = LinearProbeOptions(run=checkpoint, source=options.source, workdir=options.workdir, batch_size=BATCH)
            folds = 5 if source.train.num_examples < FEW_IMAGES else None
            if (kept := with_own_head(run, source, options.resize, resize)) is not None:
                save_with_own_head(run, kept, source, dataclasses.replace(named, resize=options.resize))
            else:
                probe(run, source, dataclasses.replace(named, resize=resize, folds=folds))
    measured = EvaluateOptions(run=options.workdir, source=options.source)
    trained = measured.open_run()
    predictor = open_predictor(trained, measured.input, measured.devices)
    evaluate(predictor, source or open_source(options.source), measured)
    commands = trained.next_commands("evaluate")
    if checkpoint is not None and baseline is not None:  # the classes' names are a better start than zeros
        words = ("finetune", "--checkpoint", checkpoint, "--zero-shot-head", *data)
        commands[-1] = (*words, "--workdir", f"{options.workdir}-from-words")
    cli.print_next(commands)


def _resize(resize: Resize | None) -> list[str]:
    return [] if resize is None else ["--resize", resize]


if __name__ == "__main__":
    cli.run(main)
