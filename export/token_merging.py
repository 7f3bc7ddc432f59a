"""Token merging (ToMe): each block joins its most similar patch tokens, so that later blocks compute fewer.

Paper: "Token Merging: Your ViT But Faster" (arXiv 2210.09461), section 3; official code facebookresearch/ToMe,
`tome/merge.py` and `tome/patch/timm.py`. The weights stay as they are, and the outputs change: how much is measured.

Axes: B batch, N tokens, P patch tokens, S tokens that may be merged away, T tokens that they are merged into, D width,
H heads, d width of a head.
"""

import typing
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from keras_vit import ViTConfig, config_of, preprocessing_of
from keras_vit.checkpoints.load import check_unchanged
from keras_vit.errors import Rules
from keras_vit.models.attention import DotProductAttention, split_heads
from keras_vit.models.layers import PoolTokens, WeightedMean


def merging_rules(model: keras.Model, merged: int) -> Rules:
    """Yield the rules of a model of which so many tokens can be merged in each block.

    It must be a ViT whose tokens keep no place after the input, and half of its patch tokens are the most.
    """
    config = config_of(model)
    check_unchanged(model, "leave --merge-tokens out")
    yield (
        not isinstance(config, ViTConfig),
        f"The model {model.name!r} is a ResNet without tokens; leave --merge-tokens out.",
    )
    config = typing.cast(ViTConfig, config)
    positions = config.position_embedding
    for reason, present in (
        ("axial attention", config.axial),
        ("locality self-attention", config.locality_attention),
        (f"{positions} positions in every block", positions == "relative" or config.is_rotary),
        ("positions added before every block", config.position_injection != "input"),
    ):
        yield (
            present,
            f"The model {model.name!r} has {reason}, for which merged tokens have no place; leave --merge-tokens out.",
        )
    rows, columns = config.grid(preprocessing_of(model).image_size)
    yield (
        merged > rows * columns // 2,
        f"Of {rows * columns} patch tokens a block merges at most {rows * columns // 2}, but --merge-tokens is "
        f"{merged}; give fewer.",
    )


