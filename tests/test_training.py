"""Training runs: schedule, optimizer, resume, run directory, what is refused."""

import dataclasses
import json
import math
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import UserError, ViTConfig
from keras_vit.npz import read_npz
from training import fit, pretrain
from training.recipes import RECIPES, find_recipe
from training.run import Run
from training.sources import DataArguments, array_split

MODEL = ViTConfig(patch_size=4, hidden_size=12, num_layers=2, num_heads=3, mlp_dim=20, dropout_rate=0.1)
RECIPE = dataclasses.replace(RECIPES["digits"], model=MODEL, epochs=3, batch_size=200, warmup_steps=2)


def arguments(workdir: pathlib.Path, recipe=RECIPE, seed: int = 0, deterministic: bool = False) -> pretrain.Arguments:
    return pretrain.Arguments(DataArguments("digits"), str(workdir), recipe, seed, deterministic)


@pytest.fixture(name="finished", scope="module")
def _finished(tmp_path_factory) -> Run:
    return pretrain.pretrain(arguments(tmp_path_factory.mktemp("runs") / "finished"), "tiny")


def test_a_run_leaves_everything_that_belongs_to_it(finished):
    names = {path.name for path in finished.path.iterdir()}
    assert names == {
        "config.json", "labels.txt", "model.keras", "samples.npz", "metrics.jsonl", "tensorboard", "checkpoints",
        "curves.png",
    }  # fmt: skip
    config = json.loads((finished.path / "config.json").read_text())
    assert config["settings"]["recipe"]["model"]["hidden_size"] == 12
    assert config["settings"]["source"]["data"] == "digits"
    assert config["environment"]["keras"] == keras.__version__
    assert (finished.path / "labels.txt").read_text().split() == list("0123456789")
    assert [record["epoch"] for record in finished.metrics()] == [1, 2, 3]
    assert finished.metrics()[0].keys() >= {"loss", "accuracy", "val_loss", "val_accuracy", "learning_rate", "seconds"}
    assert any((finished.path / "tensorboard").rglob("events*"))


def test_the_model_of_a_run_knows_its_preprocessing(finished):
    model = keras.models.load_model(finished.model_file)
    assert keras_vit.preprocessing_of(model) == keras_vit.Preprocessing((8, 8), channels=1)


class Interrupted(Exception):
    """Stands for a kill."""


def test_a_run_interrupted_after_an_epoch_ends_in_the_same_bits(finished, tmp_path, monkeypatch):
    save_state = fit.save_state

    def save_and_stop(run, model, epoch):
        save_state(run, model, epoch)
        if epoch == 2:
            raise Interrupted

    monkeypatch.setattr(fit, "save_state", save_and_stop)
    with pytest.raises(Interrupted):
        pretrain.pretrain(arguments(tmp_path / "run"), "tiny")
    monkeypatch.setattr(fit, "save_state", save_state)
    assert not (tmp_path / "run" / "model.keras").exists()

    run = pretrain.pretrain(arguments(tmp_path / "run"), "tiny")
    for here, there in zip(
        *(keras.models.load_model(r.model_file).get_weights() for r in (run, finished)), strict=True
    ):
        np.testing.assert_array_equal(here, there)
    for here, there in zip(run.metrics(), finished.metrics(), strict=True):
        assert {**here, "seconds": 0} == {**there, "seconds": 0}


def test_another_seed_gives_another_model(finished, tmp_path):
    run = pretrain.pretrain(arguments(tmp_path / "run", seed=1), "tiny")
    assert run.metrics()[-1]["loss"] != finished.metrics()[-1]["loss"]


def test_a_finished_run_is_left_alone(finished, capsys):
    before = finished.model_file.stat().st_mtime_ns
    pretrain.pretrain(arguments(finished.path), "tiny")
    assert finished.model_file.stat().st_mtime_ns == before
    assert "nothing to do" in capsys.readouterr().out


def test_the_directory_of_another_run_is_refused_with_the_differences(finished):
    other = dataclasses.replace(RECIPE, learning_rate=0.5, model=dataclasses.replace(MODEL, mlp_dim=24))
    with pytest.raises(UserError) as caught:
        pretrain.pretrain(arguments(finished.path, other), "tiny")
    assert "recipe.learning_rate (there 0.002, here 0.5)" in str(caught.value)
    assert "recipe.model.mlp_dim (there 20, here 24)" in str(caught.value)


def test_a_directory_that_is_no_run_is_refused_untouched(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is no run directory"):
        pretrain.pretrain(arguments(tmp_path), "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch_size": 2000}, "batch of 2000 is larger than the training set of 1437 images"),
        ({"warmup_steps": 21}, "warm-up of 21 steps leaves none of the run's 21"),
        ({"image_size": (9, 8)}, "image height must be a multiple of the patch height 4, but is 9"),
    ],
)
def test_what_cannot_be_trained_leaves_no_directory(fields, words, tmp_path):
    with pytest.raises(UserError, match=words):
        pretrain.pretrain(arguments(tmp_path / "run", dataclasses.replace(RECIPE, **fields)), "tiny")
    assert not (tmp_path / "run").exists()


