"""Multi-head attention over all tokens, or along one axis of their grid.

Axes: B batch, N tokens, M key tokens, D width, H heads, d width of a head (D = H * d), h rows and w columns of the
grid.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import keras
from keras import ops

from keras_vit.errors import UserError, check_integers
from keras_vit.models.gpu import fused_attention, runs_on_cudnn
from keras_vit.models.layers import CHANNELS_LAST, PACKAGE, TokenDense, initial, small_normal
from keras_vit.models.positions import RotaryPositions

# Added to the logits of what is not attended to: exp underflows to 0 behind it, and float16 holds it.
FORBIDDEN = -30000.0
# A block's attention probabilities are heads x tokens x tokens. For more tokens than this they take most of the memory
# that rematerialization leaves, so they are computed for _QUERIES tokens at a time.
_MANY_TOKENS, _QUERIES = 1024, 256


def attention(
    query_tokens,
    tokens,
    *,
    num_heads: int,
    name: str,
    dropout_rate: float = 0.0,
    bias: bool = True,
    relative: bool = False,
    key_bias: bool = True,
    rotary: Mapping[str, Any] | None = None,
    locality: bool = False,
    norm_epsilon: float | None = None,
    attention_bias=None,
):
    """Attention of query_tokens (B, N, D) over tokens (B, M, D) -> (B, N, D).

    Args:
        num_heads: H, a divisor of D.
        name: name of the attention layer. The projections are `name`.query, .key, .value and .out.
        dropout_rate: dropout rate of the attention probabilities.
        bias: whether query, key and value projections have a bias. The output projection always has one.
        relative: whether to add relative position logits.
        key_bias: whether the key projection has a bias, with `bias`.
        rotary: arguments of `RotaryPositions`; None for no rotation.
        locality: whether no token attends to itself and each head learns its temperature.
        norm_epsilon: of a LayerNorm before the output projection; None for none.
        attention_bias: (B, H or 1, N, M), added to the logits; not with `relative` or `locality`.
    """
    width = tokens.shape[-1]
    query = TokenDense(width, use_bias=bias, name=f"{name}.query")(query_tokens)
    key = TokenDense(width, use_bias=bias and key_bias, name=f"{name}.key")(tokens)
    value = TokenDense(width, use_bias=bias, name=f"{name}.value")(tokens)
    if rotary is not None:
        query = RotaryPositions(num_heads, **rotary, name=f"{name}.rotated_query")(query)
        key = RotaryPositions(num_heads, **rotary, name=f"{name}.rotated_key")(key)
    if locality:
        query = HeadScale(num_heads, name=f"{name}.scaled_query")(query)
    inputs = [query, key, value]
    if locality:
        # A mask, not relative positions; saved models have it under this name.
        inputs.append(NoSelfAttention(name=f"{name}.relative")(query))  # (1, 1, N, N)
    if relative:
        inputs.append(RelativePositions(num_heads, name=f"{name}.relative")(query))  # (B, H, N, N)
    if attention_bias is not None:
        inputs.append(attention_bias)
    y = DotProductAttention(num_heads, dropout_rate, name=name)(*inputs)  # (B, N, D)
    if norm_epsilon is not None:
        y = keras.layers.LayerNormalization(epsilon=norm_epsilon, name=f"{name}.norm")(y)
    return TokenDense(width, name=f"{name}.out")(y)


def axis_attention(tokens, axis: str, grid: tuple[int, int], **options):
    """Self-attention within each row or column of the tokens (B, h * w, D). The options are those of `attention`."""
    name = options["name"]
    folded = FoldAxis(axis, grid, name=f"{name}.fold")(tokens)  # (B * h, w, D) or (B * w, h, D)
    return UnfoldAxis(axis, grid, name=f"{name}.unfold")(attention(folded, folded, **options))


def chunk_attention(model: keras.Model, queries: int | None) -> None:
    """Compute attention in chunks of queries, so that memory grows linearly with the number of tokens.

    The outputs are equal up to rounding. In training, each chunk is recomputed for its gradient. Call this function
    before the model is traced by `predict` or a tf.function. The setting is not saved with the model.

    Args:
        model: a model built by `keras_vit.build`.
        queries: number of queries per chunk, such as 256; None for all queries at once.

    Raises:
        UserError: if the model has no attention, relative positions, or dropout of the attention probabilities.
    """
    check_integers("queries", queries)
    layers = [layer for layer in model.layers if isinstance(layer, DotProductAttention)]
    biased = any(isinstance(layer, RelativePositions | NoSelfAttention | MaskAttention) for layer in model.layers)
    if not layers or biased or any(layer.dropout_rate for layer in layers):
        raise UserError(
            "Only attention without relative positions, masks and dropout of the probabilities is computed in chunks, "
            f"and the model {model.name!r} has other attention or none; leave chunk_attention out."
        )
    for layer in layers:
        layer.queries_at_a_time = queries


def chunk_long_attention(network: keras.Model) -> None:
    """Compute the attention of many tokens in chunks of queries, where `chunk_attention` can.

    Not on JAX, whose fused attention keeps no probabilities, and works without chunks only.
    """
    layers = [layer for layer in network.layers if isinstance(layer, DotProductAttention)]
    if keras.backend.backend() == "jax" or any(layer.queries_at_a_time for layer in layers):
        return
    if max((layer.input[0].shape[1] for layer in layers), default=0) > _MANY_TOKENS:
        with contextlib.suppress(UserError):  # it refuses relative positions and dropout of the probabilities
            chunk_attention(network, _QUERIES)


def attention_probabilities(query, key, attention_bias=None, *, scaled: bool = False):
    """softmax(q k / sqrt(d)) per head: (B, H, N, d) and (B, H, d, M) -> (B, H, N, M), rows summing to 1.

    The query is scaled before the product, as in flax, unless it is already `scaled`. The softmax is always computed in
    float32. `attention_bias` (B, H, N, M), of RelativePositions or NoSelfAttention, is added before the softmax.
    """
    if not scaled:
        query = query * (query.shape[-1] ** -0.5)
    logits = ops.matmul(query, key)  # (B, H, N, M)
    if attention_bias is not None:
        logits = logits + attention_bias
    return ops.cast(ops.softmax(ops.cast(logits, "float32"), axis=-1), query.dtype)


def split_heads(tokens, num_heads: int, *, transposed: bool = False):
    """Tokens (B, N, D) -> (B, H, N, d), or (B, H, d, N)."""
    heads = ops.reshape(tokens, (-1, tokens.shape[1], num_heads, tokens.shape[-1] // num_heads))
    return ops.transpose(heads, (0, 2, 3, 1) if transposed else (0, 2, 1, 3))


def join_heads(heads):
    """(B, H, N, d) -> tokens (B, N, D)."""
    _, num_heads, num_tokens, width = heads.shape
    return ops.reshape(ops.transpose(heads, (0, 2, 1, 3)), (-1, num_tokens, num_heads * width))


@keras.saving.register_keras_serializable(PACKAGE)
class DotProductAttention(keras.layers.Layer):
    """Multi-head attention between projected tokens; the projections are separate layers.

    Call: query (B, N, D), key (B, M, D), value (B, M, D), perhaps an attention bias (B, H, N, M) -> (B, N, D). In
    training, each probability is dropped with `dropout_rate`, for every head and query by itself (flax:
    broadcast_dropout=False).

    `queries_at_a_time` is set by `chunk_attention` and is not saved.

    On JAX, attention without dropout, attention bias and chunks is one operation: on GPUs since Ampere that of cuDNN
    in bfloat16 and float16, else that of XLA.
    """

    # Whether the query already includes the factor 1 / sqrt(d). Only exported inference models set it.
    scaled = False

    def __init__(self, num_heads: int, dropout_rate: float = 0.0, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.dropout_rate = dropout_rate
        self.dropout = keras.layers.Dropout(dropout_rate) if dropout_rate else None
        self.queries_at_a_time: int | None = None

    def call(self, query, key, value, attention_bias=None, training=None):
        in_chunks = self.queries_at_a_time is not None and self.queries_at_a_time < query.shape[1]
        drops = self.dropout is not None and training
        if not in_chunks and not drops and attention_bias is None and keras.backend.backend() == "jax":
            return self._in_one_operation(query, key, value)
        key, value = self.key_heads(key), split_heads(value, self.num_heads)
        if in_chunks:
            return self._in_chunks(query, key, value)
        probabilities = self.probabilities(split_heads(query, self.num_heads), key, attention_bias)
        return join_heads(self.weighted_values(probabilities, value, training))

    def key_heads(self, key):
        """Split keys (B, M, D) into heads for `probabilities`: (B, H, d, M)."""
        return split_heads(key, self.num_heads, transposed=True)

    def probabilities(self, query, key, attention_bias=None):
        """See attention_probabilities."""
        return attention_probabilities(query, key, attention_bias)  # (B, H, N, M)

    def weighted_values(self, probabilities, value, training=None):
        """The mean of the values (B, H, M, d) by probabilities (B, H, N, M), some of them dropped: (B, H, N, d)."""
        if self.dropout is not None:
            probabilities = self.dropout(probabilities, training=training)
        return ops.matmul(probabilities, value)

    def _in_one_operation(self, query, key, value):
        """The same without dropout and attention_bias: (B, N, D), (B, M, D) and (B, M, D) -> (B, N, D)."""
        heads = self.num_heads, query.shape[-1] // self.num_heads
        query, key, value = (ops.reshape(x, (-1, x.shape[1], *heads)) for x in (query, key, value))
        if runs_on_cudnn(keras.backend.standardize_dtype(query.dtype), heads[1]):
            outputs = fused_attention()(query, key, value)
        else:
            # Left to choose, Keras 3.15 would take a kernel with a causal mask on a TPU, although none is given.
            outputs = ops.dot_product_attention(query, key, value, flash_attention=False)
        return ops.reshape(outputs, (-1, query.shape[1], heads[0] * heads[1]))

    def _in_chunks(self, query, key, value):
        """The same, for c queries after the others, so that (B, H, c, M) are the most probabilities at a time.

        Query (B, N, D) and heads of key and value -> (B, N, D).
        """
        _, num_queries, width = query.shape
        num_chunks = -(-num_queries // self.queries_at_a_time)
        size = -(-num_queries // num_chunks)  # nearly equal chunks need little padding
        missing = num_chunks * size - num_queries  # padding of the last chunk, removed below
        chunks = ops.pad(query, ((0, 0), (0, missing), (0, 0)))
        chunks = ops.reshape(chunks, (-1, num_chunks, size, self.num_heads, width // self.num_heads))
        # Recompute chunks for the gradient: stored chunks would need as much memory as full attention.
        attend = keras.remat(lambda c, key, value: self.weighted_values(self.probabilities(c, key), value))
        chunks = ops.transpose(chunks, (1, 0, 3, 2, 4))  # (N / c, B, H, c, d)
        outputs = ops.map(lambda c: attend(c, key, value), chunks)
        outputs = ops.transpose(outputs, (1, 0, 3, 2, 4))  # (B, N / c, c, H, d)
        return ops.reshape(outputs, (-1, num_queries + missing, width))[:, :num_queries]

    def compute_output_shape(self, query_shape, key_shape, value_shape, attention_bias_shape=None):
        return query_shape


@keras.saving.register_keras_serializable(PACKAGE)
class AttentionProbabilities(keras.layers.Layer):
    """The probabilities that DotProductAttention uses at inference, as an output (B, H, N, M)."""

    def __init__(self, num_heads: int, scaled: bool = False, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.scaled = scaled

    def call(self, query, key, attention_bias=None):
        query, key = split_heads(query, self.num_heads), split_heads(key, self.num_heads, transposed=True)
        return attention_probabilities(query, key, attention_bias, scaled=self.scaled)


@keras.saving.register_keras_serializable(PACKAGE)
class RelativePositions(keras.layers.Layer):
    """An attention bias that depends on the offset between two tokens: query (B, N, D) -> (B, H, N, N).

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
        self.embedding = self.add_weight(name="embedding", shape=shape, initializer=small_normal())

    def call(self, query):
        num_tokens, reach = query.shape[1], self.embedding.shape[0]  # N, 2 N - 1
        keys = ops.cast(self.embedding, query.dtype)  # row r is for p_key - p_query = r - (N - 1)
        query = split_heads(query, self.num_heads)  # (B, H, N, d)
        logits = ops.matmul(query * (keys.shape[-1] ** -0.5), ops.transpose(keys))  # (B, H, N, 2 N - 1)
        # Shift each query's row by one more step: pad one column, then reshape to the old width.
        logits = ops.reshape(ops.pad(logits, ((0, 0), (0, 0), (0, 0), (0, 1))), (-1, self.num_heads, 2 * num_tokens**2))
        logits = ops.reshape(logits[:, :, : num_tokens * reach], (-1, self.num_heads, num_tokens, reach))
        return logits[:, :, :, num_tokens - 1 :]  # (B, H, N, N)


