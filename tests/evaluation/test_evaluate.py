"""The evaluation report: its numbers, exact over the whole set, and its refusals."""

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys

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
from training.data.sources import DataOptions, DataSet, array_split, digits
from training.evaluation.evaluate import evaluate
from training.evaluation.metrics import intervals, measure, measure_real, read_real_labels
from training.evaluation.plots import draw_mistakes, draw_reliability
from training.evaluation.predictions import one_class
from training.evaluation.predictors import Predictor, open_predictor
from training.loop.devices.strategies import StrategyOptions
from training.options.evaluate import EvaluateOptions, InputOptions

NAMES = ("ant", "bee", "cat")
CONFIG = ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
DIGITS = tuple("0123456789")


def test_the_numbers_are_those_counted_by_hand():
    logits = np.log([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.5, 0.4, 0.1]])
    metrics = measure(logits, np.array([0, 0, 1, 2, 1]), NAMES)
    assert (metrics["num_examples"], metrics["num_correct"], metrics["accuracy"]) == (5, 4, 0.8)
    assert metrics["log_loss"] == pytest.approx(-np.log([0.7, 0.6, 0.8, 0.6, 0.4]).mean())
    assert metrics["confusion"] == [[2, 0, 0], [1, 1, 0], [0, 0, 1]]
    assert metrics["classes"]["ant"] == {
        "num_examples": 2, "precision": pytest.approx(2 / 3), "recall": 1.0, "f1": pytest.approx(0.8)
    }  # fmt: skip
    assert "top5_accuracy" not in metrics


@pytest.fixture(name="run")
def _run(tmp_path) -> Run:
    """A run directory with an untrained model for the digits."""
    model = randomize(keras_vit.build(CONFIG, preprocessing=Preprocessing((8, 8), channels=1), num_classes=10))
    run = Run.at(tmp_path / "run")
    run.start({"command": "test"}, DIGITS)
    run.save_model(model)
    return run


class Figures(dict):
    """The figures of a report by the names of their files, which hold no image."""

    cannot_be_drawn: frozenset[str] = frozenset()

    def save(self, figure, path: pathlib.Path, **_) -> None:
        if path.name in self.cannot_be_drawn:
            raise TypeError("Invalid shape (8, 8, 2) for image data")
        self[path.name] = figure
        path.write_bytes(b"an image")


@pytest.fixture(name="figures")
def _figures(monkeypatch) -> Figures:
    """Images are kept as figures: to draw their files takes seconds, and other tests look at these."""
    figures = Figures()
    monkeypatch.setattr("training.evaluation.plots.save_figure", figures.save)
    return figures


@pytest.fixture(name="no_data")
def _no_data(tmp_path) -> str:
    """Data that cannot be opened: they must not even be, which may take as long as the evaluation."""
    for name in "0123456789":
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return f"folder:{tmp_path / 'broken'}"


def evaluated(run: str | pathlib.Path, source: DataSet | None = None, **options) -> dict:
    """The metrics of a model on the digits, or on other data under their name."""
    chosen = EvaluateOptions(str(run), DataOptions("digits"), **options)
    predictor = open_predictor(open_measured(chosen), chosen.input, chosen.devices)
    return evaluate(predictor, source or digits(), chosen)


@pytest.mark.parametrize("batch_size", [pytest.param(1000, marks=pytest.mark.slow), 7])
def test_every_image_counts_once_with_any_batch_size(run, batch_size):
    metrics = evaluated(run.path, batch_size=batch_size)
    assert metrics["num_examples"] == 360
    split = digits().evaluation
    images = np.stack([split.example(index)[0] for index in range(360)])
    labels = np.array([int(split.example(index)[1]) for index in range(360)])
    model = load_model(run.path)
    logits = model.predict((images.astype(np.float32) - 127.5) / 127.5, verbose=0)
    assert metrics["num_correct"] == int((logits.argmax(-1) == labels).sum())


