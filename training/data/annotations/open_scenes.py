"""Images with masks as the data set of a training run: read from files, checked, and converted to a task.

`Split.target` has what a task trains on: one segment for each pixel at most. `Split.truth` has the `Segments` as they
are annotated, with overlaps and crowds, which an evaluation needs.
"""

import dataclasses
import functools
import os
import pathlib
import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.files.documents import LARGEST, read_text
from keras_vit.files.labels import LABELS, composed, distinct_names
from keras_vit.images.formats import is_hidden, is_picture, others_line
from keras_vit.models.config import SegmentationTask
from training.data.annotations.coco import CocoPicture, coco_segments, read_coco
from training.data.annotations.listed_images import held_out, own_labels, upright_size
from training.data.annotations.masks import IGNORED, segments_of_mask, two_classes, two_values
from training.data.annotations.panoptic import PanopticPicture, read_panoptic, segments_of_png
from training.data.annotations.segments import NONE, UNCOUNTED, Segments, ignored_pixels, ignored_sentence, of_task
from training.data.annotations.tfds_masks import tfds_scenes
from training.data.annotations.voc import VOC_CLASSES, voc_segments
from training.data.dataset import DataSet, ImageWarnings, Split, decoding_problem, problems_of, summarize_problems
from training.data.dense import DenseBatches
from training.options.segment import SceneOptions, folders_of_splits

# Pixels outside of all objects, in semantic segmentation of object annotations.
BACKGROUND = "background"
# Names of classes in a line.
_MOST_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Scene:
    """An image and a function that reads its segments; a UserError of it says what is wrong, without the image."""

    file: pathlib.Path
    segments: Callable[[tuple[int, int]], Segments]
    """From the height and width of the upright image, which the mask must have."""
    stated_size: tuple = (None, None)
    """Height and width as the file says, unchecked."""


@dataclasses.dataclass(frozen=True)
class Scenes:
    """Images with segments, as a kind of data has them."""

    labels: tuple[str, ...]
    """Names of the classes; empty if they have numbers alone."""
    train: Sequence[Scene]
    evaluation: Sequence[Scene]
    held_out: bool
    """Whether the evaluation images are those that a rule chose."""
    names_values: bool = False
    """Whether the names are those of a labels.txt for the values of masks."""

    def converted(self, convert: Callable[[Segments], Segments]) -> "Scenes":
        """Return the same images with other segments."""

        def changed(scene: Scene) -> Scene:
            return dataclasses.replace(scene, segments=lambda size: convert(scene.segments(size)))

        return dataclasses.replace(self, train=[*map(changed, self.train)], evaluation=[*map(changed, self.evaluation)])


@dataclasses.dataclass(frozen=True)
class SceneBatches(DenseBatches):
    """Batches of pictures with segments."""

    stuff: tuple[int, ...] = ()
    """Classes that have no objects."""


def open_scenes(options: SceneOptions, task: SegmentationTask) -> DataSet:
    """Open what `--data` names, and check all of it.

    Raises UserError for pictures and masks that cannot be read or do not fit, by name, and for masks without objects
    where the task needs them.
    """
    if options.kind == "tfds":
        if task != "semantic":
            raise UserError(f"The masks of TensorFlow Datasets are classes of pixels; leave --task {task} out.")
        labels, splits, most = tfds_scenes(options)
        return DataSet(labels, *splits, batches=SceneBatches(most))
    read = {"folder": _folder, "voc": _voc, "coco": _coco, "panoptic": _panoptic}[options.kind]
    scenes, contents = read(options, task), _Contents(task)
    contents.read(scenes.train, "training")
    learned = set(contents.classes)
    contents.read(scenes.evaluation, "evaluation")
    value = two_values(contents.values, len(scenes.labels)) if options.kind in ("folder", "voc") else None
    if value is not None and not contents.things:
        print(f"The masks of {options.path} have the values 0 and {IGNORED if value < 0 else value}, read as 0 and 1.")
        scenes = scenes.converted(lambda segments: two_classes(segments, value))
        learned = contents.become_two_classes(value, learned)
    labels = distinct_names(scenes.labels or contents.numbered_labels(options.path), options.path)
    _check_contents(contents, labels, options, task)
    _check_learned(scenes, labels, learned, options.path)
    contents.print_ignored()
    train, evaluation = (_split(images, task, contents) for images in (scenes.train, scenes.evaluation))
    batches = SceneBatches(contents.most, tuple(sorted(contents.classes - contents.things)))
    return DataSet(labels, train, evaluation, held_out=scenes.held_out, batches=batches)