@keras.saving.register_keras_serializable(PACKAGE)
class HeadScale(keras.layers.Layer):
    """Multiply the query (B, N, D) of each head by a learned factor, initially 1: the inverse of a temperature."""

    def __init__(self, num_heads: int, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads

    def build(self, input_shape):
        self.scale = self.add_weight(name="scale", shape=(self.num_heads,), initializer=initial("ones"))

    def call(self, query):
        factors = ops.repeat(self.scale, query.shape[-1] // self.num_heads)  # (D,)
        return query * ops.cast(factors, query.dtype)


@keras.saving.register_keras_serializable(PACKAGE)
class NoSelfAttention(keras.layers.Layer):
    """An attention bias that keeps each token from attending to itself: query (B, N, D) -> (1, 1, N, N)."""

    def call(self, query):
        return ops.cast(FORBIDDEN * ops.eye(query.shape[1])[None, None], query.dtype)


@keras.saving.register_keras_serializable(PACKAGE)
class MaskAttention(keras.layers.Layer):
    """An attention bias that keeps each query token inside of the mask that it predicts.

    "Your ViT is Secretly an Image Segmentation Model" (arXiv 2503.19108), section 3.2, as EoMT of transformers does.
    Before each block, each query of each image is masked with the probability of the block, the weight `probabilities`
    (blocks,), which training anneals from 1 to 0. Other tokens attend to all tokens, and all tokens attend to those
    before the patches.

    Outside training, the same queries of every image are masked, and a block of probability 0 keeps the bias of the
    block before it, as in the original.

    Call: mask logits (B, h', w', Q), the number of the block, the bias of the block before it or None -> (B, 1, N, N)
    for N = Q + num_prefix_tokens + patches.

    Args:
        num_blocks: blocks with a probability of their own.
        grid: rows and columns of patches.
        num_prefix_tokens: tokens between queries and patches.
    """

    def __init__(self, num_blocks: int, grid: tuple[int, int], num_prefix_tokens: int, **kwargs):
        super().__init__(**kwargs)
        self.num_blocks = num_blocks
        self.grid = tuple(grid)
        self.num_prefix_tokens = num_prefix_tokens
        self.seed_generator = keras.random.SeedGenerator()

    def build(self, mask_logits_shape, before_shape=None):
        self.probabilities = self.add_weight(
            name="probabilities", shape=(self.num_blocks,), initializer="ones", trainable=False
        )

    def call(self, mask_logits, before=None, block=0, training=False):
        num_queries, num_patches = mask_logits.shape[-1], self.grid[0] * self.grid[1]
        logits = ops.image.resize(
            ops.cast(mask_logits, "float32"), self.grid, interpolation="bilinear", data_format=CHANNELS_LAST
        )
        inside = ops.transpose(ops.reshape(logits, (-1, num_patches, num_queries)), (0, 2, 1)) > 0  # (B, Q, patches)
        probability = ops.cast(self.probabilities[block], "float32")
        shape = (ops.shape(mask_logits)[0] if training else 1, num_queries, 1)
        drawn = keras.random.uniform(shape, dtype="float32", seed=self.seed_generator if training else block)
        seen = ops.logical_or(inside, drawn >= probability)
        bias = ops.where(seen, 0.0, FORBIDDEN)
        others = self.num_prefix_tokens + num_patches
        bias = ops.pad(bias, ((0, 0), (0, others), (num_queries + self.num_prefix_tokens, 0)))[:, None]  # (B, 1, N, N)
        bias = ops.cast(bias, mask_logits.dtype)
        if training:
            return bias
        without = ops.zeros_like(bias) if before is None else before
        return ops.where(probability > 0.0, bias, without)


class _Axis(keras.layers.Layer):
    """Base of the layers that convert between grid tokens and sequences along one axis, "row" or "column"."""

    def __init__(self, axis: str, grid: tuple[int, int], **kwargs):
        super().__init__(**kwargs)
        self.axis = axis
        self.grid = tuple(grid)


@keras.saving.register_keras_serializable(PACKAGE)
class FoldAxis(_Axis):
    """Every row ("row") or column ("column") of a grid of tokens as a sequence: (B, h * w, D) -> (B * h, w, D)."""

    def call(self, tokens):
        (rows, columns), width = self.grid, tokens.shape[-1]
        if self.axis == "row":
            return ops.reshape(tokens, (-1, columns, width))
        tokens = ops.transpose(ops.reshape(tokens, (-1, rows, columns, width)), (0, 2, 1, 3))
        return ops.reshape(tokens, (-1, rows, width))

    def compute_output_shape(self, input_shape):
        sequences, length = self.grid if self.axis == "row" else self.grid[::-1]
        return input_shape[0] and input_shape[0] * sequences, length, input_shape[-1]


@keras.saving.register_keras_serializable(PACKAGE)
class UnfoldAxis(_Axis):
    """The inverse of FoldAxis: (B * h, w, D) -> (B, h * w, D)."""

    def call(self, tokens):
        (rows, columns), width = self.grid, tokens.shape[-1]
        if self.axis == "column":
            tokens = ops.transpose(ops.reshape(tokens, (-1, columns, rows, width)), (0, 2, 1, 3))
        return ops.reshape(tokens, (-1, rows * columns, width))

    def compute_output_shape(self, input_shape):
        sequences, length = self.grid if self.axis == "row" else self.grid[::-1]
        return input_shape[0] and input_shape[0] // sequences, sequences * length, input_shape[-1]
