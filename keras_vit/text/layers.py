"""Layers of text towers that Keras does not have.

Axes: B batch, T tokens, D width.
"""

import keras
from keras import ops

from keras_vit.models.layers import PACKAGE, initial, small_normal

# exp underflows to 0 behind it, and float16 holds it.
_FORBIDDEN = -30000.0


@keras.saving.register_keras_serializable(PACKAGE)
class PadText(keras.layers.Layer):
    """Token ids (B, t) with t <= length -> (B, length), with the id 0 behind them.

    No token of a causal tower sees what comes after it, so the padding does not change the embedding.
    """

    def __init__(self, length: int, **kwargs):
        super().__init__(**kwargs)
        self.length = length

    def call(self, ids):
        missing = self.length - ops.shape(ids)[1]
        return ops.reshape(ops.pad(ids, ((0, 0), (0, missing))), (-1, self.length))

    def compute_output_shape(self, input_shape):
        return input_shape[0], self.length


@keras.saving.register_keras_serializable(PACKAGE)
class TextEmbedding(keras.layers.Layer):
    """The embeddings of tokens and of their positions, added: ids (B, T) -> (B, T, D).

    Args:
        vocab_size: number of tokens.
        length: T.
        width: D.
    """

    def __init__(self, vocab_size: int, length: int, width: int, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.length = length
        self.width = width

    def build(self, input_shape):
        for name, rows in (("tokens", self.vocab_size), ("positions", self.length)):
            weight = self.add_weight(name=name, shape=(rows, self.width), initializer=initial(small_normal()))
            setattr(self, name, weight)

    def call(self, ids):
        return ops.take(self.tokens, ids, axis=0) + self.positions  # (B, T, D)

    def compute_output_shape(self, input_shape):
        return *input_shape, self.width


@keras.saving.register_keras_serializable(PACKAGE)
class CausalMask(keras.layers.Layer):
    """An attention bias that keeps each token from the later ones: query (B, T, D) -> (1, 1, T, T)."""

    def call(self, query):
        later = ops.triu(ops.ones((query.shape[1], query.shape[1])), 1)
        return ops.cast(_FORBIDDEN * later[None, None], query.dtype)

    def compute_output_shape(self, query_shape):
        return 1, 1, query_shape[1], query_shape[1]


@keras.saving.register_keras_serializable(PACKAGE)
class PoolText(keras.layers.Layer):
    """The token that stands for the text: tokens (B, T, D) and their ids (B, T) -> (B, D).

    Args:
        kind: "first-end": the first whose id is `end_token`; "largest": the first with the largest id; "last": the
            last.
        end_token: see `kind`.
    """

    def __init__(self, kind: str, end_token: int | None = None, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind
        self.end_token = end_token

    def call(self, tokens, ids):
        if self.kind == "last":
            return tokens[:, -1]
        values = ops.cast(ops.equal(ids, self.end_token), "int32") if self.kind == "first-end" else ids
        place = ops.argmax(values, axis=1)  # (B,), the first of equal ones
        return ops.take_along_axis(tokens, ops.cast(place, "int32")[:, None, None], axis=1)[:, 0]

    def compute_output_shape(self, tokens_shape, ids_shape):
        return tokens_shape[0], tokens_shape[2]
