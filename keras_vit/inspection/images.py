"""Read the images to inspect: image files, folders, the samples of a run, or a data set."""

import os
import pathlib
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from keras_vit.errors import UserError
from keras_vit.files.labels import LABELS, read_labels
from keras_vit.files.remote import to_path
from keras_vit.images.files import Image, Samples, decode, read_folder, read_image
from keras_vit.run import SAMPLES

if TYPE_CHECKING:
    from keras_vit.images.preprocessing import Preprocessing
    from keras_vit.run import Run

# How the name of a data set begins, as `--data` of the training commands takes it.
_DATA_SETS = ("digits", "tfds:", "folder:", "csv:", "tfrecord:", "tar:")


def image_source(source: str | None, run: "Run") -> str:
    """Return --images or, without it, the samples of the run directory. Raises UserError unless it is there."""
    if source:
        _check(source)
        return source
    if (samples := run.file(SAMPLES)) is None:
        raise UserError(
            f"{run.name} has no images of its own; give --images, an image, a folder of images, or a data set."
        )
    return str(samples)


def _check(source: str) -> None:
    if not to_path(source).exists() and not source.startswith(_DATA_SETS):
        raise UserError(
            f"There is no image or folder {source!r}; --images takes one of these, a run's samples.npz, digits, "
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
        preprocessing: see `keras_vit.images.files.decode`.

    Raises:
        UserError: if there is no such image, folder or data set, or if an image, of a folder each image, cannot
            be decoded.
    """
    _check(str(source))
    path = to_path(source)
    if path.suffix == ".npz" and path.is_file():
        return _samples(path, count, labels)
    if path.is_file():
        return [read_image(path, preprocessing)]
    if path.is_dir():
        return read_folder(path, count, preprocessing)
    return _data_set(str(source), count, data_dir)


def _samples(path: pathlib.Path, count: int, labels: tuple[str, ...]) -> list[Image]:
    samples = Samples.from_file(path)
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
        return _samples(pathlib.Path(folder) / SAMPLES, count, read_labels(pathlib.Path(folder) / LABELS))
