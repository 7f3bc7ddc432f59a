"""Folders of images and masks: which mask belongs to which image, and what is wrong with them."""

import functools
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import PIL.Image
import PIL.ImageOps
import tensorflow as tf

from keras_vit import UserError
from keras_vit.files.labels import read_labels
from keras_vit.images.formats import is_hidden, is_picture, others_line
from keras_vit.run_directory import LABELS
from training.input.dataset import ImageWarnings, decoded, decoding_problem, problems_of, summarize_problems
from training.options.segment import check_pairs, split_folders
from training.segmentation.scenes import IGNORED, Scenes

# Without a split of its own, every tenth pair by name is evaluated.
_HOLD_OUT = 10


Pairs = Sequence[tuple[str, str]]
"""Files of images and of their masks."""


def open_scenes(folder: str) -> tuple[tuple[str, ...], Scenes, Scenes]:
    """Return the names of the classes, the training pairs and the evaluation pairs of a folder.

    Raises UserError if an image has no mask or a mask no image, if they differ in size, if a file cannot be read, or if
    the values of the masks are not the numbers of the classes.
    """
    root = pathlib.Path(folder)
    folders = split_folders(root)
    if folders is not None:
        splits = (_pairs(folders[0]), _pairs(folders[1]))
    else:
        pairs = _pairs(root)
        if len(pairs) < 2:
            raise UserError(f"{root} holds {len(pairs)} image; it needs two, to train on and to evaluate on.")
        evaluated = range(0, len(pairs), _HOLD_OUT)
        splits = ([pair for row, pair in enumerate(pairs) if row not in evaluated], [pairs[row] for row in evaluated])
    found = sorted(set().union(*(_checked(pairs) for pairs in splits)))
    return _labels(root, found), _scenes(splits[0]), _scenes(splits[1], held_out=folders is None)


def _scenes(pairs: Pairs, held_out: bool = False) -> Scenes:
    images, masks = (tf.constant(files) for files in zip(*pairs, strict=True))

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        mask = tf.numpy_function(_read_file, [masks[index]], tf.uint8)
        return decoded(tf.io.read_file(images[index])), tf.ensure_shape(mask, (None, None))

    return Scenes(len(pairs), read, lambda index: pairs[index][0], held_out)


def read_mask(path: str) -> np.ndarray:
    """Return the classes of a mask: (h, w) uint8, of a palette its indices. Raises UserError if it is no mask."""
    try:
        with PIL.Image.open(path) as image:
            values = np.asarray(image)
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise UserError(f"The mask {path} cannot be read ({error}); repair it, or remove it and its image.") from error
    if values.dtype.kind == "f":
        raise UserError(f"The mask {path} holds fractions; save class numbers, such as an 8-bit PNG.")
    if values.ndim != 2 or values.min() < 0 or values.max() > IGNORED:
        raise UserError(
            f"The mask {path} should have one channel with class numbers from 0 to 254, but has the shape "
            f"{values.shape} and values up to {values.max()}; convert colors to numbers."
        )
    return values.astype(np.uint8)


def _read_file(path: bytes) -> np.ndarray:
    return read_mask(os.fsdecode(path))


def _pairs(folder: pathlib.Path) -> Pairs:
    """Return the pairs of a folder of images/ and masks/, in the order of their names."""
    check_pairs(folder)
    images, masks = _by_name(folder / "images"), _by_name(folder / "masks")
    unmatched = [f"the image {images[name].name} has no mask" for name in sorted(images.keys() - masks.keys())]
    unmatched += [f"the mask {masks[name].name} has no image" for name in sorted(masks.keys() - images.keys())]
    if unmatched:
        raise UserError(
            f"In {folder}, {len(unmatched)} files have no counterpart of the same name: {'; '.join(unmatched[:10])}"
            f"{' …' if len(unmatched) > 10 else ''}; add or remove them."
        )
    if not images:
        raise UserError(f"{folder / 'images'} holds no image.")
    return [(str(images[name]), str(masks[name])) for name in sorted(images)]


def _by_name(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return the pictures of a folder and those inside it by their path without suffix; no hidden ones."""
    found: dict[str, pathlib.Path] = {}
    others = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_dir() or any(map(is_hidden, inside.parts)):
            continue
        if not is_picture(path):
            others.append(path.name)
        elif (first := found.setdefault(str(inside.with_suffix("")), path)) != path:
            raise UserError(f"{first} and {path} have the same name; the mask of one image must be clear: rename one.")
    if others:
        print(others_line(others, str(folder)))
    return found


def _checked(pairs: Pairs) -> set[int]:
    """Return the classes in the masks of a split. Raises UserError for the files that do not fit."""
    image_warnings = ImageWarnings()
    problem = functools.partial(_image_problem, image_warnings=image_warnings)
    if bad := problems_of([image for image, _ in pairs], problem):
        raise UserError(
            f"{len(bad)} of {len(pairs)} images cannot be read: {summarize_problems(bad)}; repair them, or remove them "
            "and their masks."
        )
    image_warnings.warn(f"{len(pairs):,} images")
    classes: set[int] = set()
    for image, mask in pairs:
        values = read_mask(mask)
        with PIL.Image.open(image) as opened:
            width, height = PIL.ImageOps.exif_transpose(opened).size
        if values.shape != (height, width):
            raise UserError(
                f"The mask {mask} has {values.shape[0]}x{values.shape[1]} pixels, but its image {height}x{width}; "
                "they must have the same size."
            )
        classes |= set(np.unique(values).tolist())
    return classes - {IGNORED}


def _image_problem(file: str, image_warnings: ImageWarnings) -> str | None:
    return decoding_problem(tf.io.read_file(file), image_warnings, file)


def _labels(root: pathlib.Path, found: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the classes. Raises UserError if the values of the masks are not their numbers."""
    values = ", ".join(map(str, found[:20]))
    if (root / LABELS).is_file():
        labels = read_labels(root / LABELS)
        if found and found[-1] >= len(labels):
            raise UserError(
                f"{root / LABELS} names {len(labels)} classes, 0 to {len(labels) - 1}, but the masks have the values "
                f"{values}; add names, or correct the masks (255 is not counted)."
            )
    else:
        labels = tuple(map(str, range(len(found))))
        if list(found) != list(range(len(found))):
            raise UserError(
                f"The masks have the values {values}, which are not the numbers of classes from 0 on; correct them, or "
                f"name the class of every number in {root / LABELS}."
            )
    if len(labels) < 2:
        raise UserError(f"The masks of {root} have one class at most (255 is not counted); at least two are needed.")
    return labels