def test_the_report_is_written_in_all_forms(run, tmp_path):
    output = tmp_path / "report"
    evaluated(run.path, output=str(output))
    photos = {"confusion.png", "reliability.png", "mistakes.png"}
    files = {"evaluation.json", "evaluation.md", "predictions.csv", "report.html", *photos}
    assert {path.name for path in output.iterdir()} == files
    assert all(f"]({name})" in (output / "evaluation.md").read_text() for name in photos)
    gallery = tf.io.decode_png((output / "mistakes.png").read_bytes(), channels=1).numpy()
    assert np.mean(gallery < 128) > 0.1  # the digits are white on black
    numbers = json.loads((output / "evaluation.json").read_text())
    page = (output / "evaluation.md").read_text()
    assert page.startswith(f"# {run.path.name} on digits\n")  # without the folders of this machine
    accuracy, interval = rounded_to(numbers["accuracy"], numbers["intervals"]["accuracy"])
    assert re.search(rf"\| accuracy +\| +{accuracy} \| +{interval} \|", page)
    assert not re.search(r"\| \w+_\w+ ", page)  # rows in words


def test_calibration_is_stored_in_the_run_and_used_by_it(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    metrics = evaluated(copy, output=str(tmp_path / "out"), calibrate=True)
    stored = json.loads((copy / "temperature.json").read_text())
    assert stored == metrics["calibration"]
    assert stored["after"]["log_loss"] < stored["before"]["log_loss"] == metrics["log_loss"]
    assert Run.open(copy).temperature == stored["temperature"]
    sentence = capsys.readouterr().out.splitlines()[-1]
    no_better = "The probabilities on these images are no better than equal ones for all classes. "
    assert sentence.startswith(f"{no_better if stored['temperature'] > 19.9 else ''}Temperature ")
    assert sentence in (tmp_path / "out" / "evaluation.md").read_text()
    with pytest.raises(UserError, match="--value-range applies only to evaluations without --calibrate"):
        options = {"calibrate": True, "input": InputOptions(value_range=(0.0, 1.0))}
        evaluated(copy, output=str(tmp_path / "out"), **options)
    with pytest.raises(UserError, match="--calibrate applies only to a run directory"):
        shutil.copy(copy / "model.keras", tmp_path / "alone.keras")
        evaluated(tmp_path / "alone.keras", output=str(tmp_path), calibrate=True)


def test_a_run_without_mistakes_gets_its_report_before_it_is_said_that_nothing_can_be_calibrated(run, tmp_path, capsys):
    split = digits().evaluation

    def predict(split: Split, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        return np.eye(10)[split.labels], split.labels

    options = EvaluateOptions(str(run.path), DataOptions("digits"), output=str(tmp_path / "out"), calibrate=True)
    predictor = Predictor(open_measured(options), "model", 10, DIGITS, predict)
    with pytest.raises(UserError, match="but nearly all 360 are right"):
        evaluate(predictor, digits(), options)
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (report["num_correct"], "calibration" in report) == (split.num_examples, False)
    assert "Accuracy 100.0% (95% interval 98.9 to 100.0%), 360 of 360 images" in capsys.readouterr().out
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


@pytest.mark.parametrize("counts", [(1, 3), (10, 4), (7, 1), (130, 1), (1,), (23_456, 300)])
def test_the_axis_of_counts_is_labelled_with_the_numbers_where_its_ticks_are(counts, figures, tmp_path):
    rows = [{"low": n / 15, "high": (n + 1) / 15, "accuracy": 0.5, "confidence": n / 15} for n in range(len(counts))]
    draw_reliability([{**row, "num_examples": n} for row, n in zip(rows, counts, strict=True)], 0.1, tmp_path / "r.png")
    figures["r.png"].draw_without_rendering()
    axis = figures["r.png"].axes[1].yaxis
    bottom, top = axis.get_view_interval()
    ticks = [tick for tick in axis.get_major_ticks() if bottom <= tick.get_loc() <= top]
    labels = [tick.label1.get_text() for tick in ticks]
    assert labels == [f"{tick.get_loc():,g}" for tick in ticks]
    assert len(set(labels)) == len(labels) >= 2


def test_an_image_that_no_figure_can_show_costs_no_number(run, figures, tmp_path):
    output = tmp_path / "report"
    evaluated(run.path, output=str(output), save_predictions=True)
    assert (output / "confusion.png").is_file()  # of an older run
    assert (output / "predictions.npz").is_file()
    figures.cannot_be_drawn = frozenset({"confusion.png", "mistakes.png"})
    metrics = evaluated(run.path, output=str(output))
    files = {"evaluation.json", "evaluation.md", "predictions.csv", "reliability.png", "report.html"}  # of this run
    assert {path.name for path in output.iterdir()} == files
    assert json.loads((output / "evaluation.json").read_text())["accuracy"] == metrics["accuracy"]
    text = (output / "evaluation.md").read_text()
    assert "](reliability.png)" in text
    assert "](confusion.png)" not in text
    assert "](mistakes.png)" not in text


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


def test_data_of_other_classes_are_refused(run):
    source = dataclasses.replace(digits(), labels=("zero", *"123456789"))
    with pytest.raises(UserError, match="has 10 classes and the data have 10: only the run"):
        evaluated(run.path, source)


def test_an_unfinished_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="There is no file or folder"):
        evaluated(tmp_path / "none")
    with pytest.raises(UserError, match="is not a finished run: it has no model.keras"):
        evaluated(tmp_path)


def test_neither_a_file_nor_the_report_of_another_run_is_overwritten(run, tmp_path, no_data):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file is a file; --output accepts a directory"):
        evaluate_command.main(
            ["--run", str(run.path), "--data", no_data, "--output", str(tmp_path / "file" / "report")]
        )
    Run.at(tmp_path / "other").start({"command": "other"}, NAMES)
    with pytest.raises(UserError, match="other is the directory of a run; give --output"):
        evaluate_command.main(["--run", str(run.path), "--data", no_data, "--output", str(tmp_path / "other")])


@pytest.mark.parametrize("limit", [1000, 15_000])  # of a file: that of the measures, and that of the predictions
def test_the_numbers_are_whole_or_not_there(limit, run, tmp_path):
    output = str(tmp_path / "a" / "b")
    with full_disk(limit), pytest.raises(OSError, match="File too large"):
        evaluated(run.path, output=output, save_predictions=True)
    assert list(tmp_path.iterdir()) == [run.path]


def test_a_model_of_another_number_of_classes_is_refused(run, no_data, tmp_path):
    for name in "3456789":
        shutil.rmtree(tmp_path / "broken" / name)
    (run.path / "labels.txt").write_text("0\n1\n2\n")
    with pytest.raises(UserError, match=r"output has shape \(None, 10\), but there are 3 labels"):
        evaluate_command.main(["--run", str(run.path), "--data", no_data])


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
    log_loss = sklearn.metrics.log_loss(labels, probabilities, labels=range(7))
    assert found["log_loss"] == pytest.approx(log_loss, abs=1e-9)
    for name in ("precision", "recall", "f1"):
        scores = getattr(sklearn.metrics, f"{name}_score")(labels, said, **of_class)
        assert [row[name] for row in found["classes"].values()] == pytest.approx(scores, abs=1e-12)
        assert found[f"macro_{name}"] == pytest.approx(scores[np.unique(labels)].mean(), abs=1e-12)  # those with images
    accuracy, confidence = sklearn.calibration.calibration_curve(said == labels, probabilities.max(-1), n_bins=15)
    assert [row["accuracy"] for row in found["reliability"]] == pytest.approx(accuracy, abs=1e-9)
    assert [row["confidence"] for row in found["reliability"]] == pytest.approx(confidence, abs=1e-9)
    shares = np.histogram(probabilities.max(-1), bins=15, range=(0, 1))[0] / len(labels)
    assert found["ece"] == pytest.approx(shares[shares > 0] @ np.abs(accuracy - confidence), abs=1e-9)


def test_intervals_hold_the_measures_and_are_those_of_the_binomial():
    logits, labels, names = _made_up()
    found, ranges = (function(logits, labels, names) for function in (measure, intervals))
    for name in ("accuracy", "top5_accuracy", "log_loss", "macro_f1", "macro_recall"):
        assert ranges[name][0] < found[name] < ranges[name][1]
    for name in names[:-1]:
        assert ranges["classes"][name]["f1"][0] < found["classes"][name]["f1"] < ranges["classes"][name]["f1"][1]
    assert ranges["classes"]["g"]["recall"] == [0.0, 0.0]
    width = 2 * 1.96 * np.sqrt(found["accuracy"] * (1.0 - found["accuracy"]) / len(labels))
    assert ranges["accuracy"][1] - ranges["accuracy"][0] == pytest.approx(width, rel=0.1)


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


# The models


@pytest.fixture(name="made", scope="module")
def _made(tmp_path_factory) -> pathlib.Path:
    """One model in every form: run/, run/model.keras, weights.npz, served/1, phone/; and its evaluation images."""
    folder = tmp_path_factory.mktemp("made")
    preprocessing = Preprocessing((8, 8), channels=1, resize="resize-small", crop_from=10)
    model = randomize(keras_vit.build(CONFIG, preprocessing=preprocessing, num_classes=10))
    run = Run.at(folder / "run")
    run.start({"command": "test"}, DIGITS)
    run.save_model(model)
    keras_vit.save_checkpoint(model, folder / "weights.npz", layout="npz")
    images = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 1), np.uint8)
    samples = Samples(tuple(tf.io.encode_png(image).numpy() for image in images), np.arange(9))
    saved_model_of(model, DIGITS, samples, folder / "served")
    tflite_of(model, DIGITS, samples, folder / "phone", ("float32",))
    return folder


