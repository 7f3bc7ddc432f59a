"""Whether images to evaluate a model on were among those that it was trained on. Imports no TensorFlow."""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from keras_vit import UserError
from keras_vit.errors import is_or_are
from keras_vit.files.remote import is_remote, to_path
from keras_vit.run import IMAGES, Run
from training.data.checks import split_folders
from training.data.listed_files import listed_files
from training.options.common import ALONE, AnnotatedData, DataOptions

if TYPE_CHECKING:
    from training.data.dataset import DataSet


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """Images that a model was, or is to be, trained and evaluated on."""

    data: str  # as --data, or of what a soup is the average of
    split_seed: int | None = None
    counts: tuple[int, int] | None = None  # training and evaluation images; None where it is not known
    fingerprint: int | None = None  # the fingerprint of the data set; None where it is not known

    @classmethod
    def of_run(cls, run: Run) -> "TrainingData | None":
        """Return the training data of a run; None if it is of no training command."""
        try:
            source, images = run.settings["source"], run.settings.get("images")
            counts = (images["train"], images["evaluation"]) if images else None
            return cls(source["data"], source.get("split_seed"), counts, run.config.get(IMAGES))
        except (KeyError, TypeError, AttributeError):
            return None

    @classmethod
    def of_options(cls, options: DataOptions, source: "DataSet | None" = None) -> "TrainingData":
        """Return the data as a run on them would have them; without the opened data, by the options alone."""
        if source is None:
            return cls(options.data, options.split_seed)
        counts = source.train.num_examples, source.evaluation.num_examples
        return cls(options.data, options.split_seed, counts, source.fingerprint)

    @property
    def place(self) -> tuple[str, str]:
        """The kind of the data, and their path however it is written."""
        kind, _, rest = self.data.partition(":")
        is_path = kind in ("folder", "csv") and not is_remote(rest)
        return kind, str(pathlib.Path(rest).resolve()) if is_path else rest

    def is_other_split(self, other: "TrainingData") -> bool:
        """Return whether another seed drew the evaluation images of the same data."""
        return self.split_seed != other.split_seed and self.place == other.place

    def has_other_images(self, other: "TrainingData") -> bool:
        """Return whether the images differ, as far as both are known."""
        pairs = (self.counts, other.counts), (self.fingerprint, other.fingerprint)
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def check_split(run: Run, options: DataOptions) -> None:
    """Raise UserError if a run was trained on another split of the same data: it knows images that would test it."""
    known = TrainingData.of_run(run)
    if known is None or not known.is_other_split(TrainingData.of_options(options)):
        return
    advice = "leave --split-seed out" if known.split_seed is None else f"give --split-seed {known.split_seed}"
    _refuse_split(run, f"on another split of {known.data}", advice)


def _refuse_split(run: Run, trained: str, advice: str) -> NoReturn:
    raise UserError(
        f"{run.name} was trained {trained}, so it may have been trained on images that it would be evaluated on now; "
        f"{advice}."
    )


def check_evaluation_images(run: Run, options: DataOptions, source: "DataSet") -> bool:
    """`check_held_out`, then `warn_of_training_images` for the evaluation images; return whether these are known."""
    check_held_out(run, options, source)
    return warn_of_training_images(run, source.evaluation.digests, source.evaluation.name)


def check_held_out(run: Run, options: DataOptions, source: "DataSet") -> None:
    """Raise UserError if a rule keeps other images for evaluation now than when a run was trained on the same data."""
    known, now = TrainingData.of_run(run), TrainingData.of_options(options, source)
    if known is None or known.counts is None or not source.held_out:
        return
    if known.place != now.place or not known.has_other_images(now):
        return
    before, after = sum(known.counts), sum(now.counts or ())
    others = "other images, or the same under other names or classes"
    then = others if before == after else f"{before:,} images, instead of {after:,}"
    exclude, advice = run.settings["source"].get("exclude"), "evaluate on images of another folder"
    if exclude != options.exclude:
        advice = "leave --exclude out" if exclude is None else f"give --exclude {exclude}, as in training"
    elif (group := DataOptions.of_settings(run.settings["source"]).group) != options.group:
        advice = f"give --group {group}, as in training"
    _refuse_split(run, f"when {known.data} had {then}", advice)


def check_group(run: Run, options: AnnotatedData, is_drawn: bool) -> None:
    """Raise UserError if other images with masks or boxes are drawn for evaluation than when a run was trained."""
    known = run.settings.get("source")
    if not is_drawn or not isinstance(known, dict) or known.get("data") != options.data:
        return
    if (group := known.get("group", ALONE)) != options.group:
        _refuse_split(run, f"on another split of {options.data}", f"give --group {group}, as in training")


def warn_of_training_images(run: Run, digests: np.ndarray | None, name: Callable[[int], object]) -> bool:
    """Print a sentence if a run was trained on some of the evaluation images; return whether that is known.

    The images have digests (n,), see `FileContents`, and names by their numbers.
    """
    known = run.training_images
    if digests is None or known is None:
        return False
    seen = np.flatnonzero(np.isin(digests, known))
    if len(seen):
        print(
            f"Warning: {len(seen):,} of the {len(digests):,} evaluation images {is_or_are(len(seen))} among the "
            f"training images of {run.name}, such as {name(int(seen[0]))}, so the results are too good for new images; "
            "evaluate on others."
        )
    return True


def may_know_images(run: Run, source: "DataSet", *, is_export: bool) -> bool:
    """Whether images to evaluate on may be training images of a model: a rule made the split, or they are records.

    Published checkpoints are not checked; a run on the same data uses the splits of its training.
    """
    known = TrainingData.of_run(run)
    if known is None:
        return source.held_out and is_export
    records = known.place[0] in ("tfrecord", "tar")
    if source.held_out:
        return records or is_export
    return source.evaluation.digests is None and not records and run.training_images is not None


def warn_of_known_images(run: Run, options: DataOptions, source: "DataSet") -> None:
    """Print a sentence if the run to start from was trained on another split of the same data, which a rule made."""
    known, now = TrainingData.of_run(run), TrainingData.of_options(options, source)
    if known is not None and known.place == now.place and (known.is_other_split(now) or known.has_other_images(now)):
        print(
            f"Warning: {run.name} was trained on another split of {known.data}, so it may have been trained on "
            "images that this run is evaluated on, and the accuracy may be too high; evaluate on images of "
            "another folder."
        )


def check_soup(runs: Sequence[Run]) -> None:
    """Raise UserError unless there are two different runs, of one split of a folder or list where a rule made it.

    The average of others would know the evaluation images of each of them.
    """
    places = {run.path if is_remote(run.name) else run.path.resolve() for run in runs}
    if len(places) < max(len(runs), 2):
        raise UserError(f"A soup takes two different runs or more, but was given {', '.join(r.name for r in runs)}.")
    trained_on = [(run.name, data) for run in runs if (data := TrainingData.of_run(run)) is not None]
    for (name, one), (other, two) in itertools.combinations(trained_on, 2):
        differ = one.place == two.place and (one.is_other_split(two) or one.has_other_images(two))
        if differ and one.place[0] in ("folder", "csv") and not _has_splits(*one.place):
            raise UserError(
                f"{name} and {other} were trained on different splits of {one.data}, so each may have been trained on "
                "images that the other is evaluated on; average runs of one split."
            )


def _has_splits(kind: str, path: str) -> bool:
    """Whether a folder or list has splits of its own; False where it is no longer there, so that a rule is assumed."""
    root = to_path(path)
    try:
        return "" not in listed_files(root).value_of if kind == "csv" else split_folders(root) is not None
    except (OSError, UserError):
        return False
