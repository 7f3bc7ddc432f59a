"""A clean copy of a folder of images, by Pillow: upright, RGB(A) or gray, JPEG or PNG, no broken files and no copies.

What stays as it is was also decoded as training does, since Pillow shows what is left of some damaged files. Only the
files in work are in memory, and a digest of each.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import importlib
import itertools
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import tensorflow as tf

from keras_vit.cli.progress import Progress
from keras_vit.cli.start import native_stderr_silenced
from keras_vit.errors import reason_of
from keras_vit.files.atomic import atomic_folder
from keras_vit.files.tables import CsvWriter, markdown_table
from keras_vit.images.decode import check_png, open_image, turned
from keras_vit.images.formats import convertible_format, format_problem, is_image_name, orientation
from training.data.dataset import check_some_read, decoding_problem
from training.data.file_contents import shown
from training.data.image_folder import images_in

# What was done to each image, in the new folder.
TABLE = "prepared.csv"
_ENDINGS = {"JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"), "PNG": (".png",)}
# The formats of Pillow that are opened: no documents, and none that needs another program. HEIF is that of pillow-heif.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "AVIF", "HEIF", "JPEG2000", "PPM")
_LOSSY = ("JPEG", "MPO", "HEIF", "AVIF")  # MPO is a JPEG with further images behind it
_JPEG_OPTIONS = {"quality": 95, "subsampling": 0}  # 4:4:4
_LARGEST_FILE = 2**30
_LONGEST_JPEG = 65500  # pixels of a side, for libjpeg
# Bits that cameras and scanners use of 16.
_USED_BITS = (8, 10, 12, 16)
_ORIENTATION, _UPRIGHT = 0x0112, 1  # of EXIF
_BITS_PER_SAMPLE, _SAMPLE_FORMAT, _WHITE_IS_ZERO = 258, 339, (262, 0)  # tags of TIFF, and a value
# Files that each thread has at hand, and files that a message names.
_AHEAD, _MOST_NAMED = 4, 10
_HEIC = "HEIC, which needs the package pillow-heif"
_WORDS_OF = {
    "kept": "kept as they are",
    "converted": "converted",
    "turned": "turned upright",
    "broken": "left out: broken",
    "copy": "left out: exact copies",
}


class _Outcome(NamedTuple):
    done: str  # a key of _WORDS_OF
    note: str = ""  # a remark; the reason if the file is broken
    format: str = ""  # JPEG or PNG
    digest: bytes = b""  # the SHA-256 of the content


def prepare(folder: pathlib.Path, output: pathlib.Path) -> None:
    """Write the images of `folder` and its subfolders to the new folder `output`, with a table of what was done.

    Raises UserError if no image can be read. The new folder appears when it is complete.
    """
    files = sorted(map(pathlib.Path, images_in(folder)))  # those of a folder together
    with contextlib.suppress(ImportError):
        importlib.import_module("pillow_heif").register_heif_opener()
    counts: collections.Counter[str] = collections.Counter()
    reasons: set[str] = set()
    broken: list[str] = []
    moved: list[str] = []
    first: dict[bytes, pathlib.Path] = {}
    with atomic_folder(output) as stage, (stage / TABLE).open("w", encoding="utf-8", newline="") as stream:
        table = CsvWriter(stream)
        table.writerow(("file", "done", "written", "note"))
        for file, temporary, outcome in _outcomes(folder, files, stage):
            name, done, note, written = file.relative_to(folder), outcome.done, outcome.note, ""
            original = first.setdefault(outcome.digest, name) if outcome.digest else name
            if done == "broken":
                reasons.add(note)
                broken += [f"{shown(str(name))} ({note})"] if len(broken) < _MOST_NAMED else []
            elif original != name:
                done, note = "copy", f"of {shown(str(original))}"
                moved += [f"{shown(str(name))} {note}"] if original.parent != name.parent else []
                temporary.unlink()
            else:
                target = _free(file, stage / name, outcome.format)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(temporary, target)
                written = shown(str(target.relative_to(stage)))
            counts[done] += 1
            table.writerow((shown(str(name)), done, written, note))
        rows = [[words, f"{counts[done]:,}"] for done, words in _WORDS_OF.items()]
        print(markdown_table(["", "files"], rows, num_text_columns=1))
        if broken:
            more = "; …" if counts["broken"] > len(broken) else ""
            if _HEIC in reasons:
                more += (
                    f"; for HEIC, pip install pillow-heif, remove {output} if it is there, and run the command again"
                )
            print(f"Broken: {'; '.join(broken)}{more}.")
        check_some_read(len(first))
    if moved:
        print(
            f"Warning: {len(moved):,} of the copies {'was' if len(moved) == 1 else 'were'} in another folder than the "
            f"image that is kept, such as {moved[0]}; check which folder is right."
        )
    print(f"{output} has the images, and {output / TABLE} says of each what was done.")


def _outcomes(
    folder: pathlib.Path, files: list[pathlib.Path], stage: pathlib.Path
) -> Iterator[tuple[pathlib.Path, pathlib.Path, _Outcome]]:
    """Yield each file, the file that was written for it if it is not broken, and the outcome, in their order."""
    threads = min(os.cpu_count() or 1, 16)
    numbered = enumerate(files)
    with (
        Progress("Preparing images", len(files)) as progress,
        native_stderr_silenced(),  # what libtiff prints of odd files
        warnings.catch_warnings(),
        concurrent.futures.ThreadPoolExecutor(threads) as pool,
    ):
        warnings.simplefilter("ignore")  # Pillow's, of odd metadata
        waiting: collections.deque = collections.deque()
        for number, file in itertools.chain(numbered, [(None, None)] * threads * _AHEAD):
            if file is not None:
                temporary = stage / f".{number}"
                waiting.append((file, temporary, pool.submit(_outcome, file, temporary)))
            if waiting and (file is None or len(waiting) > threads * _AHEAD):
                file, temporary, future = waiting.popleft()
                yield file, temporary, future.result()
                progress.update()


def _outcome(file: pathlib.Path, temporary: pathlib.Path) -> _Outcome:
    """Write what becomes of a file to `temporary`."""
    if file.is_dir():
        return _Outcome("broken", "a link to a folder, which is not followed")
    if not file.is_file():
        return _Outcome("broken", "no file, or a link to none")
    try:
        if (size := file.stat().st_size) > _LARGEST_FILE:
            return _Outcome("broken", f"{size:,} bytes, more than the maximum of {_LARGEST_FILE:,}")
        data = file.read_bytes()
    except OSError as error:
        return _Outcome("broken", reason_of(error))
    try:
        image, outcome = _clean(data)
    except PIL.UnidentifiedImageError:
        known = convertible_format(data)
        note = f"a {known} file that Pillow does not read" if known else "no image"
        return _Outcome("broken", _HEIC if known == "HEIC" else note)
    except Exception as error:  # Pillow raises many types for damaged files
        return _Outcome("broken", reason_of(error)[:120])
    if image is not None:
        options = _JPEG_OPTIONS if outcome.format == "JPEG" else {}
        image.save(temporary, outcome.format, icc_profile=image.info.get("icc_profile"), **options)
    elif problem := decoding_problem(tf.constant(data)):
        return _Outcome("broken", problem)
    else:
        temporary.write_bytes(data)
    return outcome._replace(digest=hashlib.sha256(data).digest())


def _clean(data: bytes) -> tuple[PIL.Image.Image | None, _Outcome]:
    """Return the image of a file as it is to be saved, or None if the file is fine. Raises any of Pillow's errors."""
    with open_image(data, formats=_FORMATS) as image:
        kind, frames = image.format, getattr(image, "n_frames", 1)
        if kind == "PNG":
            check_png(data)
        profile = image.info.get("icc_profile") if image.mode != "CMYK" else None
        image.load()
        turn = orientation(data)
        if kind not in ("JPEG", "MPO", "PNG", "WEBP"):
            turn = image.getexif().get(_ORIENTATION, _UPRIGHT)  # Pillow has turned TIFF and HEIC, and says so
        if turn == _UPRIGHT and _is_clean(image, data):
            return None, _Outcome("kept", format="PNG" if kind == "PNG" else "JPEG")
        clean, note = _as_bytes(image)
    if turn != _UPRIGHT:
        clean = PIL.Image.fromarray(np.squeeze(turned(np.atleast_3d(np.asarray(clean)), turn)))
    clean.info = {"icc_profile": profile} if profile else {}
    notes = [kind.replace("HEIF", "HEIC"), note]
    if frames > 1 and kind not in ("JPEG", "MPO"):
        notes.append(f"the first of {frames:,} {'pages' if kind == 'TIFF' else 'frames'}")
    done = "converted" if turn == _UPRIGHT else "turned"
    return clean, _Outcome(done, ", ".join(filter(None, notes)), _saved_format(clean, kind, data))


