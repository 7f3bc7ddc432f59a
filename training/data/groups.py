"""Groups of images that belong together, of which a drawn split has none on both sides: near copies, bursts, names.

Near copies are images that were saved again, brightened or blurred: their colors at 16 x 16 pixels, less their means,
have a cosine of 0.995 or more; no two of 4,000 images of CIFAR-10 or Fashion-MNIST do. A burst is of one camera within
a minute, as EXIF says. Imports no TensorFlow.
"""

import collections
import dataclasses
import datetime
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import PIL.Image
import scipy.sparse

from keras_vit import UserError
from keras_vit.images.decode import open_image
from training.options.common import AUTO, FOLDER

_SIDE, _LEAST_COSINE = 16, 0.995
# Images up to which all are compared, and how many at a time.
_MOST_COMPARED, _BLOCK = 50_000, 2048
_BURST = datetime.timedelta(minutes=1)
# Tags of EXIF: maker and model of the camera, the block of the exposure, and its time there.
_CAMERA, _EXPOSURE, _TIME = (0x010F, 0x0110), 0x8769, 0x9003


@dataclasses.dataclass(frozen=True)
class Look:
    """The look of an image, and what its EXIF data say."""

    colors: np.ndarray
    """(768,) float16, of length 1; zeros for an image of one color."""
    camera: str
    time: datetime.datetime | None
    """When it was taken; None without EXIF."""


def look_at(content: bytes) -> Look | None:
    """Return the look of the bytes of a file; None for one that cannot be read."""
    try:
        with open_image(content) as image:
            exif, time = image.getexif(), None
            if taken := exif.get_ifd(_EXPOSURE).get(_TIME):
                time = datetime.datetime.strptime(str(taken), "%Y:%m:%d %H:%M:%S")
            image.draft("RGB", (2 * _SIDE, 2 * _SIDE))
            pixels = image.convert("RGBA").resize((_SIDE, _SIDE), PIL.Image.Resampling.BOX)
    except Exception:  # any of Pillow's, of a file that TensorFlow may read
        return None
    colors: np.ndarray = np.asarray(pixels, np.float32)
    colors = colors[..., :3] * (colors[..., 3:] / 255.0) + 255.0 - colors[..., 3:]  # on white
    centered = (colors - colors.mean(axis=(0, 1))).ravel()
    length = float(np.linalg.norm(centered))
    unit = centered / length if length > _SIDE else np.zeros_like(centered)
    return Look(unit.astype(np.float16), " ".join(str(exif.get(tag, "")) for tag in _CAMERA), time)


def groups_of(
    files: Sequence[str],
    root: pathlib.Path,
    rule: str,
    looks: Sequence[Look | None],
    named: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Return the number of the group of each file.

    Args:
        files: paths.
        root: folder of the data; a regular expression sees the paths below it.
        rule: auto: near copies and bursts; beside them, folder: the files of a folder; else a regular expression, whose
            first group, or the whole match, is the same for files that belong together.
        looks: of the files.
        named: file -> the name of its group in the data, of those that have one.

    Raises UserError for a regular expression that is none, or fits no file.
    """
    links = _near_copies(looks) + _bursts(looks) + _same(map((named or {}).get, files))
    if rule != AUTO:
        links += _same(map(os.path.dirname, files) if rule == FOLDER else _matches(files, root, rule))
    ends = np.array(links, np.int64).reshape(-1, 2)
    graph = scipy.sparse.coo_array((np.ones(len(ends), bool), tuple(ends.T)), shape=(len(files), len(files)))
    numbers = scipy.sparse.csgraph.connected_components(graph, directed=False)[1]
    return dict(zip(files, numbers.tolist(), strict=True))


def _same(names: Iterable[str | None]) -> list[tuple[int, int]]:
    first: dict[str, int] = {}
    return [(first.setdefault(name, row), row) for row, name in enumerate(names) if name]


def _matches(files: Sequence[str], root: pathlib.Path, rule: str) -> list[str | None]:
    try:
        expression = re.compile(rule)
    except re.error as error:
        raise UserError(
            f"--group takes auto, none, folder or a regular expression, and {rule!r} is none: {error}."
        ) from error
    matches = [expression.search(os.path.relpath(file, root)) for file in files]
    if not any(matches):
        raise UserError(f"--group {rule!r} fits no file, such as {os.path.relpath(files[0], root)}; correct it.")
    return [match and match[min(expression.groups, 1)] for match in matches]


def _near_copies(looks: Sequence[Look | None]) -> list[tuple[int, int]]:
    rows = np.array([row for row, look in enumerate(looks) if look and look.colors.any()], np.int64)
    if not 1 < len(rows) <= _MOST_COMPARED:
        return []
    colors = np.stack([look.colors for look in looks if look and look.colors.any()]).astype(np.float32)
    links = list[tuple[int, int]]()
    for begin in range(0, len(rows), _BLOCK):
        near = np.argwhere(colors[begin : begin + _BLOCK] @ colors[begin:].T >= _LEAST_COSINE) + begin
        links += map(tuple, rows[near[near[:, 0] < near[:, 1]]].tolist())
    return links


def _bursts(looks: Sequence[Look | None]) -> list[tuple[int, int]]:
    taken = sorted((look.camera, look.time, row) for row, look in enumerate(looks) if look and look.time)
    pairs = itertools.pairwise(taken)
    return [(one[2], two[2]) for one, two in pairs if one[0] == two[0] and two[1] - one[1] <= _BURST]


def held_out(of_class: Mapping[str, Sequence[str]], group_of: Mapping[str, int], share: int) -> set[str]:
    """Return files to evaluate on: of each class one in `share`, rounded up, and with each file all of its group.

    of_class: class -> its files in the order in which they are chosen. Raises UserError for a class whose images are
    too few groups for both sides.
    """
    label_of = {file: label for label, files in of_class.items() for file in files}
    members: dict[int, list[str]] = collections.defaultdict(list)
    for file in label_of:
        members[group_of[file]].append(file)
    kept, counts = set[str](), collections.Counter[str]()
    for label, files in of_class.items():
        wanted = -(-len(files) // share)
        by_size = sorted(files, key=lambda file: len(members[group_of[file]]))  # where only large groups are left
        for file in (*files, *by_size):
            group = members[group_of[file]]
            more = collections.Counter(label_of[each] for each in group)
            is_small = counts[label] + more[label] <= 1.5 * wanted or (not counts[label] and file is by_size[0])
            leaves_some = all(counts[name] + more[name] < len(of_class[name]) for name in more)
            if counts[label] < wanted and file not in kept and is_small and leaves_some:
                kept.update(group)
                counts += more
        if not counts[label]:
            raise UserError(
                f"The {len(files):,} images of {label!r} belong together, as far as --group says, and a group is "
                "either trained or evaluated on; add images of other scenes, or give --group none."
            )
    return kept
