""".keras and .weights.h5 files as checkpoints."""

import dataclasses
import pathlib
import shutil
import zipfile
from collections.abc import Callable

import h5py
import keras
import numpy as np
import pytest

import keras_vit
from keras_vit import UserError
from keras_vit.files.keras_model import load_model
from tests.support import TINY, TINY_IMAGE, TINY_STEM, assert_equal_weights, randomize

HYBRID = dataclasses.replace(TINY, patch_size=1, stem=TINY_STEM, gated_mlp=True, layer_scale=0.1, num_registers=2)
LARGER = (24, 60)


@pytest.fixture(name="model")
def _model(tiny_model) -> keras.Model:
    return tiny_model


def logits(model: keras.Model, images: np.ndarray) -> np.ndarray:
    return keras.ops.convert_to_numpy(model(images))


@pytest.mark.parametrize("kind", ["file", "run"])
def test_a_keras_file_is_a_checkpoint(kind, model, tmp_path, tiny_images):
    path = tmp_path / "model.keras"
    model.save(path)
    path = path if kind == "file" else tmp_path
    again = keras_vit.from_checkpoint(path)
    np.testing.assert_array_equal(logits(again, tiny_images), logits(model, tiny_images))
    if kind == "run":
        return
    changed = keras_vit.from_checkpoint(path, num_classes=3, dropout_rate=0.2, image_size=LARGER)
    assert changed.output_shape == (None, 3)
    assert keras_vit.config_of(changed).dropout_rate == 0.2
    with pytest.raises(UserError, match="num_heads=4 does not apply, .* .keras file"):
        keras_vit.from_checkpoint(path, num_heads=4)
    description = keras_vit.describe(path)
    assert (description.layout, description.config) == ("keras", keras_vit.config_of(model))
    assert (description.num_classes, description.num_parameters) == (7, model.count_params())


def test_an_unfinished_run_says_how_to_finish_it(tmp_path):
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    with pytest.raises(UserError, match="is not a finished run: it has no model.keras"):
        keras_vit.from_checkpoint(tmp_path)


def test_a_keras_model_of_another_package_is_refused(tmp_path):
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]).save(tmp_path / "x.keras")
    with pytest.raises(UserError, match="was not built by keras_vit"):
        keras_vit.from_checkpoint(tmp_path / "x.keras")


def test_no_code_of_a_keras_file_runs(tmp_path):
    image = keras.Input((8, 8, 3))
    keras.Model(image, keras.layers.Lambda(lambda x: x + 1.0)(image)).save(tmp_path / "x.keras")
    with pytest.raises(UserError, match="author's code, Lambda, which is not run"):
        keras_vit.from_checkpoint(tmp_path / "x.keras")


def test_a_keras_file_of_another_version_is_named_with_the_words_of_keras(tmp_path):
    image = keras.Input((4,))
    keras.Model(image, keras.layers.Dense(2)(image)).save(tmp_path / "old.keras")
    changes = [b'"units": 2', b'"units": 2, "made_later": 1'], [keras.__version__.encode(), b"9.8.7"]
    with zipfile.ZipFile(tmp_path / "old.keras") as old, zipfile.ZipFile(tmp_path / "x.keras", "w") as new:
        for name in old.namelist():
            content = old.read(name)
            for before, after in changes:
                content = content.replace(before, after)
            new.writestr(name, content)
    with pytest.raises(UserError, match=r"{'made_later': 1}.; Keras 9.8.7 saved it, and this is"):
        keras_vit.from_checkpoint(tmp_path / "x.keras")


def test_a_keras_file_that_grows_in_memory_is_refused(model, tmp_path):
    path = tmp_path / "x.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", b" " * 10_000_000)
    with pytest.raises(UserError, match="it would be 10,000,000 bytes after decompression"):
        keras_vit.from_checkpoint(path)


def test_a_keras_file_of_a_later_version_of_zip_is_one_sentence(model, tmp_path):
    path = tmp_path / "x.keras"
    model.save(path)
    content, entry = path.read_bytes(), b"PK\x01\x02"
    path.write_bytes(content.replace(entry + content.split(entry, 1)[1][:4], entry + b"\x14\x00\x40\x00"))
    with pytest.raises(UserError, match="cannot be read as a Keras model .zip file version"):
        keras_vit.from_checkpoint(path)


def test_the_weights_of_a_model_are_loaded_into_one_like_it(tmp_path, tiny_images):
    saved, model = (keras_vit.build(HYBRID, image_size=TINY_IMAGE, num_classes=7) for _ in range(2))
    randomize(saved).save_weights(tmp_path / "x.weights.h5")
    report = keras_vit.load_checkpoint(model, tmp_path / "x.weights.h5")
    assert len(report.loaded) == len(model.weights)
    np.testing.assert_array_equal(logits(model, tiny_images), logits(saved, tiny_images))


