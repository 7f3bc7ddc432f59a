"""What Keras lacks for a Vision Transformer: the layers that own its weights, and those that need a name.

Axes: B batch, N tokens, M key tokens, D width, H heads, d width of a head (D = H * d).
Weights have the names and initial values of vit_jax `models_vit.py` (flax 0.x defaults where it gives none).
"""

import contextlib
import contextvars
from collections.abc import Iterator

import keras
import numpy as np
from keras import ops

_PACKAGE = "keras_vit"
_weights_will_be_loaded = contextvars.ContextVar("weights_will_be_loaded", default=False)


@contextlib.contextmanager
def weights_will_be_loaded() -> Iterator[None]:
    """Models built inside begin with zeros: drawing random numbers for a checkpoint to overwrite takes seconds."""
    token = _weights_will_be_loaded.set(True)
    try:
        yield
    finally:
        _weights_will_be_loaded.reset(token)


def _initial(initializer):
    return "zeros" if _weights_will_be_loaded.get() else initializer


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
class StandardizedConv2D(keras.layers.Layer):
    """A convolution without bias whose kernel is standardised per output channel each time it is used.

    (kernel - mean) / (sqrt(variance + variance_epsilon) + deviation_epsilon), with the population variance over height,
    width and input channels. The stored kernel is the raw one. BiT adds its epsilon to the variance, the hybrids add
    theirs to the deviation.

    Args:
        filters: output channels.
        kernel_size, strides: of both sides, in pixels.
        padding: "valid" or "same" (TensorFlow's: at stride 2 and even sizes more after than before).
        variance_epsilon, deviation_epsilon: see above.

    Shape: (B, H, W, C) -> (B, H', W', filters).
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int,
        strides: int,
        padding: str,
        variance_epsilon: float,
        deviation_epsilon: float,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.filters = filters
        self.kernel_size = kernel_size
        self.strides = strides
        self.padding = padding
        self.variance_epsilon = variance_epsilon
        self.deviation_epsilon = deviation_epsilon

    def build(self, input_shape):
        shape = (self.kernel_size, self.kernel_size, input_shape[-1], self.filters)
        self.kernel = self.add_weight(name="kernel", shape=shape, initializer=_initial("lecun_normal"), autocast=False)

    def call(self, images):
        kernel = ops.cast(self.kernel, "float32")  # 1e-10 is nothing in half precision
        centred = kernel - ops.mean(kernel, axis=(0, 1, 2), keepdims=True)
        variance = ops.mean(ops.square(centred), axis=(0, 1, 2), keepdims=True)
        kernel = centred / (ops.sqrt(variance + self.variance_epsilon) + self.deviation_epsilon)
        return ops.conv(
            images,
            ops.cast(kernel, images.dtype),
            strides=self.strides,
            padding=self.padding,
            data_format="channels_last",
        )

    def compute_output_shape(self, input_shape):
        batch, *sides, _ = input_shape
        window = self.kernel_size if self.padding == "valid" else 1
        return batch, *(-(-(side - window + 1) // self.strides) for side in sides), self.filters


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
        use_bias: False for the projections of models without them.

    Shape: (..., D) -> (..., units).
    """

    def __init__(
        self,
        units: int,
        activation: str | None = None,
        kernel_initializer: str = "glorot_uniform",
        bias_stddev: float = 0.0,
        use_bias: bool = True,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.use_bias = use_bias
        self.units = units
        self.activation = activation
        self.kernel_initializer = kernel_initializer
        self.bias_stddev = bias_stddev

    def build(self, input_shape):
        width = input_shape[-1]
        kernel = _initial(keras.initializers.get(self.kernel_initializer))
        self.kernel = self.add_weight(name="kernel", shape=(width, self.units), initializer=kernel)
        if self.use_bias:
            bias = keras.initializers.RandomNormal(stddev=self.bias_stddev) if self.bias_stddev else "zeros"
            self.bias = self.add_weight(name="bias", shape=(self.units,), initializer=bias)

    def call(self, tokens):
        flat = ops.reshape(tokens, (-1, tokens.shape[-1]))  # (B * N, D)
        flat = ops.matmul(flat, self.kernel)  # (B * N, units)
        if self.use_bias:
            flat = ops.add(flat, self.bias)
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
            name="pos_embedding", shape=(1, *input_shape[1:]), initializer=_initial(_small_normal())
        )

    def call(self, tokens):
        return tokens + ops.cast(self.pos_embedding, tokens.dtype)  # (B, N, D)

    def compute_output_shape(self, input_shape):
        return input_shape


def _small_normal() -> keras.initializers.Initializer:
    """Made anew for each table: an initialiser takes its seed when it is made, so that one of a module would ignore
    `keras.utils.set_random_seed`.
    """
    return keras.initializers.RandomNormal(stddev=0.02)


