"""Models for images of several classes each: training, measures, predictions and exports."""

import csv
import json
import pathlib
import shutil

import numpy as np
import PIL.Image
import pytest
import sklearn.metrics
import tensorflow as tf

import keras_vit
from export import parity
from export import run as export_run
from export.options import SourceOptions
from export.saved_model import __main__ as saved_model
from export.source import open_model
from export.tflite import __main__ as tflite
from keras_vit import UserError
from keras_vit.files.keras_model import load_model
from keras_vit.run import Run
from tests.data.test_csv_targets import csv_file
from tests.support import randomize
from training import evaluate, predict, pretrain, soup
from training.data.sources import array_split, open_source
from training.evaluation import evaluate as evaluation
from training.evaluation.metrics import measure_multi_label, multi_label_intervals
from training.evaluation.predictors import Predictor
from training.evaluation.report import Subject, multi_label_report, write_report
from training.objectives.objective import Classification
from training.options.common import DataOptions
from training.options.evaluate import EvaluateOptions
from training.recipes.pretrain import find_recipe

NAMES = ("bottom", "left", "right")


def made_up(count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Logits with equal values among them, and targets of four classes; the last class is in no image."""
    rng = np.random.default_rng(5)
    targets = (rng.uniform(size=(count, 4)) < (0.5, 0.3, 0.1, 0.0)).astype(np.float32)
    return np.round(rng.normal(0.0, 1.0, (count, 4)) + 2.0 * targets - 0.7, 1).astype(np.float32), targets


def test_the_measures_are_those_counted_by_hand():
    logits = np.array([[2.0, -1.0], [1.0, 1.0], [-1.0, -3.0]])
    targets = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    found = measure_multi_label(logits, targets, ("a", "b"))
    assert found["exact_match"] == pytest.approx(1 / 3)  # the first image
    assert found["micro_f1"] == pytest.approx(4 / 6)  # 2 right decisions, 3 said and 3 true
    assert found["classes"]["a"]["average_precision"] == pytest.approx((1.0 + 2 / 3) / 2)
    assert found["mean_average_precision"] == pytest.approx((5 / 6 + 1.0) / 2)
    losses = [np.log1p(np.exp(-x)) for x in (2.0, 1.0, -1.0, 1.0, -1.0, 3.0)]
    assert found["log_loss"] == pytest.approx(np.mean(losses))


def test_one_class_is_measured_as_beside_one_without_images():
    logits, targets = np.array([[2.0], [1.0], [-1.0], [-2.0], [-3.0]]), np.array([[1], [0], [1], [0], [0]])
    found = measure_multi_label(logits, targets, ("a",))
    row = found["classes"]["a"]
    assert (row["num_examples"], row["precision"], row["recall"], row["f1"]) == (2, 0.5, 0.5, 0.5)
    assert (found["micro_f1"], found["macro_f1"], found["exact_match"]) == (0.5, 0.5, 0.6)
    assert found["mean_average_precision"] == pytest.approx((1 + 2 / 3) / 2)


def test_a_class_without_images_is_left_out_of_the_mean():
    logits, targets = made_up()
    found = measure_multi_label(logits, targets, tuple("abcd"))
    assert found["classes"]["d"]["average_precision"] is None
    own = sklearn.metrics.average_precision_score(targets[:, :3], logits[:, :3], average="macro")
    assert found["mean_average_precision"] == pytest.approx(own)
    assert found["macro_f1"] == pytest.approx(np.mean([found["classes"][name]["f1"] for name in "abc"]))
    faultless = measure_multi_label(np.array([[5.0, -5.0], [-5.0, -5.0]]), np.array([[1, 0], [0, 0]]), ("a", "b"))
    assert (faultless["macro_f1"], faultless["mean_average_precision"]) == (1.0, 1.0)


def test_intervals_hold_the_measures_and_use_scikit_learns_average_precision(monkeypatch):
    logits, targets = made_up()
    names, measured = tuple("abcd"), measure_multi_label(*made_up(), tuple("abcd"))
    found = multi_label_intervals(logits, targets, names)
    for name in ("mean_average_precision", "micro_f1", "macro_f1", "exact_match", "log_loss"):
        assert found[name][0] < measured[name] < found[name][1]
    for name in "abc":
        low, high = found["classes"][name]["f1"]
        assert low < measured["classes"][name]["f1"] < high
    assert found["classes"]["d"]["average_precision"] is None
    everything_once = np.random.default_rng(0)
    monkeypatch.setattr(np.random, "default_rng", lambda seed: everything_once)
    everything_once = type("Once", (), {"integers": lambda self, low, high, size: np.arange(size)})()
    exact = multi_label_intervals(logits, targets, names)
    for name in "abc":
        average = measured["classes"][name]["average_precision"]
        assert exact["classes"][name]["average_precision"] == pytest.approx([average, average])


def test_images_without_any_class_leave_the_average_precision_unknown(tmp_path, capsys):
    split = array_split(np.zeros((3, 4, 4, 1), np.uint8), np.zeros(3, np.int64), ("a", "b"))
    logits = np.array([[1.0, -1.0], [-1.0, -2.0], [-3.0, -1.0]])
    targets, names = np.zeros((3, 2)), ("a", "b")
    metrics = measure_multi_label(logits, targets, names)
    metrics["intervals"] = multi_label_intervals(logits, targets, names)
    write_report(multi_label_report(Subject("run on x", tmp_path, split), logits, targets, names, metrics))
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["mean_average_precision"] is found["intervals"]["mean_average_precision"] is None
    assert found["exact_match"] == pytest.approx(2 / 3)
    assert "precision unknown, since no image has a class" in capsys.readouterr().out
    assert not (tmp_path / "precision_recall.png").exists()
    assert "nan" not in (tmp_path / "evaluation.md").read_text()


def test_draws_without_any_class_are_left_out_of_the_interval():
    targets = np.zeros((5, 2))
    targets[0, 0] = 1.0
    low, high = multi_label_intervals(np.random.default_rng(0).normal(size=(5, 2)), targets, "ab")[
        "mean_average_precision"
    ]
    assert 0.0 < low <= high <= 1.0


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory) -> pathlib.Path:
    """Images with bright sides, a CSV file that names the sides, and a run of a model that knows nothing yet."""
    place = tmp_path_factory.mktemp("sides")
    rng, lines = np.random.default_rng(0), []
    for number in range(120):
        sides = rng.uniform(size=3) < (0.5, 0.5, 0.2)
        lines.append(f"{number}.png,{'|'.join(name for name, there in zip(NAMES, sides, strict=True) if there)}")
    csv_file(place, "path,labels", lines)
    for line in lines:
        name, labels = line.split(",")
        pixels = rng.integers(0, 60, (8, 8))
        pixels[5:, 2:6] += 150 * ("bottom" in labels)
        pixels[:, :2] += 150 * ("left" in labels)
        pixels[:, 6:] += 150 * ("right" in labels)
        PIL.Image.fromarray(pixels.astype(np.uint8)).save(place / name)
    recipe, run = find_recipe("digits"), Run.at(place / "run")
    run.start({"recipe": {"loss": "multi-label"}}, NAMES)
    run.save_model(randomize(recipe.build(len(NAMES))))
    return place


def logits_of(place: pathlib.Path, names) -> np.ndarray:
    """By the model of the run and its preprocessing alone."""
    model = load_model(place / "run")
    images = [np.asarray(PIL.Image.open(place / name))[..., None] for name in names]
    return np.asarray(model(np.stack([np.asarray(keras_vit.preprocessing_of(model)(image)) for image in images])))


def test_data_of_several_classes_choose_the_loss(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")  # what --verbose does
    data = f"csv:{place / 'list.csv'}"
    pretrain.main(["digits", "--data", data, "--workdir", str(tmp_path / "new"), "--dry-run"])
    printed = capsys.readouterr().out
    assert "Each image may have several classes" in printed
    assert "recipe.loss: multi-label" in printed


def test_the_loss_is_that_of_a_sigmoid_for_each_class_and_right_is_each_decision():
    logits, targets = np.array([[2.0, -1.0], [-3.0, 0.5]], np.float32), np.array([[1.0, 1.0], [0.0, 0.0]], np.float32)
    objective = Classification("multi-label")
    losses, (_, right, seen) = objective.measure(None, targets, logits, np.ones(2, np.float32))
    expected = [[np.log1p(np.exp(-2.0)), np.log1p(np.exp(1.0))], [np.log1p(np.exp(-3.0)), np.log1p(np.exp(0.5))]]
    np.testing.assert_allclose(losses, np.sum(expected, axis=1), rtol=1e-6)
    assert objective.metrics == ("loss", "binary_accuracy")
    assert (float(right), float(seen)) == (1.0, 2.0)  # half of the decisions about each image


def test_exports_agree_when_all_classes_of_an_image_do():
    expected = np.array([[5.0, 0.4, 0.4], [5.0, -0.4, 0.4], [3.0, -1.0, -1.0]])
    logits = np.array([[5.0, -0.4, 0.4], [5.0, -0.2, 0.3], [2.0, -1.0, -1.0]])
    assert parity.agreement(expected, logits, multi_label=True) == pytest.approx(2 / 3)
    assert parity.agreement(expected, logits, multi_label=False) == 1.0


@pytest.mark.slow
def test_the_report_has_the_precision_of_each_class(place, tmp_path, capsys):
    data = f"csv:{place / 'list.csv'}"
    evaluate.main(["--run", str(place / "run"), "--data", data, "--output", str(tmp_path), "--save-predictions"])
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert f"precision {found['mean_average_precision']:.4f}" in printed
    with np.load(tmp_path / "predictions.npz") as stored:
        assert found["classes"]["left"]["num_examples"] == stored["labels"][:, 1].sum()
        own = sklearn.metrics.average_precision_score(stored["labels"], stored["logits"], average="macro")
    assert found["mean_average_precision"] == pytest.approx(own)
    assert list(found["classes"]) == list(NAMES)
    with np.load(tmp_path / "predictions.npz") as stored:
        assert stored["labels"].shape == stored["logits"].shape == (12, 3)
    text = (tmp_path / "evaluation.md").read_text()
    assert "| bottom |" in text
    assert "exact" not in text
    assert (tmp_path / "precision_recall.png").stat().st_size > 5000


def test_options_and_data_of_one_class_each_are_refused(place, tmp_path):
    data, several = (DataOptions(f"csv:{folder / 'list.csv'}") for folder in (tmp_path, place))
    csv_file(tmp_path, "path,label", [f"{number}.png,{NAMES[number % 3]}" for number in range(6)])
    run = Run.open(str(place / "run"))
    model = Predictor(run, "model", 3, NAMES, lambda *_: pytest.fail("it was run"), is_multi_label=True)
    for name, value in (("calibrate", True), ("real_labels", place / "list.csv"), ("max_error", 0.1)):
        chosen = EvaluateOptions(run.name, several, output=str(tmp_path), **{name: value})
        option = f"--{name.replace('_', '-')}"
        with pytest.raises(UserError, match=f"{option} applies only to images of one class each"):
            evaluation.evaluate(model, open_source(several, multi_label=True), chosen)
    with pytest.raises(UserError, match="was trained on images of several classes each, but these have one class each"):
        evaluation.evaluate(model, open_source(data), EvaluateOptions(run.name, data, output=str(tmp_path)))
    options = ["--workdir", str(tmp_path / "new"), "--batch-size", "2", "--warmup-steps", "0"]
    with pytest.raises(UserError, match="--loss multi-label is for images of several classes each"):
        pretrain.main(["digits", "--data", data.data, *options, "--loss", "multi-label"])
    with pytest.raises(UserError, match="--loss applies only to labels"):
        pretrain.main(["digits", "--data", several.data, *options, "--teacher", "x"])


def test_predict_names_every_class_that_reaches_the_threshold(place, tmp_path, capsys):
    files = [f"{number}.png" for number in range(12)]
    probabilities = 1.0 / (1.0 + np.exp(-logits_of(place, files)))
    threshold = float(np.median(probabilities))
    output = tmp_path / "found.csv"
    arguments = ["--run", str(place / "run"), *(str(place / file) for file in files), "--threshold", str(threshold)]
    predict.main([*arguments, "--output", str(output)])
    with output.open() as stream:
        rows = list(csv.DictReader(stream))
    for file, shares in zip(files, probabilities, strict=True):
        [row] = [row for row in rows if row["picture"].endswith(f"/{file}")]
        names, values = (row[column].split("|") if row[column] else [] for column in ("classes", "probabilities"))
        found = dict(zip(names, map(float, values), strict=True))
        expected = {name: share for name, share in zip(NAMES, shares, strict=True) if share >= threshold}
        assert found == pytest.approx(expected, abs=1e-4)
        assert row["rejected"] == str(not expected)
    capsys.readouterr()
    predict.main([*arguments[:-1], "0.9999"])  # which no class reaches
    assert f"{place / files[0]} (rejected)" in capsys.readouterr().out
    predict.main(["--run", str(place / "run"), *map(str, sorted(place.glob("1?.png"))), "--output", f"{output}.html"])
    assert "Classes from 50.0% on: <b>" in pathlib.Path(f"{output}.html").read_text()


@pytest.mark.slow
def test_a_soup_and_an_export_of_such_runs_are_of_their_kind(place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "other")
    for run in (place / "run", tmp_path / "other"):
        config = json.loads((run / "config.json").read_text())
        config["settings"]["source"] = {"data": "csv:list.csv"}
        (run / "config.json").write_text(json.dumps(config))
    soup.main([str(place / "run"), str(tmp_path / "other"), "--output", str(tmp_path / "soup")])
    assert Run.open(tmp_path / "soup").is_multi_label
    labels = place / "run" / "labels.txt"
    options = SourceOptions(run=str(place / "run"), labels=str(labels))
    assert open_model(export_run.open_run(options), options).origin.multi_label


@pytest.mark.slow
def test_an_export_is_evaluated_on_its_kind_of_images_and_saturated_probabilities_are_finite(place, tmp_path):
    model = load_model(place / "run")
    model.get_layer("head").bias.assign([40.0, 0.0, -40.0])
    run = Run.at(tmp_path / "run")
    run.start({"recipe": {"loss": "multi-label"}}, NAMES)
    run.save_model(model)
    saved_model.main(["--checkpoint", str(run.path), "--output", str(tmp_path / "served")])
    report = report_of(tmp_path / "served", place, tmp_path / "report")
    assert np.isfinite(report["log_loss"])
    one = csv_file(tmp_path, "path,label", [f"{number}.png,{NAMES[number % 3]}" for number in range(30)])
    with pytest.raises(UserError, match="was trained on images of several classes each, but these have one class each"):
        evaluate.main(["--run", str(tmp_path / "served"), "--data", one.data, "--output", str(tmp_path / "other")])


@pytest.fixture(name="trained", scope="module")
def _trained(place, tmp_path_factory) -> pathlib.Path:
    """A run that was trained on the images."""
    run = tmp_path_factory.mktemp("trained") / "run"
    data = f"csv:{place / 'list.csv'}"
    options = ["--epochs", "12", "--batch-size", "30", "--warmup-steps", "5", "--shift", "0"]
    pretrain.main(["digits", "--data", data, "--workdir", str(run), *options])
    return run


def report_of(model: pathlib.Path, place: pathlib.Path, output: pathlib.Path) -> dict:
    evaluate.main(["--run", str(model), "--data", f"csv:{place / 'list.csv'}", "--output", str(output)])
    return json.loads((output / "evaluation.json").read_text())


@pytest.mark.slow
def test_training_learns_each_class(place, trained, tmp_path):
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val_binary_accuracy"] > 0.9
    assert "val_accuracy" not in last
    assert Run.open(trained / "model.keras").is_multi_label
    assert report_of(trained, place, tmp_path)["mean_average_precision"] > 0.95


@pytest.mark.slow
def test_exports_have_the_probability_of_each_class(place, trained, tmp_path):
    saved_model.main(["--run", str(trained), "--output", str(tmp_path / "served")])
    version = tmp_path / "served" / "1"
    report = json.loads((version / "report.json").read_text())
    assert report["multi_label"]
    assert report["keras_accuracy"] is None
    assert "several classes" in (version / "README.md").read_text()
    files = tf.constant([(place / f"{number}.png").read_bytes() for number in range(8)])
    served = tf.saved_model.load(str(version)).signatures["serving_default"](image_bytes=files)
    assert served["probabilities"].numpy().sum(axis=1).max() > 1.5
    of_export, of_run = (
        report_of(model, place, tmp_path / name) for model, name in ((tmp_path / "served", "a"), (trained, "b"))
    )
    assert of_export["log_loss"] == pytest.approx(of_run["log_loss"], rel=1e-4)
    assert of_export["micro_f1"] == of_run["micro_f1"]
    tflite.main(["--run", str(trained), "--output", str(tmp_path / "phone"), "--formats", "float32"])
    [file] = (tmp_path / "phone").glob("*.tflite")
    assert report_of(file, place, tmp_path / "c")["micro_f1"] == of_run["micro_f1"]
