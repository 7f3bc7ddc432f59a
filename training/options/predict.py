"""Options of `keras-vit predict`, and what can be checked of them before TensorFlow is imported."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Annotated, Literal

from keras_vit import UserError
from keras_vit.cli.options import Aliases, MayLead, Port, Positional, Share
from keras_vit.cli.parser import Given, arguments_of
from keras_vit.errors import refuse_first, refuse_without_effect
from keras_vit.files.remote import is_remote, matching
from keras_vit.images.formats import is_picture_name
from keras_vit.run_directory import CONFIG, MODEL
from keras_vit.runs import Run
from keras_vit.text.classes import is_text_file
from training.options.pipeline import Runner

Explanation = Literal["rollout", "relevance"]
HOST = "127.0.0.1"
# How the file of a model is called, and no picture.
_MODEL_FILES = (".keras", ".npz", ".safetensors")
OUTPUTS = (".csv", ".json", ".html", ".parquet")
# Files of a SavedModel, in its directory or in that of its versions, which TF Serving takes.
_EXPORTED = ("saved_model.pb", "[0-9]*/saved_model.pb")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Classify image files."""

    pictures: Annotated[tuple[str, ...], Positional("PICTURES")] = ()
    """Image files, folders, which are searched recursively, and patterns such as 'pictures/*.png'."""
    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory, .keras file, checkpoint file or folder, address, or official name such as augreg:B_16."""
    labels: str | None = None
    """Text file with one class name per line; default the run's labels.txt or the names in a config.json, else class
    numbers."""
    classes: tuple[str, ...] | None = None
    """Of a checkpoint with a text tower (CLIP, SigLIP): texts that are its classes, such as cat dog "a rabbit", or a
    .txt file with one in each line, or with a name and its texts, as in "cat: a cat | a kitten". Behind them, a value
    with a slash or the ending of a picture, such as pictures/ or ./cat.jpg, is one of the PICTURES."""
    templates: tuple[str, ...] | None = None
    """Sentences in which each text replaces {}, such as "a photo of a {}.", whose embeddings are averaged; clip: the 80
    of CLIP; siglip: the one of SigLIP; or a .txt file with one in each line. Default: the texts as they are."""
    output: str | None = None
    """File for the results, which ends in .csv, .json, .html or .parquet; with --runner, a folder of Parquet files."""
    excel: bool = False
    """Begin a .csv file with a byte order mark, by which Excel knows that it is UTF-8."""
    threshold: Share | None = None
    """Reject a picture whose most likely class has a lower probability than this, 0 to 1. For a
    multi-label model, show every class at or above it; default 0.5."""
    explain: Explanation | None = None
    """Show beside each picture, in the page, which parts count: attention rollout, or relevance (Grad-CAM)."""
    serve: bool = False
    """Serve a page on 127.0.0.1 that classifies one picture after the other."""
    port: Port = 8000
    """Port of the page."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to resize the model's input to; default its own."""
    num_heads: int | None = None
    """Attention heads, if the checkpoint does not specify them."""
    runner: Runner | None = None
    """Run as an Apache Beam pipeline on many machines; PICTURES may then be in a bucket, and be a .csv file with a
    column path. Options of the pipeline follow --; see embed."""

    def __post_init__(self) -> None:
        is_export = self.run.endswith(".tflite") or any(any(pathlib.Path(self.run).glob(name)) for name in _EXPORTED)
        has_no_folder = self.output is None or pathlib.Path(self.output).suffix
        refuse_first(
            [
                pictures_or_page(self.pictures, self.serve, self.classes),
                (
                    is_export,
                    f"{self.run} is an export, but pictures are classified by the model itself; give the run that it "
                    "was exported from, or measure the export by keras-vit evaluate.",
                ),
                (self.serve and self.output, "--serve shows its results in the browser; leave --output out."),
                (
                    self.runner is not None and (has_no_folder or self.explain),
                    "--runner needs --output with a folder for Parquet files, and makes no page; give that.",
                ),
                (
                    self.explain and not (self.serve or (self.output or "").endswith(".html")),
                    "--explain draws maps, so it needs --output FILE.html or --serve.",
                ),
                (
                    self.classes is not None and self.labels is not None,
                    "--classes names the classes by their texts; leave --labels out.",
                ),
            ]
        )
        if self.output is not None and self.runner is None:
            check_output_file(self.output, OUTPUTS)
        refuse_without_effect(
            self,
            [
                (("port",), self.serve, "--serve"),
                (("templates",), self.classes is not None, "--classes"),
                (("excel",), (self.output or "").endswith(".csv"), "--output FILE.csv"),
            ],
        )

    def next_commands(self, run: Run) -> list[tuple[str, ...]]:
        """Commands to go on with after the pictures were classified."""
        if run.file(CONFIG) and self.classes is None:
            return run.next_commands("predict")
        model = ("predict", *arguments_of(self, "pictures", "output", "explain", "serve", "port"))
        has_page = (self.output or "").endswith(".html")
        return [(*model, "--serve") if has_page else (*model, "--output", "predictions.html", *self.pictures)]


