"""The model as an artifact needs it: plain convolutions, one dtype, nothing that only training knows."""

from collections.abc import Mapping
from types import MappingProxyType

import keras
import numpy as np
from keras import ops

from keras_vit.layers import StandardizedConv2D, TokenDense, weights_will_be_loaded


def in_dtype(model: keras.Model, dtype: str) -> keras.Model:
    """The model with all weights and all arithmetic in "float32" or "bfloat16"; itself where it is so already.

    A model trained under a mixed policy has float32 weights and loses nothing in float32. Softmax and the statistics
    of the norms stay float32 in any case.
    """
    if all(layer.dtype_policy.name == dtype for layer in model.layers):
        return model
    return _rebuilt(model, dtype)


def plain(
    model: keras.Model, dtype: str = "float32", *, for_onnx: bool = False, fold_norms: bool = False
) -> keras.Model:
    """The model in one dtype with its standardised convolutions baked into plain ones, equal to float rounding.

    Args:
        model: any of ours.
        dtype: "float32" or "bfloat16".
        for_onnx: write what ONNX and its runtime get wrong in another way: see _ErfDense, _NearlyZeroPadding.
        fold_norms: put scale and offset of the norms into the dense layers behind them, for runtimes that compute a
            norm operation by operation: TensorFlow goes over all tokens five times for what then takes it two.
    """
    rewritten = for_onnx and any(_is_exact_gelu(layer) or _is_pool_padding(layer) for layer in model.layers)
    folds = _norms_and_readers(model) if fold_norms else {}
    if rewritten or folds or any(isinstance(layer, StandardizedConv2D) for layer in model.layers):
        return _rebuilt(model, dtype, bake=True, for_onnx=for_onnx, folds=folds)
    return in_dtype(model, dtype)


class _ErfDense(TokenDense):
    """A dense layer and the exact GELU as 0.5 x (1 + erf(x / sqrt 2)).

    TensorFlow's own goes through erfc, for which ONNX has no operator; tf2onnx writes one all the same.
    """

    def call(self, tokens):
        x = super().call(tokens)
        return 0.5 * x * (1.0 + ops.erf(x * 0.5**0.5))


class _NearlyZeroPadding(keras.layers.ZeroPadding2D):
    """Zeros around the images of a max pooling, as 1e-30.

    ONNX Runtime (1.31) merges a padding with exact zeros into the pooling behind it, which knows only padding that
    never is the maximum.
    """

    def call(self, images):
        return ops.pad(images, ((0, 0), *self.padding, (0, 0)), constant_values=1e-30)


def _is_exact_gelu(layer: keras.layers.Layer) -> bool:
    return isinstance(layer, TokenDense) and layer.activation == "gelu_erf"


def _is_pool_padding(layer: keras.layers.Layer) -> bool:
    return layer.name == "resnet.root_block.pool_padding"


# The norms of an encoder block, and who reads them and nothing else.
_READERS = {
    "LayerNorm_0": [f"MultiHeadDotProductAttention_1.{projection}" for projection in ("query", "key", "value")],
    "LayerNorm_2": ["MlpBlock_3.Dense_0"],
}


def _norms_and_readers(model: keras.Model) -> dict[str, list[str]]:
    """The names of the norms in the encoder blocks of a model, and of the dense layers that read them."""
    names = {layer.name for layer in model.layers}
    found = {}
    for name in sorted(names):
        block, _, last = name.rpartition(".")
        readers = [f"{block}.{reader}" for reader in _READERS.get(last, [])]
        if readers and names.issuperset(readers):
            found[name] = readers
    return found


def _folded(weights: list[np.ndarray], norm: keras.layers.LayerNormalization) -> list[np.ndarray]:
    """Kernel (D, M) and bias (M,) of a dense layer that reads a norm, with the norm's scale and offset in them."""
    gamma, beta = (np.asarray(weight.value, np.float64) for weight in (norm.gamma, norm.beta))
    kernel, *bias = (weight.astype(np.float32) for weight in weights)  # models without a bias of q, k, v get one
    return [(gamma[:, None] * kernel).astype(np.float32), (beta @ kernel + sum(bias)).astype(np.float32)]


def _rebuilt(
    model: keras.Model,
    dtype: str,
    *,
    bake: bool = False,
    for_onnx: bool = False,
    folds: Mapping[str, list[str]] = MappingProxyType({}),
) -> keras.Model:
    """A copy with layers of the same names; `folds` are norms with the names of their readers."""
    norm_of = {reader: norm for norm, readers in folds.items() for reader in readers}

    def bakes(layer: keras.layers.Layer) -> bool:
        return bake and isinstance(layer, StandardizedConv2D)

    def copied(layer: keras.layers.Layer) -> keras.layers.Layer:
        if bakes(layer):
            return keras.layers.Conv2D(
                layer.filters,
                layer.kernel_size,
                layer.strides,
                layer.padding,
                use_bias=False,
                kernel_initializer="zeros",
                dtype=dtype,
                name=layer.name,
            )
        config = {**layer.get_config(), "dtype": dtype}
        if layer.name in folds:
            config |= {"scale": False, "center": False}
        if layer.name in norm_of:
            config |= {"use_bias": True}
        if for_onnx and _is_exact_gelu(layer):
            return _ErfDense.from_config({**config, "activation": None})
        if for_onnx and _is_pool_padding(layer):
            return _NearlyZeroPadding.from_config(config)
        return type(layer).from_config(config)

    with weights_will_be_loaded():
        copy = keras.models.clone_model(model, clone_function=copied)
    for layer in model.layers:
        weights = [np.asarray(weight.value) for weight in layer.weights]
        if bakes(layer):
            weights = [standardized(layer, weights[0])]
        elif layer.name in norm_of:
            weights = _folded(weights, model.get_layer(norm_of[layer.name]))
        elif layer.name in folds:
            weights = []
        copy.get_layer(layer.name).set_weights(weights)
    return copy


def standardized(layer: StandardizedConv2D, kernel: np.ndarray) -> np.ndarray:
    """The kernel (h, w, in, out) float32 that the layer convolves with."""
    centred = kernel - kernel.mean(axis=(0, 1, 2), dtype=np.float64)
    deviation = np.sqrt(np.mean(np.square(centred), axis=(0, 1, 2)) + layer.variance_epsilon)
    return (centred / (deviation + layer.deviation_epsilon)).astype(np.float32)
