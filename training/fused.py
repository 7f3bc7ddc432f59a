"""The network in the form that a CPU trains fastest: GELU and LayerNorm each as one pass over memory.

TensorFlow computes both operation by operation, eight passes over the tokens for a GELU and as many for its gradient,
and between large matrix products memory is what a step waits for. Here the passes are merged by XLA, each with a
gradient of its own; the products stay those of oneDNN, which XLA's do not reach on a CPU. Inside, the arithmetic is
float32 whatever the layers compute with.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from keras_vit.layers import TokenDense

# sqrt(2 / pi) and the cubic term of the tanh form ("Gaussian Error Linear Units", arXiv 1606.08415).
_TANH_SCALE, _TANH_CUBIC = 0.7978845608028654, 0.044715
_INVERSE_SQRT_2, _INVERSE_SQRT_2_PI = 0.7071067811865476, 0.3989422804014327


def helps() -> bool:
    """Whether this process trains on CPUs. On a GPU it was not measured, and a TPU compiles the whole step anyway."""
    return not any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))


def fused(network: keras.Model) -> keras.Model:
    """The same layers with the same weights, called in another way; the numbers are equal to float rounding."""
    kernels = {"gelu_tanh": _bias_gelu(_gelu_tanh), "gelu_erf": _bias_gelu(_gelu_erf)}
    norm = _layer_norm()

    def wrapped(layer):
        if not isinstance(layer, keras.layers.Layer):
            return layer  # an operation without weights, such as a slice
        if isinstance(layer, TokenDense) and layer.activation in kernels:
            return _Dense(layer, kernels[layer.activation])
        if isinstance(layer, keras.layers.LayerNormalization):
            return _Norm(layer, norm)
        return _Wrapped(layer)

    return keras.models.clone_model(network, clone_function=wrapped)


class _Wrapped(keras.layers.Layer):
    """A layer of another model. Called by itself, it would have two outputs, and keras.Layer.output none."""

    def __init__(self, layer: keras.layers.Layer):
        super().__init__(name=layer.name, dtype=layer.dtype_policy, autocast=layer.autocast)
        self.layer = layer
        self.built = True

    def call(self, *inputs, **options):
        return self.layer(*inputs, **options)

    def compute_output_spec(self, *inputs, **options):
        return self.layer.compute_output_spec(*inputs, **options)


class _Dense(_Wrapped):
    """A dense layer on tokens, its bias and GELU in one."""

    def __init__(self, layer: TokenDense, bias_gelu: Callable):
        super().__init__(layer)
        self._bias_gelu = bias_gelu

    def call(self, tokens):
        flat = tf.reshape(tokens, (-1, tokens.shape[-1]))  # (B * N, D)
        flat = self._bias_gelu(tf.matmul(flat, self.layer.kernel), tf.convert_to_tensor(self.layer.bias))
        return tf.reshape(flat, (-1, *tokens.shape[1:-1], self.layer.units))  # (B, N, units)


class _Norm(_Wrapped):
    """A LayerNorm over the last axis."""

    def __init__(self, layer: keras.layers.LayerNormalization, layer_norm: Callable):
        super().__init__(layer)
        self._layer_norm = layer_norm

    def call(self, tokens):
        gamma, beta = (tf.convert_to_tensor(weight) for weight in (self.layer.gamma, self.layer.beta))
        return self._layer_norm(tokens, gamma, beta, self.layer.epsilon, self.compute_dtype)


def _bias_gelu(gelu: Callable) -> Callable:
    """gelu(products + bias) of products (N, M) and bias (M,), where `gelu` gives the value and the slope at x."""

    @_compiled
    def value(products, bias):
        return tf.cast(gelu(_float32(products) + _float32(bias))[0], products.dtype)

    @_compiled
    def gradient(products, bias, upstream):
        through = _float32(upstream) * gelu(_float32(products) + _float32(bias))[1]
        return tf.cast(through, products.dtype), tf.cast(tf.reduce_sum(through, axis=0), bias.dtype)

    @tf.custom_gradient
    def bias_gelu(products, bias):
        return value(products, bias), lambda upstream: gradient(products, bias, upstream)

    return bias_gelu


def _gelu_tanh(x):
    """Value and slope of 0.5 x (1 + tanh(s (x + c x^3)))."""
    tanh = tf.tanh(_TANH_SCALE * x * (1.0 + _TANH_CUBIC * x * x))
    inner = _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBIC * x * x)
    return 0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner


def _gelu_erf(x):
    """Value and slope of x P(X < x), X normally distributed."""
    below = 0.5 * tf.math.erfc(-_INVERSE_SQRT_2 * x)
    return x * below, below + x * _INVERSE_SQRT_2_PI * tf.exp(-0.5 * x * x)


def _layer_norm() -> Callable:
    """LayerNorm in a dtype over the last axis of tokens (..., D) with gamma and beta (D,)."""

    @_compiled
    def value(tokens, gamma, beta, epsilon, dtype):
        x = _rows(tokens)
        mean = _row_means(x)
        inverse = tf.math.rsqrt(_row_means(tf.square(x - mean)) + epsilon)
        normed = (x - mean) * inverse * _float32(gamma) + _float32(beta)
        return tf.cast(tf.reshape(normed, tokens.shape), dtype), mean, inverse

    @_compiled
    def gradient(tokens, gamma, mean, inverse, upstream):
        normed, upstream = (_rows(tokens) - mean) * inverse, _rows(upstream)
        scaled = upstream * _float32(gamma)
        through = inverse * (scaled - _row_means(scaled) - normed * _row_means(scaled * normed))
        of_weights = (tf.cast(tf.reduce_sum(x, axis=0), gamma.dtype) for x in (upstream * normed, upstream))
        return tf.cast(tf.reshape(through, tokens.shape), tokens.dtype), *of_weights

    def layer_norm(tokens, gamma, beta, epsilon, dtype):
        @tf.custom_gradient
        def normed(tokens, gamma, beta):
            y, mean, inverse = value(tokens, gamma, beta, epsilon, dtype)
            return y, lambda upstream: gradient(tokens, gamma, mean, inverse, upstream)

        return normed(tokens, gamma, beta)

    return layer_norm


def _rows(tokens):
    return tf.reshape(_float32(tokens), (-1, tokens.shape[-1]))


def _row_means(x):
    """Means of the rows of (N, D), as (N, 1): by a product, for XLA adds up a row number by number."""
    return tf.matmul(x, tf.fill((x.shape[-1], 1), 1.0 / x.shape[-1]))


def _float32(x):
    return tf.cast(x, tf.float32)


def _compiled(function: Callable) -> Callable:
    return tf.function(function, jit_compile=True, autograph=False)
