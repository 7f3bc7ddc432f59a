"""Read images for inspection: image files, folders, the samples of a run, or a data set. No file is trusted."""

import dataclasses
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings

import numpy as np

from keras_vit import run_directory
from keras_vit.errors import UserError
from keras_vit.files.image_formats import color_key, format_list, format_problem, image_files, image_format, orientation
from keras_vit.files.remote import to_path
from keras_vit.inspection.options import check_images
from keras_vit.run_directory import Samples

_LARGEST_FILE = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class Image:
    """A decoded image with its name and, if known, its class."""

    name: str
    pixels: np.ndarray
    """(h, w, C) uint8, C 1 to 4."""
    label: str | None = None


def read_images(
    source: str | os.PathLike, count: int, labels: tuple[str, ...] = (), data_dir: str | None = None
) -> list[Image]:
    """Read at most `count` images.

    Args:
        source: an image file; a folder, searched recursively, with evenly spaced images taken, of which one that cannot
            be decoded is named on stdout and left out; a samples.npz, with the first images taken; or a data set, as
            `--data` of the training commands takes it.
        count: maximum number of images.
        labels: class names for the integer labels of a samples.npz.
        data_dir: directory of prepared TFDS data sets.

    Raises:
        UserError: if there is no such image, folder or data set, or if an image, of a folder each image, cannot
            be decoded.
    """
    check_images(str(source))
    path = to_path(source)
    if path.suffix == ".npz" and path.is_file():
        return _samples(path, count, labels)
    if path.is_file():
        return [_file(path, path.name)]
    if path.is_dir():
        return _folder(path, count)
    return _data_set(str(source), count, data_dir)


def decode(data: bytes, name: str, label: str | None = None) -> Image:
    """Decode the bytes of an image file; for a GIF, its first frame. An alpha channel is kept.

    Formats are the same as in training (`keras_vit.files.image_formats`). As there, EXIF orientation is not applied. In
    the name, bytes that are not UTF-8 become "?". On the TensorFlow backend, the pixels are those of training. On JAX,
    Pillow decodes; its JPEGs differ from TensorFlow's by a few levels of 255, in noisy pictures up to a dozen.
    """
    import keras  # imported here: it takes seconds, and finding mistakes in names needs none

    name = name.encode("utf-8", "replace").decode("utf-8")  # no report could hold them
    import PIL.Image  # imported here: scripts that pass arrays do not need Pillow

    try:
        if problem := format_problem(data):
            raise ValueError(problem)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)  # above 89 million pixels
            with PIL.Image.open(io.BytesIO(data), formats=[image_format(data)]) as image:
                pixels = _as_bytes(image, data)
        if image_format(data) == "JPEG" and keras.backend.backend() == "tensorflow":
            pixels = _as_in_training(data)
    except (PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError) as error:
        found = re.search(r"\d+", str(error))  # Pillow says the number of pixels in its message alone
        raise UserError(
            f"{name} is too large: it has {f'{int(found[0]):,}' if found else 'more'} pixels, and at most "
            f"{PIL.Image.MAX_IMAGE_PIXELS:,} are read; make it smaller."
        ) from error
    except Exception as error:  # Pillow's decoders raise many types for damaged files
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        advice = "" if ";" in reason else "; repair or remove it"  # the format may have its own: save it as PNG
        raise UserError(f"{name} is not a readable picture: {reason}{advice}.") from error
    return Image(name, pixels if pixels.ndim == 3 else pixels[:, :, None], label)


def _as_in_training(data: bytes) -> np.ndarray:
    """A JPEG as (h, w, C) uint8. TensorFlow's inverse cosine transform is the fast one, Pillow's the accurate one."""
    import tensorflow as tf

    return tf.io.decode_image(data, channels=0, dtype=tf.uint8, expand_animations=False).numpy()


