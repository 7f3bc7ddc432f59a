"""Temperature scaling: the best temperature, where it is stored, and what uses it."""

import json

import numpy as np
import pytest

from keras_vit import UserError
from keras_vit.run import Run
from training.evaluation.metrics import calibration, fit_temperature, log_loss, softmax


def drawn(temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and labels drawn with the probabilities softmax(logits / temperature)."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0.0, 3.0, (20_000, 5))
    gumbel = rng.gumbel(size=logits.shape)
    return logits.astype(np.float32), np.argmax(logits / temperature + gumbel, axis=-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_that_the_labels_were_drawn_with_is_found(temperature):
    assert fit_temperature(*drawn(temperature)) == pytest.approx(temperature, rel=0.05)


def test_no_temperature_nearby_has_a_lower_log_loss():
    logits, labels = drawn(2.0)
    best = fit_temperature(logits, labels)
    losses = [log_loss(softmax(logits / (best * factor)), labels) for factor in (0.99, 1.0, 1.01)]
    assert min(losses) == losses[1]


def test_calibration_measures_what_it_gains():
    found = calibration(*drawn(3.0))
    assert found["num_examples"] == 20_000
    assert found["after"]["log_loss"] < found["before"]["log_loss"]
    assert found["after"]["ece"] < 0.02 < found["before"]["ece"]


@pytest.mark.parametrize(
    ("logits", "labels", "reason"),
    [
        (np.eye(3), np.arange(3), "nearly all 3 are right"),
        (9.0 * np.eye(3), np.arange(3), "nearly all 3 are right"),
        (np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1e-12]]), np.array([0, 1, 0]), "nearly all 3 are right"),
        (np.array([[0.0, -np.inf]]), np.array([0]), "some classes have probability 0"),
    ],
)
def test_images_without_mistakes_and_infinite_logits_have_no_temperature(logits, labels, reason):
    with pytest.raises(UserError, match=reason):
        fit_temperature(logits, labels)


def test_a_run_has_its_temperature_and_everything_else_the_temperature_1(tmp_path):
    assert Run.at(tmp_path).temperature == 1.0
    (tmp_path / "temperature.json").write_text(json.dumps({"temperature": 1.5}))
    assert Run.at(tmp_path).temperature == Run(str(tmp_path / "model.keras")).temperature == 1.5
    assert Run(str(tmp_path / "ViT-B_16.npz")).temperature == 1.0


def test_a_run_with_an_export_in_it_keeps_its_temperature(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("model.keras", "model.bin", "model.safetensors"):
        (run / name).touch()
    (run / "temperature.json").write_text('{"temperature": 2.5}')
    assert Run.at(run).temperature == 2.5


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"temperature": 0.0}', '{"temperature": NaN}'])
def test_a_damaged_temperature_is_refused(tmp_path, content):
    (tmp_path / "temperature.json").write_text(content)
    with pytest.raises(UserError, match="temperature.json cannot be read as a temperature"):
        _ = Run.at(tmp_path).temperature
