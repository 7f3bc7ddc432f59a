"""Decode one image file: by TensorFlow, whatever the backend, so that all commands read and refuse the same files.

Pillow decodes where TensorFlow is missing, by the rules and to the pixels of `keras_vit.images.graph`. Only this module
opens files with Pillow.
"""

import contextlib
import functools
import importlib
import io
import itertools
import os
import pathlib
import re
import struct
import sys
import threading
import warnings
import zlib
from collections.abc import Collection

import numpy as np

from keras_vit.cli.start import native_stderr_silenced
from keras_vit.errors import UserError
from keras_vit.images.formats import LARGEST_IMAGE, USUAL_SCANS, format_problem, image_format, is_gif, orientation
from keras_vit.images.formats import formats as supported

_LARGEST_FILE = 2**30  # maximum size of a file in bytes
_DARK = 4096  # values of 16 bits below this are nearly black in 8 bits
# A graph is traced in about a second, in which a hundred images are decoded without one.
_WITHOUT_GRAPH = 64
_decoded = itertools.count()
_making = threading.Lock()  # one graph for all threads, each of which would make its own


class TooManyPixels(ValueError):
    """An image has more pixels than its reader accepts."""


def decode_file(
    data: bytes, name: str, *, accurate: bool, upright: bool, most_pixels: int = LARGEST_IMAGE
) -> np.ndarray:
    """Decode the bytes of an image file (of a GIF the first frame) -> (h, w, C) uint8, C 1 to 4, alpha kept.

    TensorFlow decodes it, whatever the backend; Pillow does without TensorFlow, and what no graph reads: GIF, and BMP
    with a palette or compression.

    Args:
        data, name: the file, and what a message calls it.
        accurate, upright, most_pixels: see `keras_vit.images.graph.decode_image`. Pillow's transform is always
            accurate: its JPEGs differ from those of the fast one by a few levels of 255, in noisy images by a dozen.

    Raises UserError for a file that is not a complete image of a supported format, or has more pixels.
    """
    problem = format_problem(data)
    if problem is None or is_gif(data) or image_format(data) == "BMP":
        try:
            _check_size(data, most_pixels)
            if problem is None and _has_tensorflow():
                return _by_tensorflow(data, accurate=accurate, upright=upright, most_pixels=most_pixels)
            return decode_with_pillow(data, upright=upright, most_pixels=most_pixels)
        except Exception as error:  # decoders raise many types for damaged files
            problem = error_reason(error)[:120] or type(error).__name__
    advice = "" if ";" in problem else "; repair or remove it"  # the format may have its own: save it as PNG
    raise UserError(f"{name} is not a readable image: {problem}{advice}.")


def error_reason(error: Exception) -> str:
    """Return the reason of an error, without the names and traces of TensorFlow's operators."""
    line = str(getattr(error, "message", error)).split("\n\t [[")[0].split("\n")[-1]  # traces stand before it
    reason = " ".join(line.split("}} ")[-1].split(" [Op:")[0].split())
    return reason.removeprefix("assertion failed: ").strip("[].")


def _check_size(data: bytes, most_pixels: int) -> None:
    """Raise TooManyPixels by the header alone; a damaged header is left to the decoder."""
    try:
        open_image(data, most_pixels=most_pixels).close()
    except TooManyPixels:
        raise
    except Exception:  # which many damaged headers raise
        return


@functools.cache
def _has_tensorflow() -> bool:
    if "tensorflow" not in sys.modules:
        try:
            tf = importlib.import_module("tensorflow")
        except ImportError:
            return False
        import keras  # imported here: it takes seconds, and finding mistakes in names needs none

        if keras.backend.backend() != "tensorflow":
            with contextlib.suppress(RuntimeError):  # another thread already uses it
                tf.config.set_visible_devices([], "GPU")  # it only decodes, and would take their memory
    return sys.modules["tensorflow"] is not None


def _by_tensorflow(data: bytes, **how) -> np.ndarray:
    """how: keyword arguments of `keras_vit.images.graph.decode_image`."""
    tf, graph = importlib.import_module("tensorflow"), importlib.import_module("keras_vit.images.graph")
    with native_stderr_silenced():  # what libjpeg prints of broken files
        if next(_decoded) < _WITHOUT_GRAPH:
            with contextlib.suppress(tf.errors.OpError):  # then the graph tells in better words what is wrong
                return np.asarray(graph.decode_image(tf.constant(data), **how))
        with _making:
            decoder = _decoder(**how)
        return np.asarray(decoder(data))


@functools.lru_cache(maxsize=4)
def _decoder(**how):
    tf, graph = importlib.import_module("tensorflow"), importlib.import_module("keras_vit.images.graph")
    signature = [tf.TensorSpec((), tf.string)]
    return tf.function(functools.partial(graph.decode_image, **how), input_signature=signature, autograph=False)


