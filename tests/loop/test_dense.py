"""The training loop with models whose outputs are dicts and targets that are masks: EoMT and the linear head."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit import SegmentationConfig
from keras_vit.models.config import LinearSegmentationConfig
from keras_vit.run import Run
from tests.interruptions import assert_ended_alike, final_state, killed_after
from tests.loop import dense_steps
from tests.loop.dense_steps import RECIPE, SMALL_LINEAR, make_model
from tests.segmentation.shapes import LABELS, shapes
from training.loop.build import build_trainer, trained_model
from training.loop.devices.strategies import open_strategy
from training.loop.plan import Setup
from training.loop.train import run_training
from training.options.common import DataOptions, Execution, StrategyOptions, TrainingOptions
from training.recipes.dense import SegmentRecipe

ROOT = pathlib.Path(__file__).parents[2]
SINGLE = StrategyOptions("single")
ONE_BLOCK = dataclasses.replace(RECIPE, num_blocks=1)


def train(folder, recipe: SegmentRecipe = RECIPE, devices: StrategyOptions = SINGLE, **execution) -> Run:
    options = TrainingOptions(
        source=DataOptions("digits"), workdir=str(folder), recipe=recipe, devices=devices,
        execution=Execution(deterministic=True, **execution),
    )  # fmt: skip
    setup = Setup(shapes(semantic=recipe.head == "linear"), open_strategy(devices))
    return run_training(
        options, setup, lambda _: make_model(recipe, dropout_rate=0.1), command="segment", recipe_name="eomt"
    )


@pytest.fixture(name="undisturbed", scope="module")
def _undisturbed(tmp_path_factory) -> Run:
    return train(tmp_path_factory.mktemp("runs") / "undisturbed", ONE_BLOCK, checkpoint_every=1)


@pytest.mark.slow
def test_a_model_of_queries_is_trained_and_saved_without_its_training_form(undisturbed):
    model = keras.models.load_model(undisturbed.path / "model.keras")
    assert keras_vit.task_of(model) == SegmentationConfig(len(LABELS), 6, 1, 1)
    assert [record["step"] for record in undisturbed.metrics()] == [3, 6]
    assert all(np.isfinite(record["val_loss"]) for record in undisturbed.metrics())
    state = final_state(undisturbed.path)
    assert any(array.shape == (1,) and not array.any() for name, array in state.items() if name.startswith("weight"))


@pytest.mark.slow
def test_a_training_with_masks_interrupted_within_an_epoch_ends_in_the_same_bits(undisturbed, tmp_path):
    with killed_after(4):
        train(tmp_path / "run", ONE_BLOCK, checkpoint_every=1)
    train(tmp_path / "run", ONE_BLOCK, checkpoint_every=1)
    assert_ended_alike(tmp_path / "run", undisturbed.path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["accumulated", "mirrored", "jax"])
def test_replicas_micro_batches_and_jax_have_the_loss_of_the_batch(case, tmp_path):
    """Each draws its own points, of which there are enough for nearly the same loss."""
    one = dense_steps.train("eomt", "single")
    np.savez(tmp_path / "state.npz", **one)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if case == "jax":
        environment |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    command = ["-m", "tests.loop.dense_steps", str(tmp_path / "o.npz"), "eomt", case, str(tmp_path / "state.npz")]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    np.testing.assert_allclose(np.load(tmp_path / "o.npz")["losses"], one["losses"], rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("execution", [{"precision": "bfloat16"}, {"precision": "float16"}])
def test_masks_are_learned_in_mixed_precision(execution, tmp_path):
    assert np.isfinite(train(tmp_path / "run", **execution).metrics()[-1]["loss"])


def test_mask_attention_is_annealed_block_by_block_and_gone_at_the_end_and_gradients_are_finite():
    trainer = build_trainer(
        lambda: make_model(RECIPE), RECIPE, 8, strategy=open_strategy(SINGLE), execution=Execution(), seed=1
    )
    probabilities = trainer.network.get_layer("mask_attention").probabilities
    actual = []
    for step in range(9):
        trainer._objective.after_step(np.int32(step))
        actual.append(np.array(probabilities))
    np.testing.assert_allclose(np.array(actual)[:, 0], [1, 1, 1, 0.5**0.9, 0, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(np.array(actual)[:, 1], [1, 1, 1, 1, 1, 0.5**0.9, 0, 0, 0], atol=1e-6)
    assert "mask_attention" not in [layer.name for layer in trained_model(trainer).layers]
    source, preprocessing = shapes(), keras_vit.preprocessing_of(trainer.network)
    images, targets, weights = next(iter(source.batches.evaluation(source.evaluation, preprocessing, batch_size=8)))
    targets = trainer._objective.whole_batch(targets, weights, lambda total: total)
    gradients, (loss, *_), _ = trainer._gradients(images, targets)  # not traced, which takes longer
    assert 0.0 < float(loss) / 8 < 100.0
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_the_head_of_pixels_learns(tmp_path):
    records = train(tmp_path / "run", dataclasses.replace(SMALL_LINEAR, steps=30)).metrics()
    assert records[-1]["val_accuracy"] > records[0]["val_accuracy"]
    assert records[-1]["val_accuracy"] > 0.8
    model = keras.models.load_model(tmp_path / "run" / "model.keras")
    assert keras_vit.task_of(model) == LinearSegmentationConfig(len(LABELS))


def test_a_dry_run_says_what_it_does_not_count(tmp_path, capsys):
    options = TrainingOptions(source=DataOptions("digits"), workdir=str(tmp_path / "run"), recipe=RECIPE)
    setup = Setup(shapes(), open_strategy(SINGLE))
    run_training(
        dataclasses.replace(options, dry_run=True), setup, lambda _: make_model(RECIPE), command="segment",
        recipe_name="eomt",
    )  # fmt: skip
    assert "the queries, and the heads of masks or boxes" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
