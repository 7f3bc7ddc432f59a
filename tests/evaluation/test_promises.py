"""Promises: that they are kept on images that were not seen, and that all exports decide alike."""

import csv
import importlib.util
import json
import pathlib

import keras
import numpy as np
import pyarrow.parquet
import pytest
import scipy.stats
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

import keras_vit
from export.onnx import __main__ as onnx
from export.saved_model import __main__ as saved_model
from export.tflite import __main__ as tflite
from keras_vit import UserError
from keras_vit.promise import PROMISE, Promise, read_promise
from keras_vit.run import Run
from keras_vit.scores import Scoring
from tests.browser import find_browser, open_browser
from tests.export.test_web_page import CDN, classify, runtime_of_page
from tests.features.places import digit_images, write_images
from tests.support import serving
from training import evaluate, linear_probe, predict
from training.evaluation.promises import _passing, answer_threshold, fit_promise

pytestmark = pytest.mark.usefixtures("models_read_once")


def drawn(rng: np.random.Generator, count: int, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Logits (n, K) and labels (n,), of which some are hard, as the logits say, and the classes differ in it."""
    labels = rng.integers(0, classes, count)
    logits = rng.normal(size=(count, classes))
    logits[np.arange(count), labels] += np.where(rng.random(count) < 0.8, 7.0, 1.5) + 0.4 * labels
    return logits.astype(np.float32), labels


def test_the_bound_is_exact_for_errors_that_grow_together():
    counts, limits, rng = np.array([60, 100, 200]), np.array([1, 3, 10]), np.random.default_rng(0)
    errors = np.cumsum(rng.random((40_000, 200)) < 0.08, axis=1)[:, counts - 1]
    simulated = np.mean(np.any(errors <= limits, axis=1))
    assert _passing(counts, limits, 0.08) == pytest.approx(simulated, abs=0.006)
    one = _passing(counts[:1], limits[:1], 0.08)
    assert one == pytest.approx(scipy.stats.binom.cdf(1, 60, 0.08))


@pytest.mark.parametrize("max_error", [0.05, pytest.param(0.1, marks=pytest.mark.slow)])
def test_few_errors_are_kept_in_19_of_20_draws(max_error):
    rng, broken, draws = np.random.default_rng(1), 0, 50
    logits, labels = drawn(rng, 100_000)
    probabilities = Scoring().probabilities(logits)
    highest, wrong = probabilities.max(axis=1), probabilities.argmax(axis=1) != labels
    answered = []
    for _ in range(draws):
        rows = rng.choice(len(labels), 600, replace=False)
        threshold = answer_threshold(highest[rows], ~wrong[rows], max_error)
        broken += wrong[highest >= threshold].mean() > max_error
        answered.append(np.mean(highest >= threshold))
    assert broken <= scipy.stats.binom.ppf(0.999, draws, 0.05)
    assert np.mean(answered) > 0.7


@pytest.mark.parametrize("by_class", [False, True])
def test_lists_have_the_true_class_as_often_as_promised(by_class):
    rng, covered = np.random.default_rng(2), []
    others, truth = drawn(rng, 20_000)
    probabilities = Scoring().probabilities(others)
    for _ in range(40):
        promise = fit_promise(*drawn(rng, 600), Scoring(), coverage=0.9, by_class=by_class)
        listed = probabilities >= np.array(promise.listed_from)
        own = listed[np.arange(len(truth)), truth]
        covered.append([own.mean(), *(own[truth == label].mean() for label in range(5))])
    mean = np.mean(covered, axis=0)
    assert mean[0] == pytest.approx(0.9, abs=0.015)
    assert mean.min() > (0.89 if by_class else 0.0)
    assert by_class or mean.min() < 0.87


@pytest.mark.parametrize("by_class", [False, True])
def test_the_list_of_a_new_image_counts_as_a_miss(by_class):
    logits, labels = drawn(np.random.default_rng(2), 124)
    promise = fit_promise(logits, labels, Scoring(), coverage=0.9, by_class=by_class)
    own = Scoring().probabilities(logits)[np.arange(124), labels]
    missed = np.bincount(labels, own < np.array(promise.listed_from)[labels], minlength=5)
    allowed = np.floor(0.1 * (np.bincount(labels, minlength=5) + 1)) - 1.0
    np.testing.assert_array_equal(missed if by_class else missed.sum(), allowed if by_class else 11.0)


def test_of_several_classes_the_share_in_the_list_is_promised():
    rng, found = np.random.default_rng(3), []
    for _ in range(40):
        targets = (rng.random((1200, 6)) < 0.3).astype(np.float32)
        logits = (rng.normal(size=targets.shape) + 3.0 * targets - 1.5).astype(np.float32)
        scoring = Scoring(is_multi_label=True)
        promise = fit_promise(logits[:400], targets[:400], scoring, coverage=0.9)
        listed = np.asarray(promise.decide(scoring.probabilities(logits[400:]))["label_set"])
        missing = (targets[400:] * ~listed).sum(axis=1) / np.maximum(targets[400:].sum(axis=1), 1)
        found.append(1.0 - missing.mean())
    assert np.mean(found) == pytest.approx(0.9, abs=0.01)


def test_too_few_images_say_which_promise_they_allow():
    logits, labels = drawn(np.random.default_rng(4), 60)
    with pytest.raises(UserError, match=r"At most 1% errors cannot be promised with 60 images.* --max-error 0\.\d+"):
        fit_promise(logits, labels, Scoring(), max_error=0.01)
    with pytest.raises(UserError, match=r"--coverage 0.983"):
        fit_promise(logits, labels, Scoring(), coverage=0.99)


def test_equal_probabilities_are_not_told_apart():
    confidence = np.repeat([0.9, 0.5], [300, 200])
    correct = np.repeat([True, False], [300, 200])
    assert answer_threshold(confidence, correct, 0.05) == pytest.approx(0.7)


def test_a_promise_is_read_as_it_was_written_and_a_damaged_one_refused(tmp_path):
    promise = Promise(0.02, 0.75, 0.9, listed_from=(0.25, 0.5), measured={"answered": 0.5})
    promise.save(tmp_path / PROMISE)
    assert read_promise(tmp_path / PROMISE) == promise
    for text in ("{}", "[]", '{"listed_from": [0.5], "answer_from": "a"}'):
        (tmp_path / PROMISE).write_text(text)
        with pytest.raises(UserError, match="promise"):
            read_promise(tmp_path / PROMISE)


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory) -> pathlib.Path:
    """A linear probe of handwritten digits with promises."""
    folder = tmp_path_factory.mktemp("promises")
    keras.utils.set_random_seed(0)
    config = keras_vit.ViTConfig(patch_size=2, hidden_size=48, num_layers=1, num_heads=4, mlp_dim=64)
    keras_vit.build(config, image_size=8, channels=1, num_classes=None).save(folder / "backbone.keras")
    options = ["--checkpoint", str(folder / "backbone.keras"), "--data", "digits", "--features", "mean", "--c", "1"]
    linear_probe.main([*options, "--workdir", str(folder / "run"), "--cache", str(folder / "cache")])
    evaluate.main(["--run", str(folder / "run"), "--max-error", "0.2", "--coverage", "0.9", "--by-class"])
    return folder / "run"


@pytest.fixture(name="images", scope="module")
def _images(run) -> pathlib.Path:
    write_images(run.parent / "pictures", digit_images(60))
    return run.parent / "pictures"


def test_prediction_says_what_is_promised(run, images, tmp_path, capsys):
    report = json.loads((run / "evaluation.json").read_text())["promise"]
    assert report["measured"]["error"] <= 0.2
    assert 1.0 <= report["measured"]["set_size"] < 6.0
    assert report["sentences"][0] in (run / "evaluation.md").read_text()
    for ending in ("json", "csv", "html"):
        predict.main(["--run", str(run), str(images), "--output", str(tmp_path / f"out.{ending}")])
    found = json.loads((tmp_path / "out.json").read_text())
    answered = [each["answered"] for each in found]
    assert 0.15 < np.mean(answered) < 1.0
    assert all(each["classes"][0]["class"] == each["label_set"][0] for each in found)
    with (tmp_path / "out.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["answered"] == "True" for row in rows] == answered
    assert [row["label_set"].split("|") for row in rows] == [each["label_set"] for each in found]
    assert (tmp_path / "out.html").read_text().count("For a person") == answered.count(False)
    assert capsys.readouterr().out.count("(for a person)") == 3 * answered.count(False)


def test_another_temperature_makes_the_promise_void(run):
    (run / "temperature.json").write_text('{"temperature": 2.0}')
    with pytest.raises(UserError, match="another model or temperature"):
        _ = Run.open(run).promise
    (run / "temperature.json").unlink()


def decisions_of(run: pathlib.Path, folder: pathlib.Path) -> tuple[list[pathlib.Path], np.ndarray, dict]:
    """The files, the inputs of the model, and what the promise of the run decides."""
    files, opened = sorted(folder.glob("*.png")), Run.open(run)
    inputs = np.stack([opened.preprocessing(opened.preprocessing.decode(file)) for file in files])
    scoring = opened.scoring()
    decided = scoring.promise.decide(scoring.probabilities(opened.model.predict_on_batch(inputs)))
    assert decided.keys() == {"answered", "label_set"}
    return files, inputs, {name: np.asarray(value) for name, value in decided.items()}


@pytest.mark.slow
def test_a_saved_model_and_a_tflite_file_decide_as_the_model(run, images, tmp_path):
    files, inputs, expected = decisions_of(run, images)
    saved_model.main(["--run", str(run), "--output", str(tmp_path / "saved")])
    tflite.main(["--run", str(run), "--output", str(tmp_path / "phone"), "--formats", "float32"])
    served = tf.saved_model.load(str(tmp_path / "saved" / "1")).signatures["serving_default"]
    runner = Interpreter(model_path=str(tmp_path / "phone" / "model-float32.tflite")).get_signature_runner()
    spec = importlib.util.spec_from_file_location("decide", tmp_path / "phone" / "decide.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    answer = served(image_bytes=tf.constant([file.read_bytes() for file in files]))
    by_program = program.decide(np.concatenate([runner(image=image[None])["logits"] for image in inputs]))
    for name, decisions in expected.items():
        np.testing.assert_array_equal(answer[name], decisions)
        np.testing.assert_array_equal(by_program[name], decisions)
    for folder in ("saved/1", "phone"):
        assert '"promise_agreement": 1.0' in (tmp_path / folder / "report.json").read_text()
    assert (tmp_path / "saved" / "1" / "assets.extra" / PROMISE).is_file()
    predict.main(["--run", str(run), str(images), "--output", str(tmp_path / "out.parquet")])
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert table["answered"].to_pylist() == expected["answered"].tolist()


@pytest.mark.slow
def test_an_onnx_file_decides_as_the_model(run, images, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    _, inputs, expected = decisions_of(run, images)
    onnx.main(["--run", str(run), "--output", str(tmp_path), "--web"])
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    outputs = [output.name for output in session.get_outputs()]
    answer = dict(zip(outputs, session.run(outputs, {session.get_inputs()[0].name: inputs}), strict=True))
    for name, decisions in expected.items():
        np.testing.assert_array_equal(answer[name], decisions)
    assert json.loads((tmp_path / "classify.json").read_text())["promise"] == Run.open(run).promise.sentences()


@pytest.mark.slow
def test_the_page_in_a_browser_decides_as_the_model(run, images, tmp_path):
    runtime, _ = runtime_of_page(), find_browser()
    pytest.importorskip("onnxruntime")
    files, _, expected = decisions_of(run, images)
    onnx.main(["--run", str(run), "--output", str(tmp_path), "--web"])
    names, shown = Run.open(run).labels, []
    with open_browser() as page, serving(tmp_path) as address:
        page.served[CDN] = runtime
        page.open(address)
        page.wait_for("!document.querySelector('input').disabled")
        for file in files:
            classify(page, file)
            shown.append(page.evaluate("document.getElementById('promise').textContent"))
    for text, is_answered, listed in zip(shown, expected["answered"], expected["label_set"], strict=True):
        classes = ", ".join(name for name, is_listed in zip(names, listed, strict=True) if is_listed)
        assert text == f"{'' if is_answered else 'Not sure enough: for a person. '}List: {classes}."
    assert len(shown) == 60
