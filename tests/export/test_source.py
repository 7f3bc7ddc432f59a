"""The model to export: a run, or a checkpoint with labels and images."""

import json
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from export import parity
from export.options import SourceOptions
from export.run import open_run
from export.saved_model import __main__ as saved_model
from export.source import ExportedModel, open_model, random_images, read_folder
from export.tflite import __main__ as tflite
from keras_vit import UserError, ViTConfig
from keras_vit.run import Run
from tests.support import encoded, randomize

CONFIG = ViTConfig(patch_size=8, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
LABELS = ("wren", "ant", "bee")


@pytest.fixture(name="place")
def _place(tmp_path) -> pathlib.Path:
    """A checkpoint, its labels, and images: two of its classes, one of another class."""
    model = randomize(keras_vit.build(CONFIG, image_size=16, num_classes=3))
    keras_vit.save_checkpoint(model, tmp_path / "vit.npz", layout="npz")
    (tmp_path / "labels.txt").write_text("wren\nant\nbee\n")
    for number, folder in enumerate(("bee", "ant", "fox")):
        (tmp_path / "pictures" / folder).mkdir(parents=True)
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        (tmp_path / "pictures" / folder / "1.PNG").write_bytes(tf.io.encode_png(pixels).numpy())
    return tmp_path


def arguments(place: pathlib.Path, **changes) -> dict:
    return {"run": str(place / "vit.npz"), "labels": str(place / "labels.txt"), "num_heads": 3, **changes}


def opened(options: dict) -> ExportedModel:
    """What a command exports with these options."""
    source = SourceOptions(**options)
    return open_model(open_run(source), source)


def test_a_checkpoint_is_verified_on_images_of_a_folder(place):
    found = opened(arguments(place, images=str(place / "pictures")))
    assert found.labels == LABELS
    assert found.samples.labels.tolist() == [1, 2, -1]
    assert found.origin.images == f"images of {place / 'pictures'}"


def test_an_image_of_a_folder_that_no_graph_reads_is_named(place):
    (place / "pictures" / "fox" / "2.gif").write_bytes(encoded(np.zeros((3, 5, 3), np.uint8), "gif"))
    samples, preprocessing = read_folder(str(place / "pictures"), ()).some(4), keras_vit.Preprocessing((16, 16))
    with pytest.raises(UserError, match="/fox/2.gif is not JPEG, .*, but a GIF file; convert the folder by"):
        next(parity.Reference(samples, preprocessing).batches())
    with pytest.raises(UserError, match="/ant/1.PNG is damaged, or has more than 0 megapixels; leave it out"):
        next(parity.Reference(samples.some(1), preprocessing, most_pixels=20 * 30 - 1).batches())


@pytest.mark.usefixtures("models_read_once")
def test_origin_and_license_of_the_weights_are_those_of_the_run(tmp_path):
    run = Run.at(tmp_path)
    run.start({}, LABELS)
    run.save_model(keras_vit.build(CONFIG, image_size=16, num_classes=3))
    random_images(keras_vit.Preprocessing((16, 16))).save(tmp_path / "samples.npz")
    official = {"checkpoint": "augreg:B_16", "license": "Apache-2.0"}
    for config, weights, terms in (
        ({"settings": {"command": "pretrain"}}, "trained from scratch", None),
        ({"weights": official}, "fine-tuned from augreg:B_16", "Apache-2.0"),
        ({"weights": {"checkpoint": "/home/anna/x.npz", "license": None}}, "fine-tuned from x.npz", None),
        ({"settings": {"command": "finetune"}}, "unknown", None),  # a run of an older version
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        origin = opened({"run": str(tmp_path)}).origin
        assert (origin.weights, origin.license) == (weights, terms)


def test_without_images_there_are_random_ones(place):
    changed = opened(arguments(place, image_size=(24, 32)))
    assert changed.model.input_shape == (None, 24, 32, 3)
    first, again = changed.samples, opened(arguments(place, image_size=(24, 32))).samples
    assert first.encoded == again.encoded
    assert len(set(first.encoded)) == 16
    assert set(first.labels) == {-1}
    assert len({tuple(tf.io.decode_png(file).shape) for file in first.encoded}) == 3


@pytest.mark.slow
def test_both_commands_take_a_checkpoint(place, capsys):
    command = ["--checkpoint", str(place / "vit.npz"), "--labels", str(place / "labels.txt"), "--num-heads", "3"]
    saved_model.main([*command, "--output", str(place / "served"), "--license", "CC-BY-4.0"])
    report = json.loads((place / "served" / "1" / "report.json").read_text())
    assert (report["accuracy"], report["num_images"], report["images_from"]) == (None, 16, "random images")
    assert (report["weights"], report["license"]) == ("vit.npz", "CC-BY-4.0")
    card = re.sub(" +", " ", (place / "served" / "1" / "README.md").read_text())
    for words in ("accuracy unknown", "| License | CC-BY-4.0 |", "| Weights | vit.npz |"):
        assert words in card
    photos = ["--images", str(place / "pictures"), "--calibration", str(place / "pictures")]
    options = ["--formats", "float32", "int8", "--max-disagreement", "1"]
    tflite.main([*command, *photos, *options, "--output", str(place / "phone")])
    report = json.loads((place / "phone" / "report.json").read_text())
    assert report["formats"]["float32"]["num_images"] == 3
    assert report["formats"]["float32"]["accuracy"] in (0.0, 0.5, 1.0)  # of two whose class is known
    assert "model-int8.tflite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": "model.tflite"}, "model.tflite is an export; give"),
        ({"labels": None}, "does not name its 3 classes; pass --labels FILE with one name per line"),
        ({"labels": "nowhere.txt"}, "There is no file 'nowhere.txt'; --labels accepts a text file"),
        ({"labels": "two.txt"}, "two.txt names 2 classes, but the model .* has 3"),
        ({"labels": "vit.npz"}, "vit.npz cannot be read as UTF-8 text with a class in each line"),
        ({"images": "nowhere"}, "There is no folder 'nowhere'; give one of images"),
        ({"images": "empty"}, "empty holds no image files .JPEG, PNG, BMP or"),
    ],
)
def test_invalid_options_are_one_sentence(place, monkeypatch, changes, words):
    monkeypatch.chdir(place)
    (place / "two.txt").write_text("wren\nant\n")
    (place / "empty").mkdir()
    (place / "model.tflite").touch()
    with pytest.raises(UserError, match=words) as caught:
        opened(arguments(place, **changes))
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_a_head_is_refused_before_its_labels(place):
    features = keras_vit.build(CONFIG, image_size=16, num_classes=0)
    keras_vit.save_checkpoint(randomize(features), place / "features.npz", layout="npz")
    with pytest.raises(UserError, match="has no classes to serve; export the features by --embeddings features"):
        opened(arguments(place, run=str(place / "features.npz")))
