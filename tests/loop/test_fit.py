"""Training runs: schedule, optimizer, resume, run directory, what is refused."""

import csv
import dataclasses
import json
import pathlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config

import keras_vit
from keras_vit import UserError, ViTConfig
from keras_vit.models.layers import no_init_weights
from keras_vit.run import Run
from tests.data.test_tar import labeled, write
from tests.interruptions import Interrupted, assert_ended_alike
from tests.support import fetched, others_slow, randomize
from training.data.sources import DataOptions
from training.loop import build, checkpoints
from training.loop import pretrain as pretraining
from training.loop.optimizers import LearningRate
from training.options.common import Execution
from training.options.train import PretrainOptions
from training.recipes.pretrain import RECIPES
from training.recipes.recipe import Schedule

MODEL = ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20, dropout_rate=0.1)
RECIPE = dataclasses.replace(
    RECIPES["digits"], model=MODEL, epochs=3, batch_size=200, schedule=Schedule(warmup_steps=2)
)


def arguments(workdir: pathlib.Path, recipe=RECIPE, **changed) -> PretrainOptions:
    return PretrainOptions(source=DataOptions("digits"), workdir=str(workdir), recipe=recipe, **changed)


@pytest.fixture(name="finished", scope="module")
def _finished(tmp_path_factory) -> Run:
    return pretraining.pretrain(arguments(tmp_path_factory.mktemp("runs") / "finished"), "tiny")


def test_a_run_leaves_everything_that_belongs_to_it(finished):
    names = {path.name for path in finished.path.iterdir()}
    assert names == {
        "config.json", "labels.txt", "model.keras", "samples.npz", "calibration.npz", "metrics.jsonl", "metrics.csv",
        "tensorboard", "checkpoints", "curves.png",
    }  # fmt: skip
    config = json.loads((finished.path / "config.json").read_text())
    assert config["settings"]["recipe"]["model"]["hidden_size"] == 12
    assert config["settings"]["source"]["data"] == "digits"
    assert config["settings"]["images"] == {"train": 1437, "evaluation": 360}
    assert config["environment"]["keras"] == keras.__version__
    assert (finished.path / "labels.txt").read_text().split() == list("0123456789")
    assert [record["epoch"] for record in finished.metrics()] == [1, 2, 3]
    assert finished.metrics()[0].keys() >= {"loss", "accuracy", "val_loss", "val_accuracy", "learning_rate", "seconds"}
    last = finished.metrics()[-1]
    rate = LearningRate(RECIPE.schedule, RECIPE.learning_rate, last["step"])
    assert 0.0 < last["learning_rate"] == pytest.approx(float(rate(last["step"] - 1)))  # of the row's last step
    with (finished.path / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [{name: float(number) for name, number in row.items()} for row in rows] == finished.metrics()
    assert any((finished.path / "tensorboard").rglob("events*"))
    model = keras.models.load_model(finished.path / "model.keras")
    assert keras_vit.preprocessing_of(model) == keras_vit.Preprocessing((8, 8), channels=1)


def killed(*_) -> None:
    raise Interrupted


@pytest.mark.parametrize(
    ("settings", "second_label", "left"),
    [({"epochs": object()}, "bee", "config.99.tmp.json"), ({"epochs": 3}, "\ud800", "labels.99.tmp.txt")],
)
def test_a_run_that_ended_while_it_started_can_be_started_again(settings, second_label, left, tmp_path):
    """Its first or its second file could not be written; a killed process leaves a part of it."""
    run = Run.at(tmp_path / "run")
    with pytest.raises((TypeError, UnicodeEncodeError)):
        run.start(settings, ("ant", second_label))
    run.path.mkdir(exist_ok=True)
    (run.path / left).write_text("{")
    run.start({"epochs": 3}, ("ant", "bee"))
    assert {path.name for path in run.path.iterdir()} == {"config.json", "labels.txt", "checkpoints"}


def test_what_killed_processes_left_unfinished_is_removed_and_nothing_else(tmp_path):
    run = Run.at(tmp_path / "run")
    run.start({}, ("ant", "bee"))
    left = ["model.99.tmp.keras", "metrics.99.tmp.jsonl", "checkpoints/state.99.tmp.npz"]
    for name in [*left, "notes.tmp", "checkpoints/mine.npz"]:
        (run.path / name).write_text("x")
    run.start({}, ("ant", "bee"))
    assert not any((run.path / name).exists() for name in left)
    assert (run.path / "notes.tmp").exists()
    assert (run.path / "checkpoints" / "mine.npz").exists()


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory) -> Run:
    """A run that was killed after its last epoch, when its model was to be saved."""
    run = Run.at(tmp_path_factory.mktemp("runs") / "trained")
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Interrupted):
        monkeypatch.setattr(Run, "save_model", killed)
        pretraining.pretrain(arguments(run.path), "tiny")
    return run


