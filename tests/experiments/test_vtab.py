"""VTAB: the published splits and label rules, which augmentation a task forbids, and the way through the suite."""

import json
import types

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

import keras_vit
from keras_vit import Preprocessing, UserError, ViTConfig
from tests.support import randomize
from training.data.dataset import Split
from training.experiments import vtab_runs
from training.experiments.vtab_runs import RULES, task_source
from training.options.train import VtabOptions
from training.recipes.finetune import FINETUNE_RECIPES, RECIPE_NAME, TASKS

BY_NAME = {task.name: task for task in TASKS}


@pytest.mark.parametrize(
    ("name", "num_train", "val", "test"),
    [
        ("caltech101", 3059, "train[2753:2953]", "test"),
        ("oxford_iiit_pet", 3680, "train[2944:3144]", "test"),
        ("svhn", 73257, "train[65931:66131]", "test"),
        ("sun397", 76128, "validation[:200]", "test"),
        ("eurosat", 27000, "train[16200:16400]", "train[80%:]"),
        ("clevr-count", 70000, "train[63000:63200]", "validation"),
        ("dsprites-location", 737280, "train[589824:590024]", "train[90%:]"),
        ("smallnorb-azimuth", 24300, "test[:200]", "test[50%:]"),
    ],
)
def test_splits_are_those_of_vtabs_code(name, num_train, val, test):
    task = BY_NAME[name]
    assert task.split("train800", num_train) == "train[:800]"
    assert task.split("val200", num_train) == val
    assert task.split("train800val200", num_train) == f"train[:800]+{val}"
    assert task.split("test", num_train) == test


def _label(name: str, **features) -> int:
    return int(RULES[name].label(features))


def test_labels_are_those_of_vtabs_code():
    assert _label("clevr-count", objects={"size": tf.zeros(3)}) == 0
    assert _label("clevr-count", objects={"size": tf.zeros(10)}) == 7
    for distance, label in ((7.9, 0), (8.1, 1), (8.6, 2), (9.1, 3), (9.6, 4), (9.9, 4), (10.1, 5)):
        coordinates = tf.constant([[0.0, 0.0, 50.0], [1.0, 2.0, distance]])
        assert _label("clevr-distance", objects={"pixel_coords": coordinates}) == label
    for distance, kind, label in ((7.9, 0, 0), (8.1, 2, 1), (19.9, 1, 1), (20.1, 1, 2), (5.0, 3, 3)):
        objects = {"location": tf.constant([[0.0, 0.0, distance], [0.0, 0.0, 1.0]]), "type": tf.constant([kind, 7])}
        assert _label("kitti-distance", objects=objects) == label
    assert [_label("dsprites-location", label_x_position=tf.constant(k)) for k in (0, 1, 2, 31)] == [0, 0, 1, 15]
    assert [_label("dsprites-orientation", label_orientation=tf.constant(k)) for k in (2, 3, 39)] == [0, 1, 15]
    assert _label("smallnorb-azimuth", label_azimuth=tf.constant(17)) == 17
    assert _label("smallnorb-elevation", label_elevation=tf.constant(8)) == 8
    assert [len(rule.names) for rule in RULES.values()] == [8, 6, 16, 16, 4, 18, 9]


def test_what_would_change_the_class_is_not_augmented():
    base = FINETUNE_RECIPES[RECIPE_NAME]
    recipes = {task.name: vtab_runs.task_recipe(task, base, 0.01, 2500) for task in TASKS}
    assert {name for name, recipe in recipes.items() if not recipe.flip} == {
        "dsprites-location", "dsprites-orientation", "smallnorb-azimuth"
    }  # fmt: skip
    assert {name for name, recipe in recipes.items() if not recipe.inception_crop} == {
        "clevr-count", "clevr-distance", "dmlab", "kitti-distance", "dsprites-location"
    }  # fmt: skip
    recipe = recipes["svhn"]
    assert (recipe.learning_rate, recipe.steps, recipe.batch_size, recipe.image_size) == (0.01, 2500, 512, (384, 384))


def _prepare(monkeypatch, dataset: str, data_dir, examples: dict) -> None:
    """Write a data set of TFDS with made-up examples, as its own builder would."""
    builder = tfds.builder(dataset, data_dir=data_dir)
    monkeypatch.setattr(type(builder), "_split_generators", lambda self, _: {k: iter(v) for k, v in examples.items()})
    builder.download_and_prepare()


@pytest.fixture(name="prepared")
def _prepared(tmp_path, monkeypatch):
    """A directory with SVHN, whose images hold their own number, and nothing else."""

    def example(number: int) -> tuple[int, dict]:
        image = np.zeros((32, 32, 3), np.uint8)
        image[:4] = number % 256
        return number, {"id": str(number), "image": image, "label": number % 10}

    splits = {"train": [example(n) for n in range(2050)], "test": [example(n) for n in range(33)]}
    _prepare(monkeypatch, "svhn_cropped", tmp_path / "tfds", splits)
    return tmp_path / "tfds"


def test_the_parts_of_a_task_are_read_from_its_files(prepared):
    builder = tfds.builder(BY_NAME["svhn"].dataset, data_dir=prepared)
    source = task_source(BY_NAME["svhn"], builder, "train800val200", "test")
    assert (source.train.num_examples, source.evaluation.num_examples, len(source.labels)) == (1000, 33, 10)
    stored = builder.as_dataset(split="train", shuffle_files=False)
    expected = [(int(x["image"][0, 0, 0]), int(x["label"])) for x in stored.skip(1844).take(3)]
    read = [source.train.example(tf.constant(index, tf.int64)) for index in (799, 800, 801)]
    assert [(int(image[0, 0, 0]), int(label)) for image, label in read][1:] == expected[1:]  # 90% of 2,050 are 1,845


