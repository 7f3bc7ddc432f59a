"""Other patches in training, and gradients uphill: FlexiViT, PatchDropout and SAM."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from tests.support import others_slow, randomize
from training.loop import build
from training.loop.trainer import Trainer
from training.objectives.objective import Classification
from training.objectives.patches import FlexiblePatches, PatchDropout
from training.options.common import Execution
from training.recipes.pretrain import find_recipe
from training.recipes.recipe import Schedule

CONFIG = keras_vit.ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
REGISTERS = dataclasses.replace(CONFIG, patch_size=2, num_registers=2)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_network_of_another_size_is_the_adapted_model_with_its_gradients(size):
    network = randomize(keras_vit.build(CONFIG, image_size=16, channels=1, num_classes=5))
    adapted = keras_vit.adapt(network, patch_size=size)
    images = np.random.default_rng(0).uniform(-1, 1, (3, 16, 16, 1)).astype(np.float32)
    step = keras.Variable(0, dtype="int32")
    [forward] = FlexiblePatches((size,), 0, Classification()).forwards(network, network, step, [])
    with tf.GradientTape() as tape:
        outputs = forward(images, training=True)
        loss = tf.reduce_sum(outputs**2)
    np.testing.assert_allclose(outputs, adapted(images), rtol=1e-4, atol=1e-4)
    gradients = tape.gradient(loss, [v.value for v in network.trainable_variables])
    assert all(gradient is not None and np.any(gradient) for gradient in map(np.array, gradients[:3]))


@pytest.mark.slow
def test_all_sizes_are_trained_in_one_trace(monkeypatch):
    traces, sizes = [], []
    step = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self, data: traces.append(1) or step(self, data))
    recipe = dataclasses.replace(
        find_recipe("digits"), model=CONFIG, batch_size=8, patch_sizes=(2, 4, 8), schedule=Schedule(warmup_steps=1)
    )
    trainer = build.build_trainer(lambda: recipe.build(10), recipe, 30, execution=Execution(), seed=3)
    images = np.random.default_rng(0).uniform(-1, 1, (8, 8, 8, 1)).astype(np.float32)
    labels = np.eye(10, dtype=np.float32)[np.arange(8)]
    for _ in range(12):
        sizes.append(int(trainer._objective.choice()))
        trainer.train_on_batch(images, labels)
    assert len(set(sizes)) == 3
    assert len(traces) == 1


def test_dropped_patches_are_computed_by_no_block():
    network = randomize(keras_vit.build(REGISTERS, image_size=8, channels=1, num_classes=5))
    images = tf.constant(np.random.default_rng(0).uniform(-1, 1, (3, 8, 8, 1)), tf.float32)
    seen = []
    for seed in ([1, 2], [1, 3]):
        dropped = PatchDropout(0.75, Classification())
        [forward] = dropped.forwards(network, network, None, [])
        dropped.random[0].assign(seed)
        with tf.GradientTape() as tape:
            tape.watch(images)
            outputs = forward(images, training=True)
        changes = np.abs(tape.gradient(outputs, images)).reshape(3, 4, 2, 4, 2).sum(axis=(2, 4))  # (B, h, w)
        assert (np.count_nonzero(changes, axis=(1, 2)) == 4).all()  # 4 of 16 patches
        seen.append(changes > 0)
    assert (seen[0] != seen[1]).any()
    assert (seen[0][0] != seen[0][1]).any()
    [every] = PatchDropout(0.0, Classification()).forwards(network, network, None, [])
    np.testing.assert_allclose(every(images, training=True), network(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("remat", "accumulation"), others_slow([(False, 1), (True, 1), (False, 2)], (True, 1)))
def test_sam_takes_the_gradient_uphill(remat, accumulation):
    recipe = dataclasses.replace(
        find_recipe("digits"),
        model=CONFIG,
        batch_size=6,
        accumulation=accumulation,
        optimizer="sgd",
        learning_rate=1.0,
        weight_decay=0.0,
        clip_norm=None,
        label_smoothing=0.0,
        schedule=Schedule("constant"),
        sharpness_radius=0.5,
    )
    model, copy = (randomize(recipe.build(10)) for _ in range(2))
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (6, 8, 8, 1)).astype(np.float32)
    labels = np.eye(10, dtype=np.float32)[rng.integers(0, 10, 6)]

    def gradients(rows) -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            loss = keras.losses.categorical_crossentropy(labels[rows], copy(images[rows]), True)
            loss = tf.reduce_sum(loss) / 6
        return [np.array(g) for g in tape.gradient(loss, [v.value for v in copy.trainable_variables])]

    expected = [0.0] * len(copy.trainable_variables)
    before = copy.get_weights()
    for rows in np.split(np.arange(6), accumulation):
        uphill = gradients(rows)
        length = np.sqrt(sum(np.sum(g**2) for g in uphill))
        copy.set_weights([w + 0.5 * g / length for w, g in zip(before, uphill, strict=True)])
        expected = [total + g for total, g in zip(expected, gradients(rows), strict=True)]
        copy.set_weights(before)
    trainer = build.build_trainer(lambda: model, recipe, 6, execution=Execution(remat=remat))
    trainer.train_on_batch(images, labels)
    for after, weight, gradient in zip(model.get_weights(), before, expected, strict=True):
        np.testing.assert_allclose(after, weight - gradient, rtol=1e-3, atol=1e-4)
