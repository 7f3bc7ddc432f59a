"""Train a classifier on your pictures, evaluate it, and save it as a run.

    python -m training.auto --data folder:pictures

looks at the data and the machine: a linear classifier on the frozen features of a published checkpoint without a GPU,
fine-tuning with a GPU or with --minutes, and training from scratch if there is no checkpoint. It says why.
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import cli, parser
from keras_vit.runs import open_run
from training import evaluate, finetune, pretrain
from training.options.auto import AutoOptions
from training.options.checks import check_data
from training.options.common import DataOptions
from training.options.probes import LinearProbeOptions
from training.workdir import check_new_workdir, check_outside


def main(arguments: Sequence[str]) -> None:
    """`--data DATA [--checkpoint NAME]`"""
    options = parser.parse(AutoOptions, arguments, prog="python -m training.auto")
    check_data(options.source)
    check_outside(options.workdir, options.source.data)
    check_new_workdir(options.workdir)
    if options.checkpoint is not None:
        open_run(options.checkpoint)
    cli.require_tensorflow()

    from training.experiments.auto import (
        FEW_IMAGES,
        finetuning_epochs,
        original_image_size,
        resize_for,
        usable_checkpoint,
    )
    from training.input.sources import open_source

    data = _as_arguments(options.source)
    training = [*data, "--workdir", options.workdir, "--seed", str(options.seed)]
    training += [] if options.resize is None else ["--resize", options.resize]
    checkpoint = usable_checkpoint(options.checkpoint)
    if checkpoint is None:
        pretrain.main(["auto", *training])
    else:
        size = original_image_size(checkpoint)
        run, source = open_run(checkpoint, image_size=size), open_source(options.source)
        epochs = finetuning_epochs(run, source, options.minutes)
        resize = options.resize or resize_for(run, source)
        if epochs:
            training += [] if resize is None or options.resize else ["--resize", resize]
            finetune.main(["--checkpoint", checkpoint, "--recipe", "auto", "--epochs", str(epochs), *training])
        else:
            from training.probes.logistic_regression import probe

            named = LinearProbeOptions(run=checkpoint, source=options.source, workdir=options.workdir)
            folds = 5 if source.train.num_examples < FEW_IMAGES else None
            probe(run, source, dataclasses.replace(named, image_size=size, resize=resize, folds=folds))
    evaluate.main(["--run", options.workdir, *data])
    pictures = options.source.data.removeprefix("folder:")
    model = ("--run", options.workdir)
    cli.print_next(
        [
            ("predict", *model, pictures) if options.source.data.startswith("folder:") else ("evaluate", *model, *data),
            ("inspect", *model, "--output", f"{options.workdir}/inspection"),
            ("saved-model", *model, "--output", f"{options.workdir}/saved_model"),
        ]
    )


def _as_arguments(source: DataOptions) -> list[str]:
    """The options of the data as a command line has them."""
    changed = [field for field in dataclasses.fields(source) if getattr(source, field.name) != field.default]
    pairs = [(f"--{field.name.replace('_', '-')}", str(getattr(source, field.name))) for field in changed]
    return [text for pair in pairs for text in pair]


if __name__ == "__main__":
    cli.run(main)
