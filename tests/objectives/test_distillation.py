"""Distillation: what the losses are, what is trained, continued and refused."""

import dataclasses
import shutil

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit import UserError
from keras_vit.files.keras_model import load_model
from tests.support import randomize, replaced
from training import pretrain
from training.loop.build import build_trainer
from training.options.common import Execution
from training.recipes.pretrain import find_recipe
from training.recipes.recipe import Schedule

STUDENT = keras_vit.ViTConfig(patch_size=2, hidden_size=8, num_layers=1, num_heads=2, mlp_dim=12)
COMMAND = ["digits", "--data", "digits", "--epochs", "2", "--batch-size", "200", "--warmup-steps", "2"]
COMMAND += ["--model.num-layers", "1", "--model.hidden-size", "12", "--model.mlp-dim", "20", "--mixup", "0.2"]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


@pytest.mark.parametrize(
    ("distillation", "remat"), [("soft", False), pytest.param("hard", False, marks=pytest.mark.slow), ("hard", True)]
)
def test_the_loss_compares_with_the_teacher_on_the_same_images(distillation, remat, upstream, monkeypatch):
    monkeypatch.setattr("training.loop.devices.kernels.on_cpu", lambda: False)  # whose form takes seconds to compile
    hard = distillation == "hard"
    config = dataclasses.replace(STUDENT, distillation="head") if hard else STUDENT
    recipe = dataclasses.replace(
        find_recipe("digits"), model=config, batch_size=5, teacher=str(upstream.path), distillation=distillation
    )
    if not hard:
        recipe = dataclasses.replace(recipe, temperature=2.0)
    recipe = dataclasses.replace(recipe, schedule=Schedule(warmup_steps=1), label_smoothing=0.0)
    model, teacher = randomize(recipe.build(10)), load_model(upstream.path)
    names = ["cls_logits", "distillation_logits"] if hard else ["logits"]
    rng = np.random.default_rng(2)
    images = rng.uniform(-1, 1, (5, 8, 8, 1)).astype(np.float32)
    labels = rng.dirichlet(np.ones(10), 5).astype(np.float32)
    outputs = keras_vit.intermediates(model, names)(images)
    actual = [log_softmax(np.array(outputs[name], np.float64) / (1 if hard else 2.0)) for name in names]
    expected = np.array(teacher(images), np.float64)
    if hard:
        of_teacher = np.eye(10)[expected.argmax(-1)]
        losses = -0.5 * np.sum(labels * actual[0] + of_teacher * actual[1], axis=-1)
    else:
        expected = log_softmax(expected / 2.0)
        losses = 4.0 * np.sum(np.exp(expected) * (expected - actual[0]), axis=-1)
    trainer = build_trainer(lambda: model, recipe, 6, execution=Execution(remat=remat))
    logs = trainer.train_on_batch(images, labels, return_dict=True)
    assert float(logs["loss"]) == pytest.approx(np.mean(losses), rel=1e-4)


def a_teacher(name: str, upstream, folder) -> str:
    """The path of a model that cannot be the teacher."""
    if name == "other classes":
        (folder / "letters").mkdir()
        keras.models.load_model(upstream.path / "model.keras").save(folder / "letters" / "model.keras")
        (folder / "letters" / "labels.txt").write_text("\n".join("abcdefghij") + "\n")
        return str(folder / "letters")
    if name == "unfinished":
        (folder / name).mkdir()
        shutil.copy(upstream.path / "labels.txt", folder / name)
        return str(folder / name)
    sizes = {"seven": {"image_size": 8, "num_classes": 7}, "wide": {"image_size": (8, 12), "num_classes": 10}}
    if name in sizes:
        keras_vit.build(STUDENT, channels=1, **sizes[name]).save(folder / f"{name}.keras")
        return str(folder / f"{name}.keras")
    return name


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ("other classes", "has 10 classes and the data have 10: only the teacher"),
        ("seven", r"must have a head of 10 classes, but its output has the shape \(None, 7\)"),
        ("wide", r"sees images of \(8, 12\) pixels in 1 channels, but this model those of \(8, 8\) in 1"),
        ("unfinished", "unfinished is not a finished run: it has no model.keras"),
        ("nowhere", "no file, folder or official checkpoint"),
    ],
)
def test_a_teacher_of_other_classes_or_size_is_refused_and_leaves_nothing(teacher, words, upstream, tmp_path):
    path, workdir = a_teacher(teacher, upstream, tmp_path), tmp_path / "run"
    with pytest.raises(UserError, match=words):
        pretrain.main([*COMMAND, "--teacher", path, "--workdir", str(workdir)])
    assert not workdir.exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--label-smoothing", "0"]])
def test_label_smoothing_of_a_recipe_is_said_to_have_no_effect_with_a_soft_teacher(options, upstream, tmp_path, capsys):
    command = replaced(COMMAND, "--epochs", "None", "--steps", "1", "--warmup-steps", "0")
    pretrain.main([*command, "--teacher", str(upstream.path), *options, "--workdir", str(tmp_path / "run")])
    sentence = "The recipe's label smoothing of 0.1 has no effect with a soft teacher."
    assert (sentence in capsys.readouterr().out) == (not options)
