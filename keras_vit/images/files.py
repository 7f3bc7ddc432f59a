"""Read images with their names: from bytes, a file, a folder, the samples of a run or a data set. None is trusted."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import numpy as np

from keras_vit.errors import UserError
from keras_vit.files.labels import LABELS, read_labels
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.files.remote import existing_file, to_path
from keras_vit.images.decode import decode_file, highest_of_unused_bits, is_uniform
from keras_vit.images.formats import LARGEST_IMAGE, SCALE_BITS, format_list, image_files

if TYPE_CHECKING:
    from keras_vit.images.preprocessing import Preprocessing


SAMPLES = "samples.npz"  # evaluation images beside a model, to check exports on
# How the name of a data set begins, as `--data` of the training commands takes it.
_DATA_SETS = ("digits", "tfds:", "folder:", "csv:", "tfrecord:", "tar:")


@dataclasses.dataclass(frozen=True)
class Image:
    """A decoded image with its name and, if known, its class."""

    name: str
    pixels: np.ndarray
    """(h, w, C) uint8, C 1 to 4."""
    label: str | None = None


def decode(
    data: bytes,
    name: str,
    label: str | None = None,
    preprocessing: "Preprocessing | None" = None,
    most_pixels: int = LARGEST_IMAGE,
) -> Image:
    """Decode the bytes of an image file; for a GIF, its first frame. An alpha channel is kept.

    Pixels are those of training. In the name, bytes that are not UTF-8 are escaped. preprocessing: of the model that
    sees the image; it says how JPEGs are decoded, and whether the image is turned by its EXIF orientation, as it is
    without.
    """
    name = os.fsencode(name).decode(errors="backslashreplace")  # no report could hold them
    accurate = preprocessing is None or preprocessing.library != "tensorflow"
    upright = preprocessing is None or preprocessing.exif_orientation
    return Image(name, decode_file(data, name, accurate=accurate, upright=upright, most_pixels=most_pixels), label)


def read_folder(path: pathlib.Path, count: int, preprocessing: "Preprocessing | None" = None) -> list[Image]:
    """Read up to `count` evenly spaced images of a folder, and print those not readable. Raises UserError for none."""
    files = image_files(path)
    images: list[Image] = []
    problems: list[Exception] = []
    for index in np.unique(np.linspace(0, len(files) - 1, min(count, len(files))).astype(int)):
        try:
            images.append(read_image(files[index], preprocessing, str(files[index].relative_to(path))))
        except (UserError, OSError) as error:
            problems.append(error)
    if not images:
        reason = problems[0] if problems else f"it has none ({format_list()})."
        raise UserError(f"No image of the folder {str(path)!r} can be read: {reason}")
    for problem in problems:
        print(f"Not inspected: {problem}")
    return images


def read_image(path: pathlib.Path, preprocessing: "Preprocessing | None" = None, name: str | None = None) -> Image:
    """Read an image file, and warn of a nearly black one or one of one color. Raises UserError if it is none."""
    data, name = existing_file(path, "check the path").read_bytes(), name or path.name
    image = decode(data, name, preprocessing=preprocessing)
    if (highest := highest_of_unused_bits(data)) is not None:
        print(f"Warning: {name} has 16 bits and is nearly black, since its highest value is {highest:,}; {SCALE_BITS}.")
    elif is_uniform(image.pixels):
        is_transparent = image.pixels.shape[-1] % 2 == 0 and image.pixels[..., -1].min() < 255
        reason = "; transparent images are put on white" if is_transparent else ""
        print(f"Warning: {name} has a single color{reason}.")
    return image


@dataclasses.dataclass(frozen=True)
class Samples:
    """Encoded images with their labels, stored beside a model to check its exports."""

    encoded: tuple[bytes, ...]
    """Contents of image files."""
    labels: np.ndarray
    """(N,) int64 class indices."""
    names: tuple[str, ...] = ()
    """Name of each image, such as its class folder and file; empty where it is not known."""

    def some(self, most: int) -> "Samples":
        """Return at most so many of the images, evenly spaced."""
        if len(self.encoded) <= most:
            return self
        rows = np.linspace(0, len(self.encoded) - 1, most).astype(int)
        names = tuple(self.names[row] for row in rows) if self.names else ()
        return Samples(tuple(self.encoded[row] for row in rows), self.labels[rows], names)

    def save(self, path: str | os.PathLike) -> None:
        """Write an .npz file of numeric arrays."""
        ends = np.cumsum([len(image) for image in self.encoded], dtype=np.int64)
        data = np.frombuffer(b"".join(self.encoded), np.uint8)
        labels = np.asarray(self.labels, np.int64)
        arrays: dict[str, np.ndarray] = {"data": data, "ends": ends, "labels": labels}
        if self.names:  # as bytes, since all arrays are numeric
            arrays["names"] = np.frombuffer("\n".join(self.names).encode("utf-8", "replace"), np.uint8)
        write_npz(path, arrays)

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> "Samples":
        """Read a file written by `save`."""
        arrays = read_npz(path)
        if not _are_samples(arrays):
            raise UserError(f"{path} has no sample images; train again to write them.")
        starts = [0, *arrays["ends"][:-1]]
        data = arrays["data"].tobytes()
        spans = zip(starts, arrays["ends"], strict=True)
        names = arrays["names"].tobytes().decode("utf-8", "replace").split("\n") if "names" in arrays else ()
        known = names if len(names) == len(arrays["labels"]) else ()
        return cls(tuple(data[start:end] for start, end in spans), arrays["labels"], tuple(known))


def _are_samples(arrays: dict[str, np.ndarray]) -> bool:
    if arrays.keys() - {"names"} != {"data", "ends", "labels"}:
        return False
    data, ends, labels = arrays["data"], arrays["ends"], arrays["labels"]
    integers = ends.dtype == labels.dtype == np.int64 and data.dtype == np.uint8
    one_each = data.ndim == ends.ndim == 1 and ends.shape == labels.shape and ends.size > 0
    return integers and one_each and bool(np.all(np.diff(ends, prepend=0) > 0)) and ends[-1] == data.size


def check_source(source: str) -> None:
    """Raise UserError for a source of `read_images` that is no data set, and not there."""
    if not to_path(source).exists() and not source.startswith(_DATA_SETS):
        raise UserError(
            f"There is no image or folder {source!r}; --images accepts one of these, a run's samples.npz, digits, "
            "tfds:NAME, folder:PATH, csv:FILE, tfrecord:GLOB or tar:GLOB."
        )


def read_images(
    source: str | os.PathLike,
    count: int,
    labels: tuple[str, ...] = (),
    data_dir: str | None = None,
    preprocessing: "Preprocessing | None" = None,
) -> list[Image]:
    """Read at most `count` images.

    Args:
        source: an image file; a folder, searched recursively, with evenly spaced images taken, of which one that cannot
            be decoded is named on stdout and left out; a samples.npz, with the first images taken; or a data set, as
            `--data` of the training commands takes it.
        count: maximum number of images.
        labels: class names for the integer labels of a samples.npz.
        data_dir: directory of prepared TFDS data sets.
        preprocessing: see `decode`.

    Raises:
        UserError: if there is no such image, folder or data set, or if an image, of a folder each image, cannot
            be decoded.
    """
    check_source(str(source))
    path = to_path(source)
    if path.suffix == ".npz" and path.is_file():
        return _of_samples(Samples.from_file(path), count, labels)
    if path.is_file():
        return [read_image(path, preprocessing)]
    if path.is_dir():
        return read_folder(path, count, preprocessing)
    return _data_set(str(source), count, data_dir)


def _of_samples(samples: Samples, count: int, labels: tuple[str, ...]) -> list[Image]:
    classes = dict(enumerate(labels))
    names = samples.names or tuple(f"image {index}" for index in range(len(samples.labels)))
    return [
        decode(data, name, None if label < 0 else classes.get(int(label), f"class {label}"))
        for data, name, label in zip(samples.encoded[:count], names, samples.labels, strict=False)
    ]


def _data_set(data: str, count: int, data_dir: str | None) -> list[Image]:
    """Read shuffled evaluation images of a data set, by `keras-vit samples`, since keras_vit needs no TensorFlow."""
    checkout = pathlib.Path(__file__).parents[2]  # the directory of training/, independent of the working directory
    places = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "training.samples", "--data", data, "--count", str(count), "--output", folder]
        command += ["--data-dir", data_dir] if data_dir else []
        # PYTHONSAFEPATH, since Python 3.11: a training.py in the working directory is not ours.
        env = {"KERAS_BACKEND": "tensorflow", "PYTHONPATH": os.pathsep.join(places), "PYTHONSAFEPATH": "1"}
        done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
        if done.returncode:
            complaint = (done.stderr.strip().splitlines() or ["no error message"])[-1]
            raise UserError(f"The data set {data!r} could not be read: {complaint}")
        for line in done.stdout.splitlines():
            if line.startswith("Warning: "):
                print(line)
        samples = Samples.from_file(pathlib.Path(folder) / SAMPLES)
        return _of_samples(samples, count, read_labels(pathlib.Path(folder) / LABELS))
