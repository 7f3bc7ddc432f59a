"""A data set: two splits of examples that can be read by number, and what can be wrong with them.

An example is an image, as it is stored, and its label. Images stay encoded until they are needed, for of a JPEG a
window can be decoded alone.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from keras_vit import Preprocessing, UserError
from keras_vit.cli.progress import tracked
from keras_vit.cli.start import as_typed, native_stderr_silenced
from keras_vit.errors import is_or_are
from keras_vit.images import formats, graph
from keras_vit.images.decode import error_reason, highest_of_unused_bits, is_uniform
from training.data.file_contents import FileContents, shown
from training.options.common import OnBadImage

# TensorFlow's errors of a file that cannot be read any more.
_LOST = (tf.errors.NotFoundError, tf.errors.PermissionDeniedError)
# How a graph says that a stored label is no class; `bad_examples_reported` makes a UserError of it.
_LABEL_OUTSIDE = "Labels must be numbers of the classes, from 0, but one of the images read has the label"
# Of images at fault, how many are named in a message, and how many different reasons are counted.
_MOST_NAMED, _REASONS = 10, 5
_LOOKED_AT = 64  # images of each split that are checked for a warning if not all of them are read beforehand


@dataclasses.dataclass(frozen=True)
class Split:
    """Examples that can be read by number."""

    num_examples: int
    read: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
    """int64 index -> (image, label int32); -1 for several classes. The image is uint8 (h, w, C), the bytes of an image
    file, or float32 (h, w, C) that is resized already, 0..255."""
    name: Callable[[int], str] = "number {}".format
    """The name of an example in messages."""
    explain_damage: Callable[[str], str | None] = lambda message: None
    """The message of an error of the graph -> the sentence about a damaged file behind it."""
    fingerprint: int = 0
    """The same for the same examples; compared between workers."""
    digests: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """A digest of the content of each example's file, uint64 (n,); None where the examples are no files."""
    parallel_reads: int | None = None
    """Reads at the same time, for examples in a bucket, where each read mostly waits."""
    labels: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """The label of each example, where they are known without reading the examples."""
    target: Callable[[tf.Tensor], Any] | None = None
    """int64 index -> float32 (K,): the share of each class, or 1 for each class of an image that may have several; of a
    data set with `batches` of its own, what these take; None where the label says all."""
    multi_label: bool = False
    """Whether an image may have any number of classes; else the shares of its target sum to 1."""
    truth: Callable[[int], Any] | None = None
    """Index -> all that the annotations say, for evaluation, where `target` has only what training needs."""
    groups: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """The group of each example (n,) int64, see `training.data.groups`; None where the split was not drawn by them."""

    def example(self, index: tf.Tensor, preprocessing: Preprocessing | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """int64 index -> (image uint8 (h, w, C), label int32), decoded as a model's preprocessing says."""
        image, label = self.read(index)
        return decoded(image, preprocessing), label

    def take(self, indices: np.ndarray) -> "Split":
        """Return a split of the examples at `indices`, in this order, with their names."""
        chosen, target, truth = tf.constant(indices, tf.int64), self.target, self.truth
        return dataclasses.replace(
            self,
            num_examples=len(indices),
            read=lambda index: self.read(chosen[index]),
            name=lambda index: self.name(int(indices[index])),
            fingerprint=zlib.crc32(np.asarray(indices, np.int64).tobytes(), self.fingerprint),
            target=(lambda index: target(chosen[index])) if target else None,
            truth=(lambda index: truth(int(indices[index]))) if truth else None,
            digests=None if self.digests is None else self.digests[indices],
            labels=None if self.labels is None else self.labels[indices],
            groups=None if self.groups is None else self.groups[indices],
        )


def split_of_files(files: Sequence[str], contents: FileContents, **fields: Any) -> Split:
    """Return image files without labels of their own, whose contents were noted. fields: further ones of `Split`."""
    paths = tf.constant([os.fsencode(file) for file in files])
    return Split(
        len(files),
        lambda index: (tf.io.read_file(paths[index]), tf.constant(-1)),
        lambda index: shown(files[index]),
        digests=contents.digests(files),
        **fields,
    )


def array_split(images: np.ndarray, labels: np.ndarray, names: tuple[str, ...]) -> Split:
    """Return images (n, h, w, C) uint8 and labels (n,) in memory as a split. Raises UserError for other labels."""
    if len(outside := labels[(labels < 0) | (labels >= len(names))]):
        raise UserError(
            f"Labels must be 0 to {len(names) - 1}, one for each of the {len(names)} classes, "
            f"but {len(outside)} of {len(labels)} are outside, {outside[0]} first."
        )
    pixels, numbers = tf.constant(images), tf.constant(labels, tf.int32)
    return Split(len(labels), lambda index: (pixels[index], numbers[index]), labels=labels)


class Batches(Protocol):
    """How batches of a data set are made whose targets are no classes of whole images, but masks or boxes.

    The order and the arguments but num_classes are those of `training_batches` and `evaluation_batches` of
    `training/data/pipeline.py`: of images and targets, and of images, targets and weights. The targets are a dict of
    arrays (B, ...), among them "labels" (B, T): the class of each target, -1 for none.
    """

    @property
    def training(self) -> Callable[..., tf.data.Dataset]: ...

    @property
    def evaluation(self) -> Callable[..., tf.data.Dataset]: ...


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set: the names of its classes and its two splits."""

    labels: tuple[str, ...]
    train: Split
    evaluation: Split
    unlabelled: Split | None = None
    """Images without labels to train on, beside those of `train`; their labels mean nothing."""
    held_out: bool = False
    """Whether the evaluation images are a part that a rule chose, so that a new image may change which they are."""
    batches: Batches | None = dataclasses.field(default=None, compare=False)
    """How its batches are made, where the targets are masks or boxes; None for classes."""

    @property
    def multi_label(self) -> bool:
        """Whether an image may have any number of classes."""
        return self.train.multi_label

    @property
    def groups(self) -> np.ndarray | None:
        """The group of each training and then each evaluation example (n,); None where none belong together."""
        if self.train.groups is None or self.evaluation.groups is None:
            return None
        groups = np.concatenate([self.train.groups, self.evaluation.groups])
        return groups if len(np.unique(groups)) < len(groups) else None

    @property
    def fingerprint(self) -> int:
        """The same for the same examples in all splits."""
        labeled = zlib.crc32(b"%d" % self.train.fingerprint, self.evaluation.fingerprint)
        return labeled if self.unlabelled is None else zlib.crc32(b"%d" % self.unlabelled.fingerprint, labeled)


# For functions of `tf.data.Dataset.map`. AutoGraph takes longer to rewrite them than TensorFlow to trace them, and they
# have no statement that depends on a tensor.
without_autograph = tf.autograph.experimental.do_not_convert


def decoded(image: tf.Tensor, preprocessing: Preprocessing | None = None) -> tf.Tensor:
    """Return the pixels (h, w, C) of an image as it is stored, the bytes of a file or pixels; see `Split.example`."""
    if image.dtype != tf.string:
        return image
    if preprocessing is not None:
        return preprocessing.decode(image)
    return graph.decode_image(image, accurate=True, upright=True)


def typical_image(split: Split) -> tuple[tuple[int, int], int, bool]:
    """Return of up to 32 images the median (height, width), 1 or 3 channels, and whether most are transparent."""
    chosen = np.unique(np.linspace(0, split.num_examples - 1, 32).astype(np.int64))
    images = [split.example(tf.constant(index))[0].numpy() for index in chosen]
    heights, widths, channels = np.array([image.shape for image in images]).T
    # Many images have an alpha that is opaque throughout.
    transparent = [image.shape[-1] % 2 == 0 and image[..., -1].min() < 255 for image in images]
    size = int(np.median(heights)), int(np.median(widths))
    return size, 1 if np.all(channels < 3) else 3, bool(np.mean(transparent) > 0.5)


def random_subset(split: Split, num_examples: int, seed: int) -> Split:
    """Return `num_examples` random examples. A smaller subset with the same seed is part of a larger one."""
    if num_examples == split.num_examples:
        return split
    return split.take(np.random.default_rng(seed).permutation(split.num_examples)[:num_examples])


def balanced(split: Split) -> Split:
    """Return a split in which all classes repeat their examples up to the largest. Raises UserError without labels."""
    labels = _known_labels(split, "--balance repeats the images of small classes")
    of_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    most = max(map(len, of_class))
    return split.take(np.concatenate([np.resize(indices, most) for indices in of_class]))


def class_weights(split: Split, num_classes: int) -> np.ndarray:
    """Return the weight of each class (K,) float32: one over its number of examples, with the mean 1 over the examples.

    That is scikit-learn's "balanced"; a class without examples has the weight 0. Raises UserError if the labels are not
    known without reading the examples.
    """
    labels = _known_labels(split, "--class-weights weights the images of small classes")
    counts = np.bincount(labels, minlength=num_classes)
    weights = len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return np.where(counts > 0, weights, 0.0).astype(np.float32)


def _known_labels(split: Split, what: str) -> np.ndarray:
    """Return the label of each example (n,). Raises UserError where there is none, for an option that does `what`."""
    if split.labels is None:
        reason = "have several classes" if split.multi_label else "are not of digits, folder:PATH or csv:FILE"
        raise UserError(f"{what}, whose labels must be known, but these images {reason}; leave it out.")
    return split.labels


def checked_label(label: tf.Tensor, names: tuple[str, ...]) -> tf.Tensor:
    """Return a stored label as int32. The graph fails where it is no class, as `bad_examples_reported` knows."""
    inside = tf.debugging.Assert((label >= 0) & (label < len(names)), [_LABEL_OUTSIDE, label])
    with tf.control_dependencies([inside]):
        return tf.cast(label, tf.int32)


@contextlib.contextmanager
def bad_examples_reported(*splits: Split) -> Iterator[None]:
    """Make a UserError of the graph error of a label outside the classes, met while examples are read.

    Also of that of an image which cannot be decoded: all such images of the splits are then looked for and named. And
    of that of a file which cannot be read any more, or of a damaged record.
    """
    try:
        yield
    except (*_LOST, tf.errors.InvalidArgumentError, tf.errors.DataLossError) as error:
        is_lost = isinstance(error, _LOST)
        if sentence := _lost_file(error.message) if is_lost else _bad_example(error.message, splits):
            raise UserError(sentence) from error
        raise


def _lost_file(message: str) -> str | None:
    """Return the sentence on a file that a graph could not read: its path and the reason stand before the operator."""
    reader = r"(?:ReadFile|DatasetToSingleElement)"
    pattern = rf"(?:\}}\}} |: |^)([^\n{{}}]+?)\s*\[(?:\[\{{\{{node [\w/]*{reader}|Op:{reader})"
    if not (lost := re.search(pattern, message, re.M)):
        return None
    path, _, why = lost[1].strip().rpartition("; ")
    return f"{path} can no longer be read ({why}); put it back, and the same command continues."


def _bad_example(message: str, splits: Sequence[Split]) -> str | None:
    """Return the sentence on what a graph refused: a damaged record, or a label; look for images and name them."""
    if sentence := next(filter(None, (split.explain_damage(message) for split in splits)), None):
        return sentence
    if label := re.search(rf"{_LABEL_OUTSIDE}\W*(-?\d+)", message):
        return f"{_LABEL_OUTSIDE} {label[1]}; correct the data, or give splits without it."
    for split in splits:
        _check_decoding(split)
    return None


def skip_undecodable(split: Split) -> Split:
    """Return the split without what cannot be decoded, which is named."""
    bad = _check_decoding(split, "skip")
    good = np.setdiff1d(np.arange(split.num_examples), bad)
    check_some_read(len(good))
    return split.take(good) if bad else split


def _check_decoding(split: Split, on_bad_image: OnBadImage = "stop") -> list[int]:
    """Read all examples, and name those that cannot be decoded; return their numbers if these are skipped."""

    def problem(index: int) -> str | None:
        try:
            image, _ = split.read(tf.constant(index, tf.int64))
        except tf.errors.DataLossError as error:
            return split.explain_damage(error.message) or error_reason(error)
        return decoding_problem(image) if image.dtype == tf.string else None

    bad = problems_of(range(split.num_examples), problem)
    what = f"of {split.num_examples} images cannot be decoded"
    report_bad([(split.name(index), why) for index, why in bad.items()], what, on_bad_image=on_bad_image)
    return list(bad)


def check_some_read(count: int) -> None:
    """Raise UserError if none of the images could be read."""
    if not count:
        raise UserError("None of the images could be read; convert them, or give others.")


def check_several_classes(source: DataSet) -> None:
    """Raise UserError for training data that leave nothing to tell apart, as far as their labels are known."""
    known = source.train.labels
    present = source.labels if known is None else [source.labels[label] for label in np.unique(known)]
    if len(present) < 2:
        raise UserError(f"The training data have one class, {present[0]!r}; at least two are needed to tell apart.")


def check_classes_of_splits(train: Iterable[str], evaluation: Iterable[str], where: object) -> None:
    """Raise UserError unless the images to train and to evaluate on have the same classes."""
    if only := sorted({*train} ^ {*evaluation}):
        few = ", ".join(only[:5]) + (", …" if only[5:] else "")
        raise UserError(
            f"Both splits of {where} must have the same classes, but {few} {is_or_are(len(only))} only in one of them; "
            "add images to the other, or remove the class."
        )


def report_bad(
    problems: Collection[tuple[str, str]], what: str, advice="repair or remove them", on_bad_image: OnBadImage = "stop"
) -> None:
    """Raise UserError for a few of the names with problems, of which a file lists all, or print it if skipped."""
    if not problems:
        return
    same: dict[str, list[str]] = {}
    for name, why in itertools.islice(problems, _MOST_NAMED):
        same.setdefault(why, []).append(name)
    named = "; ".join(f"{', '.join(names)} ({why})" for why, names in same.items())
    if len(problems) > _MOST_NAMED:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="keras_vit-images-", suffix=".txt", delete=False
        ) as file:
            file.writelines(f"{name}\t{why}\n" for name, why in problems)
        counts = collections.Counter(why for _, why in problems)
        reasons = ", ".join(f"{count} times {why[:200]}" for why, count in counts.most_common(_REASONS))
        rest = f", and {len(counts) - _REASONS} reasons more" if len(counts) > _REASONS else ""
        named += f"; and {len(problems) - _MOST_NAMED} more (in all {reasons}{rest}), which are listed in {file.name}"
    sentence = f"{len(problems)} {what}: {named}"
    if on_bad_image == "stop":
        raise UserError(f"{sentence}; {advice}.")
    print(as_typed(f"Skipped: {sentence}."))


def problems_of(examples: Sequence, problem: Callable) -> dict:
    """Return the problems that `problem` finds, by their examples. Looks at every one of them once."""
    # On stdout, beside Keras' progress, since what libjpeg prints of broken files on stderr is kept away.
    with native_stderr_silenced(), concurrent.futures.ThreadPoolExecutor() as pool:
        progress = tracked(pool.map(problem, examples), "Checking images", len(examples))
        return {example: why for example, why in zip(examples, progress, strict=True) if why}


def decoding_problem(data: tf.Tensor, image_warnings: "ImageWarnings | None" = None, name: str = "") -> str | None:
    """Say why the bytes of a file are no image that we read; else return None, and note what is odd about it."""
    content = data.numpy()
    if problem := formats.format_problem(content):
        return problem
    try:
        image = _decode(data)
    except tf.errors.OpError as error:
        return error_reason(error)
    if image_warnings is not None:
        image_warnings.note(name, image, content)
    return None


# In a graph, which walks through a header a hundred times as fast as eager operations do. One for all threads: a cached
# function that makes it would make one in each.
_decode = tf.function(
    lambda data: graph.decode_image(data, accurate=True, upright=False),
    input_signature=[tf.TensorSpec((), tf.string)],
    autograph=False,
)


@dataclasses.dataclass
class ImageWarnings:
    """Images that can be read, but look different to the model than to their author."""

    uniform: list[str] = dataclasses.field(default_factory=list)
    """Names of those of a single color, once they are on white."""
    dark: list[str] = dataclasses.field(default_factory=list)
    """Names of those of 16 bits that use so few of them that 8 bits are nearly black, each with its highest value."""

    def note(self, name: str, image: tf.Tensor, content: bytes | None = None) -> None:
        """Look at an image (h, w, C) uint8, and at the bytes of its file."""
        if content is not None and (highest := highest_of_unused_bits(content)) is not None:
            self.dark.append(f"{name} ({highest})")  # or even all black
        elif is_uniform(image.numpy()):
            self.uniform.append(name)

    def warn(self, looked_at: str) -> None:
        """Print a sentence for each kind. looked_at: how many images, and which."""
        for names, what in (
            (self.uniform, "of a single color (transparent images are put on white)"),
            (self.dark, f"of 16 bits and nearly black, since the highest value is below 4,096; {formats.SCALE_BITS}"),
        ):
            if names:
                shown = ", ".join(sorted(names)[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")
                print(f"Warning: {len(names):,} of {looked_at} {is_or_are(len(names))} {what}: {shown}")


def warn_about_images(*splits: Split) -> None:
    """Look at some images of each split, evenly spaced, and warn of what is odd about them."""
    for split in splits:
        chosen = np.unique(np.linspace(0, split.num_examples - 1, _LOOKED_AT).astype(np.int64))
        image_warnings = ImageWarnings()
        for index in chosen:
            with contextlib.suppress(tf.errors.OpError, UserError):  # reported where it is needed
                data, _ = split.read(tf.constant(index))
                if data.dtype != tf.string:
                    return  # pixels without files
                decoding_problem(data, image_warnings, split.name(int(index)))
        image_warnings.warn(f"{len(chosen)} images{' looked at' * (len(chosen) < split.num_examples)}")
