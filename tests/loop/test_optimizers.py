"""Optimizers against NumPy."""

import dataclasses

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit import UserError
from keras_vit.models.self_supervised import masked_autoencoder, self_distillation_model
from tests.support import FIXTURES, TINY, TINY_IMAGE, TINY_STEM, randomize
from training.loop.optimizers import Adam, LearningRate, Momentum, layer_lr_multipliers, make_optimizer
from training.recipes.recipe import Schedule


def model_and_gradients(num_layers: int = 1):
    config = dataclasses.replace(TINY, num_layers=num_layers)
    model = randomize(keras_vit.build(config, image_size=TINY_IMAGE, num_classes=3))
    rng = np.random.default_rng(5)
    return model, [rng.normal(size=variable.shape).astype(np.float32) for variable in model.trainable_variables]


@pytest.mark.parametrize("clip_norm", [0.25, 1e3])
def test_the_summed_gradient_is_clipped_by_its_global_norm_where_it_is_longer(clip_norm):
    model, gradients = model_and_gradients()
    before = model.get_weights()
    make_optimizer("sgd", model, 0.5, clip_norm=clip_norm).apply(gradients, model.trainable_variables)
    norm = np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in gradients))
    for old, new, gradient in zip(before, model.get_weights(), gradients, strict=True):
        np.testing.assert_allclose(new, old - 0.5 * gradient * min(1.0, clip_norm / norm), atol=1e-6)


def test_decay_is_of_kernels_alone_and_times_the_learning_rate_of_the_layer():
    model, gradients = model_and_gradients()
    before = model.get_weights()
    optimizer = make_optimizer("adamw", model, 0.01, clip_norm=None, weight_decay=0.2, layer_decay=0.5)
    optimizer.apply([0 * g for g in gradients], model.trainable_variables)
    multipliers = layer_lr_multipliers(model, 0.5)
    for variable, old in zip(model.trainable_variables, before, strict=True):
        expected = old * (1 - multipliers[variable.path] * 0.01 * 0.2) if variable.name == "kernel" else old
        np.testing.assert_allclose(variable.numpy(), expected, rtol=2e-7, err_msg=variable.path)


def test_each_layer_learns_a_share_of_what_the_next_one_does():
    model, _ = model_and_gradients(num_layers=2)
    multipliers = layer_lr_multipliers(model, 0.5)
    assert multipliers["head/kernel"] == multipliers["Transformer.encoder_norm/gamma"] == 1.0
    assert multipliers["Transformer.encoderblock_1.MlpBlock_3.Dense_0/kernel"] == 0.5
    assert multipliers["Transformer.encoderblock_0.LayerNorm_0/gamma"] == 0.25
    assert multipliers["embedding/kernel"] == multipliers["cls/cls"] == 0.125
    gradients = [np.ones(variable.shape, np.float32) for variable in model.trainable_variables]
    before = model.get_weights()
    optimizer = make_optimizer("sgd", model, 0.1, clip_norm=None, layer_decay=0.5)
    with pytest.raises(ValueError, match="variables that the optimizer was built for"):
        optimizer.apply(gradients[:1], model.trainable_variables[:1])
    optimizer.apply(gradients, model.trainable_variables)
    for variable, old in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_allclose(variable.numpy(), old - 0.1 * multipliers[variable.path], atol=1e-6)


SQUARE = dataclasses.replace(TINY, patch_size=4, hidden_size=16, num_heads=2)
GRAY = keras_vit.Preprocessing((16, 16), 1)


def _mae() -> keras.Model:
    config = dataclasses.replace(SQUARE, position_embedding="sincos-2d")
    return masked_autoencoder(config, GRAY, outputs=3, corruption=0.5, decoder_layers=1, decoder_width=32, name="model")


def _built(**fields) -> keras.Model:
    return keras_vit.build(dataclasses.replace(SQUARE, **fields), preprocessing=GRAY, num_classes=3)


