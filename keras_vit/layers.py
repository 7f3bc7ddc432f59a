"""What Keras lacks for a Vision Transformer: the layers that own its weights, and those that need a name.

Axes: B batch, N tokens, M key tokens, D width, H heads, d width of a head (D = H * d).
Weights have the names and initial values of vit_jax `models_vit.py` (flax 0.x defaults where it gives none).
"""

import keras
from keras import ops

_PACKAGE = "keras_vit"


@keras.saving.register_keras_serializable(_PACKAGE)
class ModelSpec(keras.layers.Layer):
    """Carries, inside a saved model, what its weights cannot tell; passes images through unchanged.

    Args:
        model: the fields of the configuration that the model was built from.
        preprocessing: the fields of `keras_vit.Preprocessing`, how an image becomes the model's input.
    """

    def __init__(self, model: dict, preprocessing: dict, **kwargs):
        super().__init__(**kwargs)
        self.model = model
        self.preprocessing = preprocessing

    def call(self, images):
        return images

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "model": self.model, "preprocessing": self.preprocessing}


@keras.saving.register_keras_serializable(_PACKAGE)
class TokenDense(keras.layers.Layer):
    """A dense layer on tokens, computed as one 2-D matrix product.

    Keras' Dense on (B, N, D) becomes a Tensordot, whose reshapes stand between product and bias, so that oneDNN can
    fuse neither bias nor GELU into the product. Here the tokens are flattened first and product, bias and activation
    follow each other. A rank-2 kernel also gives Glorot's bound the official fans (a rank-3 one would not).

    Args:
        units: width of the output.
        activation: "gelu_tanh", "gelu_erf", "tanh" or None.
        kernel_initializer: a Keras initialiser by name.
        bias_stddev: standard deviation of the initial bias; 0 for zeros.

    Shape: (..., D) -> (..., units).
    """

    def __init__(
        self,
        units: int,
        activation: str | None = None,
        kernel_initializer: str = "glorot_uniform",
        bias_stddev: float = 0.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.units = units
        self.activation = activation
        self.kernel_initializer = kernel_initializer
        self.bias_stddev = bias_stddev

    def build(self, input_shape):
        width = input_shape[-1]
        self.kernel = self.add_weight(
            name="kernel", shape=(width, self.units), initializer=keras.initializers.get(self.kernel_initializer)
        )
        bias = keras.initializers.RandomNormal(stddev=self.bias_stddev) if self.bias_stddev else "zeros"
        self.bias = self.add_weight(name="bias", shape=(self.units,), initializer=bias)

    def call(self, tokens):
        flat = ops.reshape(tokens, (-1, tokens.shape[-1]))  # (B * N, D)
        flat = ops.add(ops.matmul(flat, self.kernel), self.bias)  # (B * N, units)
        if self.activation == "tanh":
            flat = ops.tanh(flat)
        elif self.activation is not None:
            flat = ops.gelu(flat, approximate=self.activation == "gelu_tanh")
        return ops.reshape(flat, (-1, *tokens.shape[1:-1], self.units))  # (B, N, units)

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.units)


@keras.saving.register_keras_serializable(_PACKAGE)
class ClassToken(keras.layers.Layer):
    """Puts the learned class token in front of the patches: (B, N, D) -> (B, 1 + N, D). Initial value zero."""

    def build(self, input_shape):
        self.cls = self.add_weight(name="cls", shape=(1, 1, input_shape[-1]), initializer="zeros")

    def call(self, patches):
        token = ops.broadcast_to(self.cls, (ops.shape(patches)[0], 1, patches.shape[-1]))  # (B, 1, D)
        return ops.concatenate([ops.cast(token, patches.dtype), patches], axis=1)  # (B, 1 + N, D)

    def compute_output_shape(self, input_shape):
        batch, tokens, width = input_shape
        return batch, tokens + 1, width


@keras.saving.register_keras_serializable(_PACKAGE)
class PositionEmbedding(keras.layers.Layer):
    """Adds a learned table (1, N, D), initially normal with deviation 0.02.

    Args:
        grid: rows and columns of patches; the checkpoint loader resizes to it.
        num_prefix_tokens: tokens before the grid that have a row of their own, 1 with a class token.
    """

    def __init__(self, grid: tuple[int, int], num_prefix_tokens: int, **kwargs):
        super().__init__(**kwargs)
        self.grid = tuple(grid)
        self.num_prefix_tokens = num_prefix_tokens

    def build(self, input_shape):
        self.pos_embedding = self.add_weight(
            name="pos_embedding", shape=(1, *input_shape[1:]), initializer=keras.initializers.RandomNormal(stddev=0.02)
        )

    def call(self, tokens):
        return tokens + ops.cast(self.pos_embedding, tokens.dtype)  # (B, N, D)

    def compute_output_shape(self, input_shape):
        return input_shape


