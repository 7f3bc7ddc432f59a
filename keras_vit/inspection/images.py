"""Pictures to look at: image files, folders, the samples of a run, or a data set. All of them come from strangers."""

import dataclasses
import io
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

import numpy as np

from keras_vit import run_directory
from keras_vit.errors import UserError
from keras_vit.run_directory import Samples

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
# Pillow's own formats of these extensions; others, such as EPS, run programs.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF")
_LARGEST_FILE = 256 * 2**20
_DATA_SETS = ("digits", "tfds:", "folder:", "tfrecord:")


@dataclasses.dataclass(frozen=True)
class Picture:
    """A decoded image, its name, and its class where that is known."""

    name: str
    pixels: np.ndarray
    """(H, W, C) uint8, C 1 to 4."""
    label: str | None = None


def read_pictures(
    source: str | os.PathLike, count: int, labels: tuple[str, ...] = (), data_dir: str | None = None
) -> list[Picture]:
    """At most `count` pictures of what `--images` names.

    Args:
        source: an image file; a folder, searched with those inside it, of whose images evenly spaced ones are taken;
            a samples.npz, of which the first are; or what --data of a training command takes.
        count: pictures at most.
        labels: names of the classes that the labels of a samples.npz count.
        data_dir: directory of prepared TFDS data sets.
    """
    path = pathlib.Path(source)
    if path.suffix == ".npz" and path.is_file():
        return _samples(path, count, labels)
    if path.is_file():
        return [decode(path.read_bytes() if _small(path) else b"", path.name)]
    if path.is_dir():
        return _folder(path, count)
    if str(source).startswith(_DATA_SETS):
        return _data_set(str(source), count, data_dir)
    raise UserError(
        f"There is no image or folder {str(source)!r}; --images takes one of these, a run's samples.npz, digits, "
        "tfds:NAME, folder:PATH or tfrecord:GLOB."
    )


def decode(data: bytes, name: str, label: str | None = None) -> Picture:
    """A JPEG, PNG, BMP or GIF (first frame) -> a picture, upright as stored: EXIF is not applied, as in training."""
    import PIL.Image  # here, so that a script with arrays of its own needs no Pillow

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)  # above 89 million pixels
            with PIL.Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                pixels = _as_bytes(image)
    except Exception as error:  # Pillow's decoders raise whatever a damaged file leads them to
        unknown = isinstance(error, PIL.UnidentifiedImageError)
        reason = "another format" if unknown else " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(f"{name} cannot be read as a JPEG, PNG, BMP or GIF ({reason}); mend or remove it.") from error
    return Picture(name, pixels if pixels.ndim == 3 else pixels[:, :, None], label)


def _as_bytes(image) -> np.ndarray:
    """(H, W) or (H, W, C) uint8: grey stays grey, 16 bits become 8, everything else RGB; alpha is dropped."""
    if image.mode.startswith("I"):  # 16 bits of grey
        return np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
    grey = image.mode in ("1", "L", "LA")
    return np.asarray(image.convert("LA").getchannel(0) if grey else image.convert("RGBA").convert("RGB"))


def _small(path: pathlib.Path) -> bool:
    size = path.stat().st_size
    if size > _LARGEST_FILE:
        raise UserError(
            f"{path.name} has {size:,} bytes, more than {_LARGEST_FILE:,}; so it is not decoded; reduce it."
        )
    return True


def _folder(path: pathlib.Path, count: int) -> list[Picture]:
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in _EXTENSIONS and not any(part[0] == "." for part in file.relative_to(path).parts)
    )
    if not files:
        raise UserError(f"The folder {str(path)!r} holds no image ({', '.join(_EXTENSIONS)}).")
    chosen = np.unique(np.linspace(0, len(files) - 1, min(count, len(files))).astype(int))
    files = [files[index] for index in chosen]
    return [decode(file.read_bytes() if _small(file) else b"", str(file.relative_to(path))) for file in files]


def _samples(path: pathlib.Path, count: int, labels: tuple[str, ...]) -> list[Picture]:
    samples = Samples.load(path)
    names = dict(enumerate(labels))
    return [
        decode(data, f"image {index}", names.get(int(label), f"class {label}"))
        for index, (data, label) in enumerate(zip(samples.encoded[:count], samples.labels, strict=False))
    ]


def _data_set(data: str, count: int, data_dir: str | None) -> list[Picture]:
    """Evaluation images of a data set, in an evenly mixed order.

    This package knows no data sets and needs no TensorFlow: the training side's command writes the images to a file, in
    a process of its own.
    """
    checkout = pathlib.Path(__file__).parents[2]  # where training/ lies, whatever this process was started in
    places = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "training.samples", "--data", data, "--count", str(count), "--output", folder]
        done = subprocess.run(
            [*command, *(("--data-dir", data_dir) if data_dir else ())],
            env={**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": os.pathsep.join(places)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            complaint = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(f"The data set {data!r} could not be read: {complaint}")
        return _samples(pathlib.Path(folder) / run_directory.SAMPLES, count, run_directory.load_labels(folder))
