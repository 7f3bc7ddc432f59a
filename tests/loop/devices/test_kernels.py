"""The form in which a CPU trains a network: the same numbers as the layers themselves, to rounding."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import special

import keras_vit
from keras_vit.models.attention import attention
from keras_vit.models.layers import TokenDense
from training.loop.devices.kernels import with_cpu_kernels


def _network(layer: keras.layers.Layer, width: int) -> keras.Model:
    tokens = keras.Input((5, width))
    return keras.Model(tokens, layer(tokens))


def _randomized(network: keras.Model) -> keras.Model:
    rng = np.random.default_rng(0)
    for weight in network.weights:
        weight.assign(_in_bfloat16(rng.normal(0.0, 0.5, weight.shape)))
    return network


def _in_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The nearest ones that bfloat16 has."""
    return np.asarray(tf.cast(tf.cast(numbers, tf.bfloat16), tf.float64))


def _value_and_gradients(network: keras.Model, tokens: np.ndarray, upstream: np.ndarray) -> list[np.ndarray]:
    """What comes out, and the gradients of it, times `upstream` and added up, by the tokens and the weights."""
    given = tf.constant(tokens, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(given)
        y = network(given, training=True)
        loss = tf.reduce_sum(tf.cast(y, tf.float32) * upstream)
    gradients = tape.gradient(loss, [given, *(weight.value for weight in network.trainable_weights)])
    return [np.asarray(tf.cast(x, tf.float32)) for x in (y, *gradients)]


def _exact_norm(tokens, upstream, gamma, beta, epsilon):
    mean, variance = tokens.mean(-1, keepdims=True), tokens.var(-1, keepdims=True)
    inverse = (variance + epsilon) ** -0.5
    normed, scaled = (tokens - mean) * inverse, upstream * gamma
    through = inverse * (scaled - scaled.mean(-1, keepdims=True) - normed * (scaled * normed).mean(-1, keepdims=True))
    return [normed * gamma + beta, through, (upstream * normed).sum((0, 1)), upstream.sum((0, 1))]


def _exact_gelu(kind, tokens, upstream, kernel, bias):
    x = tokens @ kernel + bias
    if kind == "gelu_erf":
        value = x * special.ndtr(x)
        slope = special.ndtr(x) + x * np.exp(-0.5 * x**2) / np.sqrt(2.0 * np.pi)
    else:
        scale = np.sqrt(2.0 / np.pi)
        tanh = np.tanh(scale * (x + 0.044715 * x**3))
        value = 0.5 * x * (1.0 + tanh)
        slope = 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh**2) * scale * (1.0 + 3 * 0.044715 * x**2)
    through = upstream * slope
    return [value, through @ kernel.T, np.einsum("bnd,bnm->dm", tokens, through), through.sum((0, 1))]


def _off(results, exact) -> list[float]:
    return [float(np.abs(got - right).max() / np.abs(right).max()) for got, right in zip(results, exact, strict=True)]


@pytest.mark.parametrize("kind", ["gelu_tanh", "gelu_erf"])
def test_gelu_and_its_gradients_are_exact_to_rounding(kind):
    network = _randomized(_network(TokenDense(24, activation=kind), 16))
    rng = np.random.default_rng(1)
    tokens, upstream = rng.normal(0, 1, (3, 5, 16)), rng.normal(0, 1, (3, 5, 24))
    exact = _exact_gelu(kind, tokens, upstream, *(np.asarray(w.value, np.float64) for w in network.weights))
    assert max(_off(_value_and_gradients(with_cpu_kernels(network), tokens, upstream), exact)) < 2e-6


