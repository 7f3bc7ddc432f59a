"""The same network with faster operations, for training on a CPU with TensorFlow, or on a GPU.

On a CPU, TensorFlow computes GELU, LayerNorm and the gradient of a softmax operation by operation, in eight passes over
the tokens for a GELU, limited by memory bandwidth. Here XLA fuses each of them into one pass, in float32 also in mixed
precision; matrix products stay with oneDNN, which is faster than XLA on a CPU. Patches are embedded by a matrix
product, because oneDNN's gradient of the convolution takes eight times as long in bfloat16. Layers whose output is used
only at the class token compute only the class token.

On a GPU, cuDNN computes attention, whose gradients need an even number of tokens: `with_padded_tokens`.
"""

import functools
import re
from collections.abc import Callable, Container

import keras
import tensorflow as tf
from keras import ops

from keras_vit.models.attention import DotProductAttention, join_heads, split_heads
from keras_vit.models.build import calling_class_token_only, class_token_only
from keras_vit.models.gpu import MULTIPLE, padded_attention, runs_on_cudnn
from keras_vit.models.layers import LayerScale, TokenDense, gelu_erf, gelu_quick, gelu_tanh
from training.loop.devices import cudnn

# sqrt(2 / pi) and the cubic coefficient of the tanh approximation ("Gaussian Error Linear Units", arXiv 1606.08415).
_TANH_SCALE, _TANH_CUBIC = 0.7978845608028654, 0.044715
_IN_BLOCK = re.compile(r"Transformer\.encoderblock_\d+(\.|$)")
_OF_EACH_TOKEN = (
    *(keras.layers.LayerNormalization, keras.layers.Dropout, keras.layers.Add, keras.layers.Multiply),
    *(TokenDense, LayerScale),
)
_INVERSE_SQRT_2, _INVERSE_SQRT_2_PI = 0.7071067811865476, 0.3989422804014327


def on_cpu() -> bool:
    """Whether TensorFlow trains on CPUs. XLA compiles the complete step on a GPU, on a TPU and on JAX."""
    if keras.backend.backend() != "tensorflow":
        return False
    return not any(tf.config.list_logical_devices(device) for device in ("GPU", "TPU"))


def fast_here(network: keras.Model) -> keras.Model:
    """Return the form of a network that trains fast on these devices."""
    return with_cpu_kernels(network) if on_cpu() else with_padded_tokens(network)


def with_cpu_kernels(network: keras.Model) -> keras.Model:
    """Return a model with the same layers and weights, but faster calls; outputs are equal up to rounding."""
    add_bias = {
        keras.activations.linear: _bias_add,
        gelu_tanh: _bias_gelu(_gelu_tanh),
        gelu_erf: _bias_gelu(_gelu_erf),
        gelu_quick: _bias_gelu(functools.partial(_sigmoid_gated, 1.702)),
        keras.activations.silu: _bias_gelu(functools.partial(_sigmoid_gated, 1.0)),
    }
    norm, probabilities = _layer_norm(), _attention_probabilities()
    class_token = class_token_only(network)

    def wrapped(layer):
        if not isinstance(layer, keras.layers.Layer):
            return layer  # an operation without weights, such as a slice
        if layer.name in class_token or layer.quantization_mode is not None:
            return _Wrapped(layer)  # of one token, too small to be worth compiling
        if isinstance(layer, TokenDense) and layer.use_bias and layer.activation in add_bias:
            return _Dense(layer, add_bias[layer.activation])
        if isinstance(layer, keras.layers.LayerNormalization):
            return _Norm(layer, norm)
        if isinstance(layer, DotProductAttention):
            return _Attention(layer, probabilities)
        if isinstance(layer, keras.layers.Conv2D) and layer.padding == "valid" and layer.use_bias:
            return _Patches(layer) if layer.kernel_size == layer.strides != (1, 1) else _Wrapped(layer)
        return _Wrapped(layer)

    return keras.models.clone_model(
        network, clone_function=wrapped, call_function=calling_class_token_only(class_token)
    )