def test_a_diverged_run_is_no_finished_run(tmp_path):
    with pytest.raises(UserError, match="loss was no number any more in epoch 1, so training stopped"):
        recipe = dataclasses.replace(RECIPE, learning_rate=1e30, clip_norm=1e30, warmup_steps=0)
        pretrain.pretrain(arguments(tmp_path / "run", recipe), "tiny")
    assert not (tmp_path / "run" / "model.keras").exists()


@pytest.mark.parametrize(("steps", "epochs"), [(5, 1), (7, 1), (10, 2), (14, 2)])
def test_steps_can_be_given_instead_of_epochs_and_are_kept_exactly(steps, epochs, tmp_path):
    run = pretrain.pretrain(
        arguments(tmp_path / "run", dataclasses.replace(RECIPE, steps=steps, warmup_steps=0)), "tiny"
    )
    assert len(run.metrics()) == epochs
    state = read_npz(run.state_file)
    assert state["optimizer/00000"] == steps  # the optimizer's own count of its updates


def test_the_learning_rate_warms_up_linearly_and_falls_as_a_cosine():
    model = keras_vit.build(MODEL, image_size=8, num_classes=2)
    fit.compile_model(model, dataclasses.replace(RECIPE, learning_rate=0.8, warmup_steps=10), 50)
    schedule = model.optimizer._learning_rate
    for step in range(51):
        progress = min(max((step - 10) / 40, 0.0), 1.0)
        expected = 0.8 * min(1.0, step / 10) * 0.5 * (1 + math.cos(math.pi * progress))
        assert float(schedule(step)) == pytest.approx(expected, abs=1e-6)


def test_weight_decay_shrinks_kernels_alone():
    model = keras_vit.build(MODEL, image_size=8, num_classes=2)
    recipe = dataclasses.replace(RECIPE, learning_rate=0.1, weight_decay=0.5, warmup_steps=0)
    fit.compile_model(model, recipe, 50)
    before = [np.array(weight) for weight in model.trainable_weights]
    model.optimizer.apply([tf.zeros_like(weight) for weight in model.trainable_weights])
    for old, weight in zip(before, model.trainable_weights, strict=True):
        factor = 1 - 0.1 * 0.5 if weight.name == "kernel" else 1.0
        np.testing.assert_allclose(np.array(weight), factor * old, rtol=1e-6, err_msg=weight.path)


def test_a_tiny_model_learns_one_batch_by_heart():
    rng = np.random.default_rng(0)
    split = array_split(rng.integers(0, 256, (16, 8, 8, 1), dtype=np.uint8), np.arange(16) % 4, tuple("abcd"))
    recipe = dataclasses.replace(
        RECIPE, model=dataclasses.replace(MODEL, dropout_rate=0.0), batch_size=16, shift=0, label_smoothing=0.0,
        weight_decay=0.0, learning_rate=1e-2,
    )  # fmt: skip
    preprocessing = keras_vit.Preprocessing((8, 8), channels=1)
    model = keras_vit.build(recipe.model, preprocessing=preprocessing, num_classes=4)
    fit.compile_model(model, recipe, 150)
    batches = fit.training_batches(split, recipe, preprocessing, num_classes=4, seed=0, first_step=0)
    history = model.fit(batches, steps_per_epoch=150, shuffle=False, verbose=0)
    assert history.history["loss"][0] < 1.0
    images, labels = next(iter(batches))
    assert model.evaluate(images, labels, verbose=0)[1] == 1.0


def test_an_unknown_recipe_is_answered_with_the_nearest_names():
    with pytest.raises(UserError, match="no recipe named 'mnist-smal'; the nearest names are mnist-small"):
        find_recipe("mnist-smal")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"epochs": 0}, "epochs must be positive, but is 0"),
        ({"steps": 0}, "steps must be positive"),
        ({"shift": -1}, "shift must not be negative"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\)"),
        ({"model": dataclasses.replace(MODEL, classifier="unpooled")}, "not the classifier 'unpooled'"),
    ],
)
def test_an_impossible_recipe_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(RECIPE, **fields)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_its_model(name):
    recipe = RECIPES[name]
    model = keras_vit.build(recipe.model, image_size=recipe.image_size, channels=recipe.channels, num_classes=10)
    assert model.output_shape == (None, 10)


def test_the_notes_model_has_its_7850_parameters():
    recipe = RECIPES["mnist-notes"]
    model = keras_vit.build(recipe.model, image_size=recipe.image_size, channels=recipe.channels, num_classes=10)
    assert model.count_params() == 7_850