def _check_contents(
    contents: "_Contents", labels: Sequence[str], options: SceneOptions, task: SegmentationTask
) -> None:
    """Raise UserError for masks that a task cannot learn from."""
    masks, largest = f"masks of {options.path}", max(contents.classes, default=-1)
    if largest < 0:
        raise UserError(f"No pixel of the {masks} has a class, so there is nothing to learn; correct them.")
    if largest >= len(labels):
        raise UserError(
            f"{options.path} names {len(labels)} classes, 0 to {len(labels) - 1}, but the masks have the class "
            f"{largest}; add names, or correct the masks (255 is ignored)."
        )
    if task == "semantic" and len(labels) < 2:
        raise UserError(f"The {masks} have 1 class; at least two are needed.")
    if task != "semantic" and not contents.things:
        raise UserError(
            f"The {masks} tell classes, but no objects of their own, which --task {task} needs; save objects as 16-bit "
            "PNGs with 1000 * class + number, or leave --task out."
        )


def _check_learned(scenes: Scenes, labels: Sequence[str], learned: Collection[int], path: pathlib.Path) -> None:
    """Raise UserError, or print it for names that others gave, if a class occurs in no training mask."""
    absent = [name for number, name in enumerate(labels) if number not in learned]
    if not absent:
        return
    shown = f"{', '.join(absent[:_MOST_NAMED])}{' …' * (len(absent) > _MOST_NAMED)}"
    if scenes.names_values:
        raise UserError(
            f"{path / LABELS} names classes that occur in no training mask: {shown}; correct the masks, whose values "
            "should be the numbers of the names from 0 on, or remove the names."
        )
    print(f"No training image has {len(absent)} of the {len(labels)} classes: {shown}.")


def _split(scenes: Sequence[Scene], task: SegmentationTask, contents: "_Contents") -> Split:
    files = tf.constant([str(scene.file) for scene in scenes])
    sizes = [contents.sizes[str(scene.file)] for scene in scenes]

    def truth(index: int) -> Segments:
        return scenes[index].segments(sizes[index])

    def target(index: tf.Tensor) -> dict[str, tf.Tensor]:
        classes, segments = tf.numpy_function(lambda n: of_task(truth(int(n)), task), [index], [tf.int32, tf.int32])
        return {"labels": tf.ensure_shape(classes, (None,)), "segments": tf.ensure_shape(segments, (None, None))}

    return Split(
        len(scenes),
        lambda index: (tf.io.read_file(files[index]), tf.constant(-1)),
        lambda index: str(scenes[index].file),
        fingerprint=contents.checksum(scenes),
        target=target,
        truth=truth,
    )