@pytest.fixture(name="few_digits")
def _few_digits(figures) -> DataSet:
    """The first 33 evaluation images of the digits; reports without images, which another test looks at."""
    source = digits()
    return dataclasses.replace(source, evaluation=dataclasses.replace(source.evaluation, num_examples=33))


def _evaluated(model: pathlib.Path, source: DataSet, output: pathlib.Path, **options) -> tuple[dict, dict]:
    """Measures and predictions of a model."""
    metrics = evaluated(model, source, batch_size=10, output=str(output), save_predictions=True, **options)
    return metrics, read_npz(output / "predictions.npz")


@pytest.mark.slow
def test_every_form_of_a_model_has_the_same_numbers(made, few_digits, tmp_path):
    expected, predictions = _evaluated(made / "run", few_digits, tmp_path / "run")
    assert predictions["logits"].shape == (33, 10)
    forms = {
        "run/model.keras": "Keras model",
        "weights.npz": "Keras model",
        "served": "SavedModel by image_bytes",
        "phone/model-float32.tflite": "TFLite file",
    }
    for name, kind in forms.items():
        # Arrays alone say neither the heads nor how images are resized.
        unsaid = InputOptions(num_heads=3, resize="resize-small", crop_from=10)
        overrides = unsaid if name == "weights.npz" else InputOptions()
        found, others = _evaluated(made / name, few_digits, tmp_path / "other", input=overrides)
        report = json.loads((tmp_path / "other" / "evaluation.json").read_text())
        assert (report["kind"], found["num_correct"]) == (kind, expected["num_correct"])
        assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)
        np.testing.assert_array_equal(others["labels"], predictions["labels"])
        unnamed = "does not name its classes" in (tmp_path / "other" / "evaluation.md").read_text()
        assert unnamed == (name == "weights.npz")


