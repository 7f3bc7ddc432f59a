"""Resizing position embeddings: properties that hold for all grids, and agreement with torch.

`fixtures/resamplers.npz`, made with torch 2.13.0 on CPU. `grid.{old}-{new}.table` is (h * w, 2) float32, standard
normal; the other `grid.` arrays are `torch.nn.functional.interpolate` of it as float64, (1, 2, h, w), with these
arguments beside `size`:

    bilinear-aligned    mode="bilinear", align_corners=True
    bicubic-aligned     mode="bicubic", align_corners=True
    bilinear            mode="bilinear", align_corners=False, antialias=False
    bicubic             mode="bicubic", align_corners=False, antialias=False
    bicubic-antialias   mode="bicubic", align_corners=False, antialias=True
    bicubic-offset      mode="bicubic", align_corners=False, scale_factor=((h' + 0.1) / h, (w' + 0.1) / w), torch 2.14.1

In float64, because torch's own float32 is off by up to 5e-6. No new grid has several rows and one column: there torch
2.13.0 with antialias=True gives every row the values of the first.
"""

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st

from keras_vit import resize_position_embedding
from keras_vit.models.weight_resizing import Resampler
from tests.support import FIXTURES

SIDES = st.integers(1, 9)
OWN = [name for name in Resampler.__args__ if not name.endswith("-keras")]
RESAMPLERS = st.sampled_from(OWN)
ALIGNED = st.sampled_from(["bilinear-aligned", "bicubic-aligned"])
TORCH = np.load(FIXTURES / "resamplers.npz")
CASES = [name.removeprefix("grid.").removesuffix(".table") for name in TORCH if name.endswith(".table")]


def table(rows: int, columns: int, prefix: int = 1, width: int = 3) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(1, prefix + rows * columns, width)).astype(np.float32)


@pytest.mark.parametrize("resampler", OWN)
@pytest.mark.parametrize("case", CASES)
def test_every_resampler_agrees_with_torch(case, resampler):
    old, new = (tuple(map(int, side.split("x"))) for side in case.split("-"))
    values = TORCH[f"grid.{case}.table"].astype(np.float64)
    resized = resize_position_embedding(values, old, new, 0, resampler)
    np.testing.assert_allclose(resized, TORCH[f"grid.{case}.{resampler}"], rtol=0, atol=1e-12)


@hypothesis.given(SIDES, SIDES, RESAMPLERS)
def test_the_same_grid_is_left_bit_for_bit(rows, columns, resampler):
    values = table(rows, columns)
    resized = resize_position_embedding(values, (rows, columns), (rows, columns), 1, resampler)
    np.testing.assert_array_equal(resized, values)


@hypothesis.given(SIDES, SIDES, SIDES, SIDES, ALIGNED)
def test_prefix_tokens_and_corners_stay(rows, columns, new_rows, new_columns, resampler):
    values = table(rows, columns, prefix=2)
    resized = resize_position_embedding(values, (rows, columns), (new_rows, new_columns), 2, resampler)
    np.testing.assert_array_equal(resized[:, :2], values[:, :2])
    old, new = values[0, 2:].reshape(rows, columns, 3), resized[0, 2:].reshape(new_rows, new_columns, 3)
    np.testing.assert_array_equal(new[0, 0], old[0, 0])
    if new_rows > 1 and new_columns > 1:
        np.testing.assert_allclose(new[-1, -1], old[-1, -1], rtol=1e-6)


@hypothesis.given(st.integers(2, 40), st.integers(2, 40))
def test_by_default_each_point_is_its_two_neighbours_by_distance_to_the_last_bit(old, new):
    values = table(old, 1, prefix=0)[0].astype(np.float64)
    position = np.linspace(0, old - 1, new)
    left = np.minimum(position.astype(int), old - 2)
    right_share = (position - left)[:, None]
    expected = values[left] * (1 - right_share) + values[left + 1] * right_share
    np.testing.assert_array_equal(resize_position_embedding(values, (old, 1), (new, 1), 0), expected)


@hypothesis.given(SIDES, SIDES, SIDES, SIDES, RESAMPLERS)
def test_a_constant_stays_the_constant(rows, columns, new_rows, new_columns, resampler):
    resized = resize_position_embedding(
        np.ones((rows * columns, 1)), (rows, columns), (new_rows, new_columns), 0, resampler
    )
    np.testing.assert_allclose(resized, np.ones((new_rows * new_columns, 1)), atol=1e-12)


@pytest.mark.parametrize("resampler", OWN)
def test_a_half_precision_table_is_rounded_once_at_the_end(resampler):
    values = table(5, 3).astype(np.float16)
    resized = resize_position_embedding(values, (5, 3), (4, 7), 1, resampler)
    exact = resize_position_embedding(values.astype(np.float64), (5, 3), (4, 7), 1, resampler)
    assert resized.dtype == np.float16
    np.testing.assert_array_equal(resized, exact.astype(np.float16))


@pytest.mark.parametrize(("filter_", "antialias"), [("bicubic", False), ("bilinear", True)])
def test_the_resamplers_of_keras_are_its_operation(filter_, antialias):
    values = table(5, 3)
    resized = resize_position_embedding(values, (5, 3), (4, 7), 1, f"{filter_}-keras")
    grid = values[:, 1:].reshape(1, 5, 3, 3)
    expected = keras.ops.image.resize(
        grid, (4, 7), interpolation=filter_, antialias=antialias, data_format="channels_last"
    )
    np.testing.assert_array_equal(resized[:, 1:], np.reshape(expected, (1, 28, 3)))
    np.testing.assert_array_equal(resized[:, :1], values[:, :1])
