"""TokenDense is a Dense: adapters, quantization, regularizers and constraints, in memory and in files."""

import keras
import numpy as np
import pytest

import keras_vit
from export.inference_model import in_dtype, inference_model
from keras_vit.models.layers import TokenDense
from tests.support import TINY, TINY_IMAGE, randomize
from training.loop.devices.kernels import with_cpu_kernels


def _model() -> keras.Model:
    return randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7))


def _dense_layers(model: keras.Model) -> list[TokenDense]:
    return [layer for layer in model.layers if isinstance(layer, TokenDense)]


@pytest.fixture(name="tiny_images", scope="module")
def _tiny_images():
    return np.random.default_rng(3).uniform(-1.0, 1.0, (5, *TINY_IMAGE, 3)).astype(np.float32)


@pytest.fixture(name="adapted", scope="module")
def _adapted(tiny_images):
    """A model whose dense layers were fitted by LoRA alone."""
    model = _model()
    for layer in _dense_layers(model):
        layer.enable_lora(4)
    model.compile(
        keras.optimizers.Adam(0.02), keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True
    )
    frozen = [np.array(layer.non_trainable_weights[0]) for layer in _dense_layers(model)]
    model.fit(tiny_images, np.arange(len(tiny_images)) % 7, epochs=2, verbose=0)
    for layer, before in zip(_dense_layers(model), frozen, strict=True):
        np.testing.assert_array_equal(layer.non_trainable_weights[0], before)  # the kernel
        assert np.any(layer.lora_kernel_b)
    return model


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(with_cpu_kernels, marks=pytest.mark.slow),
        pytest.param(inference_model, marks=pytest.mark.slow),
        lambda model: inference_model(model, for_tensorflow=True),
    ],
)
def test_other_forms_of_a_model_with_lora_compute_the_same(form, adapted, tiny_images):
    np.testing.assert_allclose(form(adapted)(tiny_images), adapted(tiny_images), rtol=1e-5, atol=1e-5)


def test_checkpoints_and_adapted_models_hold_the_merged_kernels(adapted, tiny_images, tmp_path):
    expected = adapted(tiny_images)
    keras_vit.save_checkpoint(adapted, tmp_path / "model.npz", layout="npz")
    loaded = keras_vit.from_checkpoint(tmp_path / "model.npz", image_size=TINY_IMAGE, num_heads=TINY.num_heads)
    np.testing.assert_allclose(loaded(tiny_images), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(keras_vit.adapt(adapted)(tiny_images), expected, rtol=1e-5, atol=1e-5)


# Keras warns of each layer that has nothing to quantize.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_int8_is_close_saved_and_loaded(tiny_images, tmp_path):
    model = _model()
    expected = np.asarray(model(tiny_images))
    model.quantize("int8")
    assert {layer.quantization_mode for layer in _dense_layers(model)} == {"int8"}
    found = np.asarray(model(tiny_images))
    assert 0 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    np.testing.assert_allclose(with_cpu_kernels(model)(tiny_images), found, rtol=1e-4, atol=1e-4)
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(tiny_images), found)
    refusing = {
        "export": lambda: inference_model(model, for_tensorflow=True),
        "reference": lambda: in_dtype(model, "float32"),
        "adapt": lambda: keras_vit.adapt(model),
        "checkpoint": lambda: keras_vit.save_checkpoint(model, tmp_path / "model.npz", layout="npz"),
    }
    for refused in refusing.values():
        with pytest.raises(keras_vit.UserError, match="is quantized by Keras"):
            refused()


def test_regularizers_and_constraints_count_and_survive_a_file():
    layer = TokenDense(3, "gelu_erf", bias_stddev=0.1, kernel_regularizer="l2", kernel_constraint="non_neg")
    layer.build((None, 5, 4))
    again = TokenDense.from_config(layer.get_config())
    again.build((None, 5, 4))
    assert len(again.losses) == 1
    assert isinstance(again.kernel.constraint, keras.constraints.NonNeg)
    assert again.get_config() == layer.get_config()


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf", "tanh", None])
def test_a_layer_saved_before_is_read(activation):
    saved = {"name": "dense", "trainable": True, "dtype": "float32", "units": 3, "use_bias": True}
    saved |= {"activation": activation, "kernel_initializer": "lecun_normal", "bias_stddev": 1e-6}
    layer = TokenDense.from_config(saved)
    assert layer.get_config()["activation"] == (activation or "linear")
    assert isinstance(layer.kernel_initializer, keras.initializers.LecunNormal)
    tokens = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    assert layer(tokens).shape == (2, 5, 3)
