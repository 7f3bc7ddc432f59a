"""What the images of a run directory were: those it was trained on, and whether they are those of now.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from keras_vit import UserError, run_directory
from keras_vit.errors import is_or_are
from keras_vit.files.remote import is_remote, to_path
from training.options.checks import split_folders
from training.options.common import DataOptions
from training.options.csv_file import listed_files


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
            "others are kept for evaluation now, and the run may have been trained on them; evaluate on images of "
            "another folder."
        )
    raise UserError(
        f"{run} was trained when {known.data} had {sum(known.counts):,} images, of which {known.counts[1]:,} were kept "
        f"for evaluation; now it has {train + evaluation:,}, so that others are kept, and the run may have been "
        "trained on them; evaluate on images of another folder."
    )


def warn_of_training_images(run: str, digests: np.ndarray | None, name: Callable[[int], str]) -> bool:
    """Print a sentence if a run was trained on some of the images to evaluate it on, wherever their files are now.

    Returns whether that is known.

    Args:
        run: run directory, or a .keras file in one; anything else tells no training images.
        digests: `Split.digests` of the images.
        name: `Split.name` of the images.
    """
    known = None if digests is None else run_directory.load_training_images(run)
    if known is None or digests is None:
        return False
    seen = np.flatnonzero(np.isin(digests, known))
    if len(seen):
        print(
            f"Warning: {len(seen):,} of the {len(digests):,} evaluation images {is_or_are(len(seen))} among the "
            f"training images of {run}, such as "
            f"{name(int(seen[0]))}, so the accuracy is not that on new images; evaluate on others."
        )
    return True


def check_split(run: str, source: DataOptions) -> None:
    """Raise UserError if a run was trained on another split of the same folder: it knows images that would test it."""
    known = trained_on(run)
    if known is None or not _is_other_split(known, TrainedOn(source.data, source.split_seed, None, None)):
        return
    advice = "leave --split-seed out" if known.split_seed is None else f"give --split-seed {known.split_seed}"
    raise UserError(
        f"{run} was trained on another split of {known.data}, so it was trained on images that this split evaluates "
        f"on; {advice}."
    )


def warn_of_known_images(checkpoint: str, source: DataOptions, train: int, evaluation: int, fingerprint: int) -> None:
    """Print a sentence if the run to start from was trained on another split of the same folder or list.

    For a split that a rule makes, as `check_images`.
    """
    now = TrainedOn(source.data, source.split_seed, (train, evaluation), fingerprint)
    known = trained_on(checkpoint)
    if known is not None and known.place == now.place and (_is_other_split(known, now) or known.has_other_images(now)):
        print(
            f"Warning: {checkpoint} was trained on another split of {known.data}, so it may have been trained on "
            "images that this run is evaluated on, and the accuracy may be too high; evaluate on images of "
            "another folder."
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
                f"{run} and {other_run} were trained on different splits of {one.data}, so each may have been "
                "trained on images that the other is evaluated on; average runs of one split."
            )


def _is_other_split(one: TrainedOn, other: TrainedOn) -> bool:
    return one.split_seed != other.split_seed and one.place == other.place


def _has_splits(kind: str, path: str) -> bool:
    """Whether a folder or list has splits of its own; False where it is no longer there, so that a rule is assumed."""
    root = to_path(path)
    try:
        if kind == "csv":
            return "" not in listed_files(root).value_of
        return split_folders(root) is not None
    except (OSError, UserError):
        return False
