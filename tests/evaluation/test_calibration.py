"""Temperature scaling: the best temperature, where it is stored, and what uses it."""

import numpy as np
import pytest

from keras_vit import UserError
from keras_vit.run import Run
from training.evaluation.metrics import fit_temperature, log_loss, softmax


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


@pytest.mark.parametrize("logits", [np.eye(2), 9.0 * np.eye(2), np.array([[1.0, 0.0], [-np.inf, 1e-12]])])
def test_images_without_mistakes_have_no_temperature(logits):
    with pytest.raises(UserError, match="nearly all 2 are right"):
        fit_temperature(logits, np.arange(2))


def test_a_probability_of_0_changes_no_temperature():
    logits, labels = drawn(2.0)
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
