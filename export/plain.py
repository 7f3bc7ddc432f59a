"""The model as an artifact needs it: plain convolutions, one dtype, nothing that only training knows."""

import re

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from keras_vit.layers import SinCosPositions, StandardizedConv2D, TokenDense, weights_will_be_loaded


def in_dtype(model: keras.Model, dtype: str) -> keras.Model:
    """The model with all weights and all arithmetic in "float32" or "bfloat16"; itself where it is so already.

    A model trained under a mixed policy has float32 weights and loses nothing in float32. Softmax and the statistics
    of the norms stay float32 in any case.
    """
    if all(layer.dtype_policy.name == dtype for layer in model.layers):
        return model
    return _rebuilt(model, dtype)


def plain(
    model: keras.Model, dtype: str = "float32", *, for_onnx: bool = False, for_tensorflow: bool = False
) -> keras.Model:
    """The model in one dtype with its standardised convolutions baked into plain ones, equal to float rounding.

    Args:
        model: any of ours.
        dtype: "float32" or "bfloat16".
        for_onnx: write what ONNX and its runtime get wrong in another way: see _ErfDense, _NearlyZeroPadding.
        for_tensorflow: write the norms as what TensorFlow computes in one pass: see _OnePassNorm. What the blocks pass
            on is then larger by a factor.
    """
    rewritten = for_onnx and any(_is_exact_gelu(layer) or _is_pool_padding(layer) for layer in model.layers)
    factor = _factor_for_one_pass(model) if for_tensorflow else None
    if rewritten or factor or any(isinstance(layer, StandardizedConv2D) for layer in model.layers):
        return _rebuilt(model, dtype, bake=True, for_onnx=for_onnx, factor=factor)
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


# The epsilon of TensorFlow's LayerNorm in one pass, whatever the graph says.
_ONE_PASS_EPSILON = 1e-3
# All that adds to what the blocks pass on, and all norms that read it.
_BLOCK = r"Transformer\.encoderblock_\d+(\.row|\.column)?\."
_WRITERS = re.compile(
    rf"embedding|cls|Transformer\.posembed_input|{_BLOCK}"
    r"(posembed_input|MultiHeadDotProductAttention_1\.out|MlpBlock_3\.Dense_1)"
)
_NORMS = re.compile(rf"Transformer\.encoder_norm|{_BLOCK}LayerNorm_[02]")


class _OnePassNorm(keras.layers.LayerNormalization):
    """LayerNorm in the one form that TensorFlow, on a CPU with oneDNN, computes in one pass instead of five.

    Its rewriting of the graph asks for a positive axis and for constants, and puts 1e-3 in the place of any epsilon.
    So that must be the epsilon that is meant: the norm of f x with epsilon 1e-3 is that of x with 1e-3 / f^2, and
    whatever writes x is made larger by f in its weights. The numbers are the same where nothing is rewritten.
    """

    def set_constants(self, gamma: np.ndarray, beta: np.ndarray) -> None:
        """Scale and offset (D,) float32."""
        self._constants = gamma, beta

    def call(self, tokens):
        gamma, beta = (ops.convert_to_tensor(constant) for constant in self._constants)
        x, axis = ops.cast(tokens, "float32"), len(tokens.shape) - 1
        mean = ops.mean(x, axis=axis, keepdims=True)
        variance = ops.mean(tf.math.squared_difference(x, mean), axis=axis, keepdims=True)
        scale = ops.rsqrt(variance + self.epsilon) * gamma
        return ops.cast(x * scale + (beta - scale * mean), self.compute_dtype)


def _factor_for_one_pass(model: keras.Model) -> float | None:
    """What the blocks of a model shall pass on in the place of 1, for _OnePassNorm; None where it has no norms.

    Nor can fixed positions be made larger.
    """
    epsilons = {layer.epsilon for layer in model.layers if _NORMS.fullmatch(layer.name)}
    fixed = any(isinstance(layer, SinCosPositions) for layer in model.layers)
    if fixed or len(epsilons) != 1 or 0.0 in epsilons:
        return None
    return (_ONE_PASS_EPSILON / epsilons.pop()) ** 0.5


def _rebuilt(
    model: keras.Model, dtype: str, *, bake: bool = False, for_onnx: bool = False, factor: float | None = None
) -> keras.Model:
    """A copy with layers of the same names; with a factor, its blocks pass on that much more, to _OnePassNorm."""

    def bakes(layer: keras.layers.Layer) -> bool:
        return bake and isinstance(layer, StandardizedConv2D)

    def one_pass(layer: keras.layers.Layer) -> bool:
        return factor is not None and bool(_NORMS.fullmatch(layer.name))

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
        if one_pass(layer):
            return _OnePassNorm(epsilon=_ONE_PASS_EPSILON, scale=False, center=False, dtype=dtype, name=layer.name)
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
        elif one_pass(layer):
            copy.get_layer(layer.name).set_constants(*(weight.astype(np.float32) for weight in weights))
            weights = []
        elif factor is not None and _WRITERS.fullmatch(layer.name):
            weights = [(weight.astype(np.float64) * factor).astype(np.float32) for weight in weights]
        copy.get_layer(layer.name).set_weights(weights)
    return copy


def standardized(layer: StandardizedConv2D, kernel: np.ndarray) -> np.ndarray:
    """The kernel (h, w, in, out) float32 that the layer convolves with."""
    centred = kernel - kernel.mean(axis=(0, 1, 2), dtype=np.float64)
    deviation = np.sqrt(np.mean(np.square(centred), axis=(0, 1, 2)) + layer.variance_epsilon)
    return (centred / (deviation + layer.deviation_epsilon)).astype(np.float32)
