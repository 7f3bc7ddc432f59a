"""The supported image formats, by content: the same for training, evaluation and serving.

TensorFlow decodes images (`keras_vit.images.graph`), or Pillow where it is missing (`keras_vit.images.decode`). What
TensorFlow would decode incorrectly or without a limit is refused in a graph; single files are read by Pillow then.
"""

import collections
import contextlib
import functools
import importlib.metadata
import pathlib
import struct
from collections.abc import Sequence

from keras_vit.files.remote import first_bytes

_MAGIC = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "BMP": b"BM"}
_GIF = b"GIF8"
# The palette of a gray BMP, whose indices are its values.
GRAY_PALETTE = b"".join(bytes([gray, gray, gray, 0]) for gray in range(256))
# Formats that people have and TensorFlow does not decode, by their first bytes; `keras-vit prepare` reads the latter.
_UNSUPPORTED = {b"%PDF": "PDF", b"8BPS": "Photoshop"}
_CONVERTIBLE = {b"II*\0": "TIFF", b"MM\0*": "TIFF", b"\0\0\0\x0cjP  ": "JPEG 2000"}
_CONVERTIBLE |= {b"P%d" % kind + space: "PPM" for kind in range(1, 7) for space in (b"\n", b" ", b"\r", b"\t")}
# The brands of an ISO media file at byte 8; Pillow reads HEIC with the package pillow-heif.
_BRANDS = {b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC", b"msf1": "HEIC", b"avif": "AVIF", b"avis": "AVIF"}
_CONVERT = "convert the folder by keras-vit prepare IN OUT"
# Endings of the names of images, in formats that are not supported too.
_ENDINGS: tuple[str, ...] = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp")
_ENDINGS += (".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".ppm", ".pgm", ".pbm", ".pnm")
_ENDINGS_NAMED = 5  # of files that are no images, how many endings a line names
# Files and folders that Windows, macOS and Synology disks put among images, in lower case.
_OF_THE_SYSTEM = ("thumbs.db", "desktop.ini", "__macosx", "@eadir")
# The first TensorFlow version that decodes WebP, and the names of its distributions.
_WEBP_SINCE = (2, 21)
_DISTRIBUTIONS = "tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tensorflow-intel", "tensorflow-macos", "tf-nightly"
SCALE_BITS = "multiply its values so that white is 65,535, as the command prepare does"
_ORIENTATION, _UPRIGHT = 0x0112, 1  # the EXIF tag for orientation, and its value for upright images
# Maximum number of pixels of an image: above it Pillow warns of a decompression bomb. A JPEG counts as often as it has
# USUAL_SCANS scans; encoders of progressive files write about ten. Served models and pages accept the lower number.
LARGEST_IMAGE, LARGEST_SERVED = 89_478_485, 32_000_000
USUAL_SCANS = 32
SEGMENTS, CHUNKS = 64, 4096  # where a search in a file stops: segments of a JPEG, chunks of a PNG or WebP


@functools.cache
def formats() -> tuple[str, ...]:
    """Return the names of the formats; includes WebP unless the installed TensorFlow cannot decode it."""
    return (*_MAGIC, "WebP") if _supports_webp() else tuple(_MAGIC)


def format_list() -> str:
    """Return the formats for a message, such as "JPEG, PNG, BMP or WebP"."""
    return f"{', '.join(formats()[:-1])} or {formats()[-1]}"


def _supports_webp() -> bool:
    for distribution in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return tuple(map(int, importlib.metadata.version(distribution).split(".")[:2])) >= _WEBP_SINCE
    return True


def image_format(data: bytes) -> str | None:
    """Return the format of a file from its first 12 bytes; None if it is not supported."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP" if "WebP" in formats() else None
    return next((name for name, magic in _MAGIC.items() if data.startswith(magic)), None)


def is_gif(data: bytes) -> bool:
    """Whether a file is a GIF, of which single files are read, but none in a graph: it may hold gigabytes of frames."""
    return data.startswith(_GIF)


def convertible_format(data: bytes) -> str | None:
    """Return the format of a file that `keras-vit prepare` converts and a graph does not read, from 12 bytes."""
    brand = _BRANDS.get(data[8:12]) if data[4:8] == b"ftyp" else "GIF" if is_gif(data) else None
    return brand or next((name for magic, name in _CONVERTIBLE.items() if data.startswith(magic)), None)


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is not the user's data: it is hidden, or the system has put it there."""
    return name.startswith(".") or name.lower() in _OF_THE_SYSTEM


def is_image_name(name: str) -> bool:
    """Return whether a file is called like an image, of any format."""
    return name.lower().endswith(_ENDINGS)


def looks_like_image(path: pathlib.Path) -> bool:
    """Return whether a file is called like an image, or holds one by its first bytes, whatever it is called.

    A file without an ending may also hold a format that is not supported. So may a file that cannot be read, and a link
    to nothing: a command that reads images names these.
    """
    if is_image_name(path.name) or path.is_dir():
        return True
    if not path.is_file():
        return path.is_symlink() and not path.suffix
    try:
        start = first_bytes(path, 12)
    except OSError:
        return not path.suffix
    return _holds_image(start) or (not path.suffix and convertible_format(start) is not None)


def others_line(others: Sequence[str], where: str) -> str:
    """Return a line on files that are not images, from their names: how many, and with which endings."""
    endings = collections.Counter(pathlib.PurePath(name).suffix.lower() or "without an ending" for name in others)
    kinds = ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common(_ENDINGS_NAMED))
    files = f"1 file in {where} that is not an image"
    if len(others) > 1:
        files = f"{len(others):,} files in {where} that are not images"
    return f"Ignored: {files} ({kinds}{', …' if len(endings) > _ENDINGS_NAMED else ''})."


def image_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the readable images of a folder and its subfolders, by content, in alphabetical order; no hidden ones."""

    def is_image(path: pathlib.Path) -> bool:
        start = first_bytes(path, 12)
        is_named = is_image_name(path.name) and (is_gif(start) or image_format(start) is not None)
        return is_named or _holds_image(start)

    return [path for path in visible_files(folder) if is_image(path)]


def _holds_image(start: bytes) -> bool:
    """Return whether a file is a readable image by its first 12 bytes; a text that begins with BM or GIF8 is none."""
    if is_gif(start):
        return start[:6] in (b"GIF87a", b"GIF89a")
    form = image_format(start)
    return start[6:10] == bytes(4) if form == "BMP" else form is not None  # reserved


def visible_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of a folder and its subfolders in alphabetical order, no hidden ones."""
    visible = (path for path in folder.rglob("*") if not any(map(is_hidden, path.relative_to(folder).parts)))
    return sorted(path for path in visible if path.is_file())


def format_problem(data: bytes) -> str | None:
    """Return why a graph does not read an image file, from its header alone; None if it does."""
    match image_format(data):
        case None:
            if not data:
                return "the file is empty"
            if known := convertible_format(data):
                return f"not {format_list()}, but a {known} file; {_CONVERT}"
            known = _UNSUPPORTED.get(data[:4])
            return f"not {format_list()}, but a {known} file; save it as JPEG" if known else f"not {format_list()}"
        case "BMP" if not _has_raw_pixels(data):
            return f"a BMP with a palette or compression, which would be decoded incorrectly; {_CONVERT}"
        case "WebP" if data[12:16] == b"VP8X" and data[20:21] and data[20] & 0x02:
            # TensorFlow 2.21 writes all frames into the memory of one.
            return f"an animated WebP; {_CONVERT}"
    return None


def _has_raw_pixels(data: bytes) -> bool:
    """Return whether the data of a BMP are its pixels: TensorFlow assumes so for every BMP.

    Offsets: 14 length of the header, which the palette follows; 28 bits per pixel; 30 compression.
    """
    if len(data) < 54:
        return True  # too short to be decoded
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    bits, compression = struct.unpack_from("<HI", data, 28)
    is_gray = bits == 8 and data.startswith(GRAY_PALETTE, 14 + header_bytes)
    return header_bytes >= 40 and compression == 0 and (bits in (24, 32) or is_gray)


def orientation(data: bytes) -> int:
    """Return the EXIF orientation of a file, 1 to 8; 1 if there is none."""
    block_of = {"JPEG": _jpeg_exif, "PNG": _png_exif, "WebP": _webp_exif}.get(image_format(data) or "")
    try:
        return _UPRIGHT if block_of is None else _from_tiff(block_of(data))
    except (struct.error, IndexError):  # a damaged header
        return _UPRIGHT


def _png_exif(data: bytes) -> bytes:
    position = 8
    while position + 8 <= len(data):
        length, chunk = struct.unpack_from(">I4s", data, position)
        if chunk == b"eXIf":
            return data[position + 8 : position + 8 + min(length, 2**16)]
        position += 12 + length if chunk != b"IEND" else len(data)
    return b""


def _jpeg_exif(data: bytes) -> bytes:
    """Return the EXIF block in the APP1 segments before the first table."""
    position = 2
    for _ in range(SEGMENTS):
        marker = data[position + 1]
        if data[position] != 0xFF or not (0xE0 <= marker <= 0xEF or marker == 0xFE):
            break
        (length,) = struct.unpack_from(">H", data, position + 2)
        if marker == 0xE1 and data[position + 4 : position + 10] == b"Exif\0\0":
            return data[position + 10 : position + 2 + length]
        position += 2 + length
    return b""


def _webp_exif(data: bytes) -> bytes:
    position = 12
    while position + 8 <= len(data):
        chunk, length = struct.unpack_from("<4sI", data, position)
        if chunk == b"EXIF":
            return data[position + 8 : position + 8 + length].removeprefix(b"Exif\0\0")
        position += 8 + length + length % 2
    return b""


def _from_tiff(exif: bytes) -> int:
    if (order := {b"II": "<", b"MM": ">"}.get(exif[:2])) is None:
        return _UPRIGHT
    (directory,) = struct.unpack_from(order + "I", exif, 4)
    (entries,) = struct.unpack_from(order + "H", exif, directory)
    for entry in range(entries):
        tag, form, _, digits = struct.unpack_from(order + "HHI4s", exif, directory + 2 + 12 * entry)
        if tag == _ORIENTATION:
            (value,) = struct.unpack_from(order + ("I" if form == 4 else "H"), digits)
            return value if 1 <= value <= 8 else _UPRIGHT
    return _UPRIGHT
