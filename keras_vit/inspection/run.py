"""The work of `python -m keras_vit.inspection`: load a model and images, compute, write the report, print a summary."""

import os
import pathlib
from collections.abc import Sequence

import keras

from keras_vit import run_directory
from keras_vit.checkpoints.download import find_checkpoint
from keras_vit.checkpoints.from_checkpoint import adapt, from_checkpoint
from keras_vit.errors import UserError
from keras_vit.files.labels import read_labels
from keras_vit.files.remote import to_path
from keras_vit.inspection.compute import FIGURES, inspect
from keras_vit.inspection.html_report import summary
from keras_vit.inspection.images import read_images
from keras_vit.inspection.report import write


def run_inspection(
    *,
    output: str | os.PathLike,
    run: str | None = None,
    checkpoint: str | None = None,
    images: str | None = None,
    count: int = 128,
    show: int = 8,
    figures: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    labels: str | os.PathLike | None = None,
    image_size: tuple[int, int] | None = None,
    num_heads: int | None = None,
    num_groups: int | None = None,
    data_dir: str | None = None,
) -> None:
    """Check the arguments, inspect the model, write the report and print its summary.

    The arguments are the fields of `InspectionOptions`. Exactly one of `run` and `checkpoint` is required.

    Raises:
        UserError: for arguments that are wrong or do not fit the model.
    """
    if (run is None) == (checkpoint is None):
        raise UserError("Give either --run DIR or --checkpoint FILE, the model to inspect.")
    for option, value in (("count", count), ("show", show)):
        if value < 1:
            raise UserError(f"--{option} must be at least 1 image, but is {value}.")
    unknown = [figure for figure in figures or () if figure not in FIGURES]
    if unknown:
        raise UserError(f"There is no figure {unknown[0]!r}; --figures takes {', '.join(FIGURES)}.")
    source = _image_source(images, run)
    output = run_directory.check_output(output)
    class_names = _class_names(labels, run)
    model = _load_model(
        run=run, checkpoint=checkpoint, image_size=image_size, num_heads=num_heads, num_groups=num_groups
    )
    result = inspect(
        model,
        read_images(source, count, class_names, data_dir),
        checkpoint=str(run or checkpoint),
        labels=class_names,
        figures=figures,
        shown=show,
        layers=layers,
        heads=heads,
    )
    names = write(result, output)
    for sentence in summary(result):
        print(sentence)
    print(f"{len(names)} files in {output}; open {output / 'index.html'}.")


def _image_source(images: str | None, run: str | None) -> str | pathlib.Path:
    """The argument `images`, or the samples of the run directory if there is none."""
    if images:
        return images
    if run is None or run.endswith(".keras"):
        raise UserError("--images is needed with a checkpoint: give an image, a folder of images, or a data set.")
    run_directory.find(run, run_directory.SAMPLES)
    return to_path(run) / run_directory.SAMPLES


def _load_model(
    *,
    run: str | None,
    checkpoint: str | None,
    image_size: tuple[int, int] | None,
    num_heads: int | None,
    num_groups: int | None,
) -> keras.Model:
    """Load the model. `num_heads` and `num_groups` are only for checkpoints: a run stores its configuration."""
    if checkpoint is not None:
        path = find_checkpoint(checkpoint)
        return from_checkpoint(path, image_size=image_size, num_heads=num_heads, num_groups=num_groups)
    assert run is not None
    for option, value in (("num-heads", num_heads), ("num-groups", num_groups)):
        if value is not None:
            raise UserError(f"--{option} has no effect on a run, which stores its configuration; leave it out.")
    model = run_directory.load_model(run)
    return model if image_size is None else adapt(model, image_size=image_size)


def _class_names(labels: str | os.PathLike | None, run: str | None) -> tuple[str, ...]:
    if labels is not None:
        return read_labels(labels)
    if run is not None and to_path(run).is_dir():
        return run_directory.load_labels(run)
    return ()