class _Contents:
    """The contents of images and masks, each read once."""

    def __init__(self, task: SegmentationTask) -> None:
        self._task = task
        self.classes: set[int] = set()
        self.things: set[int] = set()
        """Classes that have objects."""
        self.most = 0
        """Targets of a picture at most."""
        self.sizes: dict[str, tuple[int, int]] = {}
        """Height and width of each upright image."""
        self.ignored: dict[str, np.ndarray] = {}
        """`ignored_pixels` of each split."""
        self._checksums: dict[str, int] = {}
        self._lock, self._warnings = threading.Lock(), ImageWarnings()

    @property
    def values(self) -> set[int]:
        """The classes, and UNCOUNTED if a pixel is marked as ignored."""
        return self.classes | ({UNCOUNTED} if any(pixels[2] for pixels in self.ignored.values()) else set())

    def read(self, scenes: Sequence[Scene], split: str) -> None:
        """Add the images of a split. Raises UserError for those that cannot be read, or whose masks cannot be used."""
        of_file, self.ignored[split] = {str(scene.file): scene for scene in scenes}, np.zeros(3, np.int64)
        if bad := problems_of(list(of_file), lambda name: self._problem(of_file[name], self.ignored[split])):
            raise UserError(
                f"{len(bad)} of {len(scenes)} pictures or their masks cannot be used: {summarize_problems(bad)}; "
                "correct or remove them."
            )
        self._warnings.warn(f"{len(scenes):,} pictures")

    def _problem(self, scene: Scene, ignored: np.ndarray) -> str | None:
        data = tf.io.read_file(str(scene.file))
        if problem := decoding_problem(data, self._warnings, str(scene.file)):
            return problem
        try:
            size = upright_size(scene.file, scene.stated_size)
            segments = scene.segments(size)
        except UserError as error:
            return str(error).rstrip(".")
        labels, objects, crowds, _, numbers, _ = segments
        parts = [os.fsencode(scene.file.name), data.numpy(), *(each.tobytes() for each in (labels, objects, numbers))]
        parts += [crowds.tobytes()] if crowds.any() else []
        targets, target_map = of_task(segments, self._task)
        with self._lock:
            self.classes |= set(labels[~crowds].tolist())
            self.things |= set(labels[objects].tolist())
            self.most = max(self.most, len(targets))
            self.sizes[str(scene.file)] = size
            ignored += ignored_pixels(target_map, self._task)
            self._checksums[str(scene.file)] = functools.reduce(lambda found, part: zlib.crc32(part, found), parts, 0)
        return None

    def become_two_classes(self, value: int, learned: set[int]) -> set[int]:
        """Replace the value of class 1, see `two_values`, by 1; return the classes of the training masks likewise."""
        if value == UNCOUNTED:
            learned = {*learned, *([1] if self.ignored["training"][2] else [])}
            for pixels in self.ignored.values():
                pixels[2] = 0
        self.classes, self.most = {0, 1}, 2
        return {1 if each == value else each for each in learned}

    def print_ignored(self) -> None:
        """Print the share of pixels that are ignored in each split."""
        for split, pixels in self.ignored.items():
            if sentence := ignored_sentence(pixels, split):
                print(sentence)

    def checksum(self, scenes: Sequence[Scene]) -> int:
        """The same for the same pictures with the same segments."""
        return zlib.crc32(np.array([self._checksums[str(scene.file)] for scene in scenes], np.uint32).tobytes())

    def numbered_labels(self, path: pathlib.Path) -> tuple[str, ...]:
        """The numbers of the classes as their names. Raises UserError if they do not begin at 0, without gaps."""
        found = sorted(self.classes)
        if found != list(range(len(found))):
            raise UserError(
                f"The masks of {path} have the classes {', '.join(map(str, found[:20]))}, which are not numbers from 0 "
                f"on; correct them, or name the class of every number in {path / LABELS}."
            )
        return tuple(map(str, found))


def _folder(options: SceneOptions, _: SegmentationTask) -> Scenes:
    """images/ and masks/, whose pixels are numbers of classes, or 1000 * class + number of the object in 16 bits."""
    folders = folders_of_splits(options.path)
    splits = [_pairs(folder) for folder in folders or (options.path,)]
    train, evaluation = splits if folders else held_out(splits[0], options.path)
    labels = own_labels(options.path)
    return Scenes(labels, train, evaluation, not folders, names_values=bool(labels))


def _pairs(folder: pathlib.Path) -> list[Scene]:
    """The pictures and masks of a folder, in the order of their names."""
    images, masks = _by_name(folder / "images"), _by_name(folder / "masks")
    unmatched = [f"the image {images[name].name} has no mask" for name in sorted(images.keys() - masks.keys())]
    unmatched += [f"the mask {masks[name].name} has no image" for name in sorted(masks.keys() - images.keys())]
    if unmatched:
        raise UserError(
            f"In {folder}, {len(unmatched)} files have no counterpart of the same name: {'; '.join(unmatched[:10])}"
            f"{' …' * (len(unmatched) > 10)}; add or remove them."
        )
    if not images:
        raise UserError(f"{folder / 'images'} holds no picture; put them there.")
    return [Scene(images[name], functools.partial(segments_of_mask, masks[name])) for name in sorted(images)]


