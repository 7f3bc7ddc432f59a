"""Polygons and run-length encodings of COCO, checked before pycocotools reads them. No TensorFlow.

The C code of pycocotools checks nothing: it reads behind the end of a damaged encoding, returns uninitialized memory
for one that ends too early, and takes memory in proportion to the perimeter of a polygon.
"""

import itertools
from typing import Any, TypedDict

import numpy as np
from pycocotools import mask as rle

from keras_vit import UserError
from keras_vit.errors import shown

# Pixels that a point may lie outside of its image by rounding.
_ROUNDING = 1.0
# Of one polygon, in pixels, for each of which pycocotools takes about 100 bytes.
_LONGEST_PERIMETER = 2**20
# Polygons of one object, which pycocotools merges in a time that grows with their square.
_MOST_POLYGONS = 10_000
# Characters of a run in a compressed encoding: five bits each, so that C's 32 bits do not overflow.
_LONGEST_RUN = 6


class RunLengths(TypedDict):
    """A mask as pycocotools reads it."""

    size: list[int]
    """Height and width in pixels."""
    counts: bytes


def run_lengths(segmentation: Any, size: tuple[int, int]) -> RunLengths:
    """Return the run-length encoding of an object's mask, as pycocotools makes it.

    Args:
        segmentation: of an annotation: polygons, or an encoding with counts as a list or compressed to a text. Any
            value that JSON can have.
        size: height and width of the upright image in pixels.

    Raises UserError, which does not name the image, for what is none of them.
    """
    height, width = size
    counts, problem = None, None
    if isinstance(segmentation, list) and segmentation and all(map(_is_polygon, segmentation)):
        problem = _polygon_problem(segmentation, size)
        if problem is None:
            return rle.merge(rle.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation, dict) and segmentation.get("size") == [height, width]:
        counts = segmentation.get("counts")
    if isinstance(counts, str) and _fills(_lengths(counts), height * width):
        return {"size": [height, width], "counts": counts.encode("ascii")}
    if isinstance(counts, list) and _fills(counts, height * width):
        return rle.frPyObjects({"size": [height, width], "counts": counts}, height, width)
    raise UserError(
        problem
        or "a segmentation should be polygons of 3 points or more, x and y of each, or a run-length encoding of all of "
        f"the size {[height, width]}, but is {shown(segmentation) if segmentation else 'missing'}"
    )


def _is_polygon(numbers: Any) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) >= 6
        and len(numbers) % 2 == 0
        and all(type(number) in (int, float) and abs(number) < 1e9 for number in numbers)
    )


def _polygon_problem(polygons: list[list[float]], size: tuple[int, int]) -> str | None:
    """Say which polygon is too long, lies outside, or is given in shares of the image; None if none is."""
    height, width = size
    if len(polygons) > _MOST_POLYGONS:
        return f"an object has {len(polygons):,} polygons, but at most {_MOST_POLYGONS:,} are read; merge them"
    numbers = np.fromiter(itertools.chain.from_iterable(polygons), np.float64)
    points = numbers.reshape(-1, 2)
    outside = max(float(-points.min()), float((points - [width, height]).max()))
    if outside > _ROUNDING:
        return f"a polygon reaches {outside:,.0f} pixels out of the image of {width} x {height}; correct or cut it"
    if numbers.max() <= 1.0 and max(size) > 1:
        return (
            "no coordinate of a polygon is above 1, as if they were shares of the image instead of pixels; multiply x "
            "by its width and y by its height"
        )
    for polygon in polygons:
        corners = np.array([*polygon, *polygon[:2]], np.float64).reshape(-1, 2)
        if (perimeter := np.abs(np.diff(corners, axis=0)).max(axis=1).sum()) > _LONGEST_PERIMETER:
            return f"a polygon has a perimeter of {perimeter:,.0f} pixels, which no outline has; correct it"
    return None


def _fills(lengths: list, pixels: int) -> bool:
    """Whether the lengths of runs are those of all pixels."""
    return all(type(each) is int and 0 <= each <= pixels for each in lengths) and sum(lengths) == pixels


def _lengths(counts: str) -> list[int]:
    """Return the lengths of the runs of a compressed encoding; [-1] for a damaged one.

    Source: `rleFrString` of pycocotools: little-endian groups of five bits, each a character from "0" on, with bit 5
    where another follows, and the sign in bit 4 of the last. From the fourth length on, they are differences.
    """
    codes = np.frombuffer(counts.encode("utf-8", "replace"), np.uint8).astype(np.int64) - ord("0")
    if not len(codes) or codes.min() < 0 or codes.max() > 63 or codes[-1] & 32:
        return [-1]
    ends = np.flatnonzero(codes & 32 == 0)
    begins = np.append(0, ends[:-1] + 1)
    digits = ends + 1 - begins
    if digits.max() > _LONGEST_RUN:
        return [-1]
    place = np.arange(len(codes)) - np.repeat(begins, digits)
    lengths = np.add.reduceat((codes & 31) << 5 * place, begins)
    lengths -= (codes[ends] & 16 > 0) * (1 << 5 * digits)
    for begin in (1, 2):
        lengths[begin::2] = np.cumsum(lengths[begin::2])
    return lengths.tolist()
