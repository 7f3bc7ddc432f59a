"""The evaluation report: its numbers, exact over the whole set, and its refusals."""

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import sklearn.calibration
import sklearn.metrics
import tensorflow as tf

import keras_vit
from export.tflite import __main__ as tflite_command
from keras_vit import Preprocessing, UserError, ViTConfig
from keras_vit.files.keras_model import load_model
from keras_vit.files.npz import read_npz
from keras_vit.files.tables import rounded_to
from keras_vit.images.files import Samples
from keras_vit.run import Run
from tests.exports import saved_model_of, tflite_of
from tests.support import full_disk, randomize, serving
from training import evaluate as evaluate_command
from training.checks import open_measured
from training.data.dataset import Split
from training.data.sources import DataOptions, DataSet, digits
from training.evaluation.evaluate import _predicted, evaluate
from training.evaluation.metrics import (
    fit_temperature,
    intervals,
    log_loss,
    measure,
    measure_real,
    read_real_labels,
    softmax,
)
from training.evaluation.plots import draw_mistakes, draw_reliability
from training.evaluation.predictions import one_class
from training.evaluation.predictors import Predictor, open_predictor
from training.loop.devices.strategies import StrategyOptions
from training.options.evaluate import EvaluateOptions, InputOptions

pytestmark = pytest.mark.usefixtures("models_read_once")

NAMES = ("ant", "bee", "cat")
CONFIG = ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
DIGITS = tuple("0123456789")


@pytest.fixture(name="saved", scope="module")
def _saved(tmp_path_factory) -> pathlib.Path:
    """A run directory with an untrained model for the digits."""
    run = Run.at(tmp_path_factory.mktemp("saved") / "run")
    run.start({"command": "test"}, DIGITS)
    run.save_model(randomize(keras_vit.build(CONFIG, preprocessing=Preprocessing((8, 8), channels=1), num_classes=10)))
    return run.path


