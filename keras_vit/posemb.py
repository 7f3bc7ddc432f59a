"""Position embeddings of another grid: NumPy in, NumPy out.

Agrees with vit_jax `checkpoint.py` (`scipy.ndimage.zoom`, order 1), which is bilinear interpolation with aligned
corners, but for the sizes at which SciPy leaves the last row and column zero (28 -> 48 among them).
"""

import numpy as np

from keras_vit.errors import UserError


def resize_position_embedding(
    table: np.ndarray, old_grid: tuple[int, int], new_grid: tuple[int, int], num_prefix_tokens: int
) -> np.ndarray:
    """Resample a table of position embeddings bilinearly, corners staying corners.

    Args:
        table: (1, P + h * w, D) or (P + h * w, D); P prefix tokens (class token), then the grid row by row.
        old_grid: (h, w), rows and columns of patches that the table was made for.
        new_grid: rows and columns wanted; need not be square.
        num_prefix_tokens: P; these rows are kept as they are.

    Returns:
        The table for the new grid, of the same rank and dtype.
    """
    table = np.asarray(table)
    (old_h, old_w), (new_h, new_w) = old_grid, new_grid
    if table.ndim not in (2, 3) or table.shape[-2] != num_prefix_tokens + old_h * old_w:
        raise UserError(
            f"A table of shape {table.shape} does not hold {num_prefix_tokens} prefix tokens and a grid of "
            f"{old_h}x{old_w}."
        )
    if (old_h, old_w) == (new_h, new_w):
        return table
    prefix, grid = table[..., :num_prefix_tokens, :], table[..., num_prefix_tokens:, :]
    grid = grid.reshape(*table.shape[:-2], old_h, old_w, table.shape[-1]).astype(np.float64)
    grid = _interpolate(_interpolate(grid, new_h, axis=-3), new_w, axis=-2)  # (..., new_h, new_w, D)
    grid = grid.reshape(*table.shape[:-2], new_h * new_w, table.shape[-1]).astype(table.dtype)
    return np.concatenate([prefix, grid], axis=-2)


def _interpolate(values: np.ndarray, new_size: int, axis: int) -> np.ndarray:
    """Linear interpolation along one axis at new_size evenly spaced points from the first to the last sample."""
    last = values.shape[axis] - 1
    position = np.linspace(0.0, last, new_size)
    left = np.minimum(position.astype(np.int64), max(last - 1, 0))
    right = np.minimum(left + 1, last)
    weight = np.expand_dims(position - left, tuple(range(1, -axis)))
    return np.take(values, left, axis) * (1.0 - weight) + np.take(values, right, axis) * weight