def with_pictures(given: Given) -> Given:
    """The options that were given; pictures behind the texts of --classes or --templates are none of these.

    What is a picture follows from how it is written, and not from what lies in the working directory: a picture or
    folder has a slash in it or the ending of a picture. Raises UserError for one that is not there, which may be a text
    with a slash, and for a text behind a picture, which may be a folder without one.
    """
    for option in ("classes", "templates"):
        values = given.get((option,), ())
        first = next((number for number, value in enumerate(values) if _is_picture(value, number)), len(values))
        if first == len(values):
            continue
        texts, pictures = values[:first], values[first:]
        for number, value in enumerate(pictures, first):
            refuse_first(
                [
                    (
                        not _is_picture(value, number),
                        f"{value!r:.80} stands behind the picture {pictures[0]!r:.80}; if it is one, too, write "
                        f"'./{value:.80}', else put the values of --{option} together.",
                    ),
                    (
                        not is_remote(value) and not os.path.lexists(value) and not matching(value),
                        f"There is no picture or folder {value!r:.80}, as which --{option} takes a value with a slash "
                        "or the ending of a picture; correct it, or write a text with a slash into a .txt file.",
                    ),
                ]
            )
        given = {**given, (option,): texts, ("pictures",): (*given.get(("pictures",), ()), *pictures)}
    return given


def _is_picture(value: str, number: int) -> bool:
    """Whether the value of this number of an option of texts is written like a picture or folder."""
    is_text = "{}" in value or (number == 0 and is_text_file((value,)))
    return not is_text and ("/" in value or is_picture_name(value))


def pictures_or_page(pictures: Sequence[str], serve: bool, classes: Sequence[str] | None) -> tuple[bool, str]:
    """A rule for `refuse_first`: either pictures are given or `--serve`; a class that a file is called may be meant."""
    name = None if serve else next((name for name in reversed(classes or ()) if os.path.lexists(name)), None)
    hint = "" if name is None else f"; {name} is taken as a class, so write ./{name} if it is meant"
    return serve == bool(pictures), f"Give pictures, such as pictures/ or cat.jpg, or --serve, but not both{hint}."


def with_run(given: Given) -> Given:
    """The options that were given; without `--run`, a run directory or model file among the pictures is the run.

    So is the first of several that is no file or folder of this machine: an official name, or a path that is missing.
    """
    pictures = given.get(("pictures",), ())
    models = [name for name in pictures if _is_model(pathlib.Path(name))][:1]
    if not models and pictures and (pictures[1:] or ("serve",) in given) and not matching(pictures[0]):
        models = [pictures[0]]
    if ("run",) in given or not models:
        return given
    return {**given, ("run",): models[0], ("pictures",): tuple(name for name in pictures if name not in models)}


def _is_model(path: pathlib.Path) -> bool:
    return path.suffix in _MODEL_FILES or (path / MODEL).is_file() or (path / CONFIG).is_file()


def check_ending(output: str | None, endings: Sequence[str]) -> None:
    """Raise UserError unless the name of the file for --output has one of these endings, or there is none."""
    if output is not None and pathlib.Path(output).suffix not in endings:
        listed = f"{', '.join(endings[:-1])} or {endings[-1]}"
        raise UserError(f"--output takes a file that ends in {listed}, but is {output!r}.")


def check_output_file(output: str, endings: Sequence[str]) -> None:
    """Raise UserError unless a file with one of these endings can be written as --output."""
    check_ending(output, endings)
    file = pathlib.Path(output)
    folder = file.absolute().parent
    refuse_first(
        [
            (not folder.is_dir(), f"There is no folder {str(file.parent)!r} for --output; create it."),
            (file.is_dir(), f"{output} is a folder; --output takes a file."),
            (
                not os.access(folder, os.W_OK | os.X_OK),
                f"The folder {str(file.parent)!r} is not writable; give another --output.",
            ),
        ]
    )