@keras.saving.register_keras_serializable(_PACKAGE)
class PositionEmbedding2D(keras.layers.Layer):
    """Adds to a patch half a vector for its column, then half a vector for its row; all learned.

    Paper "An Image is Worth 16x16 Words", appendix D.4, which does not say what becomes of the class token: here it has
    a vector of its own. Arguments as PositionEmbedding.
    """

    def __init__(self, grid: tuple[int, int], num_prefix_tokens: int, **kwargs):
        super().__init__(**kwargs)
        self.grid = tuple(grid)
        self.num_prefix_tokens = num_prefix_tokens

    def build(self, input_shape):
        (rows, columns), width = self.grid, input_shape[-1]
        self.row = self.add_weight(name="row", shape=(rows, 1, width // 2), initializer=_small_normal())
        self.column = self.add_weight(name="column", shape=(1, columns, width // 2), initializer=_small_normal())
        if self.num_prefix_tokens:
            shape = (self.num_prefix_tokens, width)
            self.prefix = self.add_weight(name="prefix", shape=shape, initializer=_small_normal())

    def call(self, tokens):
        rows, columns = self.grid
        halves = (ops.broadcast_to(half, (rows, columns, half.shape[-1])) for half in (self.column, self.row))
        table = ops.reshape(ops.concatenate(list(halves), axis=-1), (rows * columns, tokens.shape[-1]))
        if self.num_prefix_tokens:
            table = ops.concatenate([self.prefix, table], axis=0)
        return tokens + ops.cast(table, tokens.dtype)  # (B, N, D)

    def compute_output_shape(self, input_shape):
        return input_shape


@keras.saving.register_keras_serializable(_PACKAGE)
class SinCosPositions(keras.layers.Layer):
    """Adds fixed sines and cosines of a patch's column and row (big_vision's sincos2d); nothing to the class token.

    Arguments as PositionEmbedding.
    """

    def __init__(self, grid: tuple[int, int], num_prefix_tokens: int, **kwargs):
        super().__init__(**kwargs)
        self.grid = tuple(grid)
        self.num_prefix_tokens = num_prefix_tokens

    def call(self, tokens):
        table = sincos_2d(self.grid, tokens.shape[-1])
        table = np.concatenate([np.zeros((self.num_prefix_tokens, table.shape[1]), np.float32), table])
        return tokens + ops.cast(ops.convert_to_tensor(table), tokens.dtype)  # (B, N, D)

    def compute_output_shape(self, input_shape):
        return input_shape


def sincos_2d(grid: tuple[int, int], width: int) -> np.ndarray:
    """[sin x, cos x, sin y, cos y] of column x and row y, at width / 4 frequencies from 1 to 1e-4: (h * w, width)."""
    y, x = (axis.reshape(-1, 1) for axis in np.mgrid[: grid[0], : grid[1]])
    frequencies = 10_000.0 ** -np.linspace(0.0, 1.0, width // 4)
    waves = [wave(axis * frequencies) for axis in (x, y) for wave in (np.sin, np.cos)]
    return np.concatenate(waves, axis=1).astype(np.float32)


@keras.saving.register_keras_serializable(_PACKAGE)
class RelativePositions(keras.layers.Layer):
    """Logits of attention that depend on the offset between two tokens: query (B, N, D) -> (B, H, N, N).

    Paper "An Image is Worth 16x16 Words", appendix D.4: the query's content meets a learned vector for the offset of
    the two positions, and the product is added to the content logits. What the paper leaves open: each block has a
    table of its own, shared by its heads; the scaling is that of the content; the class token takes part as position 0.
    """

    def __init__(self, num_heads: int, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads

    def build(self, input_shape):
        _, num_tokens, width = input_shape
        shape = (2 * num_tokens - 1, width // self.num_heads)
        self.embedding = self.add_weight(name="embedding", shape=shape, initializer=_small_normal())

    def call(self, query):
        num_tokens, reach = query.shape[1], self.embedding.shape[0]  # N, 2 N - 1
        keys = ops.cast(self.embedding, query.dtype)  # row r is for p_key - p_query = r - (N - 1)
        query = ops.transpose(_split_heads(query, self.num_heads), (0, 2, 1, 3))  # (B, H, N, d)
        logits = ops.matmul(query * (keys.shape[-1] ** -0.5), ops.transpose(keys))  # (B, H, N, 2 N - 1)
        # Every query's row begins one step further left: written with one column more, read again with the old width.
        logits = ops.reshape(ops.pad(logits, ((0, 0), (0, 0), (0, 0), (0, 1))), (-1, self.num_heads, 2 * num_tokens**2))
        logits = ops.reshape(logits[:, :, : num_tokens * reach], (-1, self.num_heads, num_tokens, reach))
        return logits[:, :, :, num_tokens - 1 :]  # (B, H, N, N)

    def compute_output_shape(self, query_shape):
        return query_shape[0], self.num_heads, query_shape[1], query_shape[1]


@keras.saving.register_keras_serializable(_PACKAGE)
class FoldAxis(keras.layers.Layer):
    """Every row ("row") or column ("column") of a grid of tokens as a sequence: (B, h * w, D) -> (B * h, w, D)."""

    def __init__(self, axis: str, grid: tuple[int, int], **kwargs):
        super().__init__(**kwargs)
        self.axis = axis
        self.grid = tuple(grid)

    def call(self, tokens):
        (rows, columns), width = self.grid, tokens.shape[-1]
        if self.axis == "row":
            return ops.reshape(tokens, (-1, columns, width))
        tokens = ops.transpose(ops.reshape(tokens, (-1, rows, columns, width)), (0, 2, 1, 3))
        return ops.reshape(tokens, (-1, rows, width))

    def compute_output_shape(self, input_shape):
        return None, self.grid[1] if self.axis == "row" else self.grid[0], input_shape[-1]


@keras.saving.register_keras_serializable(_PACKAGE)
class UnfoldAxis(keras.layers.Layer):
    """The inverse of FoldAxis: (B * h, w, D) -> (B, h * w, D)."""

    def __init__(self, axis: str, grid: tuple[int, int], **kwargs):
        super().__init__(**kwargs)
        self.axis = axis
        self.grid = tuple(grid)

    def call(self, tokens):
        (rows, columns), width = self.grid, tokens.shape[-1]
        if self.axis == "column":
            tokens = ops.transpose(ops.reshape(tokens, (-1, columns, rows, width)), (0, 2, 1, 3))
        return ops.reshape(tokens, (-1, rows * columns, width))

    def compute_output_shape(self, input_shape):
        return None, self.grid[0] * self.grid[1], input_shape[-1]


def attention_probabilities(query, key, num_heads: int, offset_logits=None):
    """softmax(q k / sqrt(d)) per head: (B, N, D) and (B, M, D) -> (B, H, N, M), rows summing to 1.

    The query is scaled before the product, as flax does; the softmax is float32 whatever the compute dtype.
    `offset_logits` (B, H, N, M), from RelativePositions, are added before the softmax.
    """
    query = ops.transpose(_split_heads(query, num_heads), (0, 2, 1, 3))  # (B, H, N, d)
    key = ops.transpose(_split_heads(key, num_heads), (0, 2, 3, 1))  # (B, H, d, M)
    query = query * (query.shape[-1] ** -0.5)
    logits = ops.matmul(query, key)  # (B, H, N, M)
    if offset_logits is not None:
        logits = logits + offset_logits
    return ops.cast(ops.softmax(ops.cast(logits, "float32"), axis=-1), query.dtype)


def _split_heads(tokens, num_heads: int):
    width = tokens.shape[-1] // num_heads
    return ops.reshape(tokens, (-1, tokens.shape[1], num_heads, width))  # (B, N, H, d)


@keras.saving.register_keras_serializable(_PACKAGE)
class DotProductAttention(keras.layers.Layer):
    """Multi-head attention between projected tokens; the projections are layers of their own.

    Call: query (B, N, D), key (B, M, D), value (B, M, D), with relative positions also their logits (B, H, N, M) ->
    (B, N, D). In training, each probability is dropped with
    `dropout_rate`, for every head and query by itself (flax: broadcast_dropout=False).
    """

    def __init__(self, num_heads: int, dropout_rate: float = 0.0, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.dropout_rate = dropout_rate
        self.dropout = keras.layers.Dropout(dropout_rate) if dropout_rate else None

    def call(self, query, key, value, offset_logits=None, training=None):
        probabilities = attention_probabilities(query, key, self.num_heads, offset_logits)  # (B, H, N, M)
        if self.dropout is not None:
            probabilities = self.dropout(probabilities, training=training)
        value = ops.transpose(_split_heads(value, self.num_heads), (0, 2, 1, 3))  # (B, H, M, d)
        mixed = ops.transpose(ops.matmul(probabilities, value), (0, 2, 1, 3))  # (B, N, H, d)
        return ops.reshape(mixed, (-1, query.shape[1], query.shape[2]))  # (B, N, D)

    def compute_output_shape(self, query_shape, key_shape, value_shape, offset_logits_shape=None):
        return query_shape


@keras.saving.register_keras_serializable(_PACKAGE)
class AttentionProbabilities(keras.layers.Layer):
    """The probabilities that DotProductAttention uses at inference, as an output (B, H, N, M)."""

    def __init__(self, num_heads: int, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads

    def call(self, query, key, offset_logits=None):
        return attention_probabilities(query, key, self.num_heads, offset_logits)

    def compute_output_shape(self, query_shape, key_shape, offset_logits_shape=None):
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
