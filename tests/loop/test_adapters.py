"""Adapters of LoRA in the trainer, saved, loaded and merged; a trained model in int8."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit.files.keras_model import load_model
from keras_vit.models.layers import TokenDense
from tests.support import others_slow
from training.data.pipeline import evaluation_batches
from training.data.sources import DataOptions, digits
from training.loop.build import build_trainer, trained_model
from training.loop.pretrain import pretrain
from training.options.common import Execution
from training.options.train import PretrainOptions
from training.recipes.pretrain import RECIPES
from training.recipes.recipe import Schedule

RECIPE = dataclasses.replace(
    RECIPES["digits"],
    model=keras_vit.ViTConfig(patch_size=2, hidden_size=24, num_layers=2, num_heads=3, mlp_dim=48),
    batch_size=16,
    weight_decay=0.0,
    schedule=Schedule(warmup_steps=1),
)


AVERAGED = {"accumulation": 2, "ema_decay": 0.5}
CASES = [({}, False), (AVERAGED, False), ({"accumulation": 2}, True)]


@pytest.mark.parametrize(("fields", "remat"), others_slow(CASES, (AVERAGED, False)))
def test_adapters_are_trained_saved_loaded_and_merged(fields, remat, tmp_path):
    recipe = dataclasses.replace(RECIPE, **fields)
    model = recipe.build(10)
    adapted = [layer for layer in model.layers if isinstance(layer, TokenDense) and layer.name != "head"]
    for layer in adapted:
        layer.enable_lora(4)
    frozen = [np.array(layer.non_trainable_weights[0]) for layer in adapted]
    trainer = build_trainer(lambda: model, recipe, 6, execution=Execution(remat=remat))
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (32, *recipe.image_size, 1)).astype(np.float32)
    labels = np.eye(10, dtype=np.float32)[rng.integers(0, 10, 32)]
    steps = tf.data.Dataset.from_tensor_slices((images, labels)).batch(16, drop_remainder=True)
    losses = trainer.fit(steps, epochs=3, shuffle=False, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    for layer, kernel in zip(adapted, frozen, strict=True):
        np.testing.assert_array_equal(layer.non_trainable_weights[0], kernel)
        assert np.any(layer.lora_kernel_b)

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(images), model(images))
    merged = trained_model(trainer)
    assert not any("lora" in weight.path for weight in merged.weights)
    for average, weight in zip(trainer.ema, model.trainable_weights, strict=bool(trainer.ema)):
        weight.assign(average)
    np.testing.assert_allclose(merged(images), model(images), rtol=1e-5, atol=1e-5)


# Keras warns of each layer that has nothing to quantize.
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
@pytest.mark.slow
def test_a_trained_model_in_int8_is_as_accurate_within_one_percent(tmp_path):
    config = dataclasses.replace(RECIPE.model, patch_size=4, hidden_size=48)
    recipe = dataclasses.replace(
        RECIPE, model=config, epochs=None, steps=300, batch_size=64, learning_rate=5e-3, shift=0
    )
    options = PretrainOptions(source=DataOptions("digits"), workdir=str(tmp_path / "run"), recipe=recipe)
    model = load_model(pretrain(options, "tiny").path)
    preprocessing = keras_vit.preprocessing_of(model)
    batches = evaluation_batches(digits().evaluation, preprocessing, num_classes=10, batch_size=500)

    def accuracy() -> float:
        model.compile(loss=keras.losses.CategoricalCrossentropy(from_logits=True), weighted_metrics=["accuracy"])
        return model.evaluate(batches, verbose=0, return_dict=True)["accuracy"]

    before = accuracy()
    model.quantize("int8")
    assert any(layer.quantization_mode == "int8" for layer in model.layers)
    assert before > 0.8
    assert abs(accuracy() - before) <= 0.01
