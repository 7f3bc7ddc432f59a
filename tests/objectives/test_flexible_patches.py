"""FlexiViT: each step is that of a model of its patch size on the same weights; one trace for all."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from tests.support import randomize
from training.loop import build
from training.loop.trainer import Trainer
from training.objectives.classification import Classification
from training.objectives.flexible_patches import FlexiblePatches
from training.options.common import Execution
from training.recipes.pretrain import find_recipe
from training.recipes.recipe import Schedule

CONFIG = keras_vit.ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)


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
    trainer = build.compile_trainer(recipe.build(10), recipe, 30, execution=Execution(), seed=3)
    images = np.random.default_rng(0).uniform(-1, 1, (8, 8, 8, 1)).astype(np.float32)
    labels = np.eye(10, dtype=np.float32)[np.arange(8)]
    for _ in range(12):
        sizes.append(int(trainer._objective.choice()))
        trainer.train_on_batch(images, labels)
    assert len(set(sizes)) == 3
    assert len(traces) == 1
