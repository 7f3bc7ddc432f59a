"""Pictures with masks as the data set of a training run: read from files, checked, and converted to a task."""

import dataclasses
import functools
import os
import pathlib
import threading
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.errors import refuse_first
from keras_vit.files.labels import LABELS, distinct_names
from keras_vit.images.formats import is_hidden, is_picture, others_line
from keras_vit.models.config import SegmentationTask
from training.input.coco import (
    NONE,
    UNCOUNTED,
    CocoPicture,
    Segments,
    coco_segments,
    held_out,
    own_labels,
    read_coco,
    read_panoptic,
    segments_of_png,
    upright_size,
)
from training.input.dataset import DataSet, ImageWarnings, Split, decoding_problem, problems_of, summarize_problems
from training.input.dense import DenseBatches
from training.options.segment import SceneOptions, folders_of_splits
from training.segmentation.masks import VOC_CLASSES, segments_of_mask, voc_segments
from training.segmentation.tfds_masks import tfds_scenes


@dataclasses.dataclass(frozen=True)
class Scene:
    """A picture and a function that reads its segments; a UserError of it says what is wrong, without the picture."""

    file: pathlib.Path
    segments: Callable[[], Segments]


@dataclasses.dataclass(frozen=True)
class Scenes:
    """Pictures with segments, as a kind of data has them."""

    labels: tuple[str, ...]
    """Names of the classes; empty if they have numbers alone."""
    train: Sequence[Scene]
    evaluation: Sequence[Scene]
    held_out: bool
    """Whether the evaluation pictures are those that a rule chose."""


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
    scenes = {"folder": _folder, "voc": _voc, "coco": _coco, "panoptic": _panoptic}[options.kind](options)
    contents = _Contents(task)
    for pictures in (scenes.train, scenes.evaluation):
        contents.read(pictures)
    labels = distinct_names(scenes.labels or contents.numbered_labels(options.path), options.path)
    masks, largest = f"masks of {options.path}", max(contents.classes, default=-1)
    refuse_first(
        [
            (largest < 0, f"No pixel of the {masks} has a class, so there is nothing to learn; correct them."),
            (
                largest >= len(labels),
                f"{options.path} names {len(labels)} classes, 0 to {len(labels) - 1}, but the masks have the class "
                f"{largest}; add names, or correct the masks (255 is not counted).",
            ),
            (
                task == "semantic" and len(labels) < 2,
                f"The {masks} have 1 class; at least two are needed.",
            ),
            (
                task != "semantic" and not contents.things,
                f"The {masks} tell classes, but no objects of their own, which --task {task} needs; save objects as "
                "16-bit PNGs with 1000 * class + number, or leave --task out.",
            ),
        ]
    )
    train, evaluation = (
        _split(pictures, task, contents.checksum(pictures)) for pictures in (scenes.train, scenes.evaluation)
    )
    batches = SceneBatches(contents.most, tuple(sorted(contents.classes - contents.things)))
    return DataSet(labels, train, evaluation, held_out=scenes.held_out, batches=batches)


def of_task(segments: Segments, task: SegmentationTask) -> tuple[np.ndarray, np.ndarray]:
    """The classes and the map of a task's targets: for semantic one of each class, for instance the objects."""
    labels, objects, numbers = segments
    if task == "panoptic":
        return labels, numbers
    if task == "semantic":
        kept, table = np.unique(labels, return_inverse=True)
    else:
        kept, table = labels[objects], np.where(objects, np.cumsum(objects) - 1, NONE)
    return kept, np.append(table, [UNCOUNTED, NONE]).astype(np.int32)[numbers]  # by -2 and -1