def test_weights_are_loaded_at_another_size_and_without_their_head(model, tmp_path):
    model.save_weights(tmp_path / "x.weights.h5")
    larger = keras_vit.build(TINY, image_size=LARGER, num_classes=3)
    report = keras_vit.load_checkpoint(
        larger, tmp_path / "x.weights.h5", stored_grid=(3, 5), drop="head/", keep="head/"
    )
    assert report.resized == ("Transformer/posembed_input/pos_embedding",)
    adapted = keras_vit.adapt(model, image_size=LARGER, num_classes=3)
    for one, other in zip(larger.weights, adapted.weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_alone_are_no_model(model, tmp_path):
    model.save_weights(tmp_path / "x.weights.h5")
    with pytest.raises(UserError, match=r"x.weights.h5 holds .* without its architecture"):
        keras_vit.from_checkpoint(tmp_path / "x.weights.h5")


def test_weights_of_another_model_are_refused_and_change_nothing(model, tmp_path):
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")]).save_weights(tmp_path / "x.weights.h5")
    before = model.get_weights()
    with pytest.raises(UserError, match="does not fit the model; missing keys: Transformer/"):
        keras_vit.load_checkpoint(model, tmp_path / "x.weights.h5")
    assert_equal_weights(model, before)


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


def with_bias(**dataset) -> Callable[[pathlib.Path], None]:
    """What puts another bias into the file."""

    def damage(path: pathlib.Path) -> None:
        with h5py.File(path, "a") as file:
            group = file["layers/conv2d/vars"]
            del group["1"]
            group.create_dataset("1", **dataset)

    return damage


def link_elsewhere(path: pathlib.Path) -> None:
    shutil.copy(path, path.with_name("other.h5"))
    with h5py.File(path, "a") as file:
        del file["layers/conv2d/vars"]
        file["layers/conv2d/vars"] = h5py.ExternalLink("other.h5", "layers/conv2d/vars")


def damage_a_chunk(path: pathlib.Path) -> None:
    with_bias(data=np.zeros(12, np.float32), chunks=(12,), compression="gzip")(path)
    with h5py.File(path) as file:
        place = file["layers/conv2d/vars/1"].id.get_chunk_info(0).byte_offset
    with path.open("r+b") as stream:
        stream.seek(place)
        stream.write(bytes(8))


def name_by_bytes(path: pathlib.Path) -> None:
    with h5py.File(path, "a") as file:
        file[b"\xff"] = np.zeros(1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_a_chunk, "cannot be read as Keras weights"),
        (name_by_bytes, "cannot be read as Keras weights"),
        (truncate, "cannot be read as Keras weights"),
        (with_bias(shape=(12,), dtype="f4", external=[("/etc/hostname", 0, 48)]), "is in another file"),
        (with_bias(data=np.zeros(48, np.int32)), "has the type int32"),
        (with_bias(shape=(10**12,), dtype="f4", chunks=(1000,)), "cannot be of this file"),
        (link_elsewhere, "missing keys: embedding/bias, embedding/kernel"),
    ],
)
def test_hostile_weights_are_refused(damage, words, model, tmp_path):
    model.save_weights(tmp_path / "x.weights.h5")
    damage(tmp_path / "x.weights.h5")
    with pytest.raises(UserError, match=words):
        keras_vit.load_checkpoint(model, tmp_path / "x.weights.h5")


def test_compressed_weights_are_read(model, tmp_path, tiny_images):
    model.save_weights(tmp_path / "x.weights.h5")
    with h5py.File(tmp_path / "x.weights.h5", "a") as file:
        group = file["layers/conv2d/vars"]
        kernel = group["0"][()]
        del group["0"]
        group.create_dataset("0", data=kernel, compression="gzip")
    again = keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7)
    keras_vit.load_checkpoint(again, tmp_path / "x.weights.h5")
    np.testing.assert_array_equal(logits(again, tiny_images), logits(model, tiny_images))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": (1 << 16, 1 << 12), "compression": "gzip"}, r"its arrays would be 1,073,\d+,\d+ bytes, but it has"),
        ({"external": [("/etc/hostname", 0, 8)], "shape": (2,)}, "another file"),
    ],
    ids=["compressed", "external"],
)
def test_arrays_that_are_larger_than_their_file_or_outside_of_it_are_not_read(change, words, model, tmp_path):
    model.save(tmp_path / "good.keras")
    with zipfile.ZipFile(tmp_path / "good.keras") as good, zipfile.ZipFile(tmp_path / "bad.keras", "w") as bad:
        for name in good.namelist():
            content = good.read(name)
            if name == "model.weights.h5":
                (tmp_path / "w.h5").write_bytes(content)
                with h5py.File(tmp_path / "w.h5", "a") as file:
                    file.create_dataset("extra", dtype="f4", **change)
                content = (tmp_path / "w.h5").read_bytes()
            bad.writestr(name, content)
    load_model(tmp_path / "good.keras")
    with pytest.raises(UserError, match=words):
        load_model(tmp_path / "bad.keras")