@pytest.mark.slow
@pytest.mark.parametrize("damage", [lambda text: None, lambda text: text[:-20], lambda text: ""])
def test_lost_metrics_come_back_from_the_state(damage, trained, tmp_path):
    run = Run.at(shutil.copytree(trained.path, tmp_path / "run"))
    left = damage((run.path / "metrics.jsonl").read_text())
    (run.path / "metrics.jsonl").unlink()
    if left is not None:
        (run.path / "metrics.jsonl").write_text(left)
    pretraining.pretrain(arguments(run.path), "tiny")
    assert run.metrics() == trained.metrics()
    assert (run.path / "model.keras").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        lambda arrays: dict(list(arrays.items())[:-1]),
        lambda arrays: arrays | {"weight/00000": np.zeros((1, 2, 3, 5))},
        lambda arrays: {},
    ],
)
def test_a_state_of_another_model_is_refused_in_one_sentence(damage, trained, tmp_path):
    run = Run.at(shutil.copytree(trained.path, tmp_path / "run"))
    step, progress, arrays = checkpoints.load_latest(run.path / "checkpoints")
    checkpoints.save(run.path / "checkpoints", step + 1, progress, damage(fetched(arrays)))
    with pytest.raises(UserError, match=f"saved by another version; remove {run.path}"):
        pretraining.pretrain(arguments(run.path), "tiny")
    assert not (run.path / "model.keras").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_an_invalid_config_is_refused(content, tmp_path):
    config = tmp_path / "config.json"
    config.write_bytes(content)
    with pytest.raises(UserError, match="config.json cannot be read as the settings of a run"):
        Run.at(tmp_path).start({}, ("ant", "bee"))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (("ant", "bee", "cat"), "has 2 classes and the data have 3: only the data have cat"),
        (("ant", "cat"), "has 2 classes and the data have 2: only the run in .* has bee and only the data have cat"),
        (("bee", "ant"), "the same in another order"),
    ],
)
def test_a_run_does_not_go_on_with_other_classes(labels, words, tmp_path):
    Run.at(tmp_path / "run").start({}, ("ant", "bee"))
    with pytest.raises(UserError, match=words):
        Run.at(tmp_path / "run").start({}, labels)
    assert (tmp_path / "run" / "labels.txt").read_text() == "ant\nbee\n"


def test_a_finished_run_is_not_changed(finished, capsys):
    before = (finished.path / "model.keras").stat().st_mtime_ns
    pretraining.pretrain(arguments(finished.path), "tiny")
    assert (finished.path / "model.keras").stat().st_mtime_ns == before
    assert "nothing to do" in capsys.readouterr().out


def test_the_directory_of_another_run_is_refused_with_the_differences(finished):
    other = dataclasses.replace(RECIPE, learning_rate=0.5, model=dataclasses.replace(MODEL, mlp_dim=24))
    with pytest.raises(UserError) as caught:
        pretraining.pretrain(arguments(finished.path, other), "tiny")
    assert "recipe.learning_rate (there 0.002, here 0.5)" in str(caught.value)
    assert "recipe.model.mlp_dim (there 20, here 24)" in str(caught.value)


