"""The recipes `auto` and the advice: what follows from the number and size of the images."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import ResNetConfig, ViTConfig
from training import evaluate, finetune, pretrain
from training.recipes.auto import (
    DataFacts,
    advice,
    auto_finetune_reasons,
    auto_finetune_recipe,
    auto_reasons,
    auto_recipe,
)


def test_only_images_in_color_are_flipped_and_transparent_ones_are_shown_whole():
    assert [auto_recipe(DataFacts(708, (64, 64), channels)).flip for channels in (3, 1)] == [True, False]
    for make in (auto_recipe, auto_finetune_recipe):
        recipe = make(DataFacts(708, (64, 64), transparent=True))
        assert (recipe.resize, recipe.crop_from) == ("pad", None)
        assert make(DataFacts(708, (64, 64))).resize != "pad"


def test_a_few_hundred_small_images_get_a_small_resnet():
    recipe = auto_recipe(facts := DataFacts(708, (64, 64)))
    reasons = auto_reasons(facts, recipe, recipe)
    assert isinstance(recipe.model, ResNetConfig)
    assert (recipe.image_size, recipe.channels, recipe.batch_size) == ((64, 64), 3, 32)
    kinds = [reason.partition(":")[0] for reason in reasons]
    assert kinds == ["Model", "Image size", "Epochs", "Augmentation", "Checkpoint"]
    own = auto_reasons(facts, recipe, dataclasses.replace(recipe, image_size=(48, 48), epochs=1))
    assert [reason.partition(":")[0] for reason in own] == ["Model", "Augmentation", "Checkpoint"]


@pytest.mark.parametrize(
    ("number", "size", "side"),
    [
        (708, (28, 28), 32), (708, (500, 375), 64), (70_800, (500, 375), 128), (70_800, (110, 100), 96),
        (708, (70, 60), 48), (708, (5, 9000), 32),
    ],
)  # fmt: skip
def test_the_input_is_no_larger_than_the_images_need_and_so_few_are_good_for(number, size, side):
    recipe = auto_recipe(facts := DataFacts(number, size))
    assert recipe.image_size == (side, side)
    limit = "at most 64 below 10,000 images." if number == 708 else "at most 128 from scratch."
    assert limit in auto_reasons(facts, recipe, recipe)[1]


def test_more_images_get_fewer_epochs_and_larger_batches_and_few_can_be_trained_on():
    few, small, large = (auto_recipe(DataFacts(number, (28, 28), 1)) for number in (3, 700, 60_000))
    assert small.epochs > large.epochs >= 8
    assert (few.batch_size, small.batch_size, large.batch_size, large.channels) == (3, 32, 128, 1)
    assert few.schedule.warmup_steps < few.num_steps(3) == few.epochs


def test_fine_tuning_takes_more_steps_for_more_images_and_fewer_pixels_for_small_ones():
    few = auto_finetune_recipe(facts := DataFacts(10, (64, 64)))
    reasons = auto_finetune_reasons(facts, few, few)
    assert (few.image_size, few.crop_from, few.steps, few.batch_size) == ((128, 128), 160, 100, 10)
    assert all(reason.endswith(".") for reason in reasons)
    more = auto_finetune_recipe(DataFacts(1600, (600, 800)))
    assert (more.image_size, more.crop_from, more.steps, more.batch_size) == ((224, 224), 256, 1000, 32)
    assert auto_finetune_recipe(DataFacts(10**6, (600, 800))).steps == 10_000
    of_patches = auto_finetune_recipe(DataFacts(10, (64, 64), patch=14))
    assert (of_patches.image_size, of_patches.crop_from) == ((140, 140), 175)


def test_fine_tuning_at_most_doubles_the_sides_that_a_checkpoint_for_tiny_images_was_trained_on():
    for side, size in ((8, 16), (28, 56), (196, 224), (224, 224)):
        assert auto_finetune_recipe(DataFacts(10, (600, 800), pretrained_side=side)).image_size == (size, size)
    tiny = auto_finetune_recipe(facts := DataFacts(10, (600, 800), pretrained_side=8))
    assert tiny.crop_from == 18  # as 256 to 224
    reasons = auto_finetune_reasons(facts, tiny, tiny)
    assert reasons[0] == "Image size: 16 pixels, twice the 8 of the checkpoint's own images."


def test_a_reason_names_only_the_values_that_stay():
    recipe = auto_recipe(facts := DataFacts(708, (64, 64)))
    text = " ".join(auto_reasons(facts, recipe, dataclasses.replace(recipe, batch_size=5, shift=0, flip=False)))
    assert "Epochs: 64 (45,120 images seen)." in text
    assert "Augmentation: label smoothing." in text
    tuned = auto_finetune_recipe(DataFacts(10, (64, 64)))
    used = dataclasses.replace(tuned, image_size=(96, 96), steps=3, flip=False)
    assert auto_finetune_reasons(DataFacts(10, (64, 64)), tuned, used) == ["Augmentation: random crops."]


@pytest.mark.parametrize(
    "options", [["--steps", "5"], pytest.param(["--epochs", "3", "--batch-size", "6"], marks=pytest.mark.slow)]
)
def test_auto_fits_the_duration_of_the_user_and_the_patches_of_the_checkpoint(
    options, folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")  # what --verbose does
    arguments = ["--data", f"folder:{folder}", "--workdir", str(tmp_path / "run"), "--dry-run", *options]
    pretrain.main(["auto", *arguments])
    config = ViTConfig(patch_size=(4, 6), hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
    keras_vit.build(config, image_size=84, channels=1, num_classes=2).save(tmp_path / "small.keras")
    finetune.main(["--recipe", "auto", "--checkpoint", str(tmp_path / "small.keras"), *arguments])
    printed = capsys.readouterr().out
    assert printed.count("recipe.schedule.warmup_steps: 0") == 2
    assert "Image size: 132 pixels, as in the BiT-HyperRule" in printed
    assert "recipe.crop_from: 165" in printed


def test_few_and_uneven_images_are_met_with_their_numbers_and_what_to_do():
    first, few, uneven = advice([98, 13, 36], from_scratch=True)
    assert first == "Training images per class: smallest class 13, median 36, largest 98."
    assert "finetune --checkpoint augreg:S_16" in few
    assert "--balance" in uneven


@pytest.mark.parametrize(
    ("counts", "from_scratch", "sentences"),
    [([6000, 5000], True, 0), ([50, 40], True, 2), ([50, 40], False, 0), ([6000, 1000], True, 2), ([9, 0], False, 2)],
)
def test_the_advice_says_only_what_applies(counts, from_scratch, sentences):
    assert len(advice(counts, from_scratch=from_scratch)) == sentences


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    """22 gray images of 40 by 50 pixels in two uneven classes, of which 19 are for training."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, count in (("ant", 18), ("bee", 4)):
        (folder / name).mkdir()
        for index in range(count):
            image = np.random.default_rng(index).integers(0, 256, (40, 50, 1), np.uint8)
            tf.io.write_file(str(folder / name / f"{index:02}.png"), tf.io.encode_png(image))
    return folder