def _by_name(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The pictures of a folder and those inside it by their path without suffix; no hidden ones."""
    found: dict[str, pathlib.Path] = {}
    others = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_dir() or any(map(is_hidden, inside.parts)):
            continue
        if not is_picture(path):
            others.append(path.name)
        elif (first := found.setdefault(composed(os.fspath(inside.with_suffix(""))), path)) != path:
            raise UserError(f"{first} and {path} have the same name; the mask of one image must be clear: rename one.")
    if others:
        print(others_line(others, str(folder)))
    return found


def _voc(options: SceneOptions, _: SegmentationTask) -> Scenes:
    """JPEGImages, SegmentationClass, perhaps SegmentationObject, and the lists of ImageSets/Segmentation."""
    root, lists = options.path, options.path / "ImageSets" / "Segmentation"
    masks, pictures = _by_name(root / "SegmentationClass"), _by_name(root / "JPEGImages")
    objects = _by_name(root / "SegmentationObject") if (root / "SegmentationObject").is_dir() else {}
    if missing := sorted(masks.keys() - pictures.keys()):
        raise UserError(f"{root} has no picture for {len(missing)} masks, such as {missing[0]}; add or remove them.")
    scenes = {n: Scene(pictures[n], functools.partial(voc_segments, masks[n], objects.get(n))) for n in sorted(masks)}
    own = own_labels(root)
    labels, names_values = own or VOC_CLASSES, bool(own)
    if not all((lists / f"{name}.txt").is_file() for name in ("train", "val")):
        return Scenes(labels, *held_out(list(scenes.values()), root), True, names_values)
    splits = [composed(read_text(lists / f"{name}.txt", LARGEST)).split() for name in ("train", "val")]
    if unknown := [name for names in splits for name in names if name not in scenes]:
        raise UserError(f"{lists} lists {len(unknown)} pictures without a mask, such as {unknown[0]}; correct it.")
    train, evaluation = ([scenes[name] for name in names] for names in splits)
    return Scenes(labels, train, evaluation, False, names_values)


def _of_files(
    options: SceneOptions, read: Callable[[pathlib.Path, pathlib.Path], tuple[tuple[str, ...], list[Scene]]]
) -> Scenes:
    """The scenes of --data and of --eval-data, if that is given; `read` takes a file and the folder of its pictures."""
    labels, scenes = read(options.path, pathlib.Path(options.images or options.path.parent))
    if options.eval_data is None:
        return Scenes(labels, *held_out(scenes, options.path), True)
    file = pathlib.Path(options.eval_data.partition(":")[2])
    others, evaluation = read(file, pathlib.Path(options.eval_images or file.parent))
    if others != labels:
        raise UserError(f"{file} has other categories than {options.path}; give two files with the same.")
    return Scenes(labels, scenes, evaluation, False)


def _coco(options: SceneOptions, task: SegmentationTask) -> Scenes:
    def read(file: pathlib.Path, folder: pathlib.Path) -> tuple[tuple[str, ...], list[Scene]]:
        coco = read_coco(file, folder, options.allow_outside)
        classes = _Classes(coco.names, task == "semantic" and options.background == "class")

        def segments(picture: CocoPicture, size: tuple[int, int]) -> Segments:
            return classes.filled(coco_segments(picture, classes.numbers, size))

        scenes = [Scene(each.file, functools.partial(segments, each), each.stated_size) for each in coco.pictures]
        return classes.labels, scenes

    return _of_files(options, read)


def _panoptic(options: SceneOptions, task: SegmentationTask) -> Scenes:
    def read(file: pathlib.Path, folder: pathlib.Path) -> tuple[tuple[str, ...], list[Scene]]:
        names, pictures = read_panoptic(file, folder, options.allow_outside)
        are_objects = not any(picture.stuff for picture in pictures)
        classes = _Classes(names, are_objects and task == "semantic" and options.background == "class")

        def segments(picture: PanopticPicture, size: tuple[int, int]) -> Segments:
            return classes.filled(segments_of_png(picture, classes.numbers, size))

        return classes.labels, [Scene(each.file, functools.partial(segments, each)) for each in pictures]

    return _of_files(options, read)


class _Classes:
    """The classes of a file's categories and, if wanted, of the pixels outside of all objects."""

    def __init__(self, names: Mapping[int, str], has_background: bool) -> None:
        ids = sorted(names)
        self.labels = tuple(names[each] for each in ids)
        own = [place for place, name in enumerate(self.labels) if name.strip().lower() == BACKGROUND]
        first = has_background and not own
        self._background = (own or [0])[0] if has_background else None
        self.labels = (BACKGROUND, *self.labels) if first else self.labels
        self.numbers = {each: place for place, each in enumerate(ids, int(first))}
        """The number of each category by its id."""

    def filled(self, segments: Segments) -> Segments:
        """Segments with the pixels of none as one of the background."""
        outside = segments.map == NONE
        if self._background is None or not outside.any():
            return segments
        labels, objects, crowds, areas, numbers, _ = segments
        return Segments(
            np.append(labels, self._background).astype(np.int32),
            np.append(objects, False),
            np.append(crowds, False),
            np.append(areas, np.count_nonzero(outside)),
            np.where(outside, len(labels), numbers).astype(np.int32),
        )