@pytest.mark.slow
def test_a_saved_model_that_takes_tensors_is_evaluated(made, few_digits, tmp_path, capsys):
    loaded = tf.saved_model.load(made / "served" / "1")
    served = loaded.signatures["image_tensor"]

    @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 1), tf.float32, name="image")])
    def of_numbers(image):
        return {"logits": tf.ensure_shape(served(image=image)["logits"], (None, 10))}

    tf.saved_model.save(loaded, tmp_path / "numbers", signatures=of_numbers)
    expected, _ = _evaluated(made / "run", few_digits, tmp_path / "run")
    background = "does not record a background for transparent images; white is used"
    assert background not in capsys.readouterr().out
    resized = InputOptions(resize="resize-small", crop_from=10)
    found, _ = _evaluated(tmp_path / "numbers", few_digits, tmp_path / "report", input=resized)
    assert background in capsys.readouterr().out
    assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)
    in_range = dataclasses.replace(resized, value_range=(0.0, 1.0))
    other, _ = _evaluated(tmp_path / "numbers", few_digits, tmp_path / "report", input=in_range)
    assert other["log_loss"] != pytest.approx(expected["log_loss"], abs=1e-3)
    given = json.loads((tmp_path / "report" / "evaluation.json").read_text())
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
    resized = InputOptions(resize="resize-small", crop_from=10)
    again, _ = _evaluated(tmp_path / "other.tflite", few_digits, tmp_path / "report", input=resized)
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
    samples = Samples((tf.io.encode_png(np.zeros((8, 8, 1), np.uint8)).numpy(),), np.arange(1))
    [(file, _)] = tflite_of(model, DIGITS, samples, tmp_path / "phone", ("float32",), uint8_input=uint8_input).values()
    expected, _ = _evaluated(tmp_path / "model.keras", few_digits, tmp_path / "report")
    found, _ = _evaluated(file, few_digits, tmp_path / "report")
    assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)


