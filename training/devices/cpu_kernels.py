"""The network in the form that a CPU trains fastest.

TensorFlow computes GELU, LayerNorm and the gradient of a softmax operation by operation, eight passes over the tokens
for a GELU and as many for its gradient, and between large matrix products memory is what a step waits for. Here each of
them is one pass, merged by XLA; the products stay those of oneDNN, which XLA's do not reach on a CPU. Inside a pass the
arithmetic is float32 whatever the layers compute with. Patches are embedded by a product, for oneDNN's gradient of the
convolution takes eight times as long in bfloat16. What only the class token is read of is computed of it alone.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from keras_vit.models.attention import DotProductAttention, join_heads, split_heads
from keras_vit.models.build import calling_class_token_only, class_token_only
from keras_vit.models.layers import TokenDense, gelu_erf, gelu_tanh

# sqrt(2 / pi) and the cubic term of the tanh form ("Gaussian Error Linear Units", arXiv 1606.08415).
_TANH_SCALE, _TANH_CUBIC = 0.7978845608028654, 0.044715
_INVERSE_SQRT_2, _INVERSE_SQRT_2_PI = 0.7071067811865476, 0.3989422804014327


def on_cpu() -> bool:
    """Whether this process trains on CPUs. On a GPU it was not measured, and a TPU compiles the whole step anyway."""
    return not any(tf.config.list_logical_devices(kind) for kind in ("GPU", "TPU"))


def with_cpu_kernels(network: keras.Model) -> keras.Model:
    """The same layers with the same weights, called in another way; the numbers are equal to float rounding."""
    add_bias = {
        keras.activations.linear: _bias_add,
        gelu_tanh: _bias_gelu(_gelu_tanh),
        gelu_erf: _bias_gelu(_gelu_erf),
    }
    norm, probabilities = _layer_norm(), _attention_probabilities()
    class_token = class_token_only(network)

    def wrapped(layer):
        if not isinstance(layer, keras.layers.Layer):
            return layer  # an operation without weights, such as a slice
        if layer.name in class_token:
            return _Wrapped(layer)  # so little that it is not worth being compiled
        if layer.quantization_mode is not None:
            return _Wrapped(layer)
        if isinstance(layer, TokenDense) and layer.use_bias and layer.activation in add_bias:
            return _Dense(layer, add_bias[layer.activation])
        if isinstance(layer, keras.layers.LayerNormalization):
            return _Norm(layer, norm)
        if isinstance(layer, DotProductAttention):
            return _Attention(layer, probabilities)
        if isinstance(layer, keras.layers.Conv2D) and _side_by_side(layer):
            return _Patches(layer)
        return _Wrapped(layer)

    return keras.models.clone_model(
        network, clone_function=wrapped, call_function=calling_class_token_only(class_token)
    )


class _Wrapped(keras.layers.Layer):
    """A layer of another model. Called by itself, it would have two outputs, and keras.Layer.output none."""

    def __init__(self, layer: keras.layers.Layer):
        super().__init__(name=layer.name, dtype=layer.compute_dtype, autocast=layer.autocast)
        self.layer = layer
        self.built = True

    def call(self, *inputs, **options):
        return self.layer(*inputs, **options)

    def compute_output_spec(self, *inputs, **options):
        return self.layer.compute_output_spec(*inputs, **options)


class _Dense(_Wrapped):
    """A dense layer on tokens, its bias and activation in one."""

    def __init__(self, layer: TokenDense, add_bias: Callable):
        super().__init__(layer)
        self._add_bias = add_bias

    def call(self, tokens):
        flat = tf.reshape(tokens, (-1, tokens.shape[-1]))  # (B * N, D)
        flat = self._add_bias(tf.matmul(flat, self.layer.kernel), tf.convert_to_tensor(self.layer.bias))
        return tf.reshape(flat, (-1, *tokens.shape[1:-1], self.layer.units))  # (B, N, units)


class _Norm(_Wrapped):
    """A LayerNorm over the last axis."""

    def __init__(self, layer: keras.layers.LayerNormalization, layer_norm: Callable):
        super().__init__(layer)
        self._layer_norm = layer_norm

    def call(self, tokens):
        gamma, beta = (tf.convert_to_tensor(weight) for weight in (self.layer.gamma, self.layer.beta))
        return self._layer_norm(tokens, gamma, beta, self.layer.epsilon, self.compute_dtype)


class _Attention(_Wrapped):
    """Attention among all tokens; in chunks or with relative positions it is as ever."""

    def __init__(self, layer: DotProductAttention, probabilities: Callable):
        super().__init__(layer)
        self._probabilities = probabilities

    def call(self, query, key, value, offset_logits=None, training=None):
        if offset_logits is not None or self.layer.queries_at_a_time is not None:
            return self.layer(query, key, value, offset_logits, training=training)
        query, key, value = (split_heads(tokens, self.layer.num_heads) for tokens in (query, key, value))
        return join_heads(self.layer.mixed(self._probabilities(query, key), value, training))


def _side_by_side(layer: keras.layers.Conv2D) -> bool:
    return layer.kernel_size == layer.strides != (1, 1) and layer.padding == "valid" and layer.use_bias


class _Patches(_Wrapped):
    """A convolution whose windows lie side by side."""

    def call(self, images):
        (height, width), (rows, columns) = self.layer.kernel_size, self.layer.compute_output_shape(images.shape)[1:3]
        images = images[:, : rows * height, : columns * width]
        windows = tf.reshape(images, (-1, rows, height, columns, width, images.shape[-1]))
        windows = tf.reshape(tf.transpose(windows, (0, 1, 3, 2, 4, 5)), (-1, height * width * images.shape[-1]))
        patches = tf.matmul(windows, tf.reshape(self.layer.kernel, (windows.shape[-1], self.layer.filters)))
        patches = _bias_add(patches, tf.convert_to_tensor(self.layer.bias))
        return tf.reshape(patches, (-1, rows, columns, self.layer.filters))


@tf.custom_gradient
def _bias_add(products, bias):
    """The sum of products (N, M) and bias (M,).

    TensorFlow's gradient by the bias adds up thousands of rows of bfloat16 in bfloat16. A product adds up in float32.
    """

    def gradient(upstream):
        if upstream.dtype == tf.bfloat16:
            return upstream, tf.matmul(tf.ones((1, tf.shape(upstream)[0]), upstream.dtype), upstream)[0]
        return upstream, tf.raw_ops.BiasAddGrad(out_backprop=upstream)

    return tf.nn.bias_add(products, bias), gradient


def _bias_gelu(gelu: Callable) -> Callable:
    """The GELU of products (N, M) + bias (M,), where `gelu` gives the value and the slope at x."""

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
        mean = _row_sums(x) / x.shape[-1]
        inverse = tf.math.rsqrt(_row_sums(tf.square(x - mean)) / x.shape[-1] + epsilon)
        normed = (x - mean) * inverse * _float32(gamma) + _float32(beta)
        return tf.cast(tf.reshape(normed, tf.shape(tokens)), dtype), mean, inverse

    @_compiled
    def gradient(tokens, gamma, mean, inverse, upstream):
        normed, upstream = (_rows(tokens) - mean) * inverse, _rows(upstream)
        scaled, width = upstream * _float32(gamma), tokens.shape[-1]
        through = inverse * (scaled - _row_sums(scaled) / width - normed * (_row_sums(scaled * normed) / width))
        of_weights = (tf.cast(tf.reduce_sum(x, axis=0), gamma.dtype) for x in (upstream * normed, upstream))
        return _like(through, tokens), *of_weights

    def layer_norm(tokens, gamma, beta, epsilon, dtype):
        @tf.custom_gradient
        def normed(tokens, gamma, beta):
            y, mean, inverse = value(tokens, gamma, beta, epsilon, dtype)
            return y, lambda upstream: gradient(tokens, gamma, mean, inverse, upstream)

        return normed(tokens, gamma, beta)

    return layer_norm


def _attention_probabilities() -> Callable:
    """softmax(q k / sqrt(d)) of queries (B, H, N, d) and keys (B, H, M, d), in float32 inside: (B, H, N, M)."""

    @_compiled
    def of_logits(probabilities, upstream, scale):
        weighted = _rows(probabilities) * _rows(upstream)
        through = scale * (weighted - _rows(probabilities) * _row_sums(weighted))
        return _like(through, probabilities)

    @tf.custom_gradient
    def attention_probabilities(query, key):
        scale = query.shape[-1] ** -0.5
        logits = tf.matmul(query * scale, key, transpose_b=True)
        probabilities = tf.cast(tf.nn.softmax(_float32(logits)), query.dtype)

        def gradient(upstream):
            scaled = of_logits(probabilities, upstream, scale)
            return tf.matmul(scaled, key), tf.matmul(scaled, query, transpose_a=True)

        return probabilities, gradient

    return attention_probabilities


def _rows(tokens):
    """(..., D) -> (N, D) float32."""
    return tf.reshape(_float32(tokens), (-1, tokens.shape[-1]))


def _row_sums(x):
    """Sums of the rows of (N, D), as (N, 1): by a product, for XLA adds up a row number by number."""
    return tf.matmul(x, tf.ones((x.shape[-1], 1)))


def _like(rows, tokens):
    return tf.cast(tf.reshape(rows, tf.shape(tokens)), tokens.dtype)


def _float32(x):
    return tf.cast(x, tf.float32)


def _compiled(function: Callable) -> Callable:
    return tf.function(function, jit_compile=True, autograph=False)
