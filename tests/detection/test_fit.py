"""Training a detector: on any backbone or further; resumed to the bit; on several devices; measured and exported."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import numpy as np
import PIL.Image
import PIL.ImageDraw
import pytest

import keras_vit
from export.saved_model import __main__ as saved_model
from keras_vit import UserError
from keras_vit.run import Run
from tests.interruptions import after_checkpoints, killed_after
from tests.support import FIXTURES, TINY_STEM
from tests.text.towers import with_tokenizer
from training import detect as command
from training.data.annotations.open_boxes import open_boxes
from training.detection.fit import detector_to_train, fit
from training.options.dense import BoxesOptions, DetectFitOptions
from training.recipes.dense import DetectRecipe

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = keras_vit.ViTConfig(patch_size=8, hidden_size=24, num_layers=2, num_heads=3, mlp_dim=48)


def make_shapes(folder: pathlib.Path, count: int) -> str:
    """Noise with up to three blue boxes and red balls; an image without them is a row of its path."""
    rng, rows = np.random.default_rng(0), ["path,x,y,w,h,label"]
    folder.mkdir()
    for number in range(count):
        image = PIL.Image.fromarray(rng.integers(90, 150, (48, 48, 3), np.uint8))
        draw, before = PIL.ImageDraw.Draw(image), len(rows)
        for place in range(rng.integers(0, 4)):
            side = int(rng.integers(10, 22))
            x, y = 24 * (place % 2) + int(rng.integers(0, 3)), 24 * (place // 2) + int(rng.integers(0, 3))
            label = "ball" if rng.random() < 0.5 else "box"
            shape, color = (draw.ellipse, (230, 40, 40)) if label == "ball" else (draw.rectangle, (40, 40, 230))
            shape([x, y, x + side - 1, y + side - 1], fill=color)
            rows.append(f"{number:03d}.png,{x},{y},{side},{side},{label}")
        rows += [f"{number:03d}.png,,,,,"] if len(rows) == before else []
        image.save(folder / f"{number:03d}.png")
    (folder / "boxes.csv").write_text("\n".join(rows))
    return f"csv:{folder / 'boxes.csv'}"


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory) -> pathlib.Path:
    place = tmp_path_factory.mktemp("fit")
    make_shapes(place / "shapes", 40)
    keras_vit.build(CONFIG, image_size=48, num_classes=2).save(place / "backbone.keras")
    return place


def arguments(place: pathlib.Path, workdir: str, *more: str, steps: int = 4) -> list[str]:
    data = ["--data", f"csv:{place / 'shapes' / 'boxes.csv'}", "--checkpoint", str(place / "backbone.keras")]
    length = ["--steps", str(steps), "--batch-size", "4", "--warmup-steps", "1", "--image-size", "48"]
    return ["fit", *data, "--workdir", str(place / workdir), *length, *more]


def weights_of(place: pathlib.Path, workdir: str) -> list[np.ndarray]:
    return [np.array(weight) for weight in Run.open(place / workdir).model.weights]


@pytest.mark.slow
def test_a_detector_learns_is_measured_used_and_exported(place, tmp_path, capsys):
    command.main(arguments(place, "run", "--learning-rate", "2e-3", "--layer-decay", "1", steps=400))
    printed = capsys.readouterr().out
    assert "400 steps of 4 images take about " in printed
    report = json.loads((place / "run" / "detection.json").read_text())
    assert report["ap50"] > 0.3
    command.main(
        ["predict", "--run", str(place / "run"), "--output", str(tmp_path / "out.json"), str(place / "shapes")]
    )
    found = json.loads((tmp_path / "out.json").read_text())
    assert {each["name"] for each in found["categories"]} == {"ball", "box"}
    saved_model.main(["--run", str(place / "run"), "--output", str(tmp_path / "served")])
    assert json.loads((tmp_path / "served" / "1" / "report.json").read_text())["images_from"] == (
        "evaluation images of the run"
    )
    command.main(arguments(place, "run", "--learning-rate", "2e-3", "--layer-decay", "1", steps=400))
    assert "is finished: nothing to do" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupted_training_continues_to_the_same_bits(place):
    options = ("--deterministic", "--evaluate-every", "2", "--mosaic", "0.5")
    command.main(arguments(place, "whole", *options))
    with killed_after(2):
        command.main(arguments(place, "parts", *options))
    steps: list[int] = []
    with after_checkpoints(steps.append):
        command.main(arguments(place, "parts", *options))
    assert steps == [4]
    for whole, parts in zip(weights_of(place, "whole"), weights_of(place, "parts"), strict=True):
        np.testing.assert_array_equal(whole, parts)


@pytest.mark.slow
def test_two_devices_and_micro_batches_train_what_one_does(place):
    command.main(arguments(place, "one"))
    two = arguments(place, "two", "--strategy", "mirrored", "--replicas", "2")
    # A process of its own: devices are made before TensorFlow starts.
    subprocess.run([sys.executable, "-m", "training.detect", *two], check=True, cwd=ROOT, capture_output=True)
    command.main(arguments(place, "micro", "--accumulation", "2"))
    for other in ("two", "micro"):
        for one, same in zip(weights_of(place, "one"), weights_of(place, other), strict=True):
            np.testing.assert_allclose(one, same, atol=2e-4)


def fit_options(checkpoint: str, place: pathlib.Path, side: int = 48) -> DetectFitOptions:
    source = BoxesOptions(data=f"csv:{place / 'shapes' / 'boxes.csv'}")
    recipe = DetectRecipe(image_size=(side, side), batch_size=4, learning_rate=0.1, steps=1)
    return DetectFitOptions(source=source, checkpoint=checkpoint, workdir="never", recipe=recipe)


def test_a_published_detector_begins_with_the_names_of_the_classes(place, tmp_path):
    owl = str(with_tokenizer("hf_owlv2", tmp_path / "owl"))
    names = ("w3_w4", "w7")
    model = detector_to_train(Run.open(owl, image_size=(20, 20)), names, fit_options(owl, place, 20))
    original = keras_vit.from_checkpoint(owl)
    tokens = keras_vit.tokenizer(owl)(["w3 w4", "w7"])
    np.testing.assert_allclose(model.get_layer("classes").embeddings, keras_vit.text_tower(owl)(tokens), atol=1e-6)
    images = np.random.default_rng(0).normal(size=(1, 20, 20, 3)).astype(np.float32)
    np.testing.assert_allclose(model(images)["boxes"], original(images)["boxes"], atol=1e-6)


def test_a_new_head_takes_one_patch_of_a_hundred_for_a_class(place):
    options = fit_options(str(place / "backbone.keras"), place)
    model = detector_to_train(Run.open(options.checkpoint), ("ball", "box"), options)
    images = np.random.default_rng(0).normal(size=(2, 48, 48, 3)).astype(np.float32)
    shares = 1 / (1 + np.exp(-np.asarray(model(images)["class_logits"])))
    assert 0.001 < np.median(shares) < 0.1
    assert keras_vit.preprocessing_of(model).padding == "after"


def test_evaluation_images_without_objects_are_refused_before_the_training(place):
    options = fit_options(str(place / "backbone.keras"), place)
    data = open_boxes(options.source)
    empty = dataclasses.replace(data, evaluation=[dataclasses.replace(data.evaluation[0], boxes=())])
    with pytest.raises(UserError, match="No evaluation image has a box that counts"):
        fit(options, empty, None)


def test_any_vision_transformer_gets_a_new_head_and_other_models_are_refused(place):
    eomt = Run.open(str(FIXTURES / "tasks" / "hf_eomt"))
    model = detector_to_train(eomt, ("ball",), fit_options(eomt.name, place))
    name = "Transformer.encoderblock_0.MlpBlock_3.Dense_0"
    np.testing.assert_array_equal(model.get_layer(name).kernel, eomt.model.get_layer(name).kernel)
    resnet = Run.of_model(keras_vit.build(TINY_STEM, image_size=32, num_classes=3))
    with pytest.raises(UserError, match="has no patch tokens"):
        detector_to_train(resnet, ("ball",), fit_options("x", place))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mosaic", "2"], "--mosaic must be in"),
        (["--label-smoothing", "0.1"], "--label-smoothing applies only to classes of whole images"),
        (["--scale-jitter", "2", "1"], "--scale-jitter accepts the least"),
    ],
)
def test_a_mistake_is_one_sentence(options, words, place):
    with pytest.raises(UserError, match=words):
        command.main(arguments(place, "never", *options))