@pytest.mark.parametrize(
    "name", ["phone/model-float32.tflite", "run", pytest.param("run/model.keras", marks=pytest.mark.slow)]
)
def test_options_that_contradict_what_a_model_says_of_its_images_are_refused(name, made, few_digits, tmp_path):
    for options, words in (
        (InputOptions(resize="stretch"), "--resize is resize-small, but stretch was given; leave --resize out."),
        (InputOptions(crop_from=9), "--crop-from is 10, but 9 was given; leave --crop-from out."),
        (InputOptions(value_range=(0.0, 255.0)), r"\(-1.0, 1.0\), but \(0.0, 255.0\) was given; leave --value-range"),
    ):
        with pytest.raises(UserError, match=f"{name} says itself that .*{words}"):
            _evaluated(made / name, few_digits, tmp_path / "report", input=options)
    same = InputOptions(resize="resize-small", crop_from=10, value_range=(-1.0, 1.0))
    found, _ = _evaluated(made / name, few_digits, tmp_path / "report", input=same)
    assert found["num_examples"] == 33


def test_a_checkpoint_at_an_address_is_downloaded_and_evaluated(made, few_digits, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("training.evaluation.evaluate.open_source", lambda arguments, **_: few_digits)
    monkeypatch.chdir(tmp_path)
    options = ["--data", "digits", "--output", "report"]
    heads = ["--num-heads", "3", "--resize", "resize-small", "--crop-from", "10"]
    expected, _ = _evaluated(made / "run", few_digits, tmp_path / "run")
    with serving(made) as address:
        for name, of_file in (("weights.npz", heads), ("run/model.keras", [])):
            evaluate_command.main(["--run", f"{address}/{name}", *options, *of_file])
            found = json.loads((tmp_path / "report" / "evaluation.json").read_text())
            assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)
            assert found["model"] == f"{address}/{name}"
        with pytest.raises(UserError, match="is an address to download from; --output accepts a directory"):
            evaluate_command.main(["--run", f"{address}/weights.npz", "--data", "digits", "--output", address])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "report", "run"]