def test_gelu_far_from_zero_is_the_identity_or_nothing_and_has_finite_gradients():
    for kind in ("gelu_tanh", "gelu_erf"):
        network = _network(TokenDense(1, activation=kind), 1)
        network.set_weights([np.ones((1, 1)), np.zeros(1)])
        tokens = np.repeat([[[1e4], [50.0], [0.0], [-50.0], [-1e4]]], 2, axis=0)
        value, gradient, *_ = _value_and_gradients(with_cpu_kernels(network), tokens, np.ones_like(tokens))
        np.testing.assert_allclose(value[0, :, 0], [1e4, 50.0, 0.0, 0.0, 0.0], atol=1e-6)
        np.testing.assert_allclose(gradient[0, :, 0], [1.0, 1.0, 0.5, 0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_layer_norm_and_its_gradients_are_exact_to_rounding(offset):
    network = _randomized(_network(keras.layers.LayerNormalization(epsilon=1e-6), 16))
    rng = np.random.default_rng(1)
    tokens, upstream = rng.normal(offset, 1, (3, 5, 16)).astype(np.float32), rng.normal(0, 1, (3, 5, 16))
    gamma, beta = (np.asarray(weight.value, np.float64) for weight in network.weights)
    exact = _exact_norm(tokens.astype(np.float64), upstream, gamma, beta, 1e-6)
    assert max(_off(_value_and_gradients(with_cpu_kernels(network), tokens, upstream), exact)) < (
        1e-4 if offset else 2e-6
    )


@pytest.mark.parametrize(
    "layer",
    [TokenDense(16, "gelu_tanh", dtype="mixed_bfloat16"), keras.layers.LayerNormalization(dtype="mixed_bfloat16")],
)
def test_in_bfloat16_it_is_no_less_exact_than_the_layers_themselves(layer):
    network = _randomized(_network(layer, 16))
    rng = np.random.default_rng(1)
    tokens, upstream = (_in_bfloat16(rng.normal(0, 1, (8, 5, 16))) for _ in range(2))
    weights = [np.asarray(weight.value, np.float64) for weight in network.weights]
    if isinstance(layer, TokenDense):
        exact = _exact_gelu("gelu_tanh", tokens, upstream, *weights)
    else:
        exact = _exact_norm(tokens, upstream, *weights, layer.epsilon)
    ours = _off(_value_and_gradients(with_cpu_kernels(network), tokens, upstream), exact)
    theirs = _off(_value_and_gradients(network, tokens, upstream), exact)
    assert max(ours) < 0.005
    assert sum(ours) <= sum(theirs) + 1e-6


def test_in_bfloat16_the_products_of_a_model_are_of_bfloat16_numbers_alone():
    """With one factor in float32, TensorFlow multiplies them by its slow kernel for sparse matrices."""
    config = keras_vit.ViTConfig(patch_size=4, hidden_size=12, num_layers=2, num_heads=3, mlp_dim=20, gated_mlp=True)
    form = with_cpu_kernels(keras_vit.build(config, image_size=8, num_classes=3, dtype="mixed_bfloat16"))
    call = tf.function(lambda images: form(images, training=True))
    graph = call.get_concrete_function(tf.TensorSpec((2, 8, 8, 3))).graph
    products = [op for op in graph.get_operations() if "MatMul" in op.type]
    assert len(products) > 12
    assert {x.dtype for op in products for x in op.inputs} == {tf.bfloat16}


def test_in_bfloat16_the_gradient_of_a_bias_is_that_of_thousands_of_rows():
    """TensorFlow's own is a tenth off."""
    network = _network(TokenDense(8, dtype="mixed_bfloat16"), 4)
    tokens, upstream = np.ones((600, 5, 4)), _in_bfloat16(np.random.default_rng(1).normal(0.1, 1, (600, 5, 8)))
    *_, bias = _value_and_gradients(with_cpu_kernels(network), tokens, upstream)
    np.testing.assert_allclose(bias, upstream.sum((0, 1)), rtol=0.01)


@pytest.mark.parametrize("dropped", [0.0, 0.5])
def test_attention_and_its_gradients_are_those_of_the_layer(dropped):
    tokens = keras.Input((5, 16))
    network = keras.Model(tokens, attention(tokens, tokens, num_heads=2, name="attention", dropout_rate=dropped))
    _randomized(network)
    rng = np.random.default_rng(1)
    given, upstream = rng.normal(0, 1, (3, 5, 16)), rng.normal(0, 1, (3, 5, 16))
    results = []
    for model in (network, with_cpu_kernels(network)):
        for seed in network.non_trainable_variables:
            seed.assign([3, 4])
        results.append(_value_and_gradients(model, given, upstream))
    largest = max(np.abs(x).max() for x in results[0])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6 * largest)


@pytest.mark.parametrize("side", [12, 14])
def test_patches_and_their_gradients_are_those_of_the_convolution(side):
    images = keras.Input((side, side, 3))
    network = _randomized(keras.Model(images, keras.layers.Conv2D(8, (4, 6), strides=(4, 6))(images)))
    rng = np.random.default_rng(1)
    given, upstream = rng.normal(0, 1, (2, side, side, 3)), rng.normal(0, 1, (2, 3, 2, 8))
    exact = _value_and_gradients(network, given, upstream)
    assert max(_off(_value_and_gradients(with_cpu_kernels(network), given, upstream), exact)) < 2e-6


def test_the_network_itself_stays_as_it_is():
    layer = TokenDense(8, "gelu_erf", name="dense")
    network = _network(layer, 4)
    before = network.get_config()
    other = with_cpu_kernels(network)
    assert network.get_layer("dense").output is network.output
    assert network.get_config() == before
    assert [weight is given for weight, given in zip(other.weights, network.weights, strict=True)] == [True, True]