def open_image(file: str | os.PathLike | bytes, *, formats: Collection[str] = (), most_pixels: int = LARGEST_IMAGE):
    """Open an image file with Pillow: the header is read and checked, the pixels are not decoded yet.

    Args:
        file: its path, or its content.
        formats: Pillow's names of the formats; default: those of `keras_vit.images.formats`, and GIF. Those that this
            Pillow does not support are left out.
        most_pixels: maximum of width times height. A progressive JPEG counts once for every 32 scans.

    Returns a PIL.Image.Image. It decodes when its pixels are read, and then raises exceptions of many types if the file
    is damaged.

    Raises TooManyPixels; PIL.UnidentifiedImageError for other formats; OSError if the file cannot be read; ValueError
    for a damaged header.
    """
    import PIL.Image  # imported here: scripts that pass arrays do not need Pillow

    data = file if isinstance(file, bytes) else _content(pathlib.Path(file))
    names = [name.upper() for name in formats or (*supported(), "GIF")]
    if not PIL.Image.OPEN.keys() >= set(names):
        PIL.Image.init()
    bombs = PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", bombs[0])
            image = PIL.Image.open(io.BytesIO(data), formats=[name for name in names if name in PIL.Image.OPEN])
    except bombs as error:
        digits = re.search(r"\d+", str(error))  # Pillow states the number of pixels in its message alone
        raise _too_many(int(digits[0]) if digits else LARGEST_IMAGE + 1, most_pixels) from error
    except PIL.UnidentifiedImageError as error:
        raise PIL.UnidentifiedImageError(f"not a readable {' or '.join(names)} file") from error
    except Exception as error:  # damaged headers raise many types
        raise ValueError(" ".join(str(error).split())[:120] or type(error).__name__) from error
    scans = data.count(b"\xff\xda") if data.startswith(b"\xff\xd8") else 0
    pixels = image.width * image.height * max(scans // USUAL_SCANS, 1)
    if pixels > most_pixels:
        image.close()
        raise _too_many(pixels, most_pixels)
    return image


def _too_many(pixels: int, most: int) -> TooManyPixels:
    return TooManyPixels(f"it has {pixels:,} pixels, and at most {most:,} are read; make it smaller")


def _content(path: pathlib.Path) -> bytes:
    if not path.is_file():  # a pipe would never end
        raise OSError("it is missing, or not a regular file")
    if (size := path.stat().st_size) > _LARGEST_FILE:
        raise OSError(f"it has {size:,} bytes, and at most {_LARGEST_FILE:,} are read")
    return path.read_bytes()


def decode_with_pillow(data: bytes, *, upright: bool, most_pixels: int = LARGEST_IMAGE) -> np.ndarray:
    """As `decode_file`, but raises any of Pillow's errors for a damaged file."""
    if image_format(data) == "PNG":
        check_png(data)
    with open_image(data, most_pixels=most_pixels) as image:
        pixels = np.atleast_3d(_as_bytes(image))
    return turned(pixels, orientation(data)) if upright else pixels


def highest_of_unused_bits(data: bytes) -> int | None:
    """The highest value of a PNG of 16 bits if it is below 4,096, so that the upper 8 are nearly black; else None."""
    if image_format(data) != "PNG" or data[24:25] != b"\x10":
        return None
    try:
        with open_image(data) as image:
            if image.mode.startswith("I"):
                highest = int(np.asarray(image).max())
            else:  # Pillow keeps the upper 8 bits of colors
                highest = 256 * int(np.asarray(image.convert("RGB")).max()) + 255
            return highest if 0 < highest < _DARK else None
    except Exception:  # a damaged file, which the decoder names
        return None


def turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Turn an image (h, w, C) as it is seen, by its EXIF orientation, 1 to 8."""
    pixels = pixels.transpose(1, 0, 2) if orientation >= 5 else pixels
    pixels = pixels[:, ::-1] if orientation in (2, 3, 6, 7) else pixels
    return np.ascontiguousarray(pixels[::-1] if orientation in (3, 4, 7, 8) else pixels)


def check_png(data: bytes) -> None:
    """Raise ValueError for a PNG with a damaged chunk or an end cut off, of which Pillow shows what is left."""
    position, chunk = 8, b""
    while position + 12 <= len(data) and chunk != b"IEND":
        length, chunk = struct.unpack_from(">I4s", data, position)
        end = position + 8 + length
        if end + 4 > len(data) or zlib.crc32(data[position + 4 : end]) != struct.unpack_from(">I", data, end)[0]:
            raise ValueError(f"its chunk {chunk.decode('ascii', 'replace')} is damaged")
        position = end + 4
    if chunk != b"IEND":
        raise ValueError("its end is missing")


def _as_bytes(image) -> np.ndarray:
    """(h, w) or (h, w, C) uint8, as TensorFlow decodes the file: 16 bits to 8, palettes to RGB, alpha kept."""
    if image.format == "BMP":  # whose fourth byte is seldom an alpha channel
        return np.asarray(image.convert("L" if image.mode == "L" else "RGB"))
    if image.format == "PNG" and image.mode != "P":  # TensorFlow ignores one transparent color
        image.info.pop("transparency", None)
    if image.mode.startswith("I"):
        return np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)  # the upper of 16 bits
    if image.mode in ("1", "L", "LA"):
        return np.asarray(image.convert("LA" if image.has_transparency_data else "L"))
    return np.asarray(image.convert("RGBA" if image.has_transparency_data else "RGB"))


def is_uniform(image: np.ndarray) -> bool:
    """Return whether an image (h, w, C) uint8, 1 to 4 channels, has one color throughout once it is on white."""
    if image.shape[-1] % 2 and not np.array_equal(image[0, 0], image[-1, image.shape[1] // 2]):
        return False  # as nearly all are, at no cost
    seen = on_white(image)
    return bool((seen == seen[:1, :1]).all())


def on_white(image: np.ndarray) -> np.ndarray:
    """Blend an image (h, w, C) uint8, C 1 to 4, on white, (h, w, 1 or 3); one without alpha is returned as it is.

    In whole numbers: the nearest to 255 - (255 - color) * alpha / 255, which is never halfway between two.
    """
    if image.shape[-1] % 2:
        return image
    darkness = (255 - image[..., :-1]).astype(np.uint16) * image[..., -1:]
    return 255 - ((darkness + 127) // 255).astype(np.uint8)