def test_a_directory_without_a_run_is_refused_and_not_changed(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not a run directory"):
        pretraining.pretrain(arguments(tmp_path), "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        ({"batch_size": 2000}, {}, "takes 2000 images, but there are 1437"),
        ({"image_size": (9, 8)}, {}, "image height must be a multiple of the patch height 4, but is 9"),
        ({}, {"execution": Execution(profile_steps=(10, 22))}, "--profile-steps needs 22, but the run has 21"),
        (
            {},
            {"execution": Execution(inspect_every=4, evaluate_every=10)},
            "--inspect-every needs 4, but .* 3 of these",
        ),
        ({}, {"workdir": "none://bucket/run"}, "^none://bucket/run cannot .* TensorFlow has no file system of this"),
        ({}, {"seed": 2**32}, "but is 4294967296"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_what_cannot_be_trained_is_refused_and_leaves_nothing(recipe, options, words, dry_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"workdir": "runs/here", "dry_run": dry_run, **options}
    with pytest.raises(UserError, match=words):
        pretraining.pretrain(arguments(recipe=dataclasses.replace(RECIPE, **recipe), **options), "tiny")
    assert list(tmp_path.iterdir()) == []


def test_labels_of_one_class_are_refused(tmp_path):
    write(tmp_path / "zeros.tar", [member for n in range(0, 40, 2) for member in labeled(range(n, n + 1))])
    source = DataOptions(f"tar:{tmp_path}/*.tar")
    options = dataclasses.replace(arguments(tmp_path / "run"), source=source)
    with pytest.raises(UserError, match="have one class, '0'; at least two"):
        pretraining.pretrain(options, "tiny")
    assert not (tmp_path / "run").exists()


class KilledAtBegin(keras.callbacks.Callback):
    """A run is killed when it is to take its first step."""

    def on_train_begin(self, logs=None):
        raise Interrupted


def killed_trainer(tmp_path, **changed) -> keras.Model:
    """The trainer of a run that is killed when it is to take its first step."""
    options, callback = dataclasses.replace(arguments(tmp_path / "run"), **changed), KilledAtBegin()
    with pytest.raises(Interrupted):
        pretraining.pretrain(options, "tiny", callbacks=[callback])
    return callback.model


def test_the_seed_decides_the_initial_weights_and_deterministic_turns_on_the_determinism_of_operations(tmp_path):
    weights = []
    for run, (seed, deterministic) in enumerate([(0, False), (1, False), (0, True)]):
        execution = Execution(deterministic=deterministic)
        weights += killed_trainer(tmp_path / str(run), seed=seed, execution=execution).network.get_weights()[:1]
        assert config.is_op_determinism_enabled() == deterministic
    np.testing.assert_array_equal(weights[0], weights[2])
    assert not np.array_equal(weights[0], weights[1])


@pytest.mark.slow
def test_a_diverged_run_is_not_finished(tmp_path):
    with pytest.raises(UserError, match="is not finite at step [1-7], so training stopped"):
        recipe = dataclasses.replace(RECIPE, learning_rate=1e30, clip_norm=1e30, schedule=Schedule(warmup_steps=0))
        pretraining.pretrain(arguments(tmp_path / "run", recipe), "tiny")
    assert not (tmp_path / "run" / "model.keras").exists()


@pytest.mark.slow
def test_a_run_of_an_earlier_version_that_counted_evaluations_goes_on_with_epochs(tmp_path):
    options = arguments(tmp_path / "run", execution=Execution(evaluate_every=8))
    run = pretraining.pretrain(options, "tiny")
    step, progress, arrays = checkpoints.load_latest(run.path / "checkpoints")
    older = progress | {"records": [record | {"epoch": n} for n, record in enumerate(progress["records"], 1)]}
    arrays = fetched(arrays)
    for path in (run.path / "checkpoints").iterdir():
        path.unlink()
    checkpoints.save(run.path / "checkpoints", step, older, arrays)
    (run.path / "model.keras").unlink()
    assert [record["epoch"] for record in pretraining.pretrain(options, "tiny").metrics()] == [1.143, 2.286, 3]


class Seen(keras.callbacks.Callback):
    """Notes its calls, and stops a run after a step of its own count."""

    def __init__(self, stop_after: int | None = None):
        super().__init__()
        self.calls, self.steps, self._stop_after = [], 0, stop_after

    def on_train_begin(self, logs=None):
        self.calls.append("begin")

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self._stop_after:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        logs["mine"] = "no number"
        self.calls.append((epoch, sorted(logs)))

    def on_train_end(self, logs=None):
        self.calls.append("end")


MEASURED = ["accuracy", "loss", "mine", "val_accuracy", "val_loss"]


def test_callbacks_of_the_caller_see_one_training_of_all_epochs_and_several_steps_at_once_and_change_no_bit(
    finished, tmp_path
):
    seen, early = Seen(), keras.callbacks.EarlyStopping("val_loss", patience=50)
    execution = Execution(evaluate_every=8, steps_per_execution=3)
    run = pretraining.pretrain(arguments(tmp_path / "run", execution=execution), "tiny", callbacks=[early, seen])
    assert seen.calls == ["begin", *((epoch, MEASURED) for epoch in range(3)), "end"]
    assert seen.steps == 3 + 3 + 2  # executions, which end with the epochs of 8, 8 and 5 steps
    assert early.best == pytest.approx(min(record["val_loss"] for record in run.metrics()))
    assert_ended_alike(run.path, finished.path, ("weight", "optimizer"))
    assert [record["step"] for record in run.metrics()] == [8, 16, 21]
    assert [record["epoch"] for record in run.metrics()] == [1.143, 2.286, 3]  # of 7 steps each


@pytest.mark.slow
def test_a_callback_that_stops_within_an_epoch_ends_the_run_with_everything_saved(tmp_path, capsys):
    seen = Seen(stop_after=10)
    run = pretraining.pretrain(arguments(tmp_path / "run"), "tiny", callbacks=[seen])
    assert [record["step"] for record in run.metrics()] == [7, 10]
    assert seen.calls == ["begin", (0, MEASURED), (1, MEASURED), "end"]
    step, _, arrays = checkpoints.load_latest(run.path / "checkpoints")
    assert step == arrays["step/00000"].fetch() == 10
    assert {"model.keras", "curves.png", "labels.txt"} <= {path.name for path in run.path.iterdir()}
    weights = [arrays[name].fetch() for name in sorted(arrays) if name.startswith("weight/")]
    saved = keras.models.load_model(run.path / "model.keras").trainable_weights
    for there, here in zip(weights, saved, strict=False):
        np.testing.assert_array_equal(np.array(here), there)
    pretraining.pretrain(arguments(run.path), "tiny")
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.slow
def test_early_stopping_that_restores_the_best_weights_decides_what_is_saved(tmp_path):
    """Of a loss that only grows to it, the first epoch is the best."""
    early = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=1, restore_best_weights=True)
    recipe = dataclasses.replace(RECIPE, learning_rate=1e-3)
    run = pretraining.pretrain(arguments(tmp_path / "run", recipe), "tiny", callbacks=[early])
    assert len(run.metrics()) == 2
    last = checkpoints.load_latest(run.path / "checkpoints")[2]["weight/00000"].fetch()
    assert not np.array_equal(np.array(keras.models.load_model(run.path / "model.keras").trainable_weights[0]), last)


def test_the_name_of_a_frozen_layer_does_not_freeze_those_that_only_begin_with_it():
    names = ["cls", "cls_2", "encoderblock_1.query", "encoderblock_1", "encoderblock_10.query"]
    model = keras.Sequential([keras.Input((1,)), *(keras.layers.Dense(1, name=name) for name in names)])
    build.choose_trained_weights(model, dataclasses.replace(RECIPE, freeze=("encoderblock_1", "cls")))
    assert [layer.name for layer in model.layers if layer.trainable] == ["cls_2", "encoderblock_10.query"]


def test_the_trainer_has_what_the_recipe_says():
    model = keras_vit.build(MODEL, image_size=8, num_classes=2)
    recipe = dataclasses.replace(RECIPE, learning_rate=0.8, weight_decay=0.5, clip_norm=0.5)
    for xla, compiled in (("on", True), ("auto", False), ("off", False)):  # auto only on a GPU
        trainer = build.build_trainer(lambda: model, recipe, 52, execution=Execution(xla=xla))
        assert trainer.jit_compile is compiled
    optimizer = trainer.optimizer
    for step, rate in ((1, 0.4), (2, 0.8), (27, 0.4), (52, 0.0)):
        optimizer.iterations.assign(step)
        assert float(optimizer.learning_rate) == pytest.approx(rate, abs=1e-6)
    with pytest.raises(UserError, match="XLA cannot compile .* --deterministic"):
        build.build_trainer(lambda: model, RECIPE, 50, execution=Execution(xla="on", deterministic=True))


def test_the_loss_is_the_cross_entropy_of_smoothed_labels():
    model = randomize(keras_vit.build(MODEL, image_size=8, num_classes=3))
    trainer = build.build_trainer(
        lambda: model, dataclasses.replace(RECIPE, label_smoothing=0.2), 50, execution=Execution()
    )
    images, labels = np.random.default_rng(0).uniform(-1, 1, (5, 8, 8, 3)), np.eye(3)[[0, 2, 1, 2, 2]]
    logits = model.predict(images, verbose=0)
    log_probabilities = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    expected = -np.mean(np.sum((0.8 * labels + 0.2 / 3) * log_probabilities, axis=-1))
    weighted = tf.data.Dataset.from_tensors(tuple(np.float32(part) for part in (images, labels, np.ones(5))))
    assert float(trainer.evaluate(weighted, verbose=0, return_dict=True)["loss"]) == pytest.approx(expected, rel=1e-4)


# One of those with the same model: BiT's for three data sets, Table 3's for more epochs.
DIFFERENT = {(recipe.model, recipe.image_size, recipe.channels): name for name, recipe in RECIPES.items()}


SMALL = [name for name in DIFFERENT.values() if RECIPES[name].image_size != (224, 224)]


@pytest.mark.parametrize("name", others_slow(DIFFERENT.values(), *SMALL))
def test_every_recipe_builds_its_model(name):
    recipe = RECIPES[name]
    # Of its width but of one block, or of one unit per stage: the whole of the largest would take seconds.
    if isinstance(recipe.model, ViTConfig):
        config = dataclasses.replace(recipe.model, num_layers=1)
    else:
        config = dataclasses.replace(recipe.model, block_units=(1,) * len(recipe.model.block_units))
    with no_init_weights():
        model = keras_vit.build(config, image_size=recipe.image_size, channels=recipe.channels, num_classes=10)
    assert model.output_shape == (None, 10)


def test_a_warmup_or_cooldown_that_is_longer_than_the_run_is_shortened_and_said(tmp_path, capsys):
    recipe = dataclasses.replace(RECIPE, epochs=2, schedule=Schedule(warmup_steps=100, cooldown_steps=14))
    optimizer = killed_trainer(tmp_path, recipe=recipe).optimizer
    printed = capsys.readouterr().out
    for part in ("warm-up of 100", "cooldown of 14"):
        assert f"The {part} steps is not shorter than the run of 14, so it is shortened to 1." in printed
    optimizer.iterations.assign(2)
    assert float(optimizer.learning_rate) > 0.5 * recipe.learning_rate  # not in a warm-up


def test_the_notes_model_has_its_7850_parameters():
    assert RECIPES["mnist-notes"].build(10).count_params() == 7_850