@pytest.fixture(name="run")
def _run(saved, tmp_path) -> Run:
    """A copy of the run."""
    return Run.at(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture(name="few_digits", scope="module")
def _few_digits() -> DataSet:
    """The first 33 evaluation images of the digits."""
    source = digits()
    return dataclasses.replace(source, evaluation=source.evaluation.take(np.arange(33)))


def evaluated(model: str | pathlib.Path, source: DataSet, output: pathlib.Path | None = None, **options) -> dict:
    """The metrics of a model on some data under the name of the digits."""
    chosen = EvaluateOptions(
        str(model), DataOptions("digits"), output=None if output is None else str(output), batch_size=10, **options
    )
    return evaluate(open_predictor(open_measured(chosen), chosen.input, chosen.devices), source, chosen)


def answered(run: Run, source: DataSet, output: pathlib.Path, logits: np.ndarray | None = None, **options) -> dict:
    """The metrics of a run with a model that gives these logits, or right answers; `is_export` is that model's."""
    is_export = options.pop("is_export", False)

    def predict(split: Split, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        return np.eye(10)[split.labels] if logits is None else logits, split.labels

    chosen = EvaluateOptions(str(run.path), DataOptions("digits"), output=str(output), **options)
    predictor = Predictor(open_measured(chosen), "model", 10, DIGITS, predict, is_export=is_export)
    return evaluate(predictor, source, chosen)


def report_in(folder: pathlib.Path) -> dict:
    return json.loads((folder / "evaluation.json").read_text())


def test_every_image_counts_once_in_batches_of_any_size_and_the_report_has_all_forms(
    saved, few_digits, tmp_path, drawn
):
    metrics = evaluated(saved, few_digits, tmp_path / "report")
    assert metrics["num_examples"] == 33
    images, labels = zip(*(few_digits.evaluation.example(index) for index in range(33)), strict=True)
    logits = load_model(saved).predict((np.stack(images).astype(np.float32) - 127.5) / 127.5, verbose=0)
    assert metrics["num_correct"] == int((logits.argmax(-1) == np.array(labels)).sum())
    output = tmp_path / "report"
    photos = {"confusion.png", "reliability.png", "mistakes.png"}
    files = {"evaluation.json", "evaluation.md", "predictions.csv", "report.html", *photos}
    assert {path.name for path in output.iterdir()} == files
    page, numbers = (output / "evaluation.md").read_text(), report_in(output)
    assert all(f"]({name})" in page for name in photos)
    gallery = tf.io.decode_png((output / "mistakes.png").read_bytes(), channels=1).numpy()
    assert np.mean(gallery < 128) > 0.1  # the digits are white on black
    assert page.startswith("# run on digits\n")  # without the folders of this machine
    accuracy, interval = rounded_to(numbers["accuracy"], numbers["intervals"]["accuracy"])
    assert re.search(rf"\| accuracy +\| +{accuracy} \| +{interval} \|", page)
    assert not re.search(r"\| \w+_\w+ ", page)  # rows in words


def test_calibration_is_stored_in_the_run_and_used_by_it(run, few_digits, tmp_path, capsys):
    logits = 9.0 * np.random.default_rng(0).normal(size=(33, 10))
    metrics = answered(run, few_digits, tmp_path / "out", logits, calibrate=True)
    stored = json.loads((run.path / "temperature.json").read_text())
    assert stored == metrics["calibration"]
    assert stored["after"]["log_loss"] < stored["before"]["log_loss"] == metrics["log_loss"]
    assert Run.open(run.path).temperature == stored["temperature"]
    sentence = capsys.readouterr().out.splitlines()[-1]
    no_better = "The probabilities on these images are no better than equal ones for all classes. "
    assert sentence.startswith(f"{no_better if stored['temperature'] > 19.9 else ''}Temperature ")
    assert sentence in (tmp_path / "out" / "evaluation.md").read_text()
    with pytest.raises(UserError, match="--value-range applies only to evaluations without --calibrate"):
        evaluated(run.path, few_digits, calibrate=True, input=InputOptions(value_range=(0.0, 1.0)))
    with pytest.raises(UserError, match="--calibrate applies only to a run directory"):
        evaluated(shutil.copy(run.path / "model.keras", tmp_path / "x.keras"), few_digits, tmp_path, calibrate=True)


def test_a_run_without_mistakes_gets_its_report_before_it_is_said_that_nothing_can_be_calibrated(
    run, few_digits, tmp_path, capsys
):
    with pytest.raises(UserError, match="but nearly all 33 are right"):
        answered(run, few_digits, tmp_path / "out", calibrate=True)
    report = report_in(tmp_path / "out")
    assert (report["num_correct"], report["worst_mistakes"], "calibration" in report) == (33, [], False)
    assert "No mistakes." in (tmp_path / "out" / "evaluation.md").read_text()
    assert not (tmp_path / "out" / "mistakes.png").exists()
    assert "Accuracy 100.0% (95% interval 89.6 to 100.0%), 33 of 33 images" in capsys.readouterr().out
    assert not (run.path / "temperature.json").exists()


def _png(image: np.ndarray) -> bytes:
    return tf.io.encode_png(image).numpy()


def test_a_mistake_of_any_image_is_shown_and_one_that_cannot_be_costs_no_other(tmp_path):
    half_black = np.zeros((8, 8, 1), np.uint8)
    half_black[:, 4:] = 255
    shapes = [half_black, half_black.repeat(3, axis=-1)]
    with_alpha = [np.concatenate([np.zeros_like(shape), half_black], axis=-1) for shape in shapes]
    files = tf.constant([_png(image) for image in (*shapes, *with_alpha)] + [b"no image", _png(half_black)])
    split = Split(len(files), lambda index: (files[index], tf.constant(0)))
    logits = np.tile([0.0, 2.0, -9.0], (len(files), 1))
    _, mistakes = one_class([""] * len(files), logits, np.zeros(len(files), np.int64), NAMES)
    draw_mistakes(split, mistakes, tmp_path / "mistakes.png")
    gallery = tf.io.decode_png((tmp_path / "mistakes.png").read_bytes(), channels=1).numpy()
    columns = np.array_split(gallery, 6, axis=1)  # one of each image
    assert [np.mean(column < 128) > 0.2 for column in columns] == [True, True, True, True, False, True]


@pytest.mark.parametrize("counts", [(10, 4), (130, 1), (1,), (23_456, 300)])
def test_the_axis_of_counts_is_labelled_with_the_numbers_where_its_ticks_are(counts, monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr("training.evaluation.plots.save_figure", lambda figure, *_: figures.append(figure))
    rows = [{"low": n / 15, "high": (n + 1) / 15, "accuracy": 0.5, "confidence": n / 15} for n in range(len(counts))]
    draw_reliability([{**row, "num_examples": n} for row, n in zip(rows, counts, strict=True)], 0.1, tmp_path / "r.png")
    figures[0].draw_without_rendering()
    axis = figures[0].axes[1].yaxis
    bottom, top = axis.get_view_interval()
    ticks = [tick for tick in axis.get_major_ticks() if bottom <= tick.get_loc() <= top]
    labels = [tick.label1.get_text() for tick in ticks]
    assert labels == [f"{tick.get_loc():,g}" for tick in ticks]
    assert len(set(labels)) == len(labels) >= 2


def test_an_image_that_no_figure_can_show_costs_no_number(run, few_digits, monkeypatch, tmp_path):
    output, wrong = tmp_path / "report", np.zeros((33, 10))
    answered(run, few_digits, output, wrong, save_predictions=True)
    assert {"confusion.png", "predictions.npz"} < {path.name for path in output.iterdir()}  # of an older evaluation

    def fails(*_) -> None:
        raise TypeError("Invalid shape (8, 8, 2) for image data")

    for name in ("confusion", "mistakes"):
        monkeypatch.setattr(f"training.evaluation.report.draw_{name}", fails)
    metrics = answered(run, few_digits, output, wrong)
    files = {"evaluation.json", "evaluation.md", "predictions.csv", "reliability.png", "report.html"}
    assert {path.name for path in output.iterdir()} == files
    assert report_in(output)["accuracy"] == metrics["accuracy"]
    text = (output / "evaluation.md").read_text()
    assert [f"]({name}.png)" in text for name in ("reliability", "confusion", "mistakes")] == [True, False, False]


def test_a_run_keeps_its_own_crop():
    small, stretched = Preprocessing((8, 8), resize="resize-small", crop_from=10), Preprocessing((8, 8))
    assert InputOptions(resize="resize-small").preprocessing(small) == small
    assert InputOptions(value_range=(0.0, 1.0)).preprocessing(small).crop_from == 10
    assert InputOptions(crop_from=12).preprocessing(small).crop_from == 12
    assert InputOptions(resize="stretch").preprocessing(small) == stretched
    with pytest.raises(UserError, match="--crop-from applies only to --resize resize-small"):
        InputOptions(crop_from=40).preprocessing(stretched)
    for options in (InputOptions(resize="resize-small"), InputOptions(resize="resize-small", crop_from=7)):
        with pytest.raises(UserError, match="crop_from (is required .* None|must be at least .* 7)"):
            options.preprocessing(stretched)


@pytest.fixture(name="no_data")
def _no_data(tmp_path) -> str:
    """Data that cannot be opened: they must not even be, which may take as long as the evaluation."""
    for name in "012":
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return f"folder:{tmp_path / 'broken'}"


def test_neither_a_file_nor_the_report_of_another_run_is_overwritten(run, tmp_path, no_data):
    for number in "3456789":
        shutil.copytree(tmp_path / "broken" / "0", tmp_path / "broken" / number)
    (tmp_path / "file").write_text("mine")
    Run.at(tmp_path / "other").start({"command": "other"}, NAMES)
    command = ["--run", str(run.path), "--data", no_data, "--output"]
    for output, words in (("file/report", "file is a file"), ("other", "the config.json of a run")):
        with pytest.raises(UserError, match=words):
            evaluate_command.main([*command, str(tmp_path / output)])


@pytest.mark.parametrize("limit", [1000, 15_000])  # of a file: that of the measures, and that of the predictions
def test_the_numbers_are_whole_or_not_there(limit, run, tmp_path):
    with full_disk(limit), pytest.raises(OSError, match="File too large"):
        answered(run, digits(), tmp_path / "a" / "b", save_predictions=True)
    assert list(tmp_path.iterdir()) == [run.path]


def test_data_of_other_classes_and_logits_that_are_no_numbers_are_refused(run, few_digits, tmp_path):
    others = dataclasses.replace(few_digits, labels=("zero", *"123456789"))
    with pytest.raises(UserError, match="has 10 classes and the data have 10: only the run"):
        answered(run, others, tmp_path / "report")
    logits = np.eye(10)[few_digits.evaluation.labels]
    logits[3:5, 1] = np.nan, np.inf
    logits[5], logits[6, :9] = -np.inf, -np.inf  # the last is that of a probability of 1
    with pytest.raises(UserError, match="outputs are not finite for 3 of 33 images"):
        answered(run, few_digits, tmp_path / "report", logits)
    predictor = types.SimpleNamespace(predict=lambda split, batch_size: (logits[6:], few_digits.evaluation.labels[6:]))
    found = measure(*_predicted(predictor, few_digits.evaluation, range(10), 5), tuple("0123456789"))
    assert found["top5_accuracy"] >= 26 / 27
    assert measure(np.zeros((3, 1)), np.zeros(3, int), ("0",))["log_loss"] == 0.0


def test_a_model_of_another_number_of_classes_is_refused(run, no_data):
    (run.path / "labels.txt").write_text("0\n1\n2\n")
    with pytest.raises(UserError, match=r"output has shape \(None, 10\), but there are 3 labels"):
        evaluate_command.main(["--run", str(run.path), "--data", no_data])


@pytest.mark.parametrize(
    ("trained", "held_out", "is_export", "may_know"),
    [
        (None, False, False, False),  # a run that does not say what it was trained on
        ("folder:pictures", False, False, True),
        ("tfrecord:shards/*", True, False, True),
        (None, True, False, False),
        (None, True, True, True),
    ],
)
def test_that_a_model_may_know_the_images_is_said(
    trained, held_out, is_export, may_know, run, few_digits, tmp_path, capsys
):
    if trained is not None:
        config = json.loads((run.path / "config.json").read_text())
        config["settings"]["source"] = {"data": trained}
        (run.path / "config.json").write_text(json.dumps(config))
    if trained == "folder:pictures":
        run.save_training_images(np.arange(3, dtype=np.uint64))
    data = dataclasses.replace(few_digits, held_out=held_out)
    answered(run, data, tmp_path / "report", is_export=is_export)
    sentence = f"These images may be training images of {run.path}, which cannot be checked"
    assert (sentence in capsys.readouterr().out) == may_know


def test_accepted_labels_are_in_the_report(run, few_digits, tmp_path):
    labels = few_digits.evaluation.labels
    (tmp_path / "real.json").write_text(json.dumps([[], *([int(k), (int(k) + 1) % 10] for k in labels[1:])]))
    logits = np.random.default_rng(1).normal(size=(33, 10))
    found = answered(run, few_digits, tmp_path / "out", logits, real_labels=str(tmp_path / "real.json"))
    right = int(np.sum(np.isin((logits.argmax(-1) - labels)[1:] % 10, [0, 1])))
    expected = {"num_examples": 32, "num_left_out": 1, "num_correct": right, "accuracy": right / 32}
    assert found["real_labels"] == expected
    assert f"{right} of 32 images; 1 without" in (tmp_path / "out" / "evaluation.md").read_text()


# The numbers


def _made_up(count: int = 900, classes: int = 7) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Logits that are right two times in three or so, labels, of which the last class has none, and names."""
    rng = np.random.default_rng(2)
    labels = rng.integers(0, classes - 1, count)
    logits = rng.normal(0.0, 1.5, (count, classes)) + 2.5 * np.eye(classes)[labels]
    return logits.astype(np.float32), labels, tuple("abcdefg"[:classes])


def test_every_measure_is_scikit_learns():
    logits, labels, names = _made_up()
    found, said = measure(logits, labels, names), logits.argmax(-1)
    exponentials = np.exp(logits.astype(np.float64))
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    of_class = {"labels": range(7), "average": None, "zero_division": 0.0}
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(labels, said), abs=1e-12)
    top5 = sklearn.metrics.top_k_accuracy_score(labels, logits, k=5, labels=range(7))
    assert found["top5_accuracy"] == pytest.approx(top5, abs=1e-12)
    expected = sklearn.metrics.log_loss(labels, probabilities, labels=range(7))
    assert found["log_loss"] == pytest.approx(expected, abs=1e-9)
    for name in ("precision", "recall", "f1"):
        scores = getattr(sklearn.metrics, f"{name}_score")(labels, said, **of_class)
        assert [row[name] for row in found["classes"].values()] == pytest.approx(scores, abs=1e-12)
        assert found[f"macro_{name}"] == pytest.approx(scores[np.unique(labels)].mean(), abs=1e-12)  # those with images
    assert found["confusion"] == sklearn.metrics.confusion_matrix(labels, said, labels=range(7)).tolist()
    accuracy, confidence = sklearn.calibration.calibration_curve(said == labels, probabilities.max(-1), n_bins=15)
    assert [row["accuracy"] for row in found["reliability"]] == pytest.approx(accuracy, abs=1e-9)
    assert [row["confidence"] for row in found["reliability"]] == pytest.approx(confidence, abs=1e-9)
    assert all(row["low"] < row["confidence"] <= row["high"] for row in found["reliability"])
    shares = np.histogram(probabilities.max(-1), bins=15, range=(0, 1))[0] / len(labels)
    assert found["ece"] == pytest.approx(shares[shares > 0] @ np.abs(accuracy - confidence), abs=1e-9)


def test_intervals_hold_the_measures_and_are_those_of_the_binomial():
    logits, labels, names = _made_up()
    found, ranges = (function(logits, labels, names) for function in (measure, intervals))
    for name in ("accuracy", "top5_accuracy", "log_loss", "macro_f1", "macro_recall"):
        assert ranges[name][0] < found[name] < ranges[name][1]
    for name in names[:-1]:
        assert ranges["classes"][name]["f1"][0] < found["classes"][name]["f1"] < ranges["classes"][name]["f1"][1]
    assert ranges["classes"]["g"]["recall"] is None  # without images
    width = 2 * 1.96 * np.sqrt(found["accuracy"] * (1.0 - found["accuracy"]) / len(labels))
    assert ranges["accuracy"][1] - ranges["accuracy"][0] == pytest.approx(width, rel=0.1)
    few = np.arange(7)[:5]
    assert intervals(np.eye(7)[few], few, names)["classes"]["a"] == {
        "precision": pytest.approx([0.2065, 1.0], abs=1e-4),  # Wilson's of one of one
        "recall": pytest.approx([0.2065, 1.0], abs=1e-4),
        "f1": pytest.approx([2 * 0.2065 / 1.2065, 1.0], abs=1e-4),
    }


def test_the_interval_of_the_ece_of_a_calibrated_model_holds_its_ece():
    rng = np.random.default_rng(3)
    logits, names = 2.0 * rng.normal(size=(2000, 3)), ("a", "b", "c")
    labels = np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1)  # drawn by the probabilities
    low, high = intervals(logits, labels, names)["ece"]
    found = measure(logits, labels, names)
    assert 0.0 <= low < found["ece"] < high < 0.04
    assert "top5_accuracy" not in found


def test_every_accepted_label_counts_and_images_without_one_do_not():
    logits, labels = np.eye(3)[[0, 1, 2, 0, 1]], np.array([0, 0, 2, 0, 1])
    found = measure_real(logits, labels, [[0], [0, 1], [], [2], [1]])
    assert found == {"num_examples": 4, "num_left_out": 1, "num_correct": 3, "accuracy": 0.75}
    for accepted in ([[]] * 5, [[1], [2], [0], [1], [1]]):
        with pytest.raises(UserError, match="Only [01] of 5 images have their own label"):
            measure_real(logits, labels, accepted)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[0], [1]", "cannot be read as JSON"),
        *(
            (text, "for each of the 3 images a list of class numbers, 0 to 2")
            for text in ("[[0], [3], [1]]", "[[0], 1, [1]]", "[[0], [true], [1]]", "[[0], [1]]")
        ),
    ],
)
def test_a_file_that_does_not_tell_accepted_labels_is_refused(text, complaint, tmp_path):
    (tmp_path / "real.json").write_text(text)
    with pytest.raises(UserError, match=complaint):
        read_real_labels(str(tmp_path / "real.json"), Split(3, lambda index: None), 3)
    with pytest.raises(UserError, match="There is no file"):
        read_real_labels(str(tmp_path / "none.json"), Split(3, lambda index: None), 3)


def test_accepted_labels_follow_the_numbers_of_imagenets_files(tmp_path):
    (tmp_path / "real.json").write_text("[[0], [1, 2], [], [2]]")
    files = ("b/ILSVRC2012_val_00000004.JPEG", "a/ILSVRC2012_val_00000002.JPEG")
    split = Split(2, lambda index: None, files.__getitem__)
    assert read_real_labels(str(tmp_path / "real.json"), split, 3) == [[2], [1, 2]]


# The temperature


def drawn_labels(temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and labels drawn with the probabilities softmax(logits / temperature)."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0.0, 3.0, (20_000, 5))
    gumbel = rng.gumbel(size=logits.shape)
    return logits.astype(np.float32), np.argmax(logits / temperature + gumbel, axis=-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_that_the_labels_were_drawn_with_is_found_and_has_the_lowest_log_loss(temperature):
    logits, labels = drawn_labels(temperature)
    best = fit_temperature(logits, labels)
    assert best == pytest.approx(temperature, rel=0.05)
    losses = [log_loss(softmax(logits / (best * factor)), labels) for factor in (0.99, 1.0, 1.01)]
    assert min(losses) == losses[1]


@pytest.mark.parametrize("logits", [np.eye(2), 9.0 * np.eye(2), np.array([[1.0, 0.0], [-np.inf, 1e-12]])])
def test_images_without_mistakes_have_no_temperature(logits):
    with pytest.raises(UserError, match="nearly all 2 are right"):
        fit_temperature(logits, np.arange(2))


def test_a_probability_of_0_changes_no_temperature():
    logits, labels = drawn_labels(2.0)
    impossible = np.pad(logits, ((0, 0), (0, 1)), constant_values=-np.inf)
    assert fit_temperature(impossible, labels) == fit_temperature(logits, labels)
    impossible[3, labels[3]] = -np.inf
    with pytest.raises(UserError, match="for each image's class, but one is 0"):
        fit_temperature(impossible, labels)


def test_a_run_has_its_temperature_and_everything_else_the_temperature_1(tmp_path):
    assert Run.at(tmp_path).temperature == 1.0
    for name in ("model.keras", "model.bin", "model.safetensors"):  # an export in it changes nothing
        (tmp_path / name).touch()
    (tmp_path / "temperature.json").write_text('{"temperature": 1.5}')
    assert Run.at(tmp_path).temperature == Run(str(tmp_path / "model.keras")).temperature == 1.5
    assert Run(str(tmp_path / "ViT-B_16.npz")).temperature == 1.0


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"temperature": 0.0}', '{"temperature": NaN}', f'{{"temperature": 1{"0" * 400}}}']
)
def test_a_damaged_temperature_is_refused(tmp_path, content):
    (tmp_path / "temperature.json").write_text(content)
    with pytest.raises(UserError, match="temperature.json cannot be read as a temperature"):
        _ = Run.at(tmp_path).temperature


# The models


@pytest.fixture(name="made", scope="module")
def _made(tmp_path_factory) -> pathlib.Path:
    """One model in several forms: run/, run/model.keras, weights.npz, phone/."""
    folder = tmp_path_factory.mktemp("made")
    preprocessing = Preprocessing((8, 8), channels=1, resize="resize-small", crop_from=10)
    model = randomize(keras_vit.build(CONFIG, preprocessing=preprocessing, num_classes=10))
    run = Run.at(folder / "run")
    run.start({"command": "test"}, DIGITS)
    run.save_model(model)
    keras_vit.save_checkpoint(model, folder / "weights.npz", layout="npz")
    tflite_of(model, DIGITS, _samples(), folder / "phone", ("float32",))
    return folder


def _samples() -> Samples:
    images = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 1), np.uint8)
    return Samples(tuple(map(_png, images)), np.arange(9))


@pytest.fixture(name="served", scope="module")
def _served(made) -> pathlib.Path:
    """The model as a SavedModel."""
    saved_model_of(load_model(made / "run"), DIGITS, _samples(), made / "served")
    return made / "served"


# Arrays alone say neither the heads nor how images are resized.
UNSAID = InputOptions(num_heads=3, resize="resize-small", crop_from=10)
RESIZED = InputOptions(resize="resize-small", crop_from=10)


def _opened(model: pathlib.Path, overrides: InputOptions, devices: StrategyOptions | None = None) -> Predictor:
    chosen = EvaluateOptions(str(model), DataOptions("digits"), output="report", input=overrides)
    return open_predictor(open_measured(chosen), overrides, devices or chosen.devices)


def _evaluated(model: pathlib.Path, source: DataSet, output: pathlib.Path, **options) -> tuple[dict, dict]:
    """Measures and predictions of a model."""
    metrics = evaluated(model, source, output, save_predictions=True, **options)
    return metrics, read_npz(output / "predictions.npz")


@pytest.mark.slow
def test_every_form_of_a_model_has_the_same_numbers(made, served, few_digits, tmp_path):
    expected, predictions = _evaluated(made / "run", few_digits, tmp_path / "run")
    assert predictions["logits"].shape == (33, 10)
    forms = {
        "run/model.keras": "Keras model",
        "weights.npz": "Keras model",
        served.name: "SavedModel by image_bytes",
        "phone/model-float32.tflite": "TFLite file",
    }
    for name, kind in forms.items():
        overrides = UNSAID if name == "weights.npz" else InputOptions()
        found, others = _evaluated(made / name, few_digits, tmp_path / "other", input=overrides)
        report = report_in(tmp_path / "other")
        assert (report["kind"], found["num_correct"]) == (kind, expected["num_correct"])
        assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)
        np.testing.assert_array_equal(others["labels"], predictions["labels"])
        unnamed = "does not name its classes" in (tmp_path / "other" / "evaluation.md").read_text()
        assert unnamed == (name == "weights.npz")


@pytest.mark.slow
def test_a_saved_model_that_takes_tensors_is_evaluated(made, served, few_digits, tmp_path, capsys):
    loaded = tf.saved_model.load(served / "1")
    tensors = loaded.signatures["image_tensor"]

    @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 1), tf.float32, name="image")])
    def of_numbers(image):
        return {"logits": tf.ensure_shape(tensors(image=image)["logits"], (None, 10))}

    tf.saved_model.save(loaded, tmp_path / "numbers", signatures=of_numbers)
    expected, _ = _evaluated(made / "run", few_digits, tmp_path / "run")
    background = "does not record a background for transparent images; white is used"
    assert background not in capsys.readouterr().out
    found, _ = _evaluated(tmp_path / "numbers", few_digits, tmp_path / "report", input=RESIZED)
    assert background in capsys.readouterr().out
    assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)
    in_range = dataclasses.replace(RESIZED, value_range=(0.0, 1.0))
    other, _ = _evaluated(tmp_path / "numbers", few_digits, tmp_path / "report", input=in_range)
    assert other["log_loss"] != pytest.approx(expected["log_loss"], abs=1e-3)
    given = report_in(tmp_path / "report")
    assert (given["resize"], given["crop_from"], given["value_range"]) == ("resize-small", 10, [0.0, 1.0])
    title = (tmp_path / "report" / "evaluation.md").read_text().splitlines()[0]
    assert title.endswith("numbers on digits, with --resize resize-small --crop-from 10 --value-range 0.0 1.0")


@pytest.mark.slow
def test_a_tflite_file_says_how_its_images_are_resized(made, few_digits, tmp_path, capsys):
    expected, _ = _evaluated(made / "run", few_digits, tmp_path / "run")
    file = made / "phone" / "model-float32.tflite"
    found, _ = _evaluated(file, few_digits, tmp_path / "report")
    assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)
    assert "does not say how images are resized" not in capsys.readouterr().out
    content = file.read_bytes()
    said = re.search(rb"; preprocessing: \{[^}]*\}", content)[0]
    earlier = b"; resize: resize-small, crop_from: 10".rjust(len(said))  # as earlier versions wrote it
    (tmp_path / "earlier.tflite").write_bytes(content.replace(said, earlier))
    same, _ = _evaluated(tmp_path / "earlier.tflite", few_digits, tmp_path / "report")
    assert same["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)
    (tmp_path / "other.tflite").write_bytes(content.replace(said, b";".rjust(len(said))))
    stretched, _ = _evaluated(tmp_path / "other.tflite", few_digits, tmp_path / "report")
    assert stretched["log_loss"] != pytest.approx(expected["log_loss"], abs=1e-3)
    again, _ = _evaluated(tmp_path / "other.tflite", few_digits, tmp_path / "report", input=RESIZED)
    assert again["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)
    assert "does not say how images are resized; here they are stretched" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("uint8_input", [False, True])
def test_a_tflite_file_says_what_its_images_are_padded_with(uint8_input, few_digits, tmp_path):
    preprocessing = Preprocessing(
        (8, 12), 1, "pad", ((-0.7,), (1.9,)), interpolation="bicubic", background=None, library="timm"
    )
    model = randomize(keras_vit.build(CONFIG, preprocessing=preprocessing, num_classes=10))
    model.save(tmp_path / "model.keras")
    samples = Samples((_png(np.zeros((8, 8, 1), np.uint8)),), np.arange(1))
    [(file, _)] = tflite_of(model, DIGITS, samples, tmp_path / "phone", ("float32",), uint8_input=uint8_input).values()
    expected, _ = _evaluated(tmp_path / "model.keras", few_digits, tmp_path / "report")
    found, _ = _evaluated(file, few_digits, tmp_path / "report")
    assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)


@pytest.mark.slow
def test_a_tflite_file_of_a_calibrated_run_says_that_its_logits_are_not_divided(run, few_digits, tmp_path, capsys):
    (run.path / "temperature.json").write_text('{"temperature": 0.5}')
    _samples().save(run.path / "samples.npz")
    tflite_command.main(["--run", str(run.path), "--output", str(tmp_path / "phone"), "--formats", "float32"])
    found, _ = _evaluated(tmp_path / "phone" / "model-float32.tflite", few_digits, tmp_path / "report")
    assert "logits that are not calibrated: an app divides them by 0.5." in capsys.readouterr().out
    expected, _ = _evaluated(run.path, few_digits, tmp_path / "other")
    assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)


@pytest.mark.parametrize("name", ["phone/model-float32.tflite", "run"])
def test_options_that_contradict_what_a_model_says_of_its_images_are_refused(name, made):
    for options, words in (
        (InputOptions(resize="stretch"), "--resize is resize-small, but stretch was given; leave --resize out."),
        (InputOptions(crop_from=9), "--crop-from is 10, but 9 was given; leave --crop-from out."),
        (InputOptions(value_range=(0.0, 255.0)), r"\(-1.0, 1.0\), but \(0.0, 255.0\) was given; leave --value-range"),
    ):
        with pytest.raises(UserError, match=f"{name} says itself that .*{words}"):
            _opened(made / name, options)
    _opened(made / name, InputOptions(resize="resize-small", crop_from=10, value_range=(-1.0, 1.0)))


def test_a_checkpoint_at_an_address_is_downloaded_and_evaluated(made, few_digits, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("training.evaluation.evaluate.open_source", lambda arguments, **_: few_digits)
    monkeypatch.chdir(tmp_path)
    command = ["--data", "digits", "--num-heads", "3", "--resize", "resize-small", "--crop-from", "10", "--output"]
    expected = evaluated(made / "run", few_digits, tmp_path / "run")
    with serving(made) as address:
        evaluate_command.main(["--run", f"{address}/weights.npz", *command, "report"])
        with pytest.raises(UserError, match="is an address to download from; --output accepts a directory"):
            evaluate_command.main(["--run", f"{address}/weights.npz", *command, address])
    found = report_in(tmp_path / "report")
    assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)
    assert found["model"] == f"{address}/weights.npz"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "report", "run"]


def test_the_class_names_in_a_tflite_file_are_those_of_its_model(made, few_digits, tmp_path):
    alone = tmp_path / "model.tflite"
    shutil.copy(made / "phone" / "model-float32.tflite", alone)
    (tmp_path / "labels.txt").write_text("a file of something else\n")
    assert _evaluated(alone, few_digits, tmp_path / "report")[1]["logits"].shape == (33, 10)
    renamed = dataclasses.replace(few_digits, labels=("zero", *few_digits.labels[1:]))
    with pytest.raises(UserError, match="only the run has 0 and only the data have zero"):
        _evaluated(alone, renamed, tmp_path / "report")


def test_overrides_that_a_model_does_not_support_are_refused(made, few_digits, tmp_path):
    phone, served = made / "phone" / "model-float32.tflite", tf.Module()
    signature = tf.TensorSpec((None,), tf.string, name="image_bytes")
    served.serve = tf.function(lambda image_bytes: {"logits": tf.zeros((1, 10))}, [signature])
    tf.saved_model.save(served, tmp_path / "served", signatures=served.serve)
    for model, overrides, devices, complaint in (
        (tmp_path / "served", InputOptions(value_range=(0.0, 1.0)), None, "--value-range applies only to models that"),
        (phone, InputOptions(image_size=(16, 16)), None, "--image-size applies only to models of Keras"),
        (phone, InputOptions(), StrategyOptions("mirrored"), "leave --strategy and --replicas out"),
        (made / "run", InputOptions(num_heads=3), None, "leave --num-heads out"),
        (made / "run", InputOptions(), StrategyOptions("multi-worker"), "runs on one machine; give --strategy single"),
    ):
        with pytest.raises(UserError, match=complaint):
            _opened(model, overrides, devices)
    with pytest.raises(UserError, match="is not a run directory to put the report into;"):
        evaluated(phone, few_digits)


def test_what_cannot_be_measured_is_refused(made, tmp_path):
    for name in ("empty", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "saved_model.pb").write_bytes(b"no model")
    (tmp_path / "damaged.tflite").write_bytes((made / "phone" / "model-float32.tflite").read_bytes()[:500])
    model = keras_vit.build(CONFIG, preprocessing=Preprocessing((8, 8), channels=1), num_classes=0)
    model.save(tmp_path / "features.keras")
    for name, complaint in (
        ("none", "There is no file or folder"),
        ("empty", "is not a finished run: it has no model.keras"),
        ("damaged", "cannot be read as a SavedModel"),
        ("damaged.tflite", "cannot be read as a TFLite model"),
        ("features.keras", "has no head: it ends with features of shape"),
    ):
        with pytest.raises(UserError, match=complaint):
            _opened(tmp_path / name, InputOptions())


_IN_REPLICAS = """
import sys, numpy as np
from training.loop.devices.strategies import StrategyOptions
from training.evaluation import report
from training.evaluation.evaluate import evaluate
from training.evaluation.predictors import Predictor, open_predictor
from training.data.sources import DataOptions, DataSet, array_split
from training.checks import open_measured
from training.options.evaluate import EvaluateOptions

report.draw_confusion = report.draw_reliability = report.draw_mistakes = lambda *_: None
run, output = sys.argv[1:]
for name, batch_size, devices in (
    ("three", 300, StrategyOptions("mirrored", 3)),  # first, for devices are divided before they are used
    ("one", 2003, StrategyOptions("single")),
):
    written = {"output": f"{output}/{name}", "save_predictions": True}
    options = EvaluateOptions(run, DataOptions("digits"), batch_size=batch_size, devices=devices, **written)
    predictor = open_predictor(open_measured(options), options.input, options.devices)
    rng = np.random.default_rng(1)
    images, labels = rng.integers(0, 256, (2003, 8, 8, 1), np.uint8), rng.integers(0, 10, 2003)
    split = array_split(images, labels, tuple("0123456789"))
    evaluate(predictor, DataSet(tuple("0123456789"), split, split), options)
"""


@pytest.mark.slow
def test_two_thousand_and_three_examples_count_once_in_any_batch_on_any_replicas(made, tmp_path):
    command = [sys.executable, "-c", _IN_REPLICAS, made / "run", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    (one, first), (other, second) = (
        (report_in(tmp_path / name), read_npz(tmp_path / name / "predictions.npz")) for name in ("one", "three")
    )
    assert one["num_examples"] == 2003
    assert one["num_correct"] == int(np.sum(first["logits"].argmax(-1) == first["labels"]))
    assert (other["num_correct"], other["confusion"]) == (one["num_correct"], one["confusion"])
    np.testing.assert_allclose(second["logits"], first["logits"], atol=1e-5)
    assert np.sum(one["confusion"]) == 2003
