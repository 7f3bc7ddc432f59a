"""The index of tar files: where each image begins and what its label says, found once and kept as tars.npz beside them.

Only the headers of the members are read, and the labels. As webdataset writes them, an example is what lies side by
side under one name, up to its first dot: `cat/7.jpg`, `cat/7.cls`. Nothing is unpacked, so a name may be any text.
"""

import concurrent.futures
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from keras_vit import UserError
from keras_vit.cli.progress import tracked
from keras_vit.errors import explained
from keras_vit.files.npz import write_npz
from keras_vit.files.remote import read_places
from keras_vit.images.formats import is_hidden
from training.data.file_contents import shown
from training.data.tfrecord import THREADS, Version, file_size, index_kept, read_index, version_of

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

Read = Callable[[int, int], bytes]


def tar_images(paths: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the images of each tar file (n,) IMAGE by its path, and the text of each label.

    Raises UserError for files that are no complete tar files, and for images without a label.
    """
    images: dict[str, np.ndarray] = {}
    numbers: dict[str, int] = {}
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        versions = dict(zip(paths, pool.map(version_of, paths), strict=True))
        for folder in sorted({os.path.dirname(path) for path in paths}):
            here = {path: version for path, version in versions.items() if os.path.dirname(path) == folder}
            images |= _images_in(folder, here, numbers, pool)
    return images, list(numbers)


def _images_in(
    folder: str, versions: Mapping[str, Version], numbers: dict[str, int], pool: concurrent.futures.ThreadPoolExecutor
) -> dict[str, np.ndarray]:
    """Return the images of the tar files of one folder; the texts of their labels get the next `numbers`."""
    index = os.path.join(folder, NAME)
    known, texts = read_index(index, _parsed, "tar files") or ({}, [])
    images = {
        path: _renumbered(known[name][1], texts, numbers)
        for path, version in versions.items()
        if (name := os.path.basename(path)) in known and known[name][0] == version
    }
    missing = [path for path in versions if path not in images]
    scanned = tracked(pool.map(scan, missing), "Indexing tar files", len(missing), "files") if missing else ()
    for path, (own, labels) in zip(missing, scanned, strict=True):
        images[path] = _renumbered(own, labels, numbers)
    if missing:
        files = {name: (version, _renumbered(own, texts, numbers)) for name, (version, own) in known.items()}
        files |= {os.path.basename(path): (version, images[path]) for path, version in versions.items()}
        with index_kept(index, "tar files"):
            described = [(name, *version, len(own)) for name, (version, own) in files.items()]
            text = json.dumps({"files": described, "labels": list(numbers)}).encode()
            every = np.concatenate([np.zeros(0, IMAGE), *(own for _, own in files.values())])
            write_npz(index, {"text": np.frombuffer(text, np.uint8), "images": every.view(np.uint8)})
    return images


def _renumbered(images: np.ndarray, texts: Sequence[str], numbers: dict[str, int]) -> np.ndarray:
    """Return the images with the numbers of their label texts among all texts."""
    changed = images.copy()
    number_of = np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int32)
    changed["label"] = number_of[images["label"]]
    return changed


def _parsed(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, tuple[Version, np.ndarray]], list[str]]:
    """Return of each file name its version and its images, and the texts of the labels."""
    text = json.loads(arrays["text"].tobytes())
    images, ends = arrays["images"].view(IMAGE), np.cumsum([count for *_, count in text["files"]])
    parts, labels = np.split(images, ends[:-1]) if len(ends) else [], text["labels"]
    fits = images["label"].min(initial=0) >= 0 and images["label"].max(initial=-1) < len(labels)
    if len(images) != (ends[-1] if len(ends) else 0) or not fits or not all(isinstance(each, str) for each in labels):
        raise ValueError
    files = {name: ((size, time), part) for (name, size, time, _), part in zip(text["files"], parts, strict=True)}
    return files, labels


class _Member(NamedTuple):
    name: str
    header: int  # where the header begins, and behind it the content
    size: int
    is_file: bool  # not a folder, a link or a device
    checksum: int  # the CRC-32 of the header


def scan(path: str) -> tuple[np.ndarray, list[str]]:
    """Return the images (n,) IMAGE of a tar file, and the texts of their labels. Raises UserError for a damaged one."""
    size = file_size(path)
    return read_places(path, lambda read: _walk(path, size, read))


def _walk(path: str, size: int, read: Read) -> tuple[np.ndarray, list[str]]:
    read, images = _ahead(read), []
    numbers: dict[str, int] = {}
    first, count = "", 0
    for members in _examples(_members(path, size, read), path):
        first, count = first or next(iter(members.values())).name, count + len(members)
        image = _image_of(members, path)
        if image is not None:
            label = numbers.setdefault(_label(members, image, path, read), len(numbers))
            images.append((image.header, image.size, image.checksum, label))
    if not images:
        there = f"none of its {count:,} files is one, {shown(first)} first" if count else "is empty"
        raise UserError(
            f"The file {path} should hold images ({', '.join(_IMAGES)}) with labels ({', '.join(_LABELS)}) beside "
            f"them, but {there}; give others."
        )
    return np.array(images, IMAGE), list(numbers)


def member_names(path: str) -> dict[int, str]:
    """Return the names of the members of a tar file, by where the header of each begins."""
    size = file_size(path)
    return read_places(path, lambda read: {member.header: member.name for member in _members(path, size, _ahead(read))})


def _ahead(read: Read) -> Read:
    """Return `read` with what follows in memory, since headers and labels are small and lie side by side."""
    start, data = 0, b""

    def read_ahead(position: int, size: int) -> bytes:
        nonlocal start, data
        if not start <= position <= position + size <= start + len(data):
            start, data = position, read(position, max(size, _AHEAD))
        return data[position - start : position - start + size]

    return read_ahead


class _Places:
    """A file as `tarfile` reads it: by its places, never behind its end, and no more than a long name at once."""

    def __init__(self, size: int, read: Read) -> None:
        self.size, self.position, self._read = size, 0, read

    def seek(self, position: int) -> None:
        self.position = position

    def tell(self) -> int:
        return self.position

    def read(self, size: int) -> bytes:
        begin, self.position = self.position, self.position + size
        if not 0 <= size <= _MOST or not 0 <= begin <= self.size - size:
            raise tarfile.ReadError(f"{size:,} bytes should follow byte {begin:,}")
        return self._read(begin, size)


def _members(path: str, size: int, read: Read) -> Iterator[_Member]:
    """Yield all members but folders of a tar file of `size` bytes, of the formats ustar, GNU and pax."""
    file, ended = _Places(size, read), False
    damaged = "is damaged, truncated, compressed, or not a tar file"
    with explained(
        lambda reason: f"The file {path} {damaged}: at byte {file.position:,}, {reason}; fetch or unpack it again.",
        *(tarfile.TarError, RecursionError, ValueError),
    ):
        while file.position < size or not ended:
            ended = read(file.position, BLOCK) == bytes(BLOCK)
            if ended:  # another tar file may follow
                file.position += BLOCK
                continue
            archive = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it would hold all of them
                header, length = member.offset_data - BLOCK, member.size
                if length < 0 or member.offset_data + length > size:
                    raise tarfile.ReadError(f"{shown(member.name)} claims {length} bytes")
                if member.issparse():
                    raise UserError(f"{shown(member.name)} of {path} has holes; write the tar file without --sparse.")
                if not member.isdir():
                    yield _Member(member.name, header, length, member.isreg(), zlib.crc32(read(header, BLOCK)))
            file.position = archive.offset
            if read(file.position, BLOCK) != bytes(BLOCK):
                raise tarfile.ReadError("there is no header of a member")


def _examples(members: Iterator[_Member], path: str) -> Iterator[dict[str, _Member]]:
    """Yield the members of each example by ending, without folders and hidden. Raises UserError for equal names."""
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
        if (other := example.get(ending := ending.lower())) and ending in (*_IMAGES, *_LABELS):
            raise UserError(f"{shown(member.name)} of {path} has the same name as {shown(other.name)}; rename one.")
        example[ending] = member
    if example:
        yield example


def _image_of(members: Mapping[str, _Member], path: str) -> _Member | None:
    """Return the image of an example; None for other files. Raises UserError for what is no image with a label."""
    images = [members[ending] for ending in _IMAGES if ending in members]
    if not images and "cls" not in members:
        return None
    problem = ""
    if not images:
        problem = f"is no image, but a label alone; write images ({', '.join(_IMAGES)}) and labels one after the other"
    elif len(images) > 1:
        problem = f"has the same name as {shown(images[-1].name)}; rename one"
    elif not images[0].is_file:
        problem = "is a link or a device; write the tar file with --dereference"
    elif not 0 < images[0].size < 2**32:
        problem = f"is no image, but has {images[0].size} bytes; leave it out"
    if problem:
        raise UserError(f"{shown((images or [members['cls']])[0].name)} of {path} {problem}.")
    return images[0]


def _label(members: Mapping[str, _Member], image: _Member, path: str, read: Read) -> str:
    """Return the text of an example's label, without spaces around it. Raises UserError without exactly one."""
    wrong = ""
    for ending in _LABELS:
        label = members.get(ending)
        if label is None or not label.is_file:
            continue
        try:
            text = read(label.header + BLOCK, label.size).decode() if label.size <= _MOST else ""
            value = json.loads(text) if ending == "json" else text
        except (ValueError, RecursionError):  # also of text that is no UTF-8
            value = None
        if isinstance(value, dict) and not value.keys() & {*_KEYS}:
            continue
        if isinstance(value, dict):
            value = next(value[key] for key in _KEYS if key in value)
        text = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
        if text and text.isprintable():
            return text
        wrong = f", but {shown(label.name)} holds none"
        break
    raise UserError(
        f"{shown(image.name)} of {path} should have one label, a number or a name, in name.cls, name.json with a "
        f"{_KEYS[0]!r} or name.txt directly before or after it{wrong}; correct it."
    )
