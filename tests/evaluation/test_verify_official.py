"""The comparison of an official checkpoint with its published accuracy, up to the download."""

import pathlib
import types

import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import UserError, published
from keras_vit.checkpoints import find as download
from keras_vit.checkpoints.find import check_name
from keras_vit.published import ACCURACY, PublishedAccuracy
from tests.support import TINY, randomize
from training import verify_official
from training.evaluation import evaluate as verification

NAME = "sam/ViT-B_16"  # has no published accuracy of its own here


@pytest.fixture(name="official")
def _official(tmp_path, monkeypatch):
    """A tiny model in the cache, where the official checkpoint would be, and a function to publish its accuracy."""
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))
    model = randomize(keras_vit.build(TINY, image_size=24, num_classes=3))
    asked = []

    def download_file(address: str, path: pathlib.Path, **_) -> str:
        asked.append(path)
        raise UserError("There is no network.")

    monkeypatch.setattr(download, "download_file", download_file)
    with pytest.raises(UserError, match="There is no network"):
        download.find_checkpoint(NAME)
    keras_vit.save_checkpoint(model, asked[0], layout="npz")

    def publish(top1: float) -> None:
        table = types.MappingProxyType({NAME: PublishedAccuracy(top1, "a paper", 24, "resize-small", 30)})
        for module in (published, verification):
            monkeypatch.setattr(module, "ACCURACY", table)

    return model, publish


def write_images(folder, count: int = 11) -> list[tuple[np.ndarray, int]]:
    rng, written = np.random.default_rng(5), []
    for label, name in enumerate(("n1", "n2", "n3")):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            image = rng.integers(0, 256, (40, 50, 3)).astype(np.uint8)
            (folder / name / f"{index}.png").write_bytes(tf.io.encode_png(image).numpy())
            written.append((image, label))
    return written


@pytest.mark.slow
def test_every_image_of_a_folder_counts_with_the_published_preprocessing(official, tmp_path, capsys):
    model, publish = official
    written = write_images(tmp_path / "val")
    taken = keras_vit.Preprocessing((24, 24), resize="resize-small", crop_from=30)
    logits = model.predict(np.stack([np.asarray(taken(image)) for image, _ in written]), verbose=0)
    correct = int(np.sum(logits.argmax(-1) == [label for _, label in written]))
    publish(round(100 * correct / 33, 1))
    verify_official.main([NAME, "--data", f"folder:{tmp_path / 'val'}"])
    printed = capsys.readouterr().out
    assert f"| {NAME} | 24 px, resize-small | 33 | {100 * correct / 33:.2f}% (" in printed
    assert "within the 95% interval of 33 images" in printed


def test_of_train_and_val_only_val_is_measured_and_a_difference_is_said(official, tmp_path, capsys):
    _, publish = official
    publish(99.9)
    write_images(tmp_path / "data" / "train", 1)
    write_images(tmp_path / "data" / "val", 4)
    verify_official.main([NAME, "--data", f"folder:{tmp_path / 'data'}"])
    assert "The published 99.9% is outside the 95% interval of 12 images" in capsys.readouterr().out


def test_every_published_accuracy_is_of_a_checkpoint_that_can_be_downloaded():
    for name, accuracy in ACCURACY.items():
        check_name(name)
        assert 70 < accuracy.top1 < 90
        if accuracy.resize is not None:
            size = (accuracy.pixels, accuracy.pixels)
            keras_vit.Preprocessing(size, resize=accuracy.resize, crop_from=accuracy.crop_from)


def test_a_name_without_a_published_accuracy_is_one_sentence():
    with pytest.raises(UserError, match="no published accuracy named 'ViT-B_16-224'"):
        verify_official.main(["ViT-B_16-224", "--data", "digits"])
