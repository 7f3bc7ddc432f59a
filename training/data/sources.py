"""Data sources: whatever `--data` names becomes examples that can be read by number.

Each source gives a training and an evaluation split. A split is a function from an index to one image and its label, so
that the order of training can be computed from seed and epoch, and continued anywhere.
"""

import numpy as np

from keras_vit import UserError
from training.data.checks import kind_and_path
from training.data.dataset import DataSet, Split, array_split, bad_examples_reported, warn_about_images
from training.data.image_folder import csv_list, folder
from training.data.tar import tar
from training.data.tfds import tfds_source
from training.data.tfrecord import tfrecord
from training.options.common import DataOptions

__all__ = ["DataOptions", "DataSet", "Split", "array_split", "bad_examples_reported", "digits", "open_source"]


def open_source(options: DataOptions, *, multi_label: bool = False) -> DataSet:
    """Open what `--data` names. Raises UserError when there is no such thing or it cannot be used.

    multi_label: whether the caller can use images of several classes each.
    """
    kind, rest = kind_and_path(options)
    match kind:
        case "digits":
            source = digits()
        case "folder":
            source = folder(options.path, options.on_bad_image, options.split_seed, options.exclude, options.group)
        case "csv":
            source = csv_list(options.path, options.on_bad_image, options.split_seed, options.exclude, options.group)
        case "tfds":
            source = tfds_source(rest, options.data_dir, options.train_split, options.eval_split)
        case _:
            source = {"tfrecord": tfrecord, "tar": tar}[kind](rest, options.on_bad_image)
    if kind in ("tfds", "tfrecord", "tar"):  # of a folder all files are looked at
        warn_about_images(source.train, source.evaluation)
    _warn_of_similar_names(source.labels)
    if source.multi_label and not multi_label:
        raise UserError(
            f"The images of {options.data} have several classes each, which pretrain, finetune, evaluate and predict "
            "can use, but not this command; give images of one class each."
        )
    return source


def _warn_of_similar_names(labels: tuple[str, ...]) -> None:
    """Name the classes that differ only in case or in outer spaces, as a table that was typed by hand has them."""
    of_name: dict[str, list[str]] = {}
    for label in labels:
        of_name.setdefault(label.strip().casefold(), []).append(label)
    for names in of_name.values():
        if len(names) > 1:
            reason = "spaces" if len({name.strip() for name in names}) == 1 else "upper and lower case"
            shown = " and ".join(map(repr, names) if reason == "spaces" else names)
            print(f"Warning: {shown} are different classes, because {reason} count.")


def digits() -> DataSet:
    """Return the 1,797 handwritten digits of scikit-learn, 8x8 gray: four fifths to train on, the rest to test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = np.round(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)  # 0..16 as stored
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    names = tuple(str(digit) for digit in range(10))
    return DataSet(names, array_split(train_x, train_y, names), array_split(test_x, test_y, names))