def with_padded_tokens(network: keras.Model) -> keras.Model:
    """Return a model with the same layers and weights, whose blocks compute on tokens for which cuDNN has gradients.

    The tokens are padded once, before the first block, where `fused_attention` pads query, key and value in each. The
    added tokens are masked in every attention and gone after the last block, so outputs and gradients are the same up
    to rounding. Returns the network itself if cuDNN does not compute its attention, if its number of tokens differs
    between its blocks, if a layer in them depends on the position of a token, or if the layers themselves call cuDNN,
    as they do on JAX for a multiple of 8.
    """
    on_jax = keras.backend.backend() == "jax"
    blocks = {layer.name: layer for layer in network.layers if _IN_BLOCK.match(layer.name)}
    attentions = [layer for layer in blocks.values() if isinstance(layer, DotProductAttention)]
    if not attentions or not all(_takes_padding(layer) for layer in blocks.values()):
        return network
    num_tokens, *others = {layer.input[0].shape[1] for layer in attentions}  # later blocks may have queries, too
    outputs = {id(output) for output in network.outputs}
    if others or (on_jax and num_tokens % MULTIPLE == 0) or any(id(x.output) in outputs for x in blocks.values()):
        return network
    in_tensorflow = functools.partial(cudnn.padded_attention, num_tokens=num_tokens)
    attend = padded_attention(num_tokens) if on_jax else in_tensorflow
    gelu = {} if on_jax else {each: _gelu_of_kept_input(each) for each in (gelu_tanh, gelu_erf)}

    def wrapped(layer):
        if isinstance(layer, DotProductAttention) and layer.name in blocks:
            return _PaddedAttention(layer, attend)
        is_plain_dense = isinstance(layer, TokenDense) and layer.use_bias and layer.quantization_mode is None
        if is_plain_dense and layer.activation in gelu:
            return _Activated(layer, gelu[layer.activation])
        return _Wrapped(layer) if isinstance(layer, keras.layers.Layer) else layer

    return keras.models.clone_model(
        network, clone_function=wrapped, call_function=_calling_padded(blocks.keys(), num_tokens)
    )


def _calling_padded(blocks: Container[str], num_tokens: int) -> Callable:
    """Return a call function of `clone_model` that pads what enters the layers of `blocks`, and cuts what leaves."""
    padded: dict[int, keras.KerasTensor] = {}  # outputs of the blocks, by id

    def call(layer, *inputs, **options):
        inside = layer.name in blocks

        def adapted(x):
            if inside and id(x) not in padded:
                return ops.pad(x, ((0, 0), (0, -num_tokens % MULTIPLE), (0, 0)))
            return x[:, :num_tokens] if id(x) in padded and not inside else x

        output = layer(*keras.tree.map_structure(adapted, inputs), **options)
        if inside:
            padded[id(output)] = output
        return output

    return call


