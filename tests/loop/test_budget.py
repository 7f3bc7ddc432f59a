"""What a recipe takes on Cloud TPU, from its operations and the compiled steps."""

import dataclasses

import pytest

from keras_vit import UserError
from training import pretrain
from training.loop.dry_run import DATA_SETS, budget, slice_of
from training.options.common import Execution
from training.recipes.pretrain import RECIPES

BFLOAT16 = Execution(precision="bfloat16")


def of_imagenet(name: str, chips: str, execution: Execution = BFLOAT16, **how):
    examples, classes = DATA_SETS["imagenet-1k"]
    options = {"num_examples": examples, "num_classes": classes, "execution": execution}
    return budget(RECIPES[name], name, chips, **options, **how)


def test_the_published_run_takes_under_seven_hours_at_a_quarter_of_the_peak():
    """big_vision: ViT-S/16, 90 epochs, TPUv3-8."""
    found = of_imagenet("vit-s16-i1k-better-plain", "v3-8")
    assert found.steps == 90 * (1_281_167 // 1024)
    assert found.flops == pytest.approx(3 * 2 * 4.6e9 * 90 * 1.281e6, rel=0.02)
    assert 6.5 < found.hours(0.26) < 7.0


def test_memory_is_that_of_the_compiled_step_or_an_estimate_of_divided_weights():
    assert of_imagenet("vit-b16-i21k", "v5e-64").memory == 7.39e9  # of 64 images
    assert of_imagenet("vit-b16-i21k", "v5e-128").compiled
    whole, divided = (
        of_imagenet("vit-h14-jft", "v5e-256", shard_weights=shard_weights) for shard_weights in (False, True)
    )
    assert not whole.compiled
    assert whole.memory - divided.memory == pytest.approx(16 * 632e6 * 255 / 256, rel=0.02)
    remat = of_imagenet("vit-b16-i21k", "v5e-64", dataclasses.replace(BFLOAT16, remat=True))
    assert remat.flops == pytest.approx(of_imagenet("vit-b16-i21k", "v5e-64").flops * 4 / 3)


def test_the_command_says_it_without_data_and_leaves_nothing(tmp_path, capsys):
    options = ["--data", "imagenet-1k", "--workdir", str(tmp_path / "b16"), "--precision", "bfloat16"]
    pretrain.main(["vit-b16-i1k", *options, "--dry-run", "--chips", "v5e-16"])
    text = capsys.readouterr().out
    for words in ("93,600 of 4,096 images, 256 on each of 16", "does not fit: --accumulation", "under 7 hours"):
        assert words in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("chips", "words"), [("v5e", "of the kinds v3, v4"), ("v9-8", "but is 'v9-8'")])
def test_other_slices_are_refused(chips, words):
    with pytest.raises(UserError, match=words):
        slice_of(chips)
    with pytest.raises(UserError, match="cannot be shared evenly by 24 chips; give --batch-size 4080"):
        of_imagenet("vit-b16-i1k", "v5e-24")
