"""Resizing position embeddings: properties that hold for all grids."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from keras_vit import UserError, resize_position_embedding

SIDES = st.integers(1, 9)


def table(rows: int, columns: int, prefix: int = 1, width: int = 3) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(1, prefix + rows * columns, width)).astype(np.float32)


@hypothesis.given(SIDES, SIDES)
def test_the_same_grid_is_left_bit_for_bit(rows, columns):
    values = table(rows, columns)
    np.testing.assert_array_equal(resize_position_embedding(values, (rows, columns), (rows, columns), 1), values)


@hypothesis.given(SIDES, SIDES, SIDES, SIDES)
def test_prefix_tokens_and_corners_stay(rows, columns, new_rows, new_columns):
    values = table(rows, columns, prefix=2)
    resized = resize_position_embedding(values, (rows, columns), (new_rows, new_columns), 2)
    np.testing.assert_array_equal(resized[:, :2], values[:, :2])
    old, new = values[0, 2:].reshape(rows, columns, 3), resized[0, 2:].reshape(new_rows, new_columns, 3)
    np.testing.assert_array_equal(new[0, 0], old[0, 0])
    if new_rows > 1 and new_columns > 1:
        np.testing.assert_allclose(new[-1, -1], old[-1, -1], rtol=1e-6)


@hypothesis.given(st.integers(2, 9), st.integers(2, 9), st.integers(2, 12), st.integers(2, 12))
def test_a_plane_stays_a_plane(rows, columns, new_rows, new_columns):
    def plane(height, width):
        y, x = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
        return (2 * y - 3 * x + 1).reshape(1, -1, 1)

    resized = resize_position_embedding(plane(rows, columns), (rows, columns), (new_rows, new_columns), 0)
    np.testing.assert_allclose(resized, plane(new_rows, new_columns), atol=1e-12)


def test_no_row_is_left_zero_where_scipy_leaves_one():
    resized = resize_position_embedding(np.ones((1, 28 * 28, 1)), (28, 28), (48, 48), 0)
    np.testing.assert_array_equal(resized, 1.0)


def test_a_table_of_another_length_is_refused():
    with pytest.raises(UserError, match=r"shape \(1, 17, 3\) does not hold 1 prefix tokens and a grid of 3x5"):
        resize_position_embedding(table(4, 4), (3, 5), (4, 4), 1)