def _takes_padding(layer: keras.layers.Layer) -> bool:
    """Whether a layer in a block computes each token by itself, or is attention that cuDNN computes."""
    if not isinstance(layer, DotProductAttention):
        return isinstance(layer, _OF_EACH_TOKEN)
    _, num_tokens, width = layer.output.shape
    if len(layer.input) > 3 or layer.dropout_rate or layer.queries_at_a_time is not None:
        return False
    if keras.backend.backend() == "jax":
        return runs_on_cudnn(layer.compute_dtype, width // layer.num_heads)
    return cudnn.computes_attention(num_tokens, layer.num_heads, width // layer.num_heads, layer.compute_dtype)


class _Wrapped(keras.layers.Layer):
    """A layer of another model. Calling the layer itself in two models would make its `output` ambiguous."""

    def __init__(self, layer: keras.layers.Layer, kernel: Callable | None = None):
        # In mixed precision, the policy also casts the weights that `call` reads. Quantized ones have their own types.
        policy = layer.dtype_policy if layer.quantization_mode is None else layer.compute_dtype
        super().__init__(name=layer.name, dtype=policy, autocast=layer.autocast)
        self.layer, self._fused = layer, kernel
        self.built = True

    def call(self, *inputs, **options):
        return self.layer(*inputs, **options)

    def compute_output_spec(self, *inputs, **options):
        return self.layer.compute_output_spec(*inputs, **options)


class _Dense(_Wrapped):
    """A dense layer on tokens, with bias and activation fused."""

    def call(self, tokens):
        flat = tf.reshape(tokens, (-1, tokens.shape[-1]))  # (B * N, D)
        flat = self._fused(tf.matmul(flat, self.layer.kernel), tf.convert_to_tensor(self.layer.bias))
        return tf.reshape(flat, (-1, *tokens.shape[1:-1], self.layer.units))  # (B, N, units)


class _Norm(_Wrapped):
    """A LayerNorm over the last axis."""

    def call(self, tokens):
        gamma, beta = (tf.convert_to_tensor(weight) for weight in (self.layer.gamma, self.layer.beta))
        return self._fused(tokens, gamma, beta, self.layer.epsilon, self.compute_dtype)


class _Attention(_Wrapped):
    """Attention among all tokens; chunked attention and relative positions use the original layer."""

    def call(self, query, key, value, attention_bias=None, training=None):
        if attention_bias is not None or self.layer.queries_at_a_time is not None:
            return self.layer(query, key, value, attention_bias, training=training)
        query, key, value = (split_heads(tokens, self.layer.num_heads) for tokens in (query, key, value))
        return join_heads(self.layer.weighted_values(self._fused(query, key), value, training))


class _PaddedAttention(_Wrapped):
    """Attention among padded tokens, of which those that were added are masked."""

    def call(self, query, key, value, training=None):
        heads = self.layer.num_heads, query.shape[-1] // self.layer.num_heads
        outputs = self._fused(*(ops.reshape(x, (-1, x.shape[1], *heads)) for x in (query, key, value)))
        return ops.reshape(outputs, (-1, query.shape[1], query.shape[-1]))


class _Activated(_Wrapped):
    """A dense layer on tokens, with another form of its activation."""

    def call(self, tokens):
        return self._fused(ops.add(ops.matmul(tokens, self.layer.kernel), self.layer.bias))


class _Patches(_Wrapped):
    """A convolution whose windows do not overlap."""

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
    """Add a bias (M,) to products (N, M)."""

    def gradient(upstream):
        if upstream.dtype == tf.bfloat16:  # a matrix product sums in float32, TensorFlow thousands of rows in bfloat16
            return upstream, tf.matmul(tf.ones((1, tf.shape(upstream)[0]), upstream.dtype), upstream)[0]
        return upstream, tf.raw_ops.BiasAddGrad(out_backprop=upstream)

    return tf.nn.bias_add(products, bias), gradient


def _bias_gelu(gelu: Callable) -> Callable:
    """Return the GELU of products (N, M) + bias (M,), where `gelu` returns value and derivative at x."""

    @_compiled
    def value(products, bias):
        return tf.cast(gelu(_float32(products) + _float32(bias))[0], products.dtype)

    @_compiled
    def gradient(products, bias, upstream):
        gradients = _float32(upstream) * gelu(_float32(products) + _float32(bias))[1]
        return tf.cast(gradients, products.dtype), tf.cast(tf.reduce_sum(gradients, axis=0), bias.dtype)

    @tf.custom_gradient
    def bias_gelu(products, bias):
        return value(products, bias), lambda upstream: gradient(products, bias, upstream)

    return bias_gelu


def _gelu_of_kept_input(gelu: Callable) -> Callable:
    """Return a form of GELU which keeps its input alone, as `keras_vit.models.gpu.gelu_of_kept_input` on JAX."""
    from tensorflow.compiler.tf2xla.python import xla

    @_compiled
    def value(x):
        if gelu is gelu_erf:
            return gelu(x)
        # In this order of products, XLA finds what cuBLAS computes in the epilogue of the product before it.
        return x * (0.5 * (1.0 + tf.tanh(_TANH_SCALE * (x + _TANH_CUBIC * (x * (x * x))))))

    @_compiled
    def gradient(x, upstream):
        # Behind the barrier, XLA does not find out that the forward pass has computed the same.
        [kept] = xla.optimization_barrier(x)
        slope = (_gelu_erf if gelu is gelu_erf else _gelu_tanh)(_float32(kept))[1]
        return tf.cast(_float32(upstream) * slope, x.dtype)

    return tf.custom_gradient(lambda x: (value(x), lambda upstream: gradient(x, upstream)))


def _gelu_tanh(x):
    """Value and derivative of 0.5 x (1 + tanh(s (x + c x^3)))."""
    tanh = tf.tanh(_TANH_SCALE * x * (1.0 + _TANH_CUBIC * x * x))
    inner = _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBIC * x * x)
    return 0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner


def _gelu_erf(x):
    """Value and derivative of x P(X < x), X normally distributed."""
    below = 0.5 * tf.math.erfc(-_INVERSE_SQRT_2 * x)
    return x * below, below + x * _INVERSE_SQRT_2_PI * tf.exp(-0.5 * x * x)


def _sigmoid_gated(factor: float, x):
    """Value and derivative of x sigmoid(factor x): SiLU, and CLIP's GELU."""
    gate = tf.sigmoid(factor * x)
    return x * gate, gate * (1.0 + factor * x * (1.0 - gate))


def _layer_norm() -> Callable:
    """Return LayerNorm over the last axis of tokens (..., D) with gamma and beta (D,), in a dtype."""

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
        of_tokens = inverse * (scaled - _row_sums(scaled) / width - normed * (_row_sums(scaled * normed) / width))
        of_weights = (tf.cast(tf.reduce_sum(x, axis=0), gamma.dtype) for x in (upstream * normed, upstream))
        return _like(of_tokens, tokens), *of_weights

    def layer_norm(tokens, gamma, beta, epsilon, dtype):
        @tf.custom_gradient
        def normed(tokens, gamma, beta):
            y, mean, inverse = value(tokens, gamma, beta, epsilon, dtype)
            return y, lambda upstream: gradient(tokens, gamma, mean, inverse, upstream)

        return normed(tokens, gamma, beta)

    return layer_norm


def _attention_probabilities() -> Callable:
    """Return softmax(q k / sqrt(d)) (B, H, N, M) of queries (B, H, N, d) and keys (B, H, M, d), in float32."""

    @_compiled
    def of_logits(probabilities, upstream, scale):
        weighted = _rows(probabilities) * _rows(upstream)
        of_scores = scale * (weighted - _rows(probabilities) * _row_sums(weighted))
        return _like(of_scores, probabilities)

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
    """Sum the rows of (N, D) to (N, 1), by a matrix product: XLA sums a row without vectorization."""
    return tf.matmul(x, tf.ones((x.shape[-1], 1)))


def _like(rows, tokens):
    return tf.cast(tf.reshape(rows, tf.shape(tokens)), tokens.dtype)


def _float32(x):
    return tf.cast(x, tf.float32)


def _compiled(function: Callable) -> Callable:
    return tf.function(function, jit_compile=True, autograph=False)
