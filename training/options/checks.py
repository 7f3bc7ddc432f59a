"""What can be checked of paths and names before TensorFlow is imported, which takes seconds."""

import dataclasses
import glob
import itertools
import json
import pathlib
from collections.abc import Sequence

from keras_vit import MODELS, UserError, run_directory
from keras_vit.errors import nearest
from keras_vit.files.atomic import is_temporary
from keras_vit.files.remote import is_remote, to_path
from training.options.common import EVALUATION_NAMES, DataOptions
from training.options.csv_file import listed_files

# Name of the file that a process locks while it writes into a run directory, or its ending.
LOCK = ".lock"
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


def check_workdir(path: pathlib.Path) -> None:
    """Raise UserError if something exists that is no run directory, finished or not."""
    if (path / run_directory.CONFIG).is_file() or not path.exists():
        return
    if not path.is_dir() or not all(is_temporary(entry) or entry.name.endswith(LOCK) for entry in path.iterdir()):
        raise UserError(f"{path} exists and is not a run directory; give a new or empty --workdir.")


def check_output(model: str, output: str | None) -> None:
    """Raise UserError unless there is a directory for the report: `--output`, or that of a run."""
    if output is None and not (to_path(model) / run_directory.CONFIG).is_file():
        raise UserError(OUTPUT_NEEDED.format(model))


@dataclasses.dataclass(frozen=True)
class TrainedOn:
    """What the config.json of a run says of its images."""

    data: str
    """As --data, or of what a soup is the average of."""
    split_seed: int | None
    counts: tuple[int, int] | None
    """Training and evaluation images; None where it does not say."""
    fingerprint: int | None
    """`Source.fingerprint`; None where it does not say."""

    @property
    def place(self) -> tuple[str, str]:
        """The kind of the source, and its path however it is written."""
        kind, _, rest = self.data.partition(":")
        is_path = kind in ("folder", "csv") and not is_remote(rest)
        return kind, str(pathlib.Path(rest).resolve()) if is_path else rest

    def has_other_images(self, other: "TrainedOn") -> bool:
        """Whether the images of two runs differ, as far as both say."""
        pairs = (self.counts, other.counts), (self.fingerprint, other.fingerprint)
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def trained_on(run: str) -> TrainedOn | None:
    """What a run directory, or a .keras file in one, was trained on; None if it is of no training command."""
    path = to_path(run)
    folder = path.parent if path.suffix == ".keras" else path
    try:
        config = json.loads((folder / run_directory.CONFIG).read_text(encoding="utf-8"))
        source, images = config["settings"]["source"], config["settings"].get("images")
        counts = (images["train"], images["evaluation"]) if images else None
        return TrainedOn(source["data"], source.get("split_seed"), counts, config.get(run_directory.IMAGES))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def check_images(run: str, source: DataOptions, train: int, evaluation: int, fingerprint: int) -> None:
    """Raise UserError if a run was trained on other images of the same folder or list.

    For a split that a rule makes: with other images it is another one, and the run may know images that would test it.
    """
    now = TrainedOn(source.data, source.split_seed, (train, evaluation), fingerprint)
    known = trained_on(run)
    if known is None or known.counts is None or known.place != now.place or not known.has_other_images(now):
        return
    if known.counts == now.counts:
        raise UserError(
            f"{run} was trained when {known.data} had other images, or the same under other names or classes, so that "
            "others are kept for evaluation now, and the run may know them; evaluate on images of another folder."
        )
    raise UserError(
        f"{run} was trained when {known.data} had {sum(known.counts):,} images, of which {known.counts[1]:,} were kept "
        f"for evaluation; now it has {train + evaluation:,}, so that others are kept, and the run may know them; "
        "evaluate on images of another folder."
    )


def check_split(run: str, source: DataOptions) -> None:
    """Raise UserError if a run was trained on another split of the same folder: it knows images that would test it."""
    known = trained_on(run)
    if known is None or not _is_other_split(known, TrainedOn(source.data, source.split_seed, None, None)):
        return
    advice = "leave --split-seed out" if known.split_seed is None else f"give --split-seed {known.split_seed}"
    raise UserError(
        f"{run} was trained on another split of {known.data}, so it knows images that this split evaluates on; "
        f"{advice}."
    )


def warn_of_known_images(checkpoint: str, source: DataOptions, train: int, evaluation: int, fingerprint: int) -> None:
    """Print a sentence if the run to start from was trained on another split of the same folder or list.

    For a split that a rule makes, as `check_images`.
    """
    now = TrainedOn(source.data, source.split_seed, (train, evaluation), fingerprint)
    known = trained_on(checkpoint)
    if known is not None and known.place == now.place and (_is_other_split(known, now) or known.has_other_images(now)):
        print(
            f"Warning: {checkpoint} was trained on another split of {known.data}, so it may know images that this run "
            "is evaluated on, and the accuracy may be too high; evaluate on images of another folder."
        )


def check_soup(runs: Sequence[str]) -> None:
    """Raise UserError if runs were trained on different splits of one folder or list, which a rule made.

    Their average would know the evaluation images of each of them.
    """
    found = [(run, known) for run in runs if (known := trained_on(run)) is not None]
    for (run, one), (other_run, other) in itertools.combinations(found, 2):
        differ = one.place == other.place and (_is_other_split(one, other) or one.has_other_images(other))
        if differ and one.place[0] in ("folder", "csv") and not _has_splits(*one.place):
            raise UserError(
                f"{run} and {other_run} were trained on different splits of {one.data}, so each knows images that the "
                "other is evaluated on; average runs of one split."
            )


def _is_other_split(one: TrainedOn, other: TrainedOn) -> bool:
    return one.split_seed != other.split_seed and one.place == other.place


def _has_splits(kind: str, path: str) -> bool:
    """Whether a folder or list has splits of its own; False where it is no longer there, so that a rule is assumed."""
    root = to_path(path)
    try:
        if kind == "csv":
            return "" not in listed_files(root)[1]
        inside = {entry.name.lower() for entry in root.iterdir()}
    except (OSError, UserError):
        return False
    return "train" in inside and bool(inside & set(EVALUATION_NAMES))
