"""The evaluation report: its numbers, exact over the whole set, and its refusals."""

import dataclasses
import json

import numpy as np
import pytest

import keras_vit
from conftest import randomize
from keras_vit import Preprocessing, UserError, ViTConfig
from training import evaluate
from training.run import Run
from training.sources import DataArguments, digits

NAMES = ("ant", "bee", "cat")


def test_the_numbers_are_those_counted_by_hand():
    logits = np.log([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.5, 0.4, 0.1]])
    metrics = evaluate.measure(logits, np.array([0, 0, 1, 2, 1]), NAMES)
    assert (metrics["num_examples"], metrics["num_correct"], metrics["accuracy"]) == (5, 4, 0.8)
    assert metrics["log_loss"] == pytest.approx(-np.log([0.7, 0.6, 0.8, 0.6, 0.4]).mean())
    assert metrics["confusion"] == [[2, 0, 0], [1, 1, 0], [0, 0, 1]]
    assert metrics["classes"]["ant"] == {
        "num_examples": 2, "precision": pytest.approx(2 / 3), "recall": 1.0, "f1": pytest.approx(0.8)
    }  # fmt: skip
    assert "top5_accuracy" not in metrics


def test_a_class_without_images_does_not_break_the_report():
    metrics = evaluate.measure(np.eye(3)[[0, 1]], np.array([0, 1]), NAMES)
    assert metrics["classes"]["cat"]["num_examples"] == 0
    assert metrics["accuracy"] == 1.0


def test_top_five_counts_the_five_highest():
    logits = np.tile(np.arange(7.0), (7, 1))
    metrics = evaluate.measure(logits, np.arange(7), tuple("abcdefg"))
    assert metrics["top5_accuracy"] == pytest.approx(5 / 7)


@pytest.fixture(name="run")
def _run(tmp_path) -> Run:
    """A run directory with an untrained model for the digits."""
    config = ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
    model = randomize(keras_vit.build(config, preprocessing=Preprocessing((8, 8), channels=1), num_classes=10))
    run = Run(tmp_path / "run")
    run.start({"command": "test"}, tuple("0123456789"))
    run.save_model(model)
    return run


@pytest.fixture(name="no_data")
def _no_data(monkeypatch):
    """Data must not even be opened, which may take as long as the evaluation."""
    monkeypatch.setattr(evaluate, "open_source", lambda arguments: pytest.fail("the data were opened"))


@pytest.mark.parametrize("batch_size", [1000, 7])
def test_every_image_counts_once_whatever_the_batch(run, batch_size):
    metrics = evaluate.evaluate(evaluate.Arguments(str(run.path), DataArguments("digits"), batch_size))
    assert metrics["num_examples"] == 360
    split = digits().evaluation
    images = np.stack([split.example(index)[0] for index in range(360)])
    labels = np.array([int(split.example(index)[1]) for index in range(360)])
    model = evaluate.run_directory.load_model(run.path)
    logits = model.predict((images.astype(np.float32) - 127.5) / 127.5, verbose=0)
    assert metrics["num_correct"] == int((logits.argmax(-1) == labels).sum())


def test_the_report_is_written_in_three_forms(run, tmp_path):
    output = tmp_path / "report"
    evaluate.evaluate(evaluate.Arguments(str(run.path), DataArguments("digits"), output=str(output)))
    assert {path.name for path in output.iterdir()} == {"evaluation.json", "evaluation.md", "confusion.png"}
    numbers = json.loads((output / "evaluation.json").read_text())
    assert f"| accuracy | {numbers['accuracy']:.6g} |" in (output / "evaluation.md").read_text()


def test_data_of_other_classes_are_refused(run, monkeypatch):
    source = dataclasses.replace(digits(), labels=("zero", *"123456789"))
    monkeypatch.setattr(evaluate, "open_source", lambda arguments: source)
    with pytest.raises(UserError, match="tells apart 10 classes and the data have 10, of which 0, zero differ"):
        evaluate.evaluate(evaluate.Arguments(str(run.path), DataArguments("digits")))


def test_an_unfinished_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="There is no run directory"):
        evaluate.evaluate(evaluate.Arguments(str(tmp_path / "none"), DataArguments("digits")))
    with pytest.raises(UserError, match="is no finished run: it has no model.keras"):
        evaluate.evaluate(evaluate.Arguments(str(tmp_path), DataArguments("digits")))


def test_a_broken_model_file_is_refused(run):
    run.model_file.write_bytes(run.model_file.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read as a Keras model"):
        evaluate.evaluate(evaluate.Arguments(str(run.path), DataArguments("digits")))


@pytest.mark.parametrize("batch_size", [0, -1])
def test_an_empty_batch_is_refused(run, batch_size, no_data):
    with pytest.raises(UserError, match=f"--batch-size must be at least 1 image, but is {batch_size}"):
        evaluate.evaluate(evaluate.Arguments(str(run.path), DataArguments("digits"), batch_size))


@pytest.mark.parametrize("output", ["file", "file/report"])
def test_a_file_in_the_place_of_the_report_is_refused_at_once(run, output, tmp_path, no_data):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file is a file; --output takes a directory"):
        evaluate.evaluate(evaluate.Arguments(str(run.path), DataArguments("digits"), output=str(tmp_path / output)))


def test_the_report_of_another_run_is_not_overwritten(run, tmp_path, no_data):
    Run(tmp_path / "other").start({"command": "other"}, NAMES)
    with pytest.raises(UserError, match="other is another run than .*run; give --output a directory of its own"):
        evaluate.evaluate(evaluate.Arguments(str(run.path), DataArguments("digits"), output=str(tmp_path / "other")))


def test_the_report_may_go_to_the_run_itself_and_replace_an_older_one(run):
    for output in (None, str(run.path / ".." / "run")):
        (run.path / "evaluation.md").write_text("old")
        evaluate.evaluate(evaluate.Arguments(str(run.path), DataArguments("digits"), output=output))
        assert "| accuracy |" in (run.path / "evaluation.md").read_text()


def test_a_report_is_whole_or_not_there(run, tmp_path, monkeypatch):
    def full(matrix, names, path):
        raise OSError("disk full")

    monkeypatch.setattr(evaluate, "_draw_confusion", full)
    with pytest.raises(OSError, match="disk full"):
        evaluate.evaluate(evaluate.Arguments(str(run.path), DataArguments("digits"), output=str(tmp_path / "a" / "b")))
    assert list(tmp_path.iterdir()) == [run.path]


def test_a_model_of_another_number_of_classes_is_refused(run, no_data):
    (run.path / "labels.txt").write_text("ant\nbee\ncat\n")
    with pytest.raises(UserError, match=r"output has shape \(None, 10\), but there are 3 labels"):
        evaluate.evaluate(evaluate.Arguments(str(run.path), DataArguments("digits")))
