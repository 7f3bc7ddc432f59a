"""A model and pictures as the command names them, looked at, and what was seen written and told."""

import pathlib

import keras

from keras_vit import run_directory
from keras_vit.checkpoints.download import find_checkpoint
from keras_vit.checkpoints.load import adapt, from_checkpoint
from keras_vit.errors import UserError
from keras_vit.inspection.compute import FIGURES, inspect
from keras_vit.inspection.html_report import sentences
from keras_vit.inspection.images import read_images
from keras_vit.inspection.options import InspectionOptions
from keras_vit.inspection.report import write


def look(arguments: InspectionOptions) -> None:
    """Check the arguments, look, write the files and print the sentences."""
    _check(arguments)
    output = run_directory.check_output(arguments.output)
    labels = _labels(arguments)
    samples = None if arguments.run is None else pathlib.Path(arguments.run) / run_directory.SAMPLES
    source = arguments.images or samples
    model = _model(arguments)
    pictures = read_images(source, arguments.count, labels, arguments.data_dir)
    findings = inspect(
        model,
        pictures,
        checkpoint=arguments.run or arguments.checkpoint,
        labels=labels,
        figures=arguments.figures,
        shown=arguments.show,
        layers=arguments.layers,
        heads=arguments.heads,
    )
    names = write(findings, output)
    for sentence in sentences(findings):
        print(sentence)
    print(f"{len(names)} files in {output}; open {output / 'index.html'}.")


def _check(arguments: InspectionOptions) -> None:
    if (arguments.run is None) == (arguments.checkpoint is None):
        raise UserError("Give either --run DIR or --checkpoint FILE, whose model is looked into.")
    for option in ("count", "show"):
        if getattr(arguments, option) < 1:
            raise UserError(f"--{option} must be at least 1 image, but is {getattr(arguments, option)}.")
    unknown = [figure for figure in arguments.figures or () if figure not in FIGURES]
    if unknown:
        raise UserError(f"There is no figure {unknown[0]!r}; --figures takes {', '.join(FIGURES)}.")
    if arguments.images is None:
        if arguments.run is None or arguments.run.endswith(".keras"):
            raise UserError("--images is needed with a checkpoint: give an image, a folder of images, or a data set.")
        run_directory.find(arguments.run, run_directory.SAMPLES)


def _model(arguments: InspectionOptions) -> keras.Model:
    """The model; the options that only a checkpoint has must not be given with a run."""
    given = {name: getattr(arguments, name) for name in ("num_heads", "num_groups")}
    if arguments.run is not None:
        meaningless = [name for name, value in given.items() if value is not None]
        if meaningless:
            raise UserError(
                f"--{meaningless[0].replace('_', '-')} means nothing to a run, which knows it; leave it out."
            )
        model = run_directory.load_model(arguments.run)
        return model if arguments.image_size is None else adapt(model, image_size=arguments.image_size)
    path = find_checkpoint(arguments.checkpoint)
    return from_checkpoint(path, image_size=arguments.image_size, **given)


def _labels(arguments: InspectionOptions) -> tuple[str, ...]:
    if arguments.labels is not None:
        return run_directory.read_labels(arguments.labels)
    if arguments.run is not None and pathlib.Path(arguments.run).is_dir():
        return run_directory.load_labels(arguments.run)
    return ()
