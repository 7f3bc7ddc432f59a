"""The model and the pictures that a command line names. Imports no TensorFlow."""

import os
import pathlib
from collections.abc import Sequence

from keras_vit import UserError
from keras_vit.cli.parser import Given, arguments_of
from keras_vit.files.keras_model import MODEL
from keras_vit.files.remote import is_remote, matching
from keras_vit.images.formats import is_picture_name
from keras_vit.run import CONFIG, Run
from keras_vit.text.classes import is_text_file
from training.options.predict import PredictOptions

# How the file of a model is called, and no picture.
_MODEL_FILES = (".keras", ".npz", ".safetensors")
# Files of a SavedModel, in its directory or in that of its versions, which TF Serving takes.
_EXPORTED = ("saved_model.pb", "[0-9]*/saved_model.pb")


def with_pictures(given: Given) -> Given:
    """Return the options that were given; pictures behind the texts of --classes or --templates are none of these.

    What is a picture follows from how it is written, and not from what lies in the working directory: a picture or
    folder has a slash in it or the ending of a picture. Raises UserError for one that is not there, which may be a text
    with a slash, and for a text behind a picture, which may be a folder without one.
    """
    for option in ("classes", "templates"):
        values = given.get((option,), ())
        first = next((number for number, value in enumerate(values) if _is_picture(value, number)), len(values))
        if first == len(values):
            continue
        for number, value in enumerate(values[first:], first):
            if not _is_picture(value, number):
                raise UserError(
                    f"{value!r:.80} stands behind the picture {values[first]!r:.80}; if it is one, too, write "
                    f"'./{value:.80}', else put the values of --{option} together."
                )
            if not is_remote(value) and not os.path.lexists(value) and not matching(value):
                raise UserError(
                    f"There is no picture or folder {value!r:.80}, as which --{option} takes a value with a slash or "
                    "the ending of a picture; correct it, or write a text with a slash into a .txt file."
                )
        pictures = (*given.get(("pictures",), ()), *values[first:])
        given = {**given, (option,): values[:first], ("pictures",): pictures}
    return given


def with_run(given: Given) -> Given:
    """Return the options that were given; without `--run`, a run directory or model file among the pictures is the run.

    So is the first of several that is no file or folder of this machine: an official name, or a path that is missing.
    """
    pictures = given.get(("pictures",), ())
    models = [name for name in pictures if _is_model(pathlib.Path(name))][:1]
    if not models and pictures and (pictures[1:] or ("serve",) in given) and not matching(pictures[0]):
        models = [pictures[0]]
    if ("run",) in given or not models:
        return given
    return {**given, ("run",): models[0], ("pictures",): tuple(name for name in pictures if name not in models)}


def check_pictures(run: str, pictures: Sequence[str], serve: bool, classes: Sequence[str] | None) -> None:
    """Raise UserError unless there are either pictures or `--serve`, and for an export as the model."""
    if serve == bool(pictures):
        name = None if serve else next((name for name in reversed(classes or ()) if os.path.lexists(name)), None)
        hint = "" if name is None else f"; {name} is taken as a class, so write ./{name} if it is meant"
        raise UserError(f"Give pictures, such as pictures/ or cat.jpg, or --serve, but not both{hint}.")
    if run.endswith(".tflite") or any(any(pathlib.Path(run).glob(name)) for name in _EXPORTED):
        raise UserError(f"{run} is an export; give the run that it was exported from, or use keras-vit evaluate.")


def check_output(output: str | None) -> None:
    """Raise UserError unless a file can be written as --output."""
    file = pathlib.Path(output or "x").absolute()
    if file.is_dir() or not (file.parent.is_dir() and os.access(file.parent, os.W_OK | os.X_OK)):
        raise UserError(f"--output takes a file in a folder that exists and can be written, but is {output!r}.")


def next_commands(options: PredictOptions, run: Run) -> list[tuple[str, ...]]:
    """Return commands to go on with after the pictures were classified."""
    if run.file(CONFIG) and options.classes is None:
        return run.next_commands("predict")
    model = ("predict", *arguments_of(options, "pictures", "output", "explain", "serve", "port"))
    has_page = (options.output or "").endswith(".html")
    return [(*model, "--serve") if has_page else (*model, "--output", "predictions.html", *options.pictures)]


def _is_picture(value: str, number: int) -> bool:
    """Return whether the value of this number of an option of texts is written like a picture or folder."""
    is_text = "{}" in value or (number == 0 and is_text_file((value,)))
    return not is_text and ("/" in value or is_picture_name(value))


def _is_model(path: pathlib.Path) -> bool:
    return path.suffix in _MODEL_FILES or (path / MODEL).is_file() or (path / CONFIG).is_file()
