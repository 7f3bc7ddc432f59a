"""What a dry run says, and that it leaves nothing behind that a run would stumble over."""

import dataclasses

import numpy as np
import pytest

import keras_vit.models.complexity
from training import pretrain
from training.input.sources import digits
from training.loop import dry_run
from training.recipes.pretrain import find_recipe


def test_a_dry_run_tells_all_and_trains_nothing(tmp_path, capsys):
    workdir = tmp_path / "runs" / "new"
    options = ["--data", "digits", "--workdir", str(workdir), "--epochs", "3", "--warmup-steps", "20"]
    pretrain.main(["digits", *options, "--dry-run"])
    text = capsys.readouterr().out
    recipe = find_recipe("digits")
    model = keras_vit.build(recipe.model, preprocessing=recipe.preprocessing(1), num_classes=10)
    for words in (
        "recipe.schedule.warmup_steps: 20",
        "recipe.model.hidden_size: 96",
        "source.data: digits",
        "132 of 32 images, 4,224 in all",
        f"{model.count_params():,}",
        "activations of 32 images",
        "     0.002 |",
        "nothing was trained",
    ):
        assert words in text
    assert [path.name for path in workdir.parent.iterdir()] == ["new.lr.png"]


def test_the_whole_run_is_three_times_the_forward():
    recipe = dataclasses.replace(find_recipe("vit-b16-i1k"), batch_size=1000, epochs=None, steps=1000)
    text = dry_run.describe_run(recipe.model, recipe, digits(), {"seed": 3}, channels=3)
    assert "17.6 G multiply-adds, 35.1 GFLOPs" in text
    assert "105 PFLOPs" in text
    assert "  seed: 3" in text


def test_memory_falls_with_16_bits_remat_accumulation_and_replicas():
    recipe = find_recipe("vit-b16-i1k")

    def total(recipe=recipe, **how) -> int:
        return sum(dry_run.estimate_memory(recipe.model, recipe, 1000, 3, **how).values())

    whole = dry_run.estimate_memory(recipe.model, recipe, 1000, 3)
    assert whole["weights"] == 4 * keras_vit.models.complexity.costs(recipe.model, (224, 224)).parameters
    assert whole["optimizer"] == 2 * whole["weights"]
    for less in (
        total(precision="bfloat16"),
        total(remat=True),
        total(replicas=8),
        total(dataclasses.replace(recipe, accumulation=8)),
        total(dataclasses.replace(recipe, optimizer="sgd")),
    ):
        assert less < total()
    averaged = dataclasses.replace(recipe, ema_decay=0.99)
    assert total(averaged) == total() + whole["weights"]
    assert total(replicas=8) == pytest.approx(total() / 8, rel=0.02)


@pytest.mark.parametrize("name", ["bit-l-r50x1", "vit-c-1gf", "r50-vit-b16-jft", "augreg-ti16-i21k"])
def test_every_family_has_a_plan(name):
    recipe = dataclasses.replace(find_recipe(name), batch_size=8, epochs=None, steps=20_000)
    text = dry_run.describe_run(recipe.model, recipe, digits(), {}, channels=3)
    assert "20,000 of 8 images, 160,000 in all" in text


def test_the_curve_is_that_of_the_schedule():
    recipe = find_recipe("bit-s-r50x1")
    steps, rates = dry_run._rates(recipe, 100_000, 91)
    np.testing.assert_allclose(rates[[30, 31, 61, 81]], [0.48, 0.048, 0.0048, 0.00048], rtol=1e-6)
    assert (steps[0], rates[0]) == (0, 0.0)
