"""The names of classes travel with a model, and a head is kept where they are those of the new classes."""

import dataclasses
import functools
import json

import keras
import numpy as np
import pytest

import keras_vit
from export.options import SourceOptions
from export.run import open_run
from export.source import open_model
from keras_vit import UserError
from keras_vit.checkpoints.checkpoint import rows_of
from tests.support import TINY, TINY_IMAGE, randomize

ONE_BLOCK = dataclasses.replace(TINY, patch_size=6, num_layers=1)
BIT = keras_vit.ResNetConfig((1,), 4, (8,), num_groups=2)
NAMES = ("ant", "bee", "red_fox")


@functools.cache
def named(config=ONE_BLOCK, **options) -> keras.Model:
    """A model with the names, for tests that change nothing of it."""
    model = randomize(keras_vit.build(config, **{"image_size": TINY_IMAGE, "num_classes": 3, **options}))
    keras_vit.set_classes(model, NAMES)
    return model


@pytest.mark.parametrize("layout", ["huggingface", "timm"])
def test_the_names_of_a_published_folder_are_those_of_the_model(layout, tmp_path):
    keras_vit.save_checkpoint(named(image_size=30), tmp_path / "folder", layout=layout)
    model, labels = keras_vit.load(tmp_path / "folder")
    assert labels == keras_vit.classes_of(model) == NAMES


def test_a_model_has_its_names_in_every_form(tmp_path):
    model = named()
    model.save(tmp_path / "own.keras")
    lora = keras.models.load_model(tmp_path / "own.keras")
    lora.get_layer("head").enable_lora(2)
    forms = {
        "saved": keras.models.load_model(tmp_path / "own.keras"),
        "loaded": keras_vit.from_checkpoint(tmp_path / "own.keras"),
        "adapted": keras_vit.adapt(model, image_size=24),
        "cloned": keras.models.clone_model(model),
        "lora": lora,
    }
    assert {name: keras_vit.classes_of(form) for name, form in forms.items()} == dict.fromkeys(forms, NAMES)
    source = SourceOptions(str(tmp_path / "own.keras"))
    assert open_model(open_run(source), source).labels == NAMES


def test_names_do_not_follow_to_another_head(tmp_path):
    model = named.__wrapped__()
    assert keras_vit.classes_of(keras_vit.adapt(model, num_classes=3)) is None
    own = keras.Model(model.input, keras.layers.Dense(3, name="own")(model.get_layer("pool").output))
    assert keras_vit.classes_of(own) is None
    keras_vit.set_classes(own, ["x", "y", "z"])
    assert keras_vit.classes_of(own) == ("x", "y", "z")
    assert keras_vit.classes_of(model) == NAMES  # which shares all other layers
    for each, names in ((model, NAMES), (own, ("x", "y", "z"))):
        each.save(tmp_path / "own.keras")
        assert keras_vit.classes_of(keras.models.load_model(tmp_path / "own.keras")) == names
    keras_vit.set_classes(own, None)
    assert (keras_vit.classes_of(own), keras_vit.classes_of(model)) == (None, NAMES)
    with pytest.raises(UserError, match="The argument classes names 2 classes, but the model model has 3"):
        keras_vit.set_classes(model, ["x", "y"])


def test_the_labels_of_an_older_run_become_those_of_its_model(tmp_path):
    (tmp_path / "run").mkdir()
    keras_vit.build(ONE_BLOCK, image_size=TINY_IMAGE, num_classes=3).save(tmp_path / "run" / "model.keras")
    (tmp_path / "run" / "labels.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"settings": {}}))
    assert keras_vit.classes_of(keras_vit.from_checkpoint(tmp_path / "run")) == ("one", "two", "three")


@pytest.mark.parametrize(
    ("config", "classes", "rows", "words"),
    [
        (ONE_BLOCK, NAMES, [0, 1, 2], "is kept: it knows all 3 classes."),
        (ONE_BLOCK, ("Red fox", "ant"), [2, 0], "all 2 classes, of the 3 of the model, in the order of the data"),
        (BIT, ("bee", "cow", "ant"), [1, None, 0], "kept for 2 of 3 classes, and new for cow"),
        (ONE_BLOCK, ("cow", "dog"), [], "is new: none of its 2 classes is among the 3"),
    ],
    ids=["all", "some", "some and new", "new"],
)
def test_a_head_keeps_the_rows_of_its_classes(config, classes, rows, words, tiny_images, capsys, tmp_path):
    model = named(config)
    model.save(tmp_path / "own.keras")
    expected = np.zeros((len(tiny_images), len(classes)), np.float32)
    for column, row in enumerate(rows):
        if row is not None:
            expected[:, column] = np.asarray(model(tiny_images))[:, row]
    for adapted in (
        keras_vit.adapt(model, classes=classes),
        keras_vit.from_checkpoint(tmp_path / "own.keras", classes=classes),
    ):
        assert keras_vit.classes_of(adapted) == classes
        np.testing.assert_allclose(np.asarray(adapted(tiny_images)), expected, rtol=0, atol=1e-6)
    assert capsys.readouterr().out.count(words) == 2


def test_a_name_that_two_classes_share_is_none_of_them():
    assert rows_of(("crane", "maillot"), ("crane", "Crane", "maillot")) == [None, 2]
    with pytest.raises(UserError, match="classes has a name for each class; leave it out"):
        keras_vit.adapt(named(), classes=NAMES, num_classes=3)