def _as_bytes(image, data: bytes) -> np.ndarray:
    """(h, w) or (h, w, C) uint8, as TensorFlow decodes the file: 16 bits to 8, palettes to RGB, alpha kept."""
    if image.format == "GIF":
        pixels = np.asarray(image.convert("RGBA"))
        return pixels[:, :, :3] * (pixels[:, :, 3:] > 0).astype(np.uint8)  # transparent pixels are black in TensorFlow
    if image.format == "BMP":
        return np.asarray(
            image.convert("L" if image.mode == "L" else "RGB")
        )  # the fourth byte is rarely an alpha channel
    if key := color_key(data):
        return _with_alpha_of(key, image, bits=data[24])
    if image.mode.startswith("I"):
        return _upper_bytes(np.asarray(image))
    if image.mode in ("1", "L", "LA"):
        return np.asarray(image.convert("LA" if image.mode == "LA" else "L"))
    return np.asarray(image.convert("RGBA" if image.has_transparency_data else "RGB"))


def _with_alpha_of(key: tuple[int, ...], image, bits: int) -> np.ndarray:
    """A PNG (h, w) or (h, w, 3) whose color `key`, of `bits` bits, is transparent -> (h, w, 2) or (h, w, 4) uint8."""
    if len(key) == 3 and bits == 16:
        raise ValueError("16-bit colors with a transparent one; save it with an alpha channel")
    image.info.pop("transparency", None)
    pixels = np.atleast_3d(np.asarray(image if bits == 16 else image.convert("L" if len(key) == 1 else "RGB")))
    scale = 1 if bits == 16 else 255 // (2**bits - 1)
    alpha = 255 * np.any(pixels != np.array(key) * scale, axis=-1, keepdims=True).astype(np.uint8)
    return np.concatenate([_upper_bytes(pixels) if bits == 16 else pixels, alpha], axis=-1)


def _upper_bytes(pixels: np.ndarray) -> np.ndarray:
    """16 bits -> 8."""
    return np.clip(pixels.astype(np.int64) >> 8, 0, 255).astype(np.uint8)


def _small(path: pathlib.Path) -> bool:
    size = path.stat().st_size
    if size > _LARGEST_FILE:
        raise UserError(f"{path.name} has {size:,} bytes, more than the maximum of {_LARGEST_FILE:,}; reduce its size.")
    return True


def _folder(path: pathlib.Path, count: int) -> list[Image]:
    files = image_files(path)
    if not files:
        raise UserError(f"The folder {str(path)!r} contains no image ({format_list()}).")
    chosen = np.unique(np.linspace(0, len(files) - 1, min(count, len(files))).astype(int))
    images: list[Image] = []
    problems: list[Exception] = []
    for index in chosen:
        try:
            images.append(_file(files[index], str(files[index].relative_to(path))))
        except (UserError, OSError) as error:
            problems.append(error)
    if len(problems) == 1 and not images:
        raise problems[0]
    if not images:
        raise UserError(f"No image of the folder {str(path)!r} can be read: {problems[0]}") from problems[0]
    for problem in problems:
        print(f"Not inspected: {problem}")
    return images


def _file(path: pathlib.Path, name: str) -> Image:
    from keras_vit.preprocessing import is_uniform  # imported here: it imports Keras, which takes seconds

    data = path.read_bytes() if _small(path) else b""
    image = decode(data, name)
    if orientation(data) != 1:
        print(f"Warning: {name} has an EXIF orientation, which is not applied: the model sees the image as stored.")
    if is_uniform(image.pixels):
        is_transparent = image.pixels.shape[-1] % 2 == 0 and image.pixels[..., -1].min() < 255
        reason = "; transparent images are put on white" if is_transparent else ""
        print(f"Warning: {name} has one color throughout{reason}.")
    return image


def _samples(path: pathlib.Path, count: int, labels: tuple[str, ...]) -> list[Image]:
    samples = Samples.load(path)
    names = dict(enumerate(labels))
    return [
        decode(data, f"image {index}", None if label < 0 else names.get(int(label), f"class {label}"))
        for index, (data, label) in enumerate(zip(samples.encoded[:count], samples.labels, strict=False))
    ]


def _data_set(data: str, count: int, data_dir: str | None) -> list[Image]:
    """Read shuffled evaluation images of a data set.

    keras_vit does not depend on TensorFlow. So `training.samples` writes the images to a file in a separate process.
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
