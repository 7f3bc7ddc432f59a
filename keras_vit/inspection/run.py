"""The work of `python -m keras_vit.inspection`: load a model and images, compute, write the report, print a summary."""

import os
from collections.abc import Sequence

import keras

from keras_vit import run_directory
from keras_vit.checkpoints.fetch.find import find_checkpoint
from keras_vit.checkpoints.from_checkpoint import adapt, from_checkpoint
from keras_vit.files.labels import read_labels
from keras_vit.files.remote import to_path
from keras_vit.inspection.compute import inspect
from keras_vit.inspection.html_report import summary
from keras_vit.inspection.images import read_images
from keras_vit.inspection.report import write
from keras_vit.models.build import preprocessing_of
from keras_vit.scores import Scoring


def run_inspection(
    *,
    output: str | os.PathLike,
    run: str | None,
    checkpoint: str | None,
    images: str,
    count: int,
    show: int,
    figures: Sequence[str] | None,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    labels: str | os.PathLike | None,
    image_size: tuple[int, int] | None,
    num_heads: int | None,
    num_groups: int | None,
    data_dir: str | None,
) -> None:
    """Inspect the model, write the report and print its summary.

    The arguments are the fields of `InspectionOptions`, which checks them. Exactly one of `run` and `checkpoint` is
    given.

    Raises:
        UserError: for arguments that do not fit the model.
    """
    output = to_path(output)
    class_names = _class_names(labels, run)
    model = _load_model(
        run=run, checkpoint=checkpoint, image_size=image_size, num_heads=num_heads, num_groups=num_groups
    )
    # A run directory is a checkpoint too.
    place = run if checkpoint is None else find_checkpoint(checkpoint)
    assert place is not None
    result = inspect(
        model,
        read_images(images, count, class_names, data_dir, preprocessing_of(model)),
        checkpoint=str(run or checkpoint),
        labels=class_names,
        figures=figures,
        shown=show,
        layers=layers,
        heads=heads,
        scoring=Scoring(run_directory.load_temperature(place), None, run_directory.is_multi_label(place)),
    )
    names = write(result, output)
    for sentence in summary(result):
        print(sentence)
    print(f"{len(names)} files in {output}; open {output / 'index.html'}.")


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
    model = run_directory.load_model(run)
    return model if image_size is None else adapt(model, image_size=image_size)


def _class_names(labels: str | os.PathLike | None, run: str | None) -> tuple[str, ...]:
    if labels is not None:
        return read_labels(labels)
    if run is not None and to_path(run).is_dir():
        return run_directory.load_labels(run)
    return ()
