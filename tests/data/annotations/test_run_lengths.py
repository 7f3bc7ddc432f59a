"""Polygons and run-length encodings: what pycocotools is given fills the image, and is read as pycocotools reads it."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from pycocotools import mask as rle

from keras_vit import UserError
from training.data.annotations.coco import run_lengths

SIZES = strategies.tuples(strategies.integers(1, 40), strategies.integers(1, 40))
RUNS = strategies.text([chr(code) for code in range(ord("0"), ord("0") + 64)], max_size=60)
ANY_NUMBER = strategies.floats() | strategies.integers(-(10**12), 10**12) | strategies.floats(0, 40)
ANY_VALUE = strategies.recursive(
    strategies.none() | strategies.booleans() | ANY_NUMBER | strategies.text(max_size=9),
    lambda inside: strategies.lists(inside, max_size=9) | strategies.dictionaries(strategies.text(max_size=5), inside),
    max_leaves=20,
)


@strategies.composite
def encodings(draw) -> tuple[tuple[int, int], np.ndarray, str]:
    """Size, mask, and its compressed encoding."""
    size = draw(SIZES)
    rng = np.random.default_rng(draw(strategies.integers(0, 2**32 - 1)))
    mask = rng.random(size) < draw(strategies.sampled_from([0.0, 0.1, 0.5, 1.0]))
    return size, mask, rle.encode(np.asfortranarray(mask, np.uint8))["counts"].decode()


def read(segmentation: object, size: tuple[int, int]) -> np.ndarray | None:
    """The mask, the same in two readings; None for what is refused."""
    try:
        first, second = (rle.decode(run_lengths(segmentation, size)) for _ in range(2))
    except UserError:
        return None
    np.testing.assert_array_equal(first, second)
    assert first.shape == size
    return first


def check_whole(case: tuple) -> None:
    size, mask, counts = case
    np.testing.assert_array_equal(read({"size": list(size), "counts": counts}, size), mask)
    flat = mask.T.ravel()
    ends = np.flatnonzero(np.diff(flat, prepend=False, append=not flat[-1]))
    lengths = np.diff(ends, prepend=0).tolist()
    np.testing.assert_array_equal(read({"size": list(size), "counts": lengths}, size), mask)


def check_damaged(case: tuple, at: int, other: str) -> None:
    size, _, counts = case
    at %= len(counts)
    assert read({"size": list(size), "counts": counts[:at]}, size) is None
    for changed in (counts + other, counts[:at] + other + counts[at + 1 :], other):
        read({"size": list(size), "counts": changed}, size)


def check_polygons(segmentation: object, size: tuple[int, int]) -> None:
    mask = read(segmentation, size)
    if mask is not None:
        expected = rle.decode(rle.merge(rle.frPyObjects(segmentation, *size)))
        np.testing.assert_array_equal(mask, expected)


def check_values(segmentation: object, counts: object, size: tuple[int, int]) -> None:
    read(segmentation, size)
    read({"size": list(size), "counts": counts}, size)


POLYGONS = strategies.lists(strategies.lists(ANY_NUMBER, max_size=12), max_size=3)
INSIDE = strategies.lists(strategies.lists(strategies.floats(-0.9, 9.0), min_size=6, max_size=12), max_size=3)
CHECKS = {
    "whole": (check_whole, (encodings(),)),
    "damaged": (check_damaged, (encodings(), strategies.integers(0, 10**4), RUNS)),
    "polygons": (check_polygons, (POLYGONS | INSIDE, SIZES)),
    "values": (check_values, (ANY_VALUE, ANY_VALUE, SIZES)),
}


@pytest.mark.parametrize("examples", [30, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHECKS)
def test_whatever_a_file_holds_is_a_mask_or_a_sentence(name, examples):
    check, arguments = CHECKS[name]
    settings = hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    settings(hypothesis.given(*arguments)(check))()


@pytest.mark.parametrize(
    ("segmentation", "words"),
    [
        ({"size": [32, 32], "counts": "0" * 599 + "P"}, "of all of the size"),
        ({"size": [32, 32], "counts": ""}, "of all of the size"),
        ({"size": [32, 32], "counts": "0"}, "of all of the size"),
        ({"size": [32, 32], "counts": [10**9, 1024 - 10**9]}, "of all of the size"),
        ({"size": [32, 32], "counts": [True] * 1024}, "of all of the size"),
        ([[1, 1, 9, 9]], "3 points"),
        ([[1, 2, 3, 4, 5, 6, 7]], "3 points"),
        ([["a"] * 6], "3 points"),
        ([], "is missing"),
        ({"size": [32, 32]}, "of all of the size"),
        ({"size": [32, 32], "counts": [-3, 1027]}, "of all of the size"),
        ({"size": [32, 32], "counts": "zz\u00e4"}, "of all of the size"),
        ([[float("nan")] * 6], "3 points"),
        ([[1, 1, 9, 9, 40, 2]], "8 pixels out of the image of 32 x 32"),
        ([[(-1) ** (n // 2) * 2**20 for n in range(64)]], "out of the image of 32 x 32"),
        ([[0.1, 0.1, 0.9, 0.1, 0.9, 0.9]], "shares of the image"),
        ([[0, 0, 32, 0] * 40_000], "perimeter of 2,5"),
        ([[0, 0, 2, 0, 2, 2]] * 10_001, "10,001 polygons"),
    ],
)
def test_what_pycocotools_cannot_take_is_named(segmentation, words):
    with pytest.raises(UserError, match=words) as refused:
        run_lengths(segmentation, (32, 32))
    assert len(str(refused.value)) < 250
