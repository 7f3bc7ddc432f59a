"""What can be checked of paths and names before TensorFlow is imported, which takes seconds."""

import dataclasses
import glob
import json
import pathlib

from keras_vit import MODELS, UserError, run_directory
from keras_vit.errors import nearest
from keras_vit.files.remote import is_remote, to_path
from training.options.common import EVALUATION_NAMES, DataOptions
from training.options.csv_file import listed_files

OUTPUT_NEEDED = "{!r} is no run directory to put the report into; give --output a directory."

# Which fields of DataOptions each kind of source takes.
_TAKEN = {
    "digits": (),
    "tfds": ("data_dir", "train_split", "eval_split"),
    "folder": ("on_bad_image", "split_seed"),
    "csv": ("on_bad_image", "split_seed"),
    "tfrecord": ("on_bad_image",),
}


def check_data(source: DataOptions) -> None:
    """Raise UserError unless `--data` names a kind of source, with the options that it takes, and its folder exists."""
    kind, _, rest = source.data.partition(":")
    if kind not in _TAKEN or bool(rest) == (kind == "digits"):
        raise UserError(
            "--data takes digits, tfds:NAME[:CONFIG], folder:PATH, csv:FILE or tfrecord:GLOB, but was given "
            f"{source.data!r}."
        )
    for field in dataclasses.fields(source):
        if field.name not in ("data", *_TAKEN[kind]) and getattr(source, field.name) != field.default:
            raise UserError(f"--{field.name.replace('_', '-')} does not apply to --data {kind}; leave it out.")
    if kind == "folder":
        _check_folder(rest)
    if kind == "csv" and not is_remote(rest):
        listed_files(to_path(rest))
    if kind == "tfrecord" and not is_remote(rest) and not glob.glob(rest):
        raise UserError(f"No file matches {rest!r}; --data tfrecord:GLOB takes a pattern such as 'shards/*.tfrecord'.")


def _check_folder(name: str) -> None:
    """Raise UserError unless there are at least two folders of classes, or one of a split."""
    path = to_path(name)
    if not path.is_dir():
        raise UserError(f"There is no folder {name!r}; --data folder:PATH takes a folder of class folders.")
    if is_remote(name):
        return  # each entry costs a request
    inside = [entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    if len(inside) < 2 and not {entry.lower() for entry in inside} & {"train", *EVALUATION_NAMES}:
        raise UserError(f"{path} should hold a folder for each of at least two classes, but holds {len(inside)}.")


def check_model(name: str) -> str:
    """Return the name of an official model. Raises UserError if there is none of this name."""
    if name not in MODELS:
        raise UserError(f"There is no official model {name!r}; the nearest names are {nearest(name, MODELS)}.")
    return name


def check_finished(run: str) -> None:
    """Raise UserError for a run directory without its model, and for a folder without any."""
    path = to_path(run)
    if is_remote(run) or not path.is_dir():
        return
    # What is said of a pickle is more than that it is no run.
    models = (run_directory.MODEL, "*.safetensors", "*.bin", "saved_model.pb", "*/saved_model.pb")
    if not any(entry for pattern in models for entry in path.glob(pattern)):
        run_directory.find(path, run_directory.MODEL)  # raises


def check_output(model: str, output: str | None) -> None:
    """Raise UserError unless there is a directory for the report: `--output`, or that of a run."""
    if output is None and not (to_path(model) / run_directory.CONFIG).is_file():
        raise UserError(OUTPUT_NEEDED.format(model))


def check_images(run: str, source: DataOptions, train: int, evaluation: int, fingerprint: int) -> None:
    """Raise UserError if a run was trained on other images of the same folder or list.

    For a split that a rule makes: with other images it is another one, and the run may know images that would test it.
    """
    try:
        config = json.loads((to_path(run) / run_directory.CONFIG).read_text(encoding="utf-8"))
        data, images = config["settings"]["source"]["data"], config["settings"]["images"]
        before = (images["train"], images["evaluation"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if _place(data) != _place(source.data):
        return
    if before == (train, evaluation) and config.get(run_directory.IMAGES, fingerprint) != fingerprint:
        raise UserError(
            f"{run} was trained when {data} had other images, or the same under other names or classes, so that others "
            "are kept for evaluation now, and the run may know them; evaluate on images of another folder."
        )
    if before != (train, evaluation):
        raise UserError(
            f"{run} was trained when {data} had {sum(before):,} images, of which {before[1]:,} were kept for "
            f"evaluation; now it has {train + evaluation:,}, so that others are kept, and the run may know them; "
            "evaluate on images of another folder."
        )


def check_split(run: str, source: DataOptions) -> None:
    """Raise UserError if a run was trained on another split of the same folder: it knows images that would test it."""
    try:
        stored = json.loads((to_path(run) / run_directory.CONFIG).read_text(encoding="utf-8"))["settings"]["source"]
        data, seed = stored["data"], stored.get("split_seed")
    except (OSError, ValueError, KeyError, TypeError):
        return  # no run of a training command
    if seed != source.split_seed and _place(data) == _place(source.data):
        advice = "leave --split-seed out" if seed is None else f"give --split-seed {seed}"
        raise UserError(
            f"{run} was trained on another split of {data}, so it knows images that this split evaluates on; {advice}."
        )


def _place(data: str) -> tuple[str, str]:
    """The kind of a source, and its path however it is written."""
    kind, _, rest = data.partition(":")
    return kind, rest if is_remote(rest) or kind not in ("folder", "csv") else str(pathlib.Path(rest).resolve())
