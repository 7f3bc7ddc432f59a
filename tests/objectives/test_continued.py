"""Training without labels from a checkpoint: what it begins with, how it resumes, and when it stops."""

import numpy as np
import pytest

import keras_vit
from keras_vit.files.keras_model import load_model
from training import pretrain
from training.features import nearest_neighbors as watch

COMMAND = ["--data", "digits", "--image-size", "8", "8", "--channels", "1", "--batch-size", "200"]
COMMAND += ["--epochs", "2", "--warmup-steps", "1", "--deterministic"]
WAYS = {
    "mnist-mae": ["--decoder-layers", "1", "--decoder-width", "32", "--corruption", "0.5"],
    "mnist-masked-patch": [],
    "mnist-dino": ["--local-size", "4", "--local-crops", "1", "--prototypes", "12", "--head-width", "16"],
}


@pytest.mark.parametrize("name", WAYS)
def test_it_begins_with_all_weights_of_the_checkpoint_and_a_tenth_of_the_learning_rate(
    name, upstream, handed_over, tmp_path, capsys
):
    start = load_model(upstream.path)
    workdir = ["--workdir", str(tmp_path / "run")]
    pretrain.main([name, *COMMAND, *WAYS[name], "--checkpoint", str(upstream.path), *workdir])
    [run] = handed_over
    model = run.make_model(10)
    new = {weight.path: np.array(weight) for weight in model.weights}
    for weight in start.weights:
        if not weight.path.startswith("head"):
            np.testing.assert_array_equal(new[weight.path], weight, err_msg=weight.path)
    assert run.options.recipe.learning_rate == pytest.approx(0.1 * {"mnist-dino": 5e-4}.get(name, 2e-3))
    assert keras_vit.config_of(model) == keras_vit.config_of(start)
    assert "new layers: " in capsys.readouterr().out


@pytest.mark.slow
def test_it_stops_when_the_features_get_worse_and_keeps_the_best(upstream, monkeypatch, tmp_path, capsys):
    accuracies = iter([0.9, 0.95, 0.5, 0.4])
    monkeypatch.setattr(
        watch, "nearest_neighbors", lambda *_, neighbors: [{"neighbors": neighbors[0], "accuracy": next(accuracies)}]
    )
    options = ["--checkpoint", str(upstream.path), "--knn-every", "1", "--epochs", "9"]
    arguments = [argument for argument in COMMAND if argument not in ("--epochs", "2")]
    pretrain.main(["mnist-masked-patch", *arguments, *options, "--workdir", str(tmp_path / "run")])
    printed = capsys.readouterr().out
    assert "The features got worse, so the run stops here" in printed
    assert "Kept the best weights (epoch 1): 95.0%" in printed
    assert not (tmp_path / "run" / "best_features.npz").exists()
