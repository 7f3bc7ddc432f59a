"""Monitoring: false alarms at the promised rate, alarms for changed images, the expected accuracy, and the command."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest
import scipy.special
import scipy.stats
import tensorflow as tf

import keras_vit
from export.files import write_beside
from export.options import SourceOptions
from export.run import open_run
from export.saved_model import __main__ as saved_model
from export.source import open_model
from keras_vit import UserError
from keras_vit.run import MONITOR, Run
from keras_vit.scores import features_and_logits
from tests.features.places import WIDER, digit_images, write_images
from tests.support import randomize
from training import monitor
from training.features.drift import compare, read_summary, summarize

pytestmark = pytest.mark.usefixtures("models_read_once")


def made(rng: np.random.Generator, count: int, shift: float = 0.0, shares=(0.5, 0.3, 0.2)) -> tuple:
    """Features (n, D), calibrated probabilities (n, K) and labels (n,) of three classes."""
    labels = rng.choice(3, count, p=shares)
    centers = 3.0 * np.eye(3, 12)
    values = centers[labels] + rng.normal(size=(count, 12)) + shift
    odds = np.exp(values[:, :3] * 3.0) * (0.5, 0.3, 0.2)
    return values.astype(np.float32), odds / odds.sum(axis=1, keepdims=True), labels


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch):
    """The interval of the expected accuracy takes most of the time."""
    monkeypatch.setattr("training.features.drift._DRAWS", 150)


@pytest.mark.parametrize(
    "change", [{"features": np.zeros((3, 2))}, {"features": np.zeros(300)}, {"entropy": np.full(300, np.nan)}]
)
def test_a_summary_whose_arrays_do_not_fit_is_refused(change, tmp_path):
    summary = summarize(*made(np.random.default_rng(0), 300))
    dataclasses.replace(summary, **change).save(tmp_path / MONITOR)
    with pytest.raises(UserError, match="cannot be read as a summary of features .*make it again"):
        read_summary(tmp_path / MONITOR)


@pytest.mark.parametrize("windows", [20, pytest.param(40, marks=pytest.mark.slow)])
def test_images_of_the_same_kind_raise_an_alarm_in_one_window_of_a_hundred(windows):
    rng, alarms, covered, gaps = np.random.default_rng(0), 0, 0, []
    summary = summarize(*made(rng, 300))
    for _ in range(windows):
        values, probabilities, labels = made(rng, 60)
        drift = compare(summary, values, probabilities)
        accuracy = np.mean(probabilities.argmax(axis=1) == labels)
        alarms += drift.is_alarm
        covered += drift.accuracy[1] <= accuracy <= drift.accuracy[2]
        gaps.append(drift.accuracy[0] - accuracy)
    assert alarms <= scipy.stats.binom.ppf(0.999, windows, 0.01)
    assert covered >= 0.9 * windows
    assert abs(np.mean(gaps)) < 0.01
    assert np.mean(np.abs(gaps)) < 0.03


def test_wide_features_of_few_images_of_the_same_kind_raise_no_alarm():
    rng = np.random.default_rng(5)
    values = (rng.normal(size=(160, 384)) * np.arange(1, 385) ** -0.3).astype(np.float32)
    probabilities = rng.dirichlet(np.ones(3), 160)
    summary = summarize(values[:80], probabilities[:80], probabilities[:80].argmax(axis=1))
    drift = compare(summary, values[80:], probabilities[80:])
    assert drift.p_value > 0.05
    lengths = np.linalg.norm(values - values[:80].mean(axis=0), axis=1)
    np.testing.assert_allclose(np.linalg.norm(summary.project(values), axis=1).mean(), lengths.mean(), rtol=0.1)


def test_a_model_that_is_sure_of_one_class_is_expected_to_be_wrong():
    rng = np.random.default_rng(4)
    summary = summarize(*made(rng, 300))
    values, _, _ = made(rng, 60)
    sure = np.tile([0.001, 0.001, 0.998], (60, 1))
    assert compare(summary, values, sure).accuracy[0] < 0.45
    assert compare(summary, values, np.roll(sure, 1, axis=1)).accuracy[0] < 0.85  # of the most frequent class


def test_moved_images_raise_an_alarm_and_the_odd_ones_moved_most():
    rng = np.random.default_rng(1)
    summary = summarize(*made(rng, 300))
    values, probabilities, _ = made(rng, 60)
    values[:20] += 2.0
    drift = compare(summary, values, probabilities)
    assert drift.is_alarm
    assert {*np.argsort(-drift.distances)[:15]} <= {*range(20)}


def test_a_class_that_became_frequent_is_named():
    rng = np.random.default_rng(2)
    summary = summarize(*made(rng, 400))
    drift = compare(summary, *made(rng, 200, shares=(0.2, 0.3, 0.5))[:2])
    assert drift.is_alarm
    assert {0, 2} <= {*drift.shares}
    then, now = drift.shares[2]
    assert then < 0.3 < now


def test_a_summary_is_read_as_it_was_written_and_small(tmp_path):
    rng = np.random.default_rng(3)
    values = rng.normal(size=(1100, 80)).astype(np.float32)
    summary = summarize(values, np.full((1100, 4), 0.25), np.zeros(1100, np.int64), 7)
    summary.save(tmp_path / MONITOR)
    assert (tmp_path / MONITOR).stat().st_size < 200_000
    read = read_summary(tmp_path / MONITOR)
    assert read.model_checksum == 7
    np.testing.assert_array_equal(read.features, summary.features)


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory) -> pathlib.Path:
    """A run of handwritten digits with random weights, and its summary."""
    run = Run.at(tmp_path_factory.mktemp("monitor") / "run")
    run.start({"source": {"data": "digits"}, "recipe": {"loss": "softmax"}}, tuple("0123456789"))
    run.save_model(randomize(keras_vit.build(WIDER, image_size=8, channels=1, num_classes=10)))
    monitor.main(["--run", str(run.path)])
    return run.path


def test_the_command_tells_inverted_digits_from_others(run, tmp_path, capsys):
    write_images(tmp_path / "same", digit_images(50))
    write_images(tmp_path / "inverted", 255 - digit_images(50))
    page, metrics = tmp_path / "moved.html", tmp_path / "monitor.prom"
    monitor.main(["--run", str(run), str(tmp_path / "same"), "--metrics", str(metrics)])
    assert f'keras_vit_drift_alarm{{run="{run}"}} 0\n' in metrics.read_text()
    with pytest.raises(SystemExit) as stop:
        monitor.main(["--run", str(run), str(tmp_path / "inverted"), "--output", str(page)])
    assert stop.value.code == 3
    printed = capsys.readouterr().out
    assert "Alarm: these images differ" in printed
    assert "Expected accuracy" in printed
    assert page.read_text().count("<img") == 48


def test_saved_features_are_compared_with_the_summary_beside_an_export(run, tmp_path, capsys):
    options, version = SourceOptions(run=str(run)), tmp_path / "served" / "1"
    version.mkdir(parents=True)
    (version / "saved_model.pb").touch()
    write_beside(version / "assets.extra", open_model(open_run(options), options).origin)
    opened = Run.open(run)
    inside = features_and_logits(opened.model).predict_on_batch(opened.preprocessing.normalize(digit_images(50)))
    arrays = {"features": inside["pre_logits"], "probabilities": scipy.special.softmax(inside["logits"], axis=-1)}
    np.savez(tmp_path / "today.npz", **arrays)
    monitor.main(["--run", str(version), str(tmp_path / "today.npz")])
    assert "No alarm: these images do not differ significantly from" in capsys.readouterr().out
    wrong = (
        {"features": arrays["features"] + np.nan},
        {"probabilities": inside["logits"]},
        {"probabilities": np.ones((50, 1))},  # of another model
        {name: array[:0] for name, array in arrays.items()},
    )
    for change in wrong:
        np.savez(tmp_path / "wrong.npz", **arrays | change)
        with pytest.raises(UserError, match=r"wrong.npz must have .*probabilities \(n, K\), finite numbers of"):
            monitor.main(["--run", str(version), str(tmp_path / "wrong.npz")])


@pytest.mark.slow
def test_an_export_carries_the_summary_for_the_features_that_it_serves(run, tmp_path, capsys):
    saved_model.main(["--run", str(run), "--output", str(tmp_path / "served")])
    version = tmp_path / "served" / "1"
    served = tf.saved_model.load(str(version)).signatures
    images = digit_images(50)
    features = served["features"](image_bytes=tf.stack([tf.io.encode_png(image) for image in images]))["features"]
    probabilities = served["image_tensor_uint8"](image=tf.constant(images))["probabilities"]
    np.savez(tmp_path / "today.npz", features=features, probabilities=probabilities)
    monitor.main(["--run", str(version), str(tmp_path / "today.npz")])
    assert "No alarm" in capsys.readouterr().out


@pytest.mark.parametrize("settings", [{"source": {"data": "digits"}, "recipe": {"loss": "multi-label"}}, {}])
def test_a_run_for_several_classes_an_image_or_without_data_is_refused(settings, run, tmp_path):
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns(MONITOR))
    config = json.loads((run / "config.json").read_text()) | {"settings": settings}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="a run for images of one class each and its --data"):
        monitor.main(["--run", str(tmp_path / "run")])