def _saved_format(image: PIL.Image.Image, kind: str, data: bytes) -> str:
    """Return JPEG for what was lossy, if it can hold the image; else PNG."""
    is_lossy = kind in _LOSSY or (kind == "WEBP" and b"VP8L" not in data[12:4096])
    return "JPEG" if is_lossy and image.mode in ("L", "RGB") and max(image.size) <= _LONGEST_JPEG else "PNG"


def _is_clean(image: PIL.Image.Image, data: bytes) -> bool:
    """Whether a file can stay as it is: a JPEG or PNG of 8 bits without palette, color key or inks."""
    if format_problem(data) is not None:
        return False
    if image.format in ("JPEG", "MPO"):
        return image.mode in ("L", "RGB")
    is_plain = image.mode in ("L", "LA", "RGB", "RGBA") and "transparency" not in image.info
    return image.format == "PNG" and is_plain and data[24] == 8


def _as_bytes(image: PIL.Image.Image) -> tuple[PIL.Image.Image, str]:
    """Return an image as L, LA, RGB or RGBA with 8 bits, and a note on its bits."""
    if image.mode == "F":
        return PIL.Image.fromarray(_of_fractions(np.asarray(image))), "fractions of 0 to 1"
    is_signed = _tags(image).get(_SAMPLE_FORMAT, (1,))[0] == 2
    if image.mode.startswith("I") or is_signed:
        pixels, bits = _integers(image, is_signed)
        levels, note = _levels(pixels)
        gray = PIL.Image.fromarray(levels)
        if (key := image.info.get("transparency")) is not None:
            gray.putalpha(PIL.Image.fromarray(255 * (pixels != key).astype(np.uint8)))
        return gray, f"{'signed ' * is_signed}{bits} bits{note}"
    if image.mode in ("L", "LA", "RGB", "RGBA") and "transparency" not in image.info:
        return image.copy(), ""
    if image.has_transparency_data:
        return image.convert("RGBA"), ""
    return image.convert("L" if image.mode == "1" else "RGB"), ""


