"""What is exported: a checkpoint with labels and images given, as well as a run."""

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from export.saved_model import __main__ as saved_model
from export.saved_model import export as saved_model_export
from export.source import SourceOptions, open_source
from export.tflite import __main__ as tflite
from keras_vit import UserError, ViTConfig
from tests.support import randomize

CONFIG = ViTConfig(patch_size=8, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
LABELS = ("wren", "ant", "bee")


@pytest.fixture(name="place")
def _place(tmp_path) -> pathlib.Path:
    """A checkpoint, its labels, and pictures: two of known classes, one of an unknown."""
    model = randomize(keras_vit.build(CONFIG, image_size=16, num_classes=3))
    keras_vit.save_checkpoint(model, tmp_path / "vit.npz", layout="npz")
    (tmp_path / "labels.txt").write_text("wren\nant\nbee\n")
    for number, folder in enumerate(("bee", "ant", "fox")):
        (tmp_path / "pictures" / folder).mkdir(parents=True)
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        (tmp_path / "pictures" / folder / "1.PNG").write_bytes(tf.io.encode_png(pixels).numpy())
    return tmp_path


def of(place: pathlib.Path, **changes) -> SourceOptions:
    given = {"checkpoint": str(place / "vit.npz"), "labels": str(place / "labels.txt"), "num_heads": 3, **changes}
    return SourceOptions(**given)


def test_a_checkpoint_is_checked_on_pictures_that_are_given(place):
    found = open_source(of(place, images=str(place / "pictures")))
    assert found.labels == LABELS
    assert found.samples.labels.tolist() == [1, 2, -1]
    assert found.origin.images == f"images of {place / 'pictures'}"


def test_without_pictures_some_are_made_up_that_are_not_alike(place):
    first, again = (open_source(of(place)).samples for _ in range(2))
    assert first.encoded == again.encoded
    assert len(set(first.encoded)) == 16
    assert set(first.labels) == {-1}
    assert len({tuple(tf.io.decode_png(file).shape) for file in first.encoded}) == 3


def test_both_commands_take_a_checkpoint(place, monkeypatch, capsys):
    monkeypatch.setattr(saved_model_export, "run_cpp_loader", lambda *_: {})
    arguments = ["--checkpoint", str(place / "vit.npz"), "--labels", str(place / "labels.txt"), "--num-heads", "3"]
    saved_model.main([*arguments, "--output", str(place / "served")])
    report = json.loads((place / "served" / "1" / "report.json").read_text())
    assert (report["accuracy"], report["num_images"], report["images_from"]) == (None, 16, "16 made-up pictures")
    assert "accuracy not known" in (place / "served" / "1" / "README.md").read_text()
    pictures = ["--images", str(place / "pictures"), "--calibration", str(place / "pictures")]
    options = ["--calibration-images", "3", "--formats", "float32", "int8", "--max-disagreement", "1"]
    tflite.main([*arguments, *pictures, *options, "--output", str(place / "phone")])
    report = json.loads((place / "phone" / "report.json").read_text())
    assert report["formats"]["float32"]["num_images"] == 3
    assert report["formats"]["float32"]["accuracy"] in (0.0, 0.5, 1.0)  # of two whose class is known
    assert "model-int8.tflite" in capsys.readouterr().out


def test_another_size_of_images_can_be_asked_for(place):
    model = open_source(of(place, image_size=(24, 32))).model
    assert model.input_shape == (None, 24, 32, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint": None}, "takes either --run DIR or --checkpoint FILE; give one"),
        ({"run": "x"}, "takes either --run DIR or --checkpoint FILE; give one"),
        ({"run": "x", "checkpoint": None}, "--labels, --num-heads belong to --checkpoint, but --run is given"),
        ({"labels": None}, "does not name its 3 classes; give --labels FILE with one name in each line"),
        ({"labels": "nowhere.txt"}, "There is no file 'nowhere.txt'; --labels takes a text file"),
        ({"labels": "two.txt"}, "The model has 3 classes, but two.txt has 2 lines"),
        ({"labels": "vit.npz"}, "vit.npz should name a class in each line, but is no UTF-8 text"),
        ({"images": "nowhere"}, "There is no folder 'nowhere' of images"),
        ({"images": "empty"}, "empty holds no image files .JPEG, PNG, BMP, GIF"),
    ],
)
def test_what_does_not_fit_is_one_sentence(place, monkeypatch, changes, words):
    monkeypatch.chdir(place)
    (place / "two.txt").write_text("wren\nant\n")
    (place / "empty").mkdir()
    with pytest.raises(UserError, match=words) as caught:
        open_source(of(place, **changes))
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_a_head_is_refused_before_its_labels(place):
    features = keras_vit.build(CONFIG, image_size=16, num_classes=0)
    keras_vit.save_checkpoint(randomize(features), place / "features.npz", layout="npz")
    with pytest.raises(UserError, match="has no classes to serve; export one with a head"):
        open_source(of(place, checkpoint=str(place / "features.npz")))