@pytest.mark.slow
def test_auto_looks_at_the_folder_trains_says_why_and_advises(folder, tmp_path, capsys):
    workdir = tmp_path / "run"
    arguments = ["auto", "--data", f"folder:{folder}", "--workdir", str(workdir), "--model.block-units", "1"]
    pretrain.main([*arguments, "--model.stage-channels", "32", "--steps", "1", "--warmup-steps", "0"])
    printed = capsys.readouterr().out
    assert "Model: a small ResNet (BiT)" in printed
    assert "Image size: 32 pixels, since the shorter side is typically 40 pixels;" in printed
    assert "Training images per class: smallest class 3, median 10, largest 16." in printed
    assert "finetune --checkpoint augreg:S_16" in printed
    recipe = json.loads((workdir / "config.json").read_text())["settings"]["recipe"]
    assert (recipe["channels"], recipe["steps"], recipe["epochs"], recipe["balance"]) == (1, 1, None, False)
    moved = shutil.copytree(folder, tmp_path / "moved")
    min(path for path in moved.rglob("*") if path.is_file()).unlink()
    evaluate.main(["--run", str(workdir), "--data", f"folder:{moved}"])
    assert f"evaluation images are among the training images of {workdir}, such as {moved}" in capsys.readouterr().out


def test_an_epoch_of_balanced_classes_is_longer(folder, tmp_path, capsys):
    arguments = ["auto", "--data", f"folder:{folder}", "--workdir", str(tmp_path / "run"), "--dry-run", "--balance"]
    pretrain.main([*arguments, "--batch-size", "16", "--epochs", "3", "--warmup-steps", "0"])
    assert "6 of 16 images, 96 in all" in capsys.readouterr().out  # 16 of each class, instead of 16 and 3
