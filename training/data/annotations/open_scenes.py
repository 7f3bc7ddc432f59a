"""Images with masks as the data set of a training run: read from files, checked, and converted to a task.

`Split.target` has what a task trains on: one segment for each pixel at most. `Split.truth` has the `Segments` as they
are annotated, with overlaps and crowds, which an evaluation needs.
"""

import dataclasses
import functools
import itertools
import os
import pathlib
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.files.documents import LARGEST, read_text
from keras_vit.files.labels import LABELS, composed, distinct_names
from keras_vit.images.formats import looks_like_image, others_line, visible_files
from keras_vit.models.config import SegmentationTask
from keras_vit.run import Run
from training.data.annotations.coco import CocoImage, PanopticImage, check_ids, read_coco, read_panoptic
from training.data.annotations.images import check_names, own_labels, train_and_val, upright_size
from training.data.annotations.masks import (
    IGNORED,
    NONE,
    UNCOUNTED,
    VOC_CLASSES,
    Segments,
    check_classes_of_masks,
    ignored_pixels,
    ignored_sentence,
    of_task,
    segments_of_mask,
    two_classes,
    two_values,
    voc_segments,
)
from training.data.dataset import DataSet, ImageWarnings, Split, problems_of, report_bad, split_of_files
from training.data.dense import SceneBatches
from training.data.file_contents import FileContents
from training.data.image_folder import file_problem
from training.data.tfds import tfds_scenes
from training.options.dense import SceneOptions, folders_of_splits

BACKGROUND = "background"  # pixels outside of all objects, in semantic segmentation of object annotations
_MOST_NAMED = 5  # names of classes in a line


@dataclasses.dataclass(frozen=True)
class Scene:
    """An image and a function that reads its segments; a UserError of it says what is wrong, without the image."""

    file: pathlib.Path
    segments: Callable[[tuple[int, int]], Segments]
    """From the height and width of the upright image, which the mask must have."""
    stated_size: tuple = (None, None)  # height and width as the file says, unchecked
    group: str = ""  # the name of its group in the data; "" without one


@dataclasses.dataclass(frozen=True)
class Scenes:
    """Images with segments, as a kind of data has them."""

    labels: tuple[str, ...]  # names of the classes; empty if they have numbers alone
    splits: Mapping[str, Sequence[Scene]]  # images of "train", and of "val" in data with a split of their own
    names_values: bool = False  # whether the names are those of a labels.txt for the values of masks


class _Facts(NamedTuple):
    """Size and classes of an image and its mask."""

    size: tuple[int, int]  # height and width of the upright image
    classes: set[int]
    things: set[int]  # classes that have objects
    num_targets: int
    ignored: np.ndarray  # see `ignored_pixels`
    checksum: int  # a checksum of the image and its segments

    def of_two_classes(self, value: int) -> "_Facts":
        """Return the facts if a value, see `two_values`, is class 1."""
        marked = {1} if value == UNCOUNTED and self.ignored[2] else set()
        ignored = self.ignored * [1, 1, value != UNCOUNTED]
        classes = {1 if each == value else each for each in self.classes}
        return self._replace(classes=classes | marked, num_targets=2, ignored=ignored)


