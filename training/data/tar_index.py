"""The index of tar files: where each image begins and what its label says, found once and kept as tars.npz beside them.

Only the headers of the members are read, and the labels. As webdataset writes them, an example is what lies side by
side under one name, up to its first dot: `cat/7.jpg`, `cat/7.cls`. Nothing is unpacked, so a name may be any text.
"""

import concurrent.futures
import dataclasses
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from keras_vit import UserError
from keras_vit.cli.progress import tracked
from keras_vit.files.npz import write_npz
from keras_vit.files.remote import read_places
from keras_vit.images.formats import is_hidden
from training.data.file_contents import shown
from training.data.record_index import file_size, read_index, version_of

NAME = "tars.npz"
BLOCK = tarfile.BLOCKSIZE
# Of each image: where the header before it begins, its bytes, a checksum of that header, and the number of its label
# text. 20 bytes, as there may be many millions.
IMAGE = np.dtype([("header", "<i8"), ("size", "<u4"), ("checksum", "<u4"), ("label", "<i4")])
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif")
# Where a label is looked for, in this order; in the object of a .json file under one of the keys.
_LABELS, _KEYS = ("cls", "json", "txt"), ("label", "class", "cls")
# Bytes read at once: the small members between two images. And at most of a label, or of a long name.
_AHEAD, _MOST = 2**12, 2**20
# How compressed files begin.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
# Files read at the same time: a read from a bucket takes tens of milliseconds.
_THREADS = 64

Read = Callable[[int, int], bytes]