def _split(scenes: Sequence[Scene], task: SegmentationTask, checksum: int) -> Split:
    files = tf.constant([str(scene.file) for scene in scenes])

    def load(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return of_task(scenes[int(index)].segments(), task)

    def target(index: tf.Tensor) -> dict[str, tf.Tensor]:
        classes, segments = tf.numpy_function(load, [index], [tf.int32, tf.int32])
        return {"labels": tf.ensure_shape(classes, (None,)), "segments": tf.ensure_shape(segments, (None, None))}

    return Split(
        len(scenes),
        lambda index: (tf.io.read_file(files[index]), tf.constant(-1)),
        lambda index: str(scenes[index].file),
        fingerprint=checksum,
        target=target,
    )


class _Contents:
    """What pictures and their segments hold, each read once."""

    def __init__(self, task: SegmentationTask) -> None:
        self._task = task
        self.classes: set[int] = set()
        self.things: set[int] = set()
        """Classes that have objects."""
        self.most = 0
        """Targets of a picture at most."""
        self._checksums: dict[str, int] = {}
        self._lock, self._warnings = threading.Lock(), ImageWarnings()

    def read(self, scenes: Sequence[Scene]) -> None:
        """Add pictures. Raises UserError for those that cannot be decoded, or whose masks cannot be used."""
        of_file = {str(scene.file): scene for scene in scenes}
        if bad := problems_of(list(of_file), lambda name: self._problem(of_file[name])):
            raise UserError(
                f"{len(bad)} of {len(scenes)} pictures or their masks cannot be used: {summarize_problems(bad)}; "
                "correct or remove them."
            )
        self._warnings.warn(f"{len(scenes):,} pictures")

    def _problem(self, scene: Scene) -> str | None:
        data = tf.io.read_file(str(scene.file))
        if problem := decoding_problem(data, self._warnings, str(scene.file)):
            return problem
        try:
            segments = labels, objects, numbers = scene.segments()
        except UserError as error:
            return str(error).rstrip(".")
        if numbers.shape != (size := upright_size(scene.file)):
            return f"its mask has {numbers.shape[0]}x{numbers.shape[1]} pixels, but the picture {size[0]}x{size[1]}"
        parts = os.fsencode(scene.file.name), data.numpy(), labels.tobytes(), objects.tobytes(), numbers.tobytes()
        checksum = functools.reduce(lambda found, part: zlib.crc32(part, found), parts, 0)
        with self._lock:
            self.classes |= set(labels.tolist())
            self.things |= set(labels[objects].tolist())
            self.most = max(self.most, len(of_task(segments, self._task)[0]))
            self._checksums[str(scene.file)] = checksum
        return None

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


def _folder(options: SceneOptions) -> Scenes:
    """images/ and masks/, whose pixels are numbers of classes, or 1000 * class + number of the object in 16 bits."""
    folders = folders_of_splits(options.path)
    splits = [_pairs(folder) for folder in folders or (options.path,)]
    train, evaluation = splits if folders else held_out(splits[0], options.path)
    return Scenes(own_labels(options.path), train, evaluation, not folders)


def _pairs(folder: pathlib.Path) -> list[Scene]:
    """The pictures and masks of a folder, in the order of their names."""
    images, masks = _by_name(folder / "images"), _by_name(folder / "masks")
    unmatched = [f"the image {images[name].name} has no mask" for name in sorted(images.keys() - masks.keys())]
    unmatched += [f"the mask {masks[name].name} has no image" for name in sorted(masks.keys() - images.keys())]
    shown = f"{'; '.join(unmatched[:10])}{' …' if len(unmatched) > 10 else ''}"
    refuse_first(
        [
            (
                unmatched,
                f"In {folder}, {len(unmatched)} files have no counterpart of the same name: {shown}; add or remove "
                "them.",
            ),
            (not images, f"{folder / 'images'} holds no picture; put them there."),
        ]
    )
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
        elif (first := found.setdefault(os.fspath(inside.with_suffix("")), path)) != path:
            raise UserError(f"{first} and {path} have the same name; the mask of one image must be clear: rename one.")
    if others:
        print(others_line(others, str(folder)))
    return found


def _voc(options: SceneOptions) -> Scenes:
    """JPEGImages, SegmentationClass, perhaps SegmentationObject, and the lists of ImageSets/Segmentation."""
    root, lists = options.path, options.path / "ImageSets" / "Segmentation"
    masks, pictures = _by_name(root / "SegmentationClass"), _by_name(root / "JPEGImages")
    objects = _by_name(root / "SegmentationObject") if (root / "SegmentationObject").is_dir() else {}
    if missing := sorted(masks.keys() - pictures.keys()):
        raise UserError(f"{root} has no picture for {len(missing)} masks, such as {missing[0]}; add or remove them.")
    scenes = {n: Scene(pictures[n], functools.partial(voc_segments, masks[n], objects.get(n))) for n in sorted(masks)}
    labels = own_labels(root) or VOC_CLASSES
    if not all((lists / f"{name}.txt").is_file() for name in ("train", "val")):
        return Scenes(labels, *held_out(list(scenes.values()), root), True)
    splits = [(lists / f"{name}.txt").read_text(encoding="utf-8").split() for name in ("train", "val")]
    if unknown := [name for names in splits for name in names if name not in scenes]:
        raise UserError(f"{lists} lists {len(unknown)} pictures without a mask, such as {unknown[0]}; correct it.")
    train, evaluation = ([scenes[name] for name in names] for names in splits)
    return Scenes(labels, train, evaluation, False)


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


def _coco(options: SceneOptions) -> Scenes:
    def read(file: pathlib.Path, folder: pathlib.Path) -> tuple[tuple[str, ...], list[Scene]]:
        coco = read_coco(file, folder, options.allow_outside)
        numbers = coco.numbers

        def segments(picture: CocoPicture) -> Segments:
            return coco_segments(picture, numbers, upright_size(picture.file, picture.stated_size))

        scenes = [Scene(picture.file, functools.partial(segments, picture)) for picture in coco.pictures]
        return tuple(coco.names[number] for number in numbers), scenes

    return _of_files(options, read)


def _panoptic(options: SceneOptions) -> Scenes:
    def read(file: pathlib.Path, folder: pathlib.Path) -> tuple[tuple[str, ...], list[Scene]]:
        names, pictures = read_panoptic(file, folder, options.allow_outside)
        numbers = {number: place for place, number in enumerate(sorted(names))}
        scenes = [Scene(picture.file, functools.partial(segments_of_png, picture, numbers)) for picture in pictures]
        return tuple(names[number] for number in numbers), scenes

    return _of_files(options, read)
