"""Fine-tuning: any checkpoint becomes a run on other images."""

import json
import shutil
from collections.abc import Callable

import keras
import numpy as np
import pytest

import export.tflite.__main__ as tflite
import keras_vit
from keras_vit import UserError
from keras_vit.files.keras_model import load_model
from keras_vit.run import Run
from tests.support import FIXTURES, randomize, replaced
from training import evaluate, finetune

COMMAND = ["--data", "digits", "--recipe", "mnist-finetune", "--steps", "2", "--batch-size", "8", "--warmup-steps", "1"]


@pytest.fixture(name="untrained")
def _untrained(handed_over) -> Callable[..., keras.Model]:
    """The model that a command hands over to training."""

    def make(*command: str) -> keras.Model:
        finetune.main(replaced(COMMAND, *command))
        run = handed_over.pop()
        return run.make_model(len(run.setup.source.labels))

    return make


def test_a_run_becomes_a_run_at_another_resolution_with_layers_frozen_by_name(upstream, tmp_path):
    # Without a warm-up, for the second step would be the first that moves the body.
    command = replaced(
        COMMAND, "--checkpoint", str(upstream.path), "--image-size", "16", "12", "--warmup-steps", "0",
        "--decay", "constant",
    )  # fmt: skip
    folder = tmp_path / "run"
    finetune.main([*command, "--workdir", str(folder), "--freeze", "embedding", "Transformer.encoderblock_0"])
    model, labels = keras_vit.load(folder)
    before, _ = keras_vit.load(upstream.path)
    old, new = ({weight.path: np.array(weight) for weight in each.weights} for each in (before, model))
    for path in old:
        frozen = path.startswith(("embedding", "Transformer.encoderblock_0"))
        assert np.array_equal(old[path], new[path]) == frozen, path
    with pytest.raises(UserError, match="--freeze encoder names no layer"):
        finetune.main([*command, "--workdir", str(tmp_path / "other"), "--freeze", "encoder"])
    assert not (tmp_path / "other").exists()
    assert model.input_shape == (None, 16, 12, 1)
    assert labels == tuple("0123456789")
    settings = json.loads((folder / "config.json").read_text())["settings"]
    assert (settings["command"], settings["checkpoint"]) == ("finetune", str(upstream.path))
    weights = json.loads((folder / "config.json").read_text())["weights"]
    assert weights == {"checkpoint": str(upstream.path), "license": None}
    assert [record["step"] for record in Run.at(folder).metrics()] == [2]


def test_it_starts_from_the_weights_with_positions_resized_and_a_new_head(upstream, untrained, tmp_path):
    before, _ = keras_vit.load(upstream.path)
    workdir = ["--workdir", str(tmp_path / "run")]
    model = untrained("--checkpoint", str(upstream.path), "--image-size", "16", "12", *workdir, "--new-head")
    old, new = ({weight.path: np.array(weight) for weight in each.weights} for each in (before, model))
    (table,) = (path for path in old if old[path].ndim == 3 and "posembed" in path)
    expected = keras_vit.resize_position_embedding(old[table], (2, 2), (4, 3), 1)
    np.testing.assert_allclose(new[table], expected, atol=1e-6)
    assert not new["head/kernel"].any()
    for path in old.keys() - {table, "head/kernel", "head/bias"}:
        np.testing.assert_array_equal(new[path], old[path], err_msg=path)


