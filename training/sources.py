"""Data sources: whatever `--data` names becomes examples that can be read by number.

Each source gives a training and an evaluation split. A split is a function from an index to one image (uint8, H W C,
as decoded) and its label, so that the order of training can be computed from seed and epoch, and continued anywhere.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import re
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import tensorflow as tf
import tqdm

from keras_vit import UserError
from keras_vit.errors import nearest
from keras_vit.quiet import native_stderr_silenced
from training.records import Records

# Sets of equal images up to this size are decoded once and held; larger ones are read when needed.
_IN_MEMORY_BYTES = 2**30
_EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
_EVALUATION_NAMES = ("test", "val", "valid", "validation")
# Of a folder without a split of its own, every tenth image of each class is kept for evaluation.
_HOLD_OUT = 10

# How a graph says that a stored label is no class; `bad_labels_named` makes a UserError of it.
_LABEL_OUTSIDE = "Labels must be numbers of the classes, from 0, but one of the images read has the label"

# Which fields of DataArguments each kind of source takes.
_TAKEN = {"digits": (), "tfds": ("data_dir", "train_split", "eval_split"), "folder": ("on_bad_image",)}

OnBadImage = Literal["stop", "skip"]


@dataclasses.dataclass(frozen=True)
class Split:
    """Examples that can be read by number."""

    num_examples: int
    example: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
    """int64 index -> (image uint8 (H, W, C), label int32); C is unknown before it runs for encoded images."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set: the names of its classes and its two splits."""

    labels: tuple[str, ...]
    train: Split
    evaluation: Split


@dataclasses.dataclass(frozen=True)
class DataArguments:
    """Where the images come from."""

    data: str
    """digits, tfds:NAME[:CONFIG], or folder:PATH of class folders or of train and test with class folders."""
    data_dir: str | None = None
    """Directory of prepared TFDS data sets; default TFDS' own."""
    train_split: str = "train"
    """TFDS split to train on, such as train[:90%]."""
    eval_split: str | None = None
    """TFDS split to evaluate on; default test, else validation."""
    on_bad_image: OnBadImage = "stop"
    """Files of a folder that are no images: name them and stop, or name and skip them."""


def open_source(arguments: DataArguments) -> Source:
    """Open what `--data` names. Raises UserError when there is no such thing or it cannot be used."""
    kind, _, rest = arguments.data.partition(":")
    if kind not in _TAKEN or bool(rest) == (kind == "digits"):
        raise UserError(f"--data takes digits, tfds:NAME[:CONFIG] or folder:PATH, but was given {arguments.data!r}.")
    for field in dataclasses.fields(arguments):
        if field.name not in ("data", *_TAKEN[kind]) and getattr(arguments, field.name) != field.default:
            raise UserError(f"--{field.name.replace('_', '-')} means nothing to --data {kind}; leave it out.")
    if kind == "tfds":
        return tfds_source(rest, arguments.data_dir, arguments.train_split, arguments.eval_split)
    return folder(pathlib.Path(rest), arguments.on_bad_image) if kind == "folder" else digits()


@contextlib.contextmanager
def bad_labels_named() -> Iterator[None]:
    """Turns the graph error of a label outside the classes, met while examples are read, into a UserError."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(rf"{_LABEL_OUTSIDE}\W*(-?\d+)", str(error))
        if found is None:
            raise
        raise UserError(f"{_LABEL_OUTSIDE} {found[1]}; mend the data, or give splits without it.") from error


def digits() -> Source:
    """The 1,797 handwritten digits that scikit-learn ships, 8x8 grey: four fifths to train on, the rest to test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = np.round(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)  # 0..16 as stored
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    names = tuple(str(digit) for digit in range(10))
    return Source(names, array_split(train_x, train_y, names), array_split(test_x, test_y, names))


def array_split(images: np.ndarray, labels: np.ndarray, names: tuple[str, ...]) -> Split:
    """Images (n, H, W, C) uint8 and labels (n,) in memory."""
    _check_labels(labels, names)
    images, labels = tf.constant(images), tf.constant(labels, tf.int32)
    return Split(len(labels), lambda index: (images[index], labels[index]))


def _check_labels(labels: np.ndarray, names: tuple[str, ...]) -> None:
    outside = labels[(labels < 0) | (labels >= len(names))]
    if len(outside):
        raise UserError(
            f"Labels must be 0 to {len(names) - 1}, one for each of the {len(names)} classes, "
            f"but {len(outside)} of {len(labels)} are outside, {outside[0]} first."
        )