def calling_with_merged_tokens(model: keras.Model, merged: int, call: Callable) -> Callable:
    """The `call_function` with which keras.models.clone_model merges tokens after the attention of each block.

    From the first merging on, each attention adds the logarithm of the tokens' sizes to its logits, and the pooling of
    the patches is the mean weighted with the sizes. A block whose attention returns the class token alone merges
    nothing.

    Args:
        model: a model that keeps `merging_rules`.
        merged: tokens to merge in each block; at most half of the patch tokens are.
        call: calls a layer with its arguments otherwise.
    """
    config = config_of(model)
    assert isinstance(config, ViTConfig)
    prefix = config.num_prefix_tokens
    residuals = {f"Transformer.encoderblock_{layer}.residual" for layer in range(config.num_layers)}
    state: dict[str, keras.KerasTensor] = {}  # "key": (B, N, D) of the last attention; "sizes": (B, N, 1)

    def log_sizes(dtype: str):
        return ops.cast(ops.transpose(ops.log(state["sizes"]), (0, 2, 1)), dtype)[:, None]  # (B, 1, 1, N)

    def call_layer(layer, *arguments, **options):
        if isinstance(layer, DotProductAttention):
            state["key"] = arguments[1]
            if "sizes" in state:
                arguments = (*arguments, log_sizes(layer.compute_dtype))
        elif isinstance(layer, WeightedMean) and "sizes" in state:
            tokens, logits = arguments
            arguments = tokens, logits + ops.cast(ops.log(state["sizes"]), logits.dtype)
        elif isinstance(layer, PoolTokens) and "gap" in layer.kind and "sizes" in state:
            return _PoolMergedTokens(layer.kind, prefix, dtype=layer.dtype_policy, name=layer.name)(
                arguments[0], state["sizes"]
            )
        output = call(layer, *arguments, **options)
        if layer.name not in residuals or output.shape[1] == 1:
            return output
        number = min(merged, (output.shape[1] - prefix) // 2)
        if number:
            heads = config.num_heads
            name = f"{layer.name.removesuffix('residual')}merged"
            merging = MergeTokens(number, prefix, heads, dtype=layer.dtype_policy, name=name)
            output, state["sizes"] = merging(output, state["key"], state.get("sizes"))
        return output

    return call_layer


class MergeTokens(keras.layers.Layer):
    """Bipartite soft matching: the `merged` most similar pairs of patch tokens become their means.

    Call: tokens (B, N, D), key (B, N, D) of the block's attention and, after a first merging, sizes (B, N, 1) float32:
    how many patches each token stands for -> tokens (B, N - merged, D) and their sizes. Every second patch token is
    compared with the others, by the cosine of their keys' mean over the heads. A mean is weighted with the sizes. The
    tokens left out of the merging keep their order, and those that others are merged into come last.
    """

    def __init__(self, merged: int, num_prefix_tokens: int, num_heads: int, **kwargs):
        super().__init__(autocast=False, **kwargs)  # sizes stay float32 in every dtype
        self.merged = merged
        self.num_prefix_tokens = num_prefix_tokens
        self.num_heads = num_heads

    def call(self, tokens, key, sizes=None):
        x, prefix = tf.cast(tokens, tf.float32), self.num_prefix_tokens
        weights = tf.ones_like(x[:, :, :1]) if sizes is None else sizes
        # The official code splits all tokens by even and odd indices, and leaves the class token out.
        sources = np.arange(prefix + prefix % 2, x.shape[1], 2, np.int32)
        targets = np.arange(prefix + 1 - prefix % 2, x.shape[1], 2, np.int32)
        metric = tf.reduce_mean(split_heads(tf.cast(key, tf.float32), self.num_heads), axis=1)  # (B, N, d)
        metric = tf.math.l2_normalize(metric, axis=-1)
        scores = tf.matmul(tf.gather(metric, sources, axis=1), tf.gather(metric, targets, axis=1), transpose_b=True)
        best = tf.math.top_k(scores, 1)  # of (B, S, T)
        _, order = tf.math.top_k(best.values[:, :, 0], len(sources))  # (B, S), the most similar first
        gone, kept = order[:, : self.merged], tf.sort(order[:, self.merged :], axis=-1)
        target = tf.gather(best.indices[:, :, 0], gone, batch_dims=1)  # (B, merged)

        # One gather and one small product: slices with a step, and concatenating, take much longer on a CPU.
        first = np.concatenate([np.arange(prefix, dtype=np.int32), targets])
        same = tf.repeat(first[None], tf.shape(x)[0], axis=0)
        rows = tf.concat([same[:, :prefix], tf.gather(sources, kept), same[:, prefix:]], axis=1)  # (B, N - merged)
        begin = x.shape[1] - self.merged - len(targets)
        assignment = tf.one_hot(target + begin, x.shape[1] - self.merged, axis=1)  # (B, N - merged, merged)

        def joined(values):
            """Sum the values (B, N, ·) of merged tokens: (B, N - merged, ·)."""
            added = tf.matmul(assignment, tf.gather(values, tf.gather(sources, gone), batch_dims=1))
            return tf.gather(values, rows, batch_dims=1) + added

        sizes = joined(weights)
        return tf.cast(joined(x * weights) / sizes, tokens.dtype), sizes


class _PoolMergedTokens(PoolTokens):
    """The mean of the patches from merged tokens (B, N, D) and their sizes (B, N, 1)."""

    def __init__(self, kind: str, num_prefix_tokens: int, **kwargs):
        super().__init__(kind, num_prefix_tokens, autocast=False, **kwargs)

    def call(self, tokens, sizes):
        patches = ops.cast(tokens[:, self.num_prefix_tokens :], "float32")
        sizes = sizes[:, self.num_prefix_tokens :]
        mean = ops.cast(ops.sum(patches * sizes, axis=1) / ops.sum(sizes, axis=1), tokens.dtype)  # (B, D)
        return mean if self.kind == "gap" else ops.concatenate([tokens[:, 0], mean], axis=-1)

    def compute_output_shape(self, tokens_shape, sizes_shape):
        return super().compute_output_shape(tokens_shape)
