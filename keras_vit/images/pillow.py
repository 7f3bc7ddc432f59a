"""Decode image files with Pillow, where TensorFlow is missing: the rules and pixels of `keras_vit.images.graph`."""

import io
import re
import struct
import warnings
import zlib

import numpy as np

from keras_vit.images.formats import LARGEST_IMAGE, color_key, image_format, orientation


def decode(data: bytes, *, upright: bool) -> np.ndarray:
    """The bytes of an image file (of a GIF the first frame) -> (h, w, C) uint8, C 1 to 4, alpha kept.

    Raises any of Pillow's errors for a damaged file.
    """
    import PIL.Image  # imported here: scripts that pass arrays do not need Pillow

    if image_format(data) == "PNG":
        check_png(data)
    with PIL.Image.open(io.BytesIO(data), formats=[image_format(data)]) as image:
        pixels = np.atleast_3d(_as_bytes(image, data))
    return turned(pixels, orientation(data)) if upright else pixels


def header_pixels(data: bytes) -> int:
    """Number of pixels in the header of an image file; 0 if it cannot be read."""
    import PIL.Image

    bombs = PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", bombs[0])
            with PIL.Image.open(io.BytesIO(data), formats=[image_format(data)]) as image:
                return image.width * image.height
    except bombs as error:
        found = re.search(r"\d+", str(error))  # Pillow says the number of pixels in its message alone
        return int(found[0]) if found else LARGEST_IMAGE + 1
    except Exception:  # a damaged header, which the decoder names
        return 0


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