@pytest.mark.parametrize(
    ("make", "before", "behind"),
    [
        (_mae, {"embedding", "cls"}, {"decoder_embedding", "decoder_patches", "decoder_norm", "mask_head"}),
        (
            lambda: self_distillation_model(SQUARE, GRAY, prototypes=4, head_width=8, name="model"),
            {"embedding", "cls", "Transformer.posembed_input"},
            {"projection_0", "projection_2", "prototypes", "Transformer.encoder_norm"},
        ),
        (
            lambda: _built(patch_size=1, stem=TINY_STEM, num_registers=1, distillation="head"),
            {"conv_root", "block2.unit2.gn3", "embedding", "registers", "distillation", "cls"},
            {"head", "head_distillation"},
        ),
        (lambda: _built(classifier="sequence"), {"embedding"}, {"SequencePool_0", "head"}),
    ],
    ids=["masked autoencoder", "self-distillation", "hybrid", "sequence pooling"],
)
def test_layers_behind_the_encoder_learn_at_the_full_rate_whatever_their_names(make, before, behind):
    multipliers = layer_lr_multipliers(make(), 0.5)
    actual = {
        multiplier: {path.split("/")[0] for path in multipliers if multipliers[path] == multiplier}
        for multiplier in (0.125, 1.0)
    }
    assert before <= actual[0.125]
    assert behind <= actual[1.0]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("fused", [True, False], ids=["tensorflow", "jax"])
def test_steps_at_a_changing_rate_are_those_of_optax(kind, fused, monkeypatch):
    """The rate multiplies the momentum of all gradients, as in optax and PyTorch; in Keras each has its own."""
    if not fused:
        for rule in (Adam, Momentum):
            monkeypatch.setattr(rule, "fused", None)
    model, gradients = model_and_gradients()
    optimizer = make_optimizer(kind, model, LearningRate(Schedule("constant", 2), 0.02, 9), clip_norm=None)
    expected = [weight.astype(np.float64) for weight in model.get_weights()]
    first, second = ([np.zeros_like(weight) for weight in expected] for _ in range(2))
    for step, rate in enumerate((0.0, 0.01, 0.02), 1):
        now = [np.float32((-1) ** (step // 2) * step) * gradient for gradient in gradients]
        optimizer.apply(now, model.trainable_variables)
        for weight, m, v, g in zip(expected, first, second, map(np.float64, now), strict=True):
            m[:] = 0.9 * m + (g if kind == "sgd" else 0.1 * g)
            v[:] = 0.999 * v + 0.001 * g**2
            adam = m / (1 - 0.9**step) / (np.sqrt(v) + 1e-8) * np.sqrt(1 - 0.999**step)
            weight -= rate * (m if kind == "sgd" else adam)
    for variable, value in zip(model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(variable, value, atol=2e-6, err_msg=variable.path)


@pytest.mark.parametrize("shape", ["square", "wide", "tall"])
def test_four_steps_of_muon_are_those_of_timm(shape):
    # timm 1.0.31: Muon(lr=0.01, weight_decay=0.1, nesterov=True, ns_coefficients="original"), Newton-Schulz in float32.
    with np.load(FIXTURES / "muon_timm.io.npz") as stored:
        weight, gradients, after = (stored[f"{shape}/{part}"] for part in ("weight", "gradients", "after"))
    model = keras.Sequential([keras.Input(weight.shape[:1]), keras.layers.Dense(weight.shape[1], use_bias=False)])
    model.set_weights([weight])
    optimizer = make_optimizer("muon", model, 0.01, clip_norm=None, weight_decay=0.1)
    for gradient, expected in zip(gradients, after, strict=True):
        optimizer.apply([gradient], model.trainable_variables)
        np.testing.assert_allclose(model.get_weights()[0], expected, atol=2e-6)


def test_muon_leaves_the_first_and_last_layer_biases_and_norms_to_adam():
    model, gradients = model_and_gradients()
    other, _ = model_and_gradients()
    for kind, changed in (("muon", model), ("adamw", other)):
        make_optimizer(kind, changed, 0.01, clip_norm=None).apply(gradients, changed.trainable_variables)
    pairs = zip(model.trainable_variables, other.trainable_variables, strict=True)
    differ = {one.path for one, two in pairs if not np.array_equal(one, two)}
    inner = ("query", "key", "value", "out", "Dense_0", "Dense_1", "pre_logits")
    assert differ == {v.path for v in model.trainable_variables if v.path.endswith(tuple(f"{n}/kernel" for n in inner))}
    assert any("query" in path for path in differ)


@pytest.mark.parametrize("model", ["resnet", "adapters"])
def test_muon_is_refused_where_no_kernel_of_a_block_is_trained(model):
    if model == "resnet":
        network = keras_vit.build(dataclasses.replace(TINY_STEM, preactivation=True), image_size=32, num_classes=3)
    else:
        network, _ = model_and_gradients()
        for layer in network.layers:
            if isinstance(layer, keras.layers.Dense):
                layer.enable_lora(1)
    with pytest.raises(UserError, match="Muon trains the 2-D kernels of blocks.*--optimizer adamw"):
        make_optimizer("muon", network, 0.01, clip_norm=None)