def attention_probabilities(query, key, num_heads: int):
    """softmax(q k / sqrt(d)) per head: (B, N, D) and (B, M, D) -> (B, H, N, M), rows summing to 1.

    The query is scaled before the product, as flax does; the softmax is float32 whatever the compute dtype.
    """
    query = ops.transpose(_split_heads(query, num_heads), (0, 2, 1, 3))  # (B, H, N, d)
    key = ops.transpose(_split_heads(key, num_heads), (0, 2, 3, 1))  # (B, H, d, M)
    query = query * (query.shape[-1] ** -0.5)
    logits = ops.matmul(query, key)  # (B, H, N, M)
    return ops.cast(ops.softmax(ops.cast(logits, "float32"), axis=-1), query.dtype)


def _split_heads(tokens, num_heads: int):
    width = tokens.shape[-1] // num_heads
    return ops.reshape(tokens, (-1, tokens.shape[1], num_heads, width))  # (B, N, H, d)


@keras.saving.register_keras_serializable(_PACKAGE)
class DotProductAttention(keras.layers.Layer):
    """Multi-head attention between projected tokens; the projections are layers of their own.

    Call: query (B, N, D), key (B, M, D), value (B, M, D) -> (B, N, D). In training, each probability is dropped with
    `dropout_rate`, for every head and query by itself (flax: broadcast_dropout=False).
    """

    def __init__(self, num_heads: int, dropout_rate: float = 0.0, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.dropout_rate = dropout_rate
        self.dropout = keras.layers.Dropout(dropout_rate) if dropout_rate else None

    def call(self, query, key, value, training=None):
        probabilities = attention_probabilities(query, key, self.num_heads)  # (B, H, N, M)
        if self.dropout is not None:
            probabilities = self.dropout(probabilities, training=training)
        value = ops.transpose(_split_heads(value, self.num_heads), (0, 2, 1, 3))  # (B, H, M, d)
        mixed = ops.transpose(ops.matmul(probabilities, value), (0, 2, 1, 3))  # (B, N, H, d)
        return ops.reshape(mixed, (-1, query.shape[1], query.shape[2]))  # (B, N, D)

    def compute_output_shape(self, query_shape, key_shape, value_shape):
        return query_shape


@keras.saving.register_keras_serializable(_PACKAGE)
class AttentionProbabilities(keras.layers.Layer):
    """The probabilities that DotProductAttention uses at inference, as an output: query, key -> (B, H, N, M)."""

    def __init__(self, num_heads: int, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads

    def call(self, query, key):
        return attention_probabilities(query, key, self.num_heads)

    def compute_output_shape(self, query_shape, key_shape):
        return query_shape[0], self.num_heads, query_shape[1], key_shape[1]


@keras.saving.register_keras_serializable(_PACKAGE)
class Probe(keras.layers.Layer):
    """The learned query of attention pooling (big_vision's MAPHead): (B, N, D) -> (B, 1, D), Glorot-uniform."""

    def build(self, input_shape):
        # Drawn as one (1, D) row: flax counts the fans of (1, 1, D) the same way.
        self.probe = self.add_weight(name="probe", shape=(1, 1, input_shape[-1]), initializer="glorot_uniform")

    def call(self, tokens):
        return ops.cast(ops.broadcast_to(self.probe, (ops.shape(tokens)[0], 1, tokens.shape[-1])), tokens.dtype)

    def compute_output_shape(self, input_shape):
        return input_shape[0], 1, input_shape[2]


@keras.saving.register_keras_serializable(_PACKAGE)
class PoolTokens(keras.layers.Layer):
    """Tokens (B, N, D) -> one vector (B, D): the first token ("token") or their mean ("gap")."""

    def __init__(self, kind: str, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind

    def call(self, tokens):
        return tokens[:, 0] if self.kind == "token" else ops.mean(tokens, axis=1)  # (B, D)

    def compute_output_shape(self, input_shape):
        return input_shape[0], input_shape[2]