def test_a_checkpoint_that_knows_evaluation_images_is_warned_of(upstream, untrained, tmp_path, capsys):
    shutil.copytree(upstream.path, tmp_path / "known")
    config = json.loads((tmp_path / "known" / "config.json").read_text())
    config["settings"]["source"] = {"data": f"folder:{tmp_path}/pictures", "split_seed": 1}
    (tmp_path / "known" / "config.json").write_text(json.dumps(config))
    for name in ("ant", "bee"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(2):
            keras.utils.save_img(tmp_path / "pictures" / name / f"{number}.png", np.eye(8)[..., None])
    command = ["--checkpoint", str(tmp_path / "known"), "--data", f"folder:{tmp_path}/pictures", "--batch-size", "2"]
    untrained(*command, "--workdir", str(tmp_path / "run"))
    assert "known was trained on another split of folder:" in capsys.readouterr().out


@pytest.mark.parametrize("resize", ["stretch", "crop"])
def test_the_recipe_decides_how_images_are_resized_and_the_checkpoint_their_values(resize, untrained, tmp_path):
    file = FIXTURES / "torchvision_vit.safetensors"
    model = untrained(
        "--checkpoint", str(file), "--num-heads", "4", "--resize", resize, "--image-size", "32", "32",
        "--workdir", str(tmp_path / "run"), "--dropout-rate", "0.2",
    )  # fmt: skip
    preprocessing = keras_vit.preprocessing_of(model)
    assert (preprocessing.image_size, preprocessing.resize) == ((32, 32), resize)
    assert (
        preprocessing.value_range
        == keras_vit.preprocessing_of(keras_vit.from_checkpoint(file, num_heads=4)).value_range
    )
    assert keras_vit.config_of(model).dropout_rate == 0.2
    assert model.output_shape == (None, 10)


def test_weights_of_keras_alone_are_those_of_a_named_model(untrained, tmp_path):
    saved = randomize(keras_vit.build("testing", image_size=32, num_classes=3))
    saved.save_weights(tmp_path / "x.weights.h5")
    options = ["--checkpoint", str(tmp_path / "x.weights.h5"), "--workdir", str(tmp_path / "run"), "--channels", "3"]
    model = untrained(*options, "--model", "testing", "--image-size", "32", "32")
    assert model.output_shape == (None, 10)
    for old, new in zip(saved.weights[:-2], model.weights[:-2], strict=True):
        np.testing.assert_array_equal(old, new)
    with pytest.raises(UserError, match="weights.h5 file needs both"):
        finetune.main([*COMMAND, *options])


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], "Say where to start: --checkpoint FILE_OR_NAME, or --model NAME"),
        (["--checkpoint", "a.npz", "--model", "ViT-B_16"], "Say where to start: --checkpoint"),
        (["--model", "ViT-B_17"], "no official model named 'ViT-B_17'; the nearest names are ViT-B_16"),
        (["--checkpoint", "nowhere.npz"], "nowhere.npz"),
        (["--recipe", "bit-hyperule"], "no recipe named 'bit-hyperule'; the nearest names are bit-hyperrule"),
    ],
)
def test_what_cannot_be_started_from_is_refused_and_leaves_nothing(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = ["--data", "digits", "--workdir", "run"]
    with pytest.raises(UserError, match=words):
        finetune.main([*start, *command])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_of_an_older_version_is_evaluated_finetuned_and_exported(upstream, tmp_path):
    """Without an id, and without a background in its preprocessing."""
    old = shutil.copytree(upstream.path, tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    del config["id"]
    (old / "config.json").write_text(json.dumps(config))
    model = keras.models.load_model(old / "model.keras")
    del next(layer for layer in model.layers if hasattr(layer, "preprocessing")).preprocessing["background"]
    model.save(old / "model.keras")
    evaluate.main(["--run", str(old), "--data", "digits"])
    accuracy = json.loads((old / "evaluation.json").read_text())["accuracy"]
    assert accuracy == pytest.approx(upstream.metrics()[-1]["val_accuracy"])
    finetune.main([*COMMAND, "--checkpoint", str(old), "--workdir", str(tmp_path / "new")])
    tflite.main(["--run", str(old), "--output", str(tmp_path / "phone"), "--formats", "float32"])
    assert load_model(tmp_path / "new").input_shape == (None, 56, 56, 1)
    assert list((tmp_path / "phone").glob("*.tflite"))
