"""The demo: the whole way, from images to a model that is served and one for phones."""

import json
import pathlib
import shlex

import numpy as np
import pytest
import tensorflow as tf

from export.saved_model import __main__ as saved_model
from export.tflite import __main__ as tflite
from training import demo, evaluate
from training.data.sources import digits
from training.recipes.pretrain import find_recipe


@pytest.mark.slow
def test_the_demo_reaches_its_numbers(tmp_path, monkeypatch):
    assert find_recipe("digits").epochs == 80
    monkeypatch.chdir(tmp_path)
    demo.main([])
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert summary["test_accuracy"] >= 0.98
    for name, part in summary["tflite"].items():
        assert abs(part["accuracy"] - summary["test_accuracy"]) <= 0.01, name


def test_the_demo_says_where_everything_is(demo_place: pathlib.Path):
    run = demo_place / "runs" / "demo"
    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() == {"parameters", "test_accuracy", "train_seconds", "saved_model", "tflite"}
    assert summary["test_accuracy"] >= 0.3
    assert summary["saved_model"]["max_abs_diff"] <= 1e-4
    assert (run / summary["saved_model"]["path"] / "saved_model.pb").is_file()
    card = (run / summary["saved_model"]["path"] / "README.md").read_text()
    assert "trained from scratch" in card
    assert "unknown" not in card
    assert summary["tflite"].keys() == {"float32", "int8-dynamic"}
    for name, part in summary["tflite"].items():
        assert (run / part["path"]).stat().st_size == part["bytes"], name
        assert abs(part["accuracy"] - summary["test_accuracy"]) <= 0.02
    assert summary["tflite"]["float32"]["max_abs_diff"] <= 1e-4
    assert summary["tflite"]["int8-dynamic"]["bytes"] < 0.5 * summary["tflite"]["float32"]["bytes"]


def test_the_served_model_reads_the_digits_from_their_files(demo_place: pathlib.Path):
    loaded = tf.saved_model.load(demo_place / "runs" / "demo" / "saved_model" / "1")
    split = digits().evaluation
    examples = [split.example(tf.constant(index, tf.int64)) for index in range(split.num_examples)]
    files = tf.stack([tf.io.encode_png(image) for image, _ in examples])
    answer = loaded.signatures["serving_default"](image_bytes=files)
    right = answer["labels"].numpy()[:, 0].astype(int) == np.array([int(label) for _, label in examples])
    summary = json.loads((demo_place / "runs" / "demo" / "summary.json").read_text())
    assert right.mean() == pytest.approx(summary["test_accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize(("export", "options"), [(saved_model, []), (tflite, ["--formats", "float32"])])
def test_the_evaluation_that_an_export_prints_runs(export, options, demo_place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(demo_place)
    export.main(["--run", "runs/demo", "--output", str(tmp_path / "new"), *options])
    lines = capsys.readouterr().out.partition("Next:\n")[2].splitlines()
    [printed] = [shlex.split(line) for line in lines if " evaluate " in line]
    evaluate.main(printed[printed.index("evaluate") + 1 :])
    assert (pathlib.Path(printed[-1]) / "report.html").is_file()
