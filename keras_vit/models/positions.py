"""Position embeddings: learned, sines and cosines, or rotations of queries and keys.

Axes: B batch, N tokens, D width.
"""

import keras
import numpy as np
from keras import ops

from keras_vit.models.layers import PACKAGE, initial, small_normal


class _OnGrid(keras.layers.Layer):
    """Base of the layers that add position embeddings to the tokens of a grid (rows, columns) of patches.

    num_prefix_tokens: number of tokens with an embedding before the patches, 1 with a class token.
    """

    def __init__(self, grid: tuple[int, int], num_prefix_tokens: int, **kwargs):
        super().__init__(**kwargs)
        self.grid = tuple(grid)
        self.num_prefix_tokens = num_prefix_tokens

    def compute_output_shape(self, input_shape):
        return input_shape


@keras.saving.register_keras_serializable(PACKAGE)
class PositionEmbedding(_OnGrid):
    """Add a learned table (1, N, D), initialized from a normal distribution with standard deviation 0.02."""

    def build(self, input_shape):
        self.pos_embedding = self.add_weight(
            name="pos_embedding", shape=(1, *input_shape[1:]), initializer=initial(small_normal())
        )

    def call(self, tokens):
        return tokens + ops.cast(self.pos_embedding, tokens.dtype)  # (B, N, D)


@keras.saving.register_keras_serializable(PACKAGE)
class PositionEmbedding2D(_OnGrid):
    """Add a learned embedding to each patch, half of it for its column and half for its row.

    Paper "An Image is Worth 16x16 Words", appendix D.4. The paper does not mention the class token; here it has a
    separate vector.
    """

    def build(self, input_shape):
        (rows, columns), width = self.grid, input_shape[-1]
        self.row = self.add_weight(name="row", shape=(rows, 1, width // 2), initializer=small_normal())
        self.column = self.add_weight(name="column", shape=(1, columns, width // 2), initializer=small_normal())
        if self.num_prefix_tokens:
            shape = (self.num_prefix_tokens, width)
            self.prefix = self.add_weight(name="prefix", shape=shape, initializer=small_normal())

    def call(self, tokens):
        rows, columns = self.grid
        halves = (ops.broadcast_to(half, (rows, columns, half.shape[-1])) for half in (self.column, self.row))
        table = ops.reshape(ops.concatenate(list(halves), axis=-1), (rows * columns, tokens.shape[-1]))
        if self.num_prefix_tokens:
            table = ops.concatenate([self.prefix, table], axis=0)
        return tokens + ops.cast(table, tokens.dtype)  # (B, N, D)


@keras.saving.register_keras_serializable(PACKAGE)
class SinCosPositions(_OnGrid):
    """Add sines and cosines of the column and row of each patch (big_vision's sincos2d), not to the class token."""

    def call(self, tokens):
        table = sincos_2d(self.grid, tokens.shape[-1])
        table = np.concatenate([np.zeros((self.num_prefix_tokens, table.shape[1]), np.float32), table])
        return tokens + ops.cast(ops.convert_to_tensor(table), tokens.dtype)  # (B, N, D)


def sincos_2d(grid: tuple[int, int], width: int) -> np.ndarray:
    """[sin x, cos x, sin y, cos y] of column x and row y, at width / 4 frequencies from 1 to 1e-4: (h * w, width)."""
    y, x = (axis.reshape(-1, 1) for axis in np.mgrid[: grid[0], : grid[1]])
    frequencies = 10_000.0 ** -np.linspace(0.0, 1.0, width // 4)
    waves = [wave(axis * frequencies) for axis in (x, y) for wave in (np.sin, np.cos)]
    return np.concatenate(waves, axis=1).astype(np.float32)


@keras.saving.register_keras_serializable(PACKAGE)
class RotaryPositions(keras.layers.Layer):
    """Rotate queries or keys by the places of their patches: (B, N, D) -> (B, N, D). Tokens before the patches stay.

    Without a reference, rows and columns are mapped to (-1, 1) at the centers of the patches, so that nothing depends
    on the size of the images. DINOv3 (arXiv 2508.10104), as in transformers' `modeling_dinov3_vit.py` at inference.

    Args:
        num_heads: H, a divisor of D; the width of a head is a multiple of 4.
        grid: rows and columns of patches, the last tokens.
        reference: rows and columns as which the grid counts (EVA-02, `RotaryEmbeddingCat` of timm); None for DINOv3's.
        offset: number of the first row and column, with a reference.
        columns_first: whether the angles of the columns come first, with a reference.
    """

    def __init__(
        self,
        num_heads: int,
        grid: tuple[int, int],
        reference: tuple[int, int] | None = None,
        offset: float = 0.0,
        columns_first: bool = False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.grid = tuple(grid)
        self.reference = None if reference is None else tuple(reference)
        self.offset = offset
        self.columns_first = columns_first

    def call(self, tokens):
        _, num_tokens, width = tokens.shape
        angles = self.angles(width // self.num_heads)  # (h * w, d)
        angles = np.pad(angles, ((num_tokens - len(angles), 0), (0, 0)))[:, None]  # (N, 1, d)
        cosine, sine = (ops.convert_to_tensor(wave(angles), tokens.dtype) for wave in (np.cos, np.sin))
        heads = ops.reshape(tokens, (-1, num_tokens, self.num_heads, width // self.num_heads))
        first, second = ops.split(heads, 2, axis=-1)
        rotated = heads * cosine + ops.concatenate([-second, first], axis=-1) * sine
        return ops.reshape(rotated, (-1, num_tokens, width))

    def compute_output_shape(self, input_shape):
        return input_shape

    def angles(self, width: int) -> np.ndarray:
        """Angles by row, then by column, at width / 4 frequencies from 1 towards 1 / 100, all twice: (h * w, width).

        With a reference, the frequencies go towards 1 / 10,000, and the places are counted as those of it.
        """
        frequencies = (100.0 if self.reference is None else 10_000.0) ** -(np.arange(width // 4) * 4.0 / width)
        if self.reference is None:
            places = [2.0 * np.pi * ((np.arange(side) + 0.5) / side * 2.0 - 1.0) for side in self.grid]
        else:
            sides = zip(self.grid, self.reference, strict=True)
            places = [(np.arange(side) + self.offset) / side * whole for side, whole in sides]
        both = np.stack(np.meshgrid(*places, indexing="ij"), axis=-1).reshape(-1, 2, 1)  # (h * w, 2, 1)
        both = both[:, ::-1] if self.columns_first else both
        angles = (both * frequencies).reshape(len(both), -1)  # (h * w, d / 2)
        return np.tile(angles, 2).astype(np.float32)