def tar_images(paths: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Path -> the images of each tar file (n,) IMAGE, and the text of each label.

    Raises UserError for files that are no complete tar files, and for images without a label.
    """
    found: dict[str, np.ndarray] = {}
    numbers: dict[str, int] = {}
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        versions = dict(zip(paths, pool.map(version_of, paths), strict=True))
        for folder in sorted({os.path.dirname(path) for path in paths}):
            here = {path: version for path, version in versions.items() if os.path.dirname(path) == folder}
            found |= _images_in(folder, here, numbers, pool)
    return found, list(numbers)


def _images_in(
    folder: str,
    versions: Mapping[str, tuple[int, int]],
    numbers: dict[str, int],
    pool: concurrent.futures.ThreadPoolExecutor,
) -> dict[str, np.ndarray]:
    """The images of the tar files of one folder; the texts of their labels get the next `numbers`."""
    index = os.path.join(folder, NAME)
    known, texts = read_index(index, _images_of, "tar files") or ({}, [])
    found = {
        path: _renumbered(known[name][1], texts, numbers)
        for path, version in versions.items()
        if (name := os.path.basename(path)) in known and known[name][0] == version
    }
    missing = [path for path in versions if path not in found]
    if not missing:
        return found
    scanned = pool.map(scan, missing)
    for path, (images, labels) in zip(
        missing, tracked(scanned, "Indexing tar files", len(missing), "files"), strict=True
    ):
        found[path] = _renumbered(images, labels, numbers)
    files = {os.path.basename(path): (version, found[path]) for path, version in versions.items()}
    kept = {name: (version, _renumbered(images, texts, numbers)) for name, (version, images) in known.items()}
    try:
        _write(index, kept | files, list(numbers))
    except OSError as error:
        print(f"The index {index} cannot be written ({error.strerror}), so each run indexes the tar files again.")
    return found


def _renumbered(images: np.ndarray, texts: Sequence[str], numbers: dict[str, int]) -> np.ndarray:
    """The images with the numbers of their label texts among all texts."""
    changed = images.copy()
    number_of = np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int32)
    changed["label"] = number_of[images["label"]]
    return changed


def _write(index: str, files: Mapping[str, tuple[tuple[int, int], np.ndarray]], texts: list[str]) -> None:
    """Write the index of a folder: file name -> its version and its images."""
    described = [(name, *version, len(images)) for name, (version, images) in files.items()]
    images = np.concatenate([np.zeros(0, IMAGE), *(images for _, images in files.values())])
    text = json.dumps({"files": described, "labels": texts})
    write_npz(index, {"text": np.frombuffer(text.encode(), np.uint8), "images": images.view(np.uint8)})


def _images_of(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, tuple[tuple[int, int], np.ndarray]], list[str]]:
    """File name -> its version and its images, and the texts of the labels."""
    text = json.loads(arrays["text"].tobytes())
    images, ends = arrays["images"].view(IMAGE), np.cumsum([count for *_, count in text["files"]])
    parts = np.split(images, ends[:-1]) if len(ends) else []
    if len(images) != (ends[-1] if len(ends) else 0) or images["label"].max(initial=-1) >= len(text["labels"]):
        raise ValueError
    files = {name: ((size, time), part) for (name, size, time, _), part in zip(text["files"], parts, strict=True)}
    return files, text["labels"]


@dataclasses.dataclass(frozen=True)
class _Member:
    name: str
    header: int
    """Where the header begins, and behind it the content."""
    size: int
    is_file: bool
    """Not a folder, a link or a device."""
    checksum: int
    """The CRC-32 of the header."""


def scan(path: str) -> tuple[np.ndarray, list[str]]:
    """The images (n,) IMAGE of a tar file, with the numbers of their labels' texts, and these texts.

    Raises UserError if it is no complete tar file of images with labels.
    """
    size = file_size(path)
    return read_places(path, lambda read: _walk(path, size, read))


def _walk(path: str, size: int, read: Read) -> tuple[np.ndarray, list[str]]:
    """As `scan`, of a file of `size` bytes. `read`: (position, size) -> bytes."""
    read, images = _ahead(read), []
    numbers: dict[str, int] = {}
    for kind, magic in ((kind, magic) for magic, kind in _COMPRESSED.items()):
        if read(0, len(magic)) == magic:
            raise UserError(
                f"The file {path} should be a tar file as it is, but is compressed by {kind}; unpack it: the pictures "
                "inside are compressed already."
            )
    first, count = "", 0
    for members in _examples(_members(path, size, read)):
        first, count = first or next(iter(members.values())).name, count + len(members)
        image = _image_of(members, path)
        if image is not None:
            label = numbers.setdefault(_label(members, image, path, read), len(numbers))
            images.append((image.header, image.size, image.checksum, label))
    if not images:
        raise UserError(
            f"The file {path} should hold images ({', '.join(_IMAGES)}) with labels ({', '.join(_LABELS)}) beside "
            + (
                f"them, but none of its {count:,} files is one, {shown(first)} first; give others."
                if count
                else "them, but is empty; give others."
            )
        )
    return np.array(images, IMAGE), list(numbers)


def _ahead(read: Read) -> Read:
    """`read` with what follows in memory, since headers and labels are small and lie side by side."""
    start, data = 0, b""

    def read_ahead(position: int, size: int) -> bytes:
        nonlocal start, data
        if not start <= position <= position + size <= start + len(data):
            start, data = position, read(position, max(size, _AHEAD))
        return data[position - start : position - start + size]

    return read_ahead


def _members(path: str, size: int, read: Read) -> Iterator[_Member]:
    """All members of a tar file of `size` bytes, of the formats ustar, GNU and pax."""
    position, ended = 0, False
    extended: dict[str, str] = {}  # what the headers before that of a member say of it
    while position < size:
        block = read(position, BLOCK)
        if block == bytes(BLOCK):  # the end; another tar file may follow
            position, ended = position + BLOCK, True
            continue
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise UserError(
                f"The file {path} is damaged, or not a tar file: at byte {position} there is no header of a member "
                f"({error}); fetch or write it again."
            ) from error
        ended, begin = False, position + BLOCK
        is_file, is_extension = header.isreg(), header.type in (*tarfile.GNU_TYPES[:2], b"x", b"g")
        length = _number(extended.pop("size", ""), header.size) if not is_extension else header.size
        what = ""
        if length < 0 or begin + length > size:
            what = f"ends within {shown(header.name)} at byte {position}, which claims {length} bytes; it is truncated"
        elif header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in extended):
            what = f"holds {shown(header.name)} with holes left out; write it without --sparse"
        elif is_extension and length > _MOST:
            what = f"has a name of {length} bytes at byte {position}; write it again"
        if what:
            raise UserError(f"The file {path} {what}.")
        if is_extension:
            extended |= _extension(header.type, read(begin, length), path, position)
        else:
            yield _Member(extended.pop("path", header.name), position, length, is_file, zlib.crc32(block))
            extended = {}
        if is_file or is_extension:  # other members have no content, whatever size they claim
            begin += -(-length // BLOCK) * BLOCK
        position = begin
    if not ended:
        raise UserError(f"The file {path} does not end as tar files do, with two empty blocks; it is truncated.")


def _number(text: str, default: int) -> int:
    return int(text) if re.fullmatch(r"\d{1,20}", text) else default


def _extension(kind: bytes, data: bytes, path: str, position: int) -> dict[str, str]:
    """Read a header of GNU or pax about the member behind it: "path", "size" and others by the names of pax."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.partition(b"\0")[0].decode("utf-8", "surrogateescape")}
    values: dict[str, str] = {}
    while kind == tarfile.XHDTYPE and data.rstrip(b"\0"):
        record = re.match(rb"(\d{1,7}) ([^=]+)=", data)
        length = int(record[1]) if record else 0
        if record is None or not record.end() < length <= len(data):
            raise UserError(
                f"The file {path} is damaged: at byte {position} the extended header is none; fetch or write it again."
            )
        values[record[2].decode("utf-8", "replace")] = data[record.end() : length - 1].decode(
            "utf-8", "surrogateescape"
        )
        data = data[length:]
    return values


def _examples(members: Iterator[_Member]) -> Iterator[dict[str, _Member]]:
    """Ending in lower case -> member, of each example; without folders and what is hidden."""
    key, example = ("", ""), dict[str, _Member]()
    for member in members:
        folder, _, name = member.name.rpartition("/")
        stem, _, ending = name.partition(".")
        if not stem or is_hidden(name):
            continue
        if (folder, stem) != key:
            if example:
                yield example
            key, example = (folder, stem), dict[str, _Member]()
        example[ending.lower()] = member
    if example:
        yield example


def _image_of(members: Mapping[str, _Member], path: str) -> _Member | None:
    """The image of an example; None for other files. Raises UserError for two, for links, and for a label alone."""
    images = [members[ending] for ending in _IMAGES if ending in members]
    if not images:
        if "cls" in members:
            raise UserError(
                f"The label {shown(members['cls'].name)} of {path} should lie beside an image of the same name "
                f"({', '.join(_IMAGES)}), but does not; write each image and its label one after the other."
            )
        return None
    image, name = images[0], shown(images[0].name)
    if len(images) > 1:
        raise UserError(f"{name} and {shown(images[-1].name)} of {path} have the same name; rename one.")
    if not image.is_file:
        raise UserError(
            f"{name} of {path} should be a file, but is a link or a device; write the tar file with --dereference."
        )
    if not 0 < image.size < 2**32:
        raise UserError(f"{name} of {path} should be an image, but has {image.size} bytes; leave it out.")
    return image


def _label(members: Mapping[str, _Member], image: _Member, path: str, read: Read) -> str:
    """The text of an example's label, without spaces around it."""
    for ending in _LABELS:
        label = members.get(ending)
        if label is None or not label.is_file:
            continue
        try:
            text = read(label.header + BLOCK, label.size).decode() if label.size <= _MOST else ""
            value = json.loads(text) if ending == "json" else text
        except (ValueError, RecursionError):  # also of text that is no UTF-8
            value = None
        if isinstance(value, dict):
            value = next((value[key] for key in _KEYS if key in value), None)
            if value is None:
                continue
        text = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
        if text and text.isprintable():
            return text
        raise UserError(
            f"{shown(label.name)} of {path} should hold one label, a number or a name, but does not; correct it."
        )
    raise UserError(
        f"{shown(image.name)} of {path} has no label; write name.cls, name.json with a {_KEYS[0]!r} or name.txt "
        "directly before or after it."
    )
