"""Open image files with Pillow, the only place that does, and decode them where TensorFlow is missing.

The decoder has the rules and pixels of `keras_vit.images.graph`.
"""

import io
import os
import pathlib
import re
import struct
import warnings
import zlib
from collections.abc import Collection

import numpy as np

from keras_vit.images.formats import LARGEST_IMAGE, USUAL_SCANS, color_key, image_format, orientation
from keras_vit.images.formats import formats as supported

# Maximum size of a file in bytes.
_LARGEST_FILE = 2**30
# Values of 16 bits below this are nearly black in 8 bits.
_DARK = 4096


class TooManyPixels(ValueError):
    """An image has more pixels than its reader accepts."""


def open_image(file: str | os.PathLike | bytes, *, formats: Collection[str] = (), most_pixels: int = LARGEST_IMAGE):
    """Open an image file with Pillow: the header is read and checked, the pixels are not decoded yet.

    Args:
        file: its path, or its content.
        formats: Pillow's names of the formats; default: those of `keras_vit.images.formats`. Those that this Pillow
            does not support are left out.
        most_pixels: maximum of width times height. A progressive JPEG counts once for every 32 scans.

    Returns a PIL.Image.Image. It decodes when its pixels are read, and then raises exceptions of many types if the file
    is damaged.

    Raises TooManyPixels; PIL.UnidentifiedImageError for other formats; OSError if the file cannot be read; ValueError
    for a damaged header.
    """
    import PIL.Image  # imported here: scripts that pass arrays do not need Pillow

    data = file if isinstance(file, bytes) else _content(pathlib.Path(file))
    names = [name.upper() for name in formats or supported()]
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


def decode(data: bytes, *, upright: bool, most_pixels: int = LARGEST_IMAGE) -> np.ndarray:
    """The bytes of an image file (of a GIF the first frame) -> (h, w, C) uint8, C 1 to 4, alpha kept.

    Raises any of Pillow's errors for a damaged file.
    """
    if image_format(data) == "PNG":
        check_png(data)
    with open_image(data, most_pixels=most_pixels) as image:
        pixels = np.atleast_3d(_as_bytes(image, data))
    return turned(pixels, orientation(data)) if upright else pixels


def highest_of_unused_bits(data: bytes) -> int | None:
    """The highest value of a PNG of 16 bits that is less than 4,096, as of cameras of 10 or 12 bits; None otherwise.

    Of 16 bits the upper 8 are taken, so such an image is nearly black.
    """
    if image_format(data) != "PNG" or data[24:25] != b"\x10":
        return None
    try:
        with open_image(data) as image:
            if image.mode.startswith("I"):
                highest = int(np.asarray(image).max())
                return highest if 0 < highest < _DARK else None
            # Pillow keeps the upper 8 bits of colors.
            highest = 256 * int(np.asarray(image.convert("RGB")).max()) + 255
            return highest if highest < _DARK else None
    except Exception:  # a damaged file, which the decoder names
        return None


def turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """An image (h, w, C) as it is seen, by its EXIF orientation, 1 to 8."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels[::-1] if orientation in (3, 4, 7, 8) else pixels)


def check_png(data: bytes) -> None:
    """Raise ValueError for a PNG with a damaged chunk or an end cut off, of which Pillow shows what is left."""
    position, kind = 8, b""
    while position + 12 <= len(data) and kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 8 + length
        if end + 4 > len(data) or zlib.crc32(data[position + 4 : end]) != struct.unpack_from(">I", data, end)[0]:
            raise ValueError(f"its chunk {kind.decode('ascii', 'replace')} is damaged")
        position = end + 4
    if kind != b"IEND":
        raise ValueError("its end is missing")


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
