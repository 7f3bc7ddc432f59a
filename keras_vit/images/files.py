"""Read image files: an image with its name, from bytes, a file or a folder. No file is trusted."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING

import numpy as np

from keras_vit.errors import UserError
from keras_vit.files.remote import existing_file
from keras_vit.images.decode import decode_file, highest_of_unused_bits, is_uniform
from keras_vit.images.formats import LARGEST_IMAGE, SCALE_BITS, format_list, image_files

if TYPE_CHECKING:
    from keras_vit.images.preprocessing import Preprocessing


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

    Pixels are those of training. In the name, bytes that are not UTF-8 become "?".

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


def read_folder(path: pathlib.Path, count: int, preprocessing: "Preprocessing | None" = None) -> list[Image]:
    """Read at most `count` images of a folder, evenly spaced, and name on stdout those that cannot be read.

    Raises UserError if there is no image, or none can be read.
    """
    files = image_files(path)
    if not files:
        raise UserError(f"The folder {str(path)!r} contains no image ({format_list()}).")
    chosen = np.unique(np.linspace(0, len(files) - 1, min(count, len(files))).astype(int))
    images: list[Image] = []
    problems: list[Exception] = []
    for index in chosen:
        try:
            images.append(read_image(files[index], preprocessing, str(files[index].relative_to(path))))
        except (UserError, OSError) as error:
            problems.append(error)
    if not images:
        raise UserError(f"No image of the folder {str(path)!r} can be read: {problems[0]}") from problems[0]
    for problem in problems:
        print(f"Not inspected: {problem}")
    return images


def read_image(path: pathlib.Path, preprocessing: "Preprocessing | None" = None, name: str | None = None) -> Image:
    """Read an image file, and warn of one that is nearly black or has one color.

    Args:
        path: the file.
        preprocessing: see `decode`.
        name: what to call it; default: the name of the file.

    Raises UserError if there is no such file, or if it cannot be decoded.
    """
    data, name = existing_file(path, "check the path").read_bytes(), name or path.name
    image = decode(data, name, preprocessing=preprocessing)
    if (highest := highest_of_unused_bits(data)) is not None:
        print(f"Warning: {name} has 16 bits and is nearly black, since its highest value is {highest:,}; {SCALE_BITS}.")
    elif is_uniform(image.pixels):
        is_transparent = image.pixels.shape[-1] % 2 == 0 and image.pixels[..., -1].min() < 255
        reason = "; transparent images are put on white" if is_transparent else ""
        print(f"Warning: {name} has one color throughout{reason}.")
    return image