def tfds_source(name: str, data_dir: str | None, train_split: str, eval_split: str | None) -> Source:
    """A data set of TensorFlow Datasets with images and labels, prepared (downloading) if it is not yet."""
    import tensorflow_datasets as tfds

    if not re.fullmatch(r"\w+(:[^:]+)?", name):
        raise UserError(f"--data takes tfds:NAME or tfds:NAME:CONFIG, as tfds:mnist, but was given 'tfds:{name}'.")
    name, _, config = name.partition(":")
    try:
        builder = tfds.builder(name, config=config or None, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        raise UserError(
            f"TensorFlow Datasets has no data set {name!r}; "
            f"the nearest names are {nearest(name, tfds.list_builders())}."
        ) from None
    except ValueError:
        known = tfds.builder_cls(name).builder_configs
        raise UserError(
            f"The data set {name!r} has no configuration {config!r}; "
            + (f"the nearest names are {nearest(config, known)}." if known else f"it has none: give tfds:{name}.")
        ) from None
    if not builder.is_prepared():
        try:
            builder.download_and_prepare()
        except Exception as error:  # whatever the data set's own code raises: no network, a moved file, no space
            raise UserError(
                f"The data set {name!r} is not prepared in {builder.data_dir} and could not be fetched "
                f"({type(error).__name__}); prepare it there, or give --data-dir."
            ) from error
    keys = builder.info.supervised_keys
    if keys is None or not isinstance(builder.info.features[keys[1]], tfds.features.ClassLabel):
        raise UserError(f"The data set {name!r} has no image with one class label; its keys are {keys}.")
    labels = tuple(builder.info.features[keys[1]].names)
    if eval_split is None:
        eval_split = next((split for split in _EVALUATION_NAMES if split in builder.info.splits), None)
        if eval_split is None:
            raise UserError(f"{name} has only the splits {', '.join(builder.info.splits)}; give --eval-split.")
    return Source(labels, *(_tfds_split(builder, split, labels) for split in (train_split, eval_split)))


def _tfds_split(builder, split: str, labels: tuple[str, ...]) -> Split:
    features, (image_key, label_key) = builder.info.features, builder.info.supervised_keys
    try:
        info = builder.info.splits[split]
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{builder.name} has no split {split!r}; it has {', '.join(builder.info.splits)}, and slices of them."
        ) from error
    if info.num_examples <= 0:  # below for a slice that ends before it begins
        raise UserError(f"The split {split!r} of {builder.name} is empty; give one that holds images.")
    shape = features[image_key].shape
    if None not in shape and info.num_examples * np.prod(shape) <= _IN_MEMORY_BYTES:
        images, numbers = builder.as_dataset(split=split, batch_size=-1, as_supervised=True, shuffle_files=False)
        return array_split(images.numpy(), numbers.numpy(), labels)

    records = Records([(part.filename, part.skip, part.take) for part in info.file_instructions])

    def example(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        decoded = features.deserialize_example(records.read(index))
        label = tf.cast(decoded[label_key], tf.int32)
        inside = tf.debugging.Assert((label >= 0) & (label < len(labels)), [_LABEL_OUTSIDE, label])
        with tf.control_dependencies([inside]):
            return decoded[image_key], tf.identity(label)

    return Split(len(records), example)


def folder(path: pathlib.Path, on_bad_image: OnBadImage) -> Source:
    """Class folders of JPEG, PNG, BMP or GIF (first frame) files; classes in the order of their names.

    With train and test (or val, valid, validation) above the classes these are the splits, and must hold the same
    classes; else every tenth image of each class, by name, is kept for evaluation.
    """
    if not path.is_dir():
        raise UserError(f"There is no folder {str(path)!r}; --data folder:PATH takes a folder of class folders.")
    splits = _split_folders(path)
    if splits:
        train, test = (_class_files(split, on_bad_image) for split in splits)
        if train.keys() != test.keys():
            raise UserError(
                f"The classes of {splits[0]} and {splits[1]} must be the same, but "
                f"{', '.join(sorted(train.keys() ^ test.keys()))} are only in one of them."
            )
    else:
        train, test = {}, {}
        for name, files in _class_files(path, on_bad_image).items():
            if len(files) < 2:
                raise UserError(f"The class {name!r} has one image, and needs two: to train on and to evaluate on.")
            test[name] = files[::_HOLD_OUT]
            train[name] = sorted(set(files) - set(test[name]))
    names = tuple(train)
    return Source(names, _file_split(train), _file_split(test))


def _split_folders(path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path] | None:
    """The folders of the training and the evaluation split, in any case; None where the folders are the classes."""
    found = {entry.lower(): path / entry for entry in _directories(path)}
    known = [found[name] for name in ("train", *_EVALUATION_NAMES) if name in found]
    if "train" in found and len(known) > 1:
        return known[0], known[1]
    for split in known:
        if _directories(split):  # without folders inside it may well be a class, of railways
            raise UserError(
                f"{split} looks like one of two splits without the other: name them train and one of "
                f"{', '.join(_EVALUATION_NAMES)}, or put the class folders directly into {path}."
            )
    return None


def _directories(path: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _class_files(path: pathlib.Path, on_bad_image: OnBadImage) -> dict[str, list[str]]:
    """Class name -> its image files in the order of their paths, all of them seen to be readable."""
    classes = _directories(path)
    if len(classes) < 2:
        raise UserError(f"{path} should hold a folder for each of at least two classes, but holds {len(classes)}.")
    for name in classes:
        if not name.isprintable():  # a line break would split it in labels.txt; no UTF-8 is not printable either
            raise UserError(f"The class folder {name!r} in {path} has unprintable characters in its name; rename it.")
    found = {name: _entries(path / name) for name in classes}
    bad = _unreadable([file for files in found.values() for file in files])
    if bad:
        named = "; ".join(f"{os.fsencode(file).decode(errors='backslashreplace')} ({why})" for file, why in bad.items())
        count = f"{len(bad)} of {sum(map(len, found.values()))} files in {path} are no readable images: {named}"
        if on_bad_image == "stop":
            raise UserError(f"{count}; mend or remove them, or give --on-bad-image skip.")
        print(f"Skipped: {count}.")
    images = {name: [file for file in files if file not in bad] for name, files in found.items()}
    for name, files in images.items():
        if not files:
            raise UserError(f"The class folder {path / name} holds no image ({', '.join(_EXTENSIONS)}).")
    return images


def _entries(folder: pathlib.Path) -> list[str]:
    """What lies in a folder and the folders inside it, without what is hidden; a link to a folder is one entry."""
    entries = [entry for entry in folder.rglob("*") if entry.is_symlink() or not entry.is_dir()]
    return sorted(
        str(entry) for entry in entries if not any(part[0] == "." for part in entry.relative_to(folder).parts)
    )


def _unreadable(files: list[str]) -> dict[str, str]:
    """Those of the files that cannot be decoded, each with the reason. Decodes every one of them once."""
    # On stdout, beside Keras' progress, since what libjpeg prints of broken files on stderr is kept away.
    with native_stderr_silenced(), concurrent.futures.ThreadPoolExecutor() as pool:
        problems = pool.map(_image_problem, files)
        progress = tqdm.tqdm(problems, "Checking images", len(files), unit="image", disable=None, file=sys.stdout)
        return {file: why for file, why in zip(files, progress, strict=True) if why}


def _image_problem(file: str) -> str | None:
    """Why a file cannot be decoded, or None."""
    if os.path.isdir(file):
        return "a link to a folder, which is not followed"
    if not os.path.isfile(file):
        return "no file, or a link to none"
    if not file.lower().endswith(_EXTENSIONS):
        return "not " + ", ".join(_EXTENSIONS)
    try:
        data = tf.io.read_file(os.fsencode(file))
        if _is_indexed_bmp(data.numpy()):
            return "a BMP with a palette or compressed, which would be read wrongly; save it as PNG"
        decode_image(data)
    except tf.errors.OpError as error:
        return error.message.split("}} ")[-1].split("\n")[0].split(" [Op:")[0]
    return None


def _is_indexed_bmp(data: bytes) -> bool:
    """Whether an image is a BMP whose bytes are not the pixels, for which TensorFlow takes them all the same.

    Offsets: 10 the first pixel, 14 the length of the header with the palette behind it, 28 bits per pixel, 30 the
    compression. The colours of a palette are blue, green, red, unused; that of a grey image is a ramp.
    """
    if data[:2] != b"BM" or len(data) < 54:
        return False
    first_pixel, header_bytes = struct.unpack_from("<II", data, 10)
    bits, compression = struct.unpack_from("<HI", data, 28)
    palette = data[14 + header_bytes : first_pixel][:1024]
    ramp = all(palette[4 * grey : 4 * grey + 3] == bytes([grey] * 3) for grey in range(len(palette) // 4))
    return bits <= 8 and (compression != 0 or not ramp)


def _file_split(classes: dict[str, list[str]]) -> Split:
    files = tf.constant([os.fsencode(file) for files in classes.values() for file in files])
    labels = tf.constant(np.repeat(np.arange(len(classes)), [len(files) for files in classes.values()]), tf.int32)
    return Split(len(files), lambda index: (decode_image(tf.io.read_file(files[index])), labels[index]))


def decode_image(data: tf.Tensor) -> tf.Tensor:
    """JPEG, PNG, BMP or GIF (first frame) bytes -> uint8 (H, W, C), C as in the file."""
    image = tf.io.decode_image(data, channels=0, dtype=tf.uint8, expand_animations=False)
    image.set_shape((None, None, None))
    return image