def open_scenes(options: SceneOptions, task: SegmentationTask, run: Run | None = None) -> DataSet:
    """Open what `--data` names, and check all of it. run: see `train_and_val`.

    Raises UserError for images and masks that cannot be read or do not fit, by name, and for masks without objects
    where the task needs them.
    """
    if options.kind == "tfds":
        _check_task(task, options.data, has_objects=False)
        labels, splits, most = tfds_scenes(options)
        return DataSet(labels, *splits, batches=SceneBatches(most))
    read = {"folder": _folder, "voc": _voc, "coco": _of_file, "panoptic": _of_file}[options.kind]
    scenes = read(options, task)
    train, evaluation = train_and_val(scenes.splits, options, run)
    is_drawn, contents = "val" not in scenes.splits and train is not evaluation, FileContents()
    facts = [_facts_of(train, task, contents)]
    facts.append(facts[0] if train is evaluation else _facts_of(evaluation, task, contents))
    if (value := _value_of_one(scenes, facts, options)) is not None:
        print(f"The masks of {options.path} have the values 0 and {IGNORED if value < 0 else value}, read as 0 and 1.")
        train, evaluation = ([_two_classes(scene, value) for scene in each] for each in (train, evaluation))
        facts = [{file: each.of_two_classes(value) for file, each in of_split.items()} for of_split in facts]
    labels, stuff = _checked_classes(scenes, facts, options.path, task, run)
    if options.kind == "folder" and task != "semantic":
        things = sorted({*range(len(labels))} - {*stuff})
        train, evaluation = ([_with_groups(scene, things) for scene in each] for each in (train, evaluation))
    if not any(each.num_targets for each in facts[1].values()):
        raise UserError(f"The evaluation masks of {options.path} have nothing that {task} can measure; give others.")
    for name, of_split in zip(("training", "evaluation"), facts, strict=True):
        if sentence := ignored_sentence(np.sum([each.ignored for each in of_split.values()], axis=0), name):
            print(sentence)
    most = max(each.num_targets for of_split in facts for each in of_split.values())
    opened = [_split(part, task, of_part, contents) for part, of_part in zip((train, evaluation), facts, strict=True)]
    return DataSet(labels, opened[0], opened[1], held_out=is_drawn, batches=SceneBatches(most, stuff))