def _tags(image: PIL.Image.Image) -> Mapping[int, Any]:
    return getattr(image, "tag_v2", {})


def _integers(image: PIL.Image.Image, is_signed: bool) -> tuple[np.ndarray, int]:
    """Return the values of a gray image (h, w) int64 and how many bits they have. Raises ValueError for signed colors.

    Pillow shows signed bytes as unsigned ones, and unsigned values of 32 bits as signed ones.
    """
    tags, pixels = _tags(image), np.asarray(image)
    bits = int(tags.get(_BITS_PER_SAMPLE, (16,))[0])
    if pixels.ndim != 2:
        raise ValueError("signed colors; save it with values from 0")
    if bits == 8:
        pixels = pixels.view(np.int8)
    elif bits == 32 and not is_signed:
        pixels = pixels.astype(np.int32).view(np.uint32)
    pixels = pixels.astype(np.int64)
    # Pillow inverts this for 8 bits, but not for 16.
    if tags.get(_WHITE_IS_ZERO[0]) == _WHITE_IS_ZERO[1]:
        pixels = 65535 - pixels
    return pixels, bits


def _levels(pixels: np.ndarray) -> tuple[np.ndarray, str]:
    """Return integers (h, w) as uint8, by the bits in use or from the lowest value, and a note on their range."""
    low, high = int(pixels.min()), int(pixels.max())
    if low < 0:
        return np.round((pixels - low) * (255 / max(high - low, 1))).astype(np.uint8), f", scaled from {low} to {high}"
    used = next((bits for bits in _USED_BITS if high < 2**bits), high.bit_length())
    note = "" if used in (16, 32) else f", scaled since {used} are used"
    return (pixels >> (used - 8)).astype(np.uint8), note


def _of_fractions(pixels: np.ndarray) -> np.ndarray:
    """Return fractions (h, w), 0 to 1, as uint8. Raises ValueError for other values."""
    low, high = pixels.min(), pixels.max()
    if not (low >= 0 and high <= 1):
        raise ValueError(f"fractions from {low:.6g} to {high:.6g}, where 0 to 1 can be read")
    return np.round(255 * pixels).astype(np.uint8)


def _free(file: pathlib.Path, target: pathlib.Path, saved: str) -> pathlib.Path:
    """Return where to write a file: under its own name, if that is one of the format and of no other file."""
    if target.suffix.lower() in _ENDINGS[saved]:
        return target
    ending = _ENDINGS[saved][0]
    short = [f"{file.stem}{ending}"] if is_image_name(file.name) else []
    numbered = (f"{file.name}-{number}{ending}" for number in itertools.count(2))
    return next(
        target.with_name(name)
        for name in itertools.chain(short, [file.name + ending], numbered)
        if not os.path.lexists(file.with_name(name)) and not os.path.lexists(target.with_name(name))
    )