def test_black_and_white_pixels_become_0_and_255(tmp_path, monkeypatch):
    def example(number: int) -> tuple[int, dict]:
        keys = tfds.builder("dsprites", data_dir=tmp_path).info.features
        numbers = {key: 0 if key.startswith("label") else 0.0 for key in keys if key != "image"}
        return number, numbers | {"image": np.eye(64, dtype=np.uint8)[..., None], "label_x_position": 31}

    whole = example(0)[1]
    _prepare(monkeypatch, "dsprites", tmp_path, {"train": [(number, whole) for number in range(1300)]})
    task = BY_NAME["dsprites-location"]
    source = task_source(task, tfds.builder(task.dataset, data_dir=tmp_path), "train800", "val200")
    image, label = source.evaluation.example(tf.constant(5, tf.int64))
    assert np.unique(image).tolist() == [0, 255]
    assert int(label) == 15
    assert source.evaluation.num_examples == 200


def test_a_split_is_repeated_as_often_as_a_run_needs():
    split = Split(7, lambda index: (tf.zeros(1), index), "image {}".format)
    longer = vtab_runs.repeated(split, 15)
    assert longer.num_examples == 21
    assert [int(longer.read(tf.constant(index))[1]) for index in (0, 6, 7, 20)] == [0, 6, 0, 6]
    assert longer.name(8) == "image 1"


@pytest.fixture(name="arguments")
def _arguments(tmp_path, prepared) -> dict:
    config = ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
    model = randomize(keras_vit.build(config, preprocessing=Preprocessing((8, 8)), num_classes=3))
    model.save(tmp_path / "tiny.keras")
    return {
        "checkpoint": str(tmp_path / "tiny.keras"),
        "workdir": str(tmp_path / "vtab"),
        "batch_size": 50,
        "image_size": (8, 8),
        "data_dir": str(prepared),
        "tasks": ("svhn", "dtd", "resisc45", "sun397"),
        "steps": (2,),
    }


@pytest.mark.slow
def test_what_is_prepared_is_run_and_the_rest_is_named(arguments, tmp_path, capsys):
    summary = vtab_runs.vtab(VtabOptions(**arguments))
    report = json.loads((tmp_path / "vtab" / "vtab.json").read_text())
    assert report == {"checkpoint": arguments["checkpoint"], **summary}
    assert (list(summary["tasks"]), summary["complete"], summary["mean"]) == (
        ["svhn"], False, summary["tasks"]["svhn"]["accuracy"]
    )  # fmt: skip
    assert list(summary["missing"]) == ["dtd", "resisc45", "sun397"]
    out, page = capsys.readouterr().out, (tmp_path / "vtab" / "vtab.md").read_text()
    for text in (out, page):
        assert f"tfds build sun397 --config tfds --data_dir {arguments['data_dir']}" in text
    assert "fetch the images by hand first" in summary["missing"]["resisc45"]
    assert "not comparable with a VTAB score" in page
    assert len((tmp_path / "vtab" / "svhn" / "final" / "metrics.jsonl").read_text().splitlines()) == 1


def test_the_setting_that_is_best_on_val200_is_trained_on_all_and_tested(arguments, monkeypatch, tmp_path):
    asked = []

    def finetuned(given, name, setting):
        recipe, source = given.recipe, setting.source
        asked.append((recipe.learning_rate, recipe.steps, source.evaluation.num_examples, given.workdir.split("/")[-1]))
        accuracy = {0.1: 0.5, 0.2: 0.75}[recipe.learning_rate] - (0.25 if recipe.steps == 3 else 0.0)
        return types.SimpleNamespace(metrics=lambda: [{"val_accuracy": accuracy}])

    monkeypatch.setattr(vtab_runs, "finetune", finetuned)
    (tmp_path / "vtab").mkdir()
    row = vtab_runs.vtab(VtabOptions(**arguments | {"learning_rates": (0.1, 0.2), "steps": (3, 4)}))["tasks"]["svhn"]
    assert asked == [
        (0.1, 3, 200, "lr0.1-steps3"), (0.1, 4, 200, "lr0.1-steps4"), (0.2, 3, 200, "lr0.2-steps3"),
        (0.2, 4, 200, "lr0.2-steps4"), (0.2, 4, 33, "final"),
    ]  # fmt: skip
    assert (row["learning_rate"], row["steps"], len(row["tried"])) == (0.2, 4, 4)


def test_means_are_by_group_of_nineteen_tasks():
    groups = [task.group for task in TASKS]
    assert [groups.count(group) for group in ("natural", "specialized", "structured")] == [7, 4, 8]
    assert len(BY_NAME) == 19
    found = {name: {"group": BY_NAME[name].group, "accuracy": accuracy}
             for name, accuracy in (("dtd", 0.5), ("svhn", 0.7), ("dmlab", 0.3))}  # fmt: skip
    summary = vtab_runs.summarize(found, {})
    assert summary["groups"]["natural"] == {"num_tasks": 2, "mean": pytest.approx(0.6)}
    assert summary["groups"]["structured"] == {"num_tasks": 1, "mean": pytest.approx(0.3)}
    assert summary["mean"] == pytest.approx(0.5)


def test_unknown_tasks_and_absent_data_are_refused(arguments, tmp_path):
    with pytest.raises(UserError, match="no task of VTAB named 'clevr'; the nearest names are clevr-"):
        vtab_runs.vtab(VtabOptions(**arguments | {"tasks": ("clevr",)}))
    with pytest.raises(UserError, match="None of the 4 tasks is prepared in .*none; prepare some by the commands"):
        vtab_runs.vtab(VtabOptions(**arguments | {"data_dir": str(tmp_path / "none")}))