def test_an_exported_file_on_a_part_of_a_folder_says_that_its_training_images_are_not_known(
    made, few_digits, tmp_path, capsys
):
    part = dataclasses.replace(few_digits, held_out=True)
    sentence = "These images may be training images of"
    _evaluated(made / "phone" / "model-float32.tflite", part, tmp_path / "report")
    assert sentence in capsys.readouterr().out
    _evaluated(made / "run", part, tmp_path / "report")
    assert sentence not in capsys.readouterr().out


@pytest.mark.parametrize(("trained", "held_out"), [("folder:pictures", False), ("tfrecord:shards/*", True)])
def test_a_run_of_a_folder_on_records_and_one_of_records_on_a_folder_may_know_the_images(
    trained, held_out, run, few_digits, tmp_path, capsys
):
    sentence = f"These images may be training images of {run.path}, which cannot be checked"
    data = dataclasses.replace(few_digits, held_out=held_out)
    _evaluated(run.path, data, tmp_path / "report")
    assert sentence not in capsys.readouterr().out  # a run that does not say what it was trained on
    config = json.loads((run.path / "config.json").read_text())
    config["settings"]["source"] = {"data": trained}
    (run.path / "config.json").write_text(json.dumps(config))
    if not held_out:
        run.save_training_images(np.arange(3, dtype=np.uint64))
    _evaluated(run.path, data, tmp_path / "report")
    assert sentence in capsys.readouterr().out


def test_the_class_names_in_a_tflite_file_are_those_of_its_model(made, few_digits, tmp_path):
    alone = tmp_path / "model.tflite"
    shutil.copy(made / "phone" / "model-float32.tflite", alone)
    (tmp_path / "labels.txt").write_text("a file of something else\n")
    _evaluated(alone, few_digits, tmp_path / "report")
    renamed = dataclasses.replace(few_digits, labels=("zero", *few_digits.labels[1:]))
    with pytest.raises(UserError, match="only the run has 0 and only the data have zero"):
        _evaluated(alone, renamed, tmp_path / "report")


@pytest.mark.slow
def test_a_tflite_file_of_a_calibrated_run_says_that_its_logits_are_not_divided(run, few_digits, tmp_path, capsys):
    (run.path / "temperature.json").write_text('{"temperature": 0.5}')
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1), np.uint8)
    samples = Samples(tuple(tf.io.encode_png(image).numpy() for image in images), np.zeros(2))
    samples.save(run.path / "samples.npz")
    tflite_command.main(["--run", str(run.path), "--output", str(tmp_path / "phone"), "--formats", "float32"])
    found, _ = _evaluated(tmp_path / "phone" / "model-float32.tflite", few_digits, tmp_path / "report")
    assert "logits that are not calibrated: an app divides them by 0.5." in capsys.readouterr().out
    expected, _ = _evaluated(run.path, few_digits, tmp_path / "other")
    assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)


def test_overrides_that_an_exported_model_does_not_support_are_refused(made, few_digits, tmp_path):
    served, phone = made / "served", made / "phone" / "model-float32.tflite"
    for model, options, complaint in (
        (
            served,
            {"input": InputOptions(value_range=(0.0, 1.0))},
            "--value-range applies only to models that take pixels",
        ),
        (phone, {"input": InputOptions(image_size=(16, 16))}, "--image-size applies only to models of Keras"),
        (phone, {"devices": StrategyOptions("mirrored")}, "leave --strategy and --replicas out"),
        (made / "run", {"input": InputOptions(num_heads=3)}, "leave --num-heads out"),
        (made / "run", {"devices": StrategyOptions("multi-worker")}, "runs on one machine; give --strategy single"),
    ):
        with pytest.raises(UserError, match=complaint):
            _evaluated(model, few_digits, tmp_path / "report", **options)
    with pytest.raises(UserError, match="is not a run directory to put the report into;"):
        evaluated(phone)


