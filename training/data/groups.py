"""Groups of images that belong together, of which a drawn split has none on both sides: near copies, bursts, names.

Near copies are images that were saved again, brightened or blurred: their colors at 16 x 16 pixels, less their means,
have a cosine of 0.995 or more; no two of 4,000 images of CIFAR-10 or Fashion-MNIST do. A burst is of one camera within
a minute, as EXIF says. Imports no TensorFlow.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import PIL.Image
import scipy.sparse

from keras_vit import UserError
from keras_vit.cli.progress import tracked
from keras_vit.errors import explained
from keras_vit.images.decode import open_image
from training.options.common import ALONE, AUTO, FOLDER

HOLD_OUT = 10  # without a split of its own, one of so many images of each class is evaluated
MOST_COMPARED = 50_000  # images up to which all are compared
# Side of the images that are compared, the cosine of near copies, and how many are compared with others at a time.
_SIDE, _LEAST_COSINE, _BLOCK = 16, 0.995, 512
_BURST = datetime.timedelta(minutes=1)
# Tags of EXIF: maker and model of the camera, the block of the exposure, and its time there.
_CAMERA, _EXPOSURE, _TIME = (0x010F, 0x0110), 0x8769, 0x9003


@dataclasses.dataclass(frozen=True)
class Look:
    """The look of an image, and what its EXIF data say."""

    colors: np.ndarray  # (768,) float16, of length 1; zeros for an image of one color
    camera: str
    time: datetime.datetime | None  # when it was taken; None without EXIF


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


def looks_of(read: Callable[[int], bytes], count: int) -> list[Look | None]:
    """Return the looks of images, which are read by their numbers; None for one that cannot be read."""

    def look(number: int) -> Look | None:
        with contextlib.suppress(OSError):  # which the check of all images reports, with others
            return look_at(read(number))
        return None

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(tracked(pool.map(look, range(count)), "Looking for near copies", count))


def groups_of(
    paths: Sequence[str], rule: str, looks: Sequence[Look | None] = (), names: Sequence[str] = ()
) -> np.ndarray:
    """Return the number of the group of each image (n,), and print how many images have a group in common.

    Args:
        paths: of the images, below the folder of the data.
        rule: auto: near copies and bursts; beside them, folder: the images of a folder; else a regular expression on
            the path, whose first group, or the whole match, is the same for images that belong together; none: each
            image alone.
        looks: of the images; none if nobody looked at them.
        names: of their groups in the data, "" without one.

    Raises UserError for a regular expression that is none, or fits no path.
    """
    if rule == ALONE:
        return np.arange(len(paths))
    links = _near_copies(looks) + _bursts(looks) + _same(names)
    if rule != AUTO:
        links += _same((os.path.dirname(path) or "." for path in paths) if rule == FOLDER else _matches(paths, rule))
    ends = np.array(links, np.int64).reshape(-1, 2)
    graph = scipy.sparse.coo_array((np.ones(len(ends), bool), tuple(ends.T)), shape=(len(paths), len(paths)))
    groups = scipy.sparse.csgraph.connected_components(graph, directed=False)[1].astype(np.int64)
    sizes = np.bincount(groups)
    if (several := sizes[sizes > 1]).size:
        count = "1 group" if several.size == 1 else f"{several.size:,} groups"
        print(
            f"{several.sum():,} images belong together in {count}, such as near copies. Each group is on one side of "
            "the split; --group none splits image by image."
        )
    return groups


def _same(names: Iterable[str | None]) -> list[tuple[int, int]]:
    first: dict[str, int] = {}
    return [(first.setdefault(name, row), row) for row, name in enumerate(names) if name]


def _matches(paths: Sequence[str], rule: str) -> list[str | None]:
    takes = "--group accepts auto, none, folder or a regular expression"
    with explained(lambda reason: f"{takes}, and {rule!r} is none: {reason}.", re.error):
        expression = re.compile(rule)
    matches = [expression.search(path) for path in paths]
    if not any(matches):
        raise UserError(f"--group {rule!r} fits no file, such as {paths[0]}; correct it.")
    return [match and match[min(expression.groups, 1)] for match in matches]


def _near_copies(looks: Sequence[Look | None]) -> list[tuple[int, int]]:
    seen = {row: look.colors for row, look in enumerate(looks) if look and look.colors.any()}
    if len(seen) < 2 or len(looks) > MOST_COMPARED:
        return []
    rows, colors, links = np.array([*seen]), np.stack([*seen.values()]).astype(np.float32), list[tuple[int, int]]()
    for begin in range(0, len(rows), _BLOCK):
        near = np.argwhere(colors[begin : begin + _BLOCK] @ colors[begin:].T >= _LEAST_COSINE) + begin
        links += map(tuple, rows[near[near[:, 0] < near[:, 1]]].tolist())
    return links


def _bursts(looks: Sequence[Look | None]) -> list[tuple[int, int]]:
    taken = sorted((look.camera, look.time, row) for row, look in enumerate(looks) if look and look.time)
    pairs = itertools.pairwise(taken)
    return [(one[2], two[2]) for one, two in pairs if one[0] == two[0] and two[1] - one[1] <= _BURST]


def held_out(
    labels: np.ndarray, names: Sequence[str], groups: np.ndarray, order: np.ndarray | None = None, *, insist: bool
) -> np.ndarray:
    """Return which images (n,) are kept for evaluation: of each class a tenth, rounded up, and with each its group.

    Args:
        labels: numbers of the classes (n,), of two images each or more.
        names: of the classes.
        groups: of the images (n,).
        order: the images (n,) in the order in which they are chosen. Default: every tenth one of each class.
        insist: whether to raise UserError for a class whose images are too few groups for both sides. Else this is
            printed, and each image is drawn alone.
    """
    rows = np.arange(len(labels)) if order is None else order
    of_class = np.split(rows[np.argsort(labels[rows], kind="stable")], np.cumsum(np.bincount(labels))[:-1])
    if order is None:
        of_class = [np.concatenate([own[first::HOLD_OUT] for first in range(HOLD_OUT)]) for own in of_class]
    kept = _whole_groups(labels, groups, of_class)
    if (failed := np.flatnonzero(np.bincount(labels) * (np.bincount(labels[kept], minlength=len(of_class)) == 0))).size:
        problem = (
            f"The {len(of_class[failed[0]]):,} images of {names[failed[0]]!r} belong together, as far as --group says, "
            "and a group is either trained or evaluated on"
        )
        if insist:
            raise UserError(f"{problem}; add images of other scenes, or give --group none.")
        print(f"Warning: {problem}. The split is image by image.")
        kept = _whole_groups(labels, rows, of_class)
    return kept


def _whole_groups(labels: np.ndarray, groups: np.ndarray, of_class: Sequence[np.ndarray]) -> np.ndarray:
    """Return which images (n,) are kept, of each class as many as can be if there are too few groups."""
    kept, counts, totals = np.zeros(len(labels), bool), np.zeros(len(of_class), np.int64), np.bincount(labels)
    by_group, ends = np.argsort(groups, kind="stable"), np.cumsum(np.bincount(groups))
    sizes = np.bincount(groups)[groups]
    for label, rows in enumerate(of_class):
        wanted = -(-len(rows) // HOLD_OUT)
        if sizes.max() == 1:
            kept[rows[:wanted]] = True
            continue
        by_size = rows[np.argsort(sizes[rows], kind="stable")]  # where only large groups are left
        for row in np.concatenate([rows, by_size]).tolist():
            if counts[label] >= wanted:
                break
            group = by_group[ends[groups[row]] - sizes[row] : ends[groups[row]]]
            more = np.bincount(labels[group], minlength=len(of_class))
            is_small = counts[label] + more[label] <= 1.5 * wanted or (not counts[label] and row == by_size[0])
            leaves_some = (counts + more < totals)[more > 0].all()
            if not kept[row] and is_small and leaves_some:
                kept[group] = True
                counts += more
    return kept
