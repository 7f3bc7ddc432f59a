"""The model and the images that a command line names. Imports neither TensorFlow nor Keras."""

import os
import pathlib
from collections.abc import Sequence

from keras_vit import UserError
from keras_vit.cli import parser
from keras_vit.cli.parser import Given, Options
from keras_vit.files.keras_model import MODEL
from keras_vit.files.remote import matching
from keras_vit.images.formats import format_list, is_hidden, is_image_name, looks_like_image, others_line, visible_files
from keras_vit.text.classes import is_text_file

# How the file of a model is called, and no image.
_MODEL_FILES = (".keras", ".npz", ".safetensors")


def parse_with_run(options_class: type[Options], arguments: Sequence[str], *, prog: str, about: str | None) -> Options:
    """Parse the arguments of a command that takes a model and images; see `with_images` and `with_run`."""
    given = parser.read(options_class, arguments, prog=prog, about=about)
    return parser.options_from(options_class, with_run(with_images(given)), prog=prog)


def with_images(given: Given) -> Given:
    """Return the options that were given; images behind the texts of --classes or --templates are none of these.

    What is an image follows from how it is written, and not from what lies in the working directory: the first one has
    a slash in it or the ending of an image, and all values behind it are images or folders, too.
    """
    for option in ("classes", "templates"):
        values = given.get((option,), ())
        first = next((number for number, value in enumerate(values) if _is_image(value, number)), len(values))
        if first < len(values):
            images = (*given.get(("images",), ()), *values[first:])
            given = {**given, (option,): values[:first], ("images",): images}
    return given


def _is_image(value: str, number: int) -> bool:
    """Return whether the value of this number of an option of texts is written like an image or folder."""
    is_text = "{}" in value or (number == 0 and is_text_file((value,)))
    return not is_text and ("/" in value or is_image_name(value))


def with_run(given: Given) -> Given:
    """Return the options that were given; without `--run`, a run directory or model file among the images is the run.

    So is the first of several that is no file or folder of this machine: an official name, or a path that is missing.
    """
    images = given.get(("images",), ())
    models = [name for name in images if _is_model(pathlib.Path(name))][:1]
    if not models and images and (images[1:] or ("serve",) in given) and not matching(images[0]):
        models = [images[0]]
    if ("run",) in given or not models:
        return given
    return {**given, ("run",): models[0], ("images",): tuple(name for name in images if name not in models)}


def _is_model(path: pathlib.Path) -> bool:
    from keras_vit.run import CONFIG

    return path.suffix in _MODEL_FILES or (path / MODEL).is_file() or (path / CONFIG).is_file()


def check_images(run: str, images: Sequence[str], serve: bool, classes: Sequence[str] | None) -> None:
    """Raise UserError unless there are either images or `--serve`, and for an export as the model."""
    from keras_vit.run import Run

    if serve == bool(images):
        name = None if serve else next((name for name in reversed(classes or ()) if os.path.lexists(name)), None)
        hint = "" if name is None else f"; {name} is taken as a class, so write ./{name} if it is meant"
        raise UserError(f"Either name images or a folder to classify, or use --serve, whose page takes them{hint}.")
    Run(run).refuse_export()


def find_images(names: Sequence[str]) -> list[pathlib.Path]:
    """Return the files that names of files and folders and patterns stand for, each once.

    Those of a folder are in alphabetical order, without hidden ones and without files that neither are called like an
    image nor hold one. Links in a folder that lead to a folder, which are not followed, or nowhere are among them,
    since `predict` names what it cannot read. Raises UserError for a name without files.
    """
    every: dict[pathlib.Path, None] = {}
    for name in names:
        path = pathlib.Path(name)
        if path.is_dir():
            files = _files_in(path)
        elif path.is_file():
            files = [path]
        else:
            files = sorted(filter(pathlib.Path.is_file, map(pathlib.Path, matching(name))))
        if not files:
            what = f"The folder {name!r} has no image" if path.is_dir() else f"There is no image {name!r}"
            raise UserError(
                f"{what} of a supported format ({format_list()}); give files, folders, or patterns such as "
                "'pictures/*.png'."
            )
        every |= dict.fromkeys(files)
    return list(every)


def _files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    # A file that is called like an image and is none is named in the results.
    files = visible_files(folder)
    images = {file for file in files if looks_like_image(file)}
    if images and len(images) < len(files):
        print(others_line([file.name for file in files if file not in images], str(folder)))
    links = (file for file in folder.rglob("*") if file.is_symlink() and not file.is_file() and looks_like_image(file))
    return sorted(images.union(link for link in links if not any(map(is_hidden, link.relative_to(folder).parts))))


def check_output(output: str | None) -> None:
    """Raise UserError unless a file can be written as --output."""
    file = pathlib.Path(output or "x").absolute()
    if file.is_dir() or not (file.parent.is_dir() and os.access(file.parent, os.W_OK | os.X_OK)):
        raise UserError(f"--output accepts a file in a folder that exists and can be written, but is {output!r}.")