def _checked_classes(
    scenes: Scenes, facts: Sequence[Mapping[str, _Facts]], path: pathlib.Path, task: SegmentationTask, run: Run | None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names of the classes, and the classes without objects. Raises UserError where they do not fit."""
    learned, others = (set[int]().union(*(each.classes for each in of_split.values())) for of_split in facts)
    things = set[int]().union(*(each.things for of_split in facts for each in of_split.values()))
    classes = learned | others
    numbers = tuple(map(str, range(max(max(classes, default=-1) + 1, len(run.labels) if run else 0))))
    labels = distinct_names(scenes.labels or numbers, path)
    check_classes_of_masks(classes, labels, path, task, are_numbers=not scenes.labels and run is None)
    _check_task(task, path, has_objects=bool(things))
    if run is None:
        _check_learned(scenes, labels, learned, path)
    return labels, tuple(sorted(classes - things))


def _facts_of(scenes: Sequence[Scene], task: SegmentationTask, contents: FileContents) -> dict[str, _Facts]:
    """Read images, whose contents are noted, and masks; return facts by file. Raises UserError for unusable ones."""
    of_file, image_warnings = {str(scene.file): scene for scene in scenes}, ImageWarnings()
    facts: dict[str, _Facts] = {}

    def problem(file: str) -> str | None:
        if why := file_problem(file, image_warnings, contents):
            return why
        try:
            scene = of_file[file]
            size = upright_size(scene.file, scene.stated_size)
            segments = scene.segments(size)
        except UserError as error:
            return str(error).rstrip(".")
        labels, objects, crowds, _, numbers, _ = segments
        checksum = contents.fingerprint([file], [scene.file.name])
        for part in (labels, objects, numbers, *([crowds] if crowds.any() else [])):
            checksum = zlib.crc32(part.tobytes(), checksum)
        targets, target_map = of_task(segments, task)
        classes, things = set(labels[~crowds].tolist()), set(labels[objects].tolist())
        facts[file] = _Facts(size, classes, things, len(targets), ignored_pixels(target_map, task), checksum)
        return None

    bad = problems_of(list(of_file), problem)
    report_bad(bad.items(), f"of {len(scenes)} images or their masks cannot be used", "correct or remove them")
    image_warnings.warn(f"{len(scenes):,} images")
    return facts


def _value_of_one(scenes: Scenes, facts: Sequence[Mapping[str, _Facts]], options: SceneOptions) -> int | None:
    """Return the value of class 1 in masks of two classes that are not 0 and 1, see `two_values`; None in others."""
    values: set[int] = set()
    for each in itertools.chain.from_iterable(of_split.values() for of_split in facts):
        values |= each.classes | ({UNCOUNTED} if each.ignored[2] else set())
        if each.things or options.kind not in ("folder", "voc"):
            return None
    return two_values(values, len(scenes.labels))


def _two_classes(scene: Scene, value: int) -> Scene:
    return dataclasses.replace(scene, segments=lambda size: two_classes(scene.segments(size), value))


def _with_groups(scene: Scene, things: Sequence[int]) -> Scene:
    """Return a scene whose pixels of the classes `things`, but of no object, are a crowd, as groups of Cityscapes."""

    def segments(size: tuple[int, int]) -> Segments:
        own = scene.segments(size)
        groups = ~own.objects & np.isin(own.labels, things)
        return own._replace(objects=own.objects | groups, crowds=own.crowds | groups)

    return dataclasses.replace(scene, segments=segments)


def _check_task(task: SegmentationTask, data: object, *, has_objects: bool) -> None:
    """Raise UserError for a task of objects on masks of classes alone."""
    if task != "semantic" and not has_objects:
        raise UserError(
            f"The masks of {data} tell classes, but no objects of their own, which --task {task} needs; save objects "
            "as 16-bit PNGs with 1000 * class + number, or leave --task out."
        )


def _check_learned(scenes: Scenes, labels: Sequence[str], learned: Collection[int], path: object) -> None:
    """Raise UserError, or print it for names that others gave, if a class occurs in no training mask."""
    if not (absent := [name for number, name in enumerate(labels) if number not in learned]):
        return
    shown = f"{', '.join(absent[:_MOST_NAMED])}{' …' * (len(absent) > _MOST_NAMED)}"
    if scenes.names_values:
        raise UserError(
            f"{path}/{LABELS} names classes that occur in no training mask: {shown}; correct the masks, whose values "
            "should be the numbers of the names from 0 on, or remove the names."
        )
    print(f"Warning: {len(absent)} of the {len(labels)} classes are in no training image: {shown}.")


def _split(
    scenes: Sequence[Scene], task: SegmentationTask, facts: Mapping[str, _Facts], contents: FileContents
) -> Split:
    own = [facts[str(scene.file)] for scene in scenes]

    def truth(index: int) -> Segments:
        return scenes[index].segments(own[index].size)

    def target(index: tf.Tensor) -> dict[str, tf.Tensor]:
        classes, segments = tf.numpy_function(lambda n: of_task(truth(int(n)), task), [index], [tf.int32, tf.int32])
        return {"labels": tf.ensure_shape(classes, (None,)), "segments": tf.ensure_shape(segments, (None, None))}

    return split_of_files(
        [str(scene.file) for scene in scenes],
        contents,
        fingerprint=zlib.crc32(np.array([each.checksum for each in own], np.uint32).tobytes()),
        target=target,
        truth=truth,
    )


def _folder(options: SceneOptions, _: SegmentationTask) -> Scenes:
    """Read images/ and masks/, whose pixels are numbers of classes, in 16 bits also 1000 * class + object."""
    folders = folders_of_splits(options.path)
    splits = {}
    for name, folder in zip(("train", "val"), folders or (options.path,), strict=False):
        images, masks = _by_name(folder / "images"), _by_name(folder / "masks")
        check_names(images, masks, folder / "masks")
        check_names(masks, images, folder / "images")
        splits[name] = [
            Scene(image, functools.partial(segments_of_mask, masks[n])) for n, image in sorted(images.items())
        ]
    labels = own_labels(options.path)
    return Scenes(labels, splits, names_values=bool(labels))


def _voc(options: SceneOptions, _: SegmentationTask) -> Scenes:
    """Read JPEGImages, SegmentationClass, perhaps SegmentationObject, and the lists of ImageSets/Segmentation."""
    root, lists = options.path, options.path / "ImageSets" / "Segmentation"
    masks, images = _by_name(root / "SegmentationClass"), _by_name(root / "JPEGImages")
    objects = _by_name(root / "SegmentationObject") if (root / "SegmentationObject").is_dir() else {}
    check_names(masks, images, root / "JPEGImages")
    splits: dict[str, Collection[str]] = {"train": sorted(masks)}
    if all((lists / f"{name}.txt").is_file() for name in ("train", "val")):
        texts = {name: composed(read_text(lists / f"{name}.txt", LARGEST)) for name in ("train", "val")}
        splits = {name: [*filter(None, map(str.strip, text.splitlines()))] for name, text in texts.items()}
        for names in splits.values():
            check_names(dict.fromkeys(names, lists), masks, root / "SegmentationClass")
    scenes = {n: Scene(images[n], functools.partial(voc_segments, masks[n], objects.get(n))) for n in masks}
    labels = own_labels(root)
    own = {split: [scenes[name] for name in names] for split, names in splits.items()}
    return Scenes(labels or VOC_CLASSES, own, names_values=bool(labels))


def _by_name(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return the images of a folder and those inside it by their path without suffix; no hidden ones."""
    images, others = dict[str, pathlib.Path](), list[str]()
    for path in visible_files(folder):
        if not looks_like_image(path):
            others.append(path.name)
            continue
        name = composed(os.fspath(path.relative_to(folder).with_suffix("")))
        if (first := images.setdefault(name, path)) != path:
            raise UserError(f"{first} and {path} have the same name; the mask of one image must be clear: rename one.")
    if others:
        print(others_line(others, str(folder)))
    return images


def _of_file(options: SceneOptions, task: SegmentationTask) -> Scenes:
    """Read --data, and --eval-data if it is given, in COCO's formats."""
    labels, scenes = _read_file(options.path, options.folder, options, task)
    if options.eval_data is None:
        return Scenes(labels, {"train": scenes})
    file = pathlib.Path(options.eval_data.partition(":")[2])
    others, evaluation = _read_file(file, pathlib.Path(options.eval_images or file.parent), options, task)
    if others != labels:
        raise UserError(f"{file} has other categories than {options.path}; give two files with the same.")
    return Scenes(labels, {"train": scenes, "val": evaluation})


def _read_file(
    file: pathlib.Path, folder: pathlib.Path, options: SceneOptions, task: SegmentationTask
) -> tuple[tuple[str, ...], list[Scene]]:
    """Return the names of the classes, and the images, of a file."""
    images: Sequence[CocoImage | PanopticImage]
    are_objects = True
    if options.kind == "coco":
        names, images = read_coco(file, folder, options.allow_outside)
    else:
        names, images = read_panoptic(file, folder, options.allow_outside)
        are_objects = not any(image.stuff for image in images)
    check_ids((each["category_id"] for image in images for each in image.objects), names, "category", file)
    ids = sorted(names)
    labels = [names[each] for each in ids]
    has_background = are_objects and task == "semantic" and options.background == "class"
    if has_background and BACKGROUND not in (name.strip().lower() for name in labels):
        labels = [BACKGROUND, *labels]
    numbers = {each: place for place, each in enumerate(ids, len(labels) - len(ids))}
    background = [name.strip().lower() for name in labels].index(BACKGROUND) if has_background else None

    def segments(image: CocoImage | PanopticImage, size: tuple[int, int]) -> Segments:
        own = image.segments(numbers, size)
        return own if background is None else _filled(own, background)

    return tuple(labels), [
        Scene(each.file, functools.partial(segments, each), each.stated_size, each.group) for each in images
    ]


def _filled(segments: Segments, background: int) -> Segments:
    """Return segments with the pixels of none as one of the background."""
    outside = segments.map == NONE
    if not outside.any():
        return segments
    return Segments(
        np.append(segments.labels, background).astype(np.int32),
        np.append(segments.objects, False),
        np.append(segments.crowds, False),
        np.append(segments.areas, np.count_nonzero(outside)),
        np.where(outside, len(segments.labels), segments.map).astype(np.int32),
    )
