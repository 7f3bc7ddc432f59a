"""Read images for inspection: image files, folders, the samples of a run, or a data set. No file is trusted."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import numpy as np

from keras_vit import run_directory
from keras_vit.errors import UserError
from keras_vit.files.remote import to_path
from keras_vit.images.decode import decode_file
from keras_vit.images.formats import LARGEST_IMAGE, SCALE_BITS, format_list, image_files
from keras_vit.images.pillow import highest_of_unused_bits
from keras_vit.inspection.source import check_images
from keras_vit.run_directory import Samples

if TYPE_CHECKING:
    from keras_vit.images.preprocessing import Preprocessing


@dataclasses.dataclass(frozen=True)
class Image:
    """A decoded image with its name and, if known, its class."""

    name: str
    pixels: np.ndarray
    """(h, w, C) uint8, C 1 to 4."""
    label: str | None = None


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
    check_images(str(source))
    path = to_path(source)
    if path.suffix == ".npz" and path.is_file():
        return _samples(path, count, labels)
    if path.is_file():
        return [_file(path, path.name, preprocessing)]
    if path.is_dir():
        return _folder(path, count, preprocessing)
    return _data_set(str(source), count, data_dir)


def decode(
    data: bytes,
    name: str,
    label: str | None = None,
    preprocessing: "Preprocessing | None" = None,
    most_pixels: int = LARGEST_IMAGE,
) -> Image:
    """Decode the bytes of an image file; for a GIF, its first frame. An alpha channel is kept.

    Formats and pixels are those of training (`keras_vit.images.formats`). In the name, bytes that are not UTF-8 become
    "?".

    Args:
        data: the file.
        name: what to call it.
        label: its class.
        preprocessing: of the model that sees the image; it says how JPEGs are decoded, and whether the image is turned
            by its EXIF orientation, as it is without.
        most_pixels: maximum of width times height.
    """
    name = name.encode("utf-8", "replace").decode("utf-8")  # no report could hold them
    accurate = preprocessing is None or preprocessing.library != "tensorflow"
    upright = preprocessing is None or preprocessing.exif_orientation
    return Image(name, decode_file(data, name, accurate=accurate, upright=upright, most_pixels=most_pixels), label)


def _folder(path: pathlib.Path, count: int, preprocessing: "Preprocessing | None") -> list[Image]:
    files = image_files(path)
    if not files:
        raise UserError(f"The folder {str(path)!r} contains no image ({format_list()}).")
    chosen = np.unique(np.linspace(0, len(files) - 1, min(count, len(files))).astype(int))
    images: list[Image] = []
    problems: list[Exception] = []
    for index in chosen:
        try:
            images.append(_file(files[index], str(files[index].relative_to(path)), preprocessing))
        except (UserError, OSError) as error:
            problems.append(error)
    if not images:
        raise UserError(f"No image of the folder {str(path)!r} can be read: {problems[0]}") from problems[0]
    for problem in problems:
        print(f"Not inspected: {problem}")
    return images


def _file(path: pathlib.Path, name: str, preprocessing: "Preprocessing | None") -> Image:
    from keras_vit.images.preprocessing import is_uniform  # imported here: it imports Keras, which takes seconds

    data = path.read_bytes()
    image = decode(data, name, preprocessing=preprocessing)
    if (highest := highest_of_unused_bits(data)) is not None:
        print(f"Warning: {name} has 16 bits and is nearly black, since its highest value is {highest:,}; {SCALE_BITS}.")
    elif is_uniform(image.pixels):
        is_transparent = image.pixels.shape[-1] % 2 == 0 and image.pixels[..., -1].min() < 255
        reason = "; transparent images are put on white" if is_transparent else ""
        print(f"Warning: {name} has one color throughout{reason}.")
    return image


def _samples(path: pathlib.Path, count: int, labels: tuple[str, ...]) -> list[Image]:
    samples = Samples.load(path)
    classes = dict(enumerate(labels))
    names = samples.names or tuple(f"image {index}" for index in range(len(samples.labels)))
    return [
        decode(data, name, None if label < 0 else classes.get(int(label), f"class {label}"))
        for data, name, label in zip(samples.encoded[:count], names, samples.labels, strict=False)
    ]


def _data_set(data: str, count: int, data_dir: str | None) -> list[Image]:
    """Read shuffled evaluation images of a data set.

    keras_vit does not depend on TensorFlow. So `keras-vit samples` writes the images to a file in a separate process.
    """
    checkout = pathlib.Path(__file__).parents[2]  # the directory of training/, independent of the working directory
    places = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "training.samples", "--data", data, "--count", str(count), "--output", folder]
        done = subprocess.run(
            [*command, *(("--data-dir", data_dir) if data_dir else ())],
            env={
                **os.environ,
                "KERAS_BACKEND": "tensorflow",
                "PYTHONPATH": os.pathsep.join(places),
                "PYTHONSAFEPATH": "1",  # a training.py in the working directory is not ours; since Python 3.11
            },
            capture_output=True,
            text=True,
        )
        if done.returncode:
            complaint = (done.stderr.strip().splitlines() or ["no error message"])[-1]
            raise UserError(f"The data set {data!r} could not be read: {complaint}")
        for line in done.stdout.splitlines():
            if line.startswith("Warning: "):
                print(line)
        return _samples(pathlib.Path(folder) / run_directory.SAMPLES, count, run_directory.load_labels(folder))