def test_a_damaged_export_is_refused(made, few_digits, tmp_path):
    (tmp_path / "saved_model.pb").write_bytes(b"no model")
    with pytest.raises(UserError, match="cannot be read as a SavedModel"):
        _evaluated(tmp_path, few_digits, tmp_path / "report")
    (tmp_path / "broken.tflite").write_bytes((made / "phone" / "model-float32.tflite").read_bytes()[:500])
    with pytest.raises(UserError, match="cannot be read as a TFLite model"):
        _evaluated(tmp_path / "broken.tflite", few_digits, tmp_path / "report")


def test_a_model_without_a_head_is_refused(few_digits, tmp_path):
    model = keras_vit.build(CONFIG, preprocessing=Preprocessing((8, 8), channels=1), num_classes=0)
    model.save(tmp_path / "features.keras")
    with pytest.raises(UserError, match="has no head: it ends with features of shape"):
        _evaluated(tmp_path / "features.keras", few_digits, tmp_path / "report")


def test_logits_that_are_no_numbers_are_refused(run):
    model = load_model(run.path)
    model.layers[-1].bias.assign(np.full(10, np.nan))
    run.save_model(model)
    with pytest.raises(UserError, match="outputs are not finite for 360 of 360 images"):
        evaluated(run.path)


def test_accepted_labels_are_in_the_report(made, few_digits, tmp_path):
    labels = [int(few_digits.evaluation.example(index)[1]) for index in range(33)]
    (tmp_path / "real.json").write_text(json.dumps([[], *([label, (label + 1) % 10] for label in labels[1:])]))
    found, predictions = _evaluated(made / "run", few_digits, tmp_path / "out", real_labels=str(tmp_path / "real.json"))
    said = predictions["logits"].argmax(-1)[1:]
    right = int(np.sum((said == labels[1:]) | (said == (np.array(labels[1:]) + 1) % 10)))
    assert found["real_labels"] == {
        "num_examples": 32, "num_left_out": 1, "num_correct": right, "accuracy": right / 32
    }  # fmt: skip
    assert f"{right} of 32 images; 1 without" in (tmp_path / "out" / "evaluation.md").read_text()


@pytest.mark.slow
def test_a_report_without_mistakes_has_no_gallery(made, figures, tmp_path):
    """Also where an older one had."""
    source = digits()
    _, predictions = _evaluated(made / "run", source, tmp_path / "out")
    said = predictions["logits"].argmax(-1)
    images = np.stack([source.evaluation.example(index)[0] for index in range(360)])
    right = dataclasses.replace(source, evaluation=array_split(images, said, source.labels))
    assert (tmp_path / "out" / "mistakes.png").is_file()
    assert _evaluated(made / "run", right, tmp_path / "out")[0]["worst_mistakes"] == []
    assert not (tmp_path / "out" / "mistakes.png").exists()
    assert "No mistakes." in (tmp_path / "out" / "evaluation.md").read_text()


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
    options = EvaluateOptions(
        run,
        DataOptions("digits"),
        batch_size=batch_size,
        output=f"{output}/{name}",
        save_predictions=True,
        devices=devices,
    )
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
        (json.loads((tmp_path / name / "evaluation.json").read_text()), read_npz(tmp_path / name / "predictions.npz"))
        for name in ("one", "three")
    )
    assert (one["num_examples"], one["num_correct"]) == (
        2003,
        int(np.sum(first["logits"].argmax(-1) == first["labels"])),
    )
    assert (other["num_correct"], other["confusion"]) == (one["num_correct"], one["confusion"])
    np.testing.assert_allclose(second["logits"], first["logits"], atol=1e-5)
    assert np.sum(one["confusion"]) == 2003
