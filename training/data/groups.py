"""Groups of images that belong together, of which a split keeps none on both sides: near copies, bursts, named groups.

Near copies are saved again, brightened or blurred: their colors at 16 x 16 pixels, without the mean, have a cosine of
0.995 or more. No two of 4,000 images of CIFAR-10 or Fashion-MNIST do. A burst is of one camera within a minute, as EXIF
says. Imports no TensorFlow.
"""

import collections
import dataclasses
import datetime
import io
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import PIL.Image
import scipy.sparse

from keras_vit import UserError

# What `--group` takes besides a regular expression.
NONE, FOLDER = "none", "folder"
_SIDE, _LEAST_COSINE = 16, 0.995
# Images up to which all are compared; of more, only equal files are copies.
_MOST_COMPARED = 50_000
_BLOCK = 2048
_BURST_SECONDS = 60.0
# Tags of EXIF: the maker, the model and the time of the exposure.
_MAKE, _MODEL, _EXIF, _TIME = 0x010F, 0x0110, 0x8769, 0x9003


@dataclasses.dataclass(frozen=True)
class Look:
    """What is known of an image file without its name."""

    colors: np.ndarray
    """(768,) float16, of length 1; zeros for an image of one color."""
    camera: str = ""
    seconds: float | None = None
    """When it was taken; None without EXIF."""


def look_at(content: bytes) -> Look | None:
    """Return the look of the bytes of a file; None for one that Pillow does not read."""
    try:
        with PIL.Image.open(io.BytesIO(content)) as image:
            exif = image.getexif()
            image.draft("RGB", (2 * _SIDE, 2 * _SIDE))
            if image.mode in ("RGBA", "LA", "PA", "P"):
                white = PIL.Image.new("RGBA", image.size, "white")
                image = PIL.Image.alpha_composite(white, image.convert("RGBA"))
            colors = np.asarray(image.convert("RGB").resize((_SIDE, _SIDE), PIL.Image.Resampling.BOX), np.float32)
            camera = f"{exif.get(_MAKE, '')} {exif.get(_MODEL, '')}".strip()
            time = str(exif.get_ifd(_EXIF).get(_TIME, ""))
    except Exception:  # any of Pillow's, of a file that TensorFlow may read
        return None
    centered = colors.ravel() - colors.mean()
    length = float(np.linalg.norm(centered))
    unit = centered / length if length > _SIDE else np.zeros_like(centered)
    try:
        seconds = datetime.datetime.strptime(time, "%Y:%m:%d %H:%M:%S").timestamp()
    except ValueError:
        seconds = None
    return Look(unit.astype(np.float16), camera, seconds)


def groups_of(
    files: Sequence[str], root: pathlib.Path, rule: str | None, looks: Mapping[str, Look], named: Mapping[str, str]
) -> np.ndarray:
    """Return numbers (n,), the same for files that belong together.

    Args:
        files: paths.
        root: folder of the data; a regular expression sees paths below it.
        rule: none: each file is alone; folder: those of a folder belong together; else a regular expression, whose
            first group, or the whole, is what those of a group share. None: near copies, bursts and `named`.
        looks: of the files.
        named: group of each file by a column of the data.

    Raises UserError for a regular expression that is none, or fits no file.
    """
    if rule == NONE:
        return np.arange(len(files))
    links = _same(named.get(file) for file in files)
    if rule == FOLDER:
        links += _same(os.path.dirname(file) for file in files)
    elif rule is not None:
        links += _same(_matches(files, root, rule))
    links += _near_copies([looks.get(file) for file in files]) + _bursts([looks.get(file) for file in files])
    begins, ends = np.array(links, np.int64).reshape(-1, 2).T
    graph = scipy.sparse.coo_array((np.ones(len(begins), bool), (begins, ends)), shape=(len(files), len(files)))
    return scipy.sparse.csgraph.connected_components(graph, directed=False)[1]


def _same(names: Iterable[str | None]) -> list[tuple[int, int]]:
    """Return links of those with the same name."""
    first: dict[str, int] = {}
    return [(first.setdefault(name, row), row) for row, name in enumerate(names) if name]


def _matches(files: Sequence[str], root: pathlib.Path, rule: str) -> list[str | None]:
    try:
        expression = re.compile(rule)
    except re.error as error:
        raise UserError(
            f"--group takes folder, none or a regular expression, but {rule!r} is none: {error}."
        ) from error
    matches = [expression.search(os.path.relpath(file, root)) for file in files]
    if not any(matches):
        raise UserError(f"--group {rule!r} fits no file, such as {os.path.relpath(files[0], root)}; correct it.")
    return [match and (match[1] if expression.groups else match[0]) for match in matches]


def _near_copies(looks: Sequence[Look | None]) -> list[tuple[int, int]]:
    rows = np.array([row for row, look in enumerate(looks) if look is not None and look.colors.any()], np.int64)
    if not 1 < len(rows) <= _MOST_COMPARED:
        return []
    colors = np.stack([looks[row].colors for row in rows.tolist()]).astype(np.float32)  # type: ignore[union-attr]
    links = list[tuple[int, int]]()
    for begin in range(0, len(rows), _BLOCK):
        near = np.argwhere(colors[begin : begin + _BLOCK] @ colors[begin:].T >= _LEAST_COSINE) + begin
        links += map(tuple, rows[near[near[:, 0] < near[:, 1]]].tolist())
    return links


def _bursts(looks: Sequence[Look | None]) -> list[tuple[int, int]]:
    taken = sorted(
        (look.camera, look.seconds, row) for row, look in enumerate(looks) if look and look.seconds is not None
    )
    return [(a[2], b[2]) for a, b in itertools.pairwise(taken) if a[0] == b[0] and b[1] - a[1] <= _BURST_SECONDS]


def held_out(of_class: Mapping[str, Sequence[str]], group_of: Mapping[str, int], share: int) -> set[str]:
    """Return files to evaluate on: of each class one in `share`, and with each file all of its group.

    Args:
        of_class: class -> its files in the order in which they are chosen.
        group_of: file -> the number of its group.
        share: of each class, one of so many is kept, rounded up.

    Raises UserError for a class whose images are one group, which cannot be on both sides.
    """
    label_of = {file: label for label, files in of_class.items() for file in files}
    members: dict[int, list[str]] = collections.defaultdict(list)
    for file in label_of:
        members[group_of[file]].append(file)
    kept, counts = set[str](), collections.Counter[str]()

    def leaves_some(more: collections.Counter[str]) -> bool:
        return all(counts[label] + more[label] < len(of_class[label]) for label in more)

    for label, files in of_class.items():
        wanted = -(-len(files) // share)
        by_size = sorted(files, key=lambda file: len(members[group_of[file]]))
        for limit, order in ((1.5 * wanted, files), (len(files), by_size)):
            for file in order:
                more = collections.Counter(label_of[each] for each in members[group_of[file]])
                if counts[label] >= (wanted if order is files else 1):
                    break
                if file not in kept and counts[label] + more[label] <= max(limit, 1) and leaves_some(more):
                    kept |= {*members[group_of[file]]}
                    counts.update(more)
        if not counts[label]:
            groups = len({group_of[file] for file in files})
            raise UserError(
                f"The {len(files):,} images of {label!r} are {groups} group{'s' * (groups > 1)} of images that belong "
                "together, too few to train on one and evaluate on another; add images of other scenes, or give "
                "--group none."
            )
    return kept
