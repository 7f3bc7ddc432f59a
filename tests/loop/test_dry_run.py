"""What a dry run says and leaves behind; what a recipe takes on Cloud TPU."""

import dataclasses
import re

import pytest

import keras_vit.models.complexity
from keras_vit import UserError
from keras_vit.run import Run
from tests.support import FIXTURES
from training import finetune, pretrain
from training.data.sources import digits
from training.loop import dry_run
from training.loop.dry_run import Workload
from training.options.common import Execution
from training.recipes.pretrain import RECIPES, find_recipe
from training.recipes.recipe import Schedule

SMALL = ["--model.num-layers", "1", "--model.hidden-size", "12", "--model.num-heads", "3", "--model.mlp-dim", "20"]


def test_a_dry_run_tells_all_and_trains_nothing(tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "runs" / "new"
    options = ["--data", "digits", "--workdir", str(workdir), "--epochs", "3", "--warmup-steps", "20", *SMALL]
    pretrain.main(["digits", *options, "--dry-run"])
    text = capsys.readouterr().out
    assert text.index("Run\n") < text.index("Learning rate\n") < text.index("add --verbose")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")  # what --verbose does
    pretrain.main(["digits", *options, "--dry-run"])
    verbose = capsys.readouterr().out
    assert verbose.startswith(text[: text.index("\nThe learning rate is plotted")])
    for words in (
        "recipe.schedule.warmup_steps: 20",
        "recipe.model.hidden_size: 12",
        "source.data: digits",
        "132 of 32 images, 4,224 in all",
        "1,590",  # parameters
        "activations of 32 images",
        "     0.002 |",
        "nothing was trained",
    ):
        assert words in verbose
    assert [path.name for path in workdir.parent.iterdir()] == ["new.lr.png"]


def test_the_whole_run_is_three_times_the_forward():
    recipe = dataclasses.replace(find_recipe("vit-b16-i1k"), batch_size=1000, epochs=None, steps=1000)
    text = dry_run.describe_run(Workload(recipe.model, recipe, 10, 3), digits())
    assert "17.6 G multiply-adds, 35.1 GFLOPs" in text
    assert "105 PFLOPs" in text


def test_the_peak_of_the_learning_rate_is_shown_however_short_it_is():
    schedule = Schedule("rsqrt", 300, timescale=300)
    recipe = dataclasses.replace(
        find_recipe("digits"), schedule=schedule, learning_rate=3e-3, epochs=None, steps=90_000
    )
    text = dry_run.describe_run(Workload(recipe.model, recipe, 10, 1), digits())
    assert "     0.003 |#\n" in text


def test_memory_falls_with_16_bits_remat_accumulation_and_replicas():
    recipe = find_recipe("vit-b16-i1k")
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, num_layers=2))

    def total(recipe=recipe, **how) -> int:
        return sum(dry_run.estimate_memory(Workload(recipe.model, recipe, 1000, 3, **how)).values())

    whole = dry_run.estimate_memory(Workload(recipe.model, recipe, 1000, 3))
    assert whole["weights"] == 4 * keras_vit.models.complexity.costs(recipe.model, (224, 224)).parameters
    assert whole["optimizer"] == 2 * whole["weights"]
    for less in (
        total(execution=Execution(precision="bfloat16")),
        total(execution=Execution(remat=True)),
        total(replicas=8),
        total(dataclasses.replace(recipe, accumulation=8)),
        total(dataclasses.replace(recipe, optimizer="sgd")),
    ):
        assert less < total()
    averaged = dataclasses.replace(recipe, ema_decay=0.99)
    assert total(averaged) == total() + whole["weights"]
    assert total(replicas=8) == pytest.approx(total() / 8, rel=0.02)


def _rows(recipe) -> dict[str, str]:
    """The rows of the table, by their names."""
    table = dry_run.describe_run(Workload(recipe.model, recipe, 10, 1), digits()).split("\n\n")[0]
    return {line[2:].split("  ")[0]: line for line in table.splitlines()[1:]}


def test_two_passes_of_a_step_uphill_are_counted():
    recipe = dataclasses.replace(find_recipe("digits"), epochs=None, examples=10**6)
    once, twice = _rows(recipe), _rows(dataclasses.replace(recipe, sharpness_radius=0.05))
    flops = [float(rows["training, total"].split()[2]) for rows in (once, twice)]
    assert flops[1] == pytest.approx(2 * flops[0], rel=0.01)
    assert "twice for --sharpness-radius" in twice["training, total"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher": "runs/large"}, "the forward pass of the teacher runs/large"),
        ({"patch_dropout": 0.5}, "--patch-dropout leaves 0.5 of the patches out"),
        ({"patch_sizes": (2, 4)}, "patches of 2, 4 pixels in turn"),
        ({}, ""),
    ],
)
def test_the_report_says_what_is_not_counted(changes, words):
    rows = _rows(dataclasses.replace(find_recipe("digits"), **changes))
    assert words in rows.get("not counted", "")
    assert ("not counted" in rows) == bool(changes)


def test_adapters_have_few_gradients_and_frozen_layers_none(tmp_path, capsys):
    command = ["--checkpoint", str(FIXTURES / "torchvision_vit.safetensors"), "--data", "digits", "--num-heads", "2"]
    command += ["--workdir", str(tmp_path / "run"), "--dry-run"]
    trained = []
    for options in (["--lora", "1"], ["--freeze", "embedding"]):
        finetune.main([*command, *options])
        text = capsys.readouterr().out
        total, part = re.search(r"parameters +([\d,]+), of which ([\d,]+) are trained", text).groups()
        trained.append(int(part.replace(",", "")) / int(total.replace(",", "")))
        assert "frozen layers need no gradient" in text
    assert trained[0] < trained[1] < 1.0
    recipe = find_recipe("digits")
    memory = dry_run.estimate_memory(Workload(recipe.model, recipe, 10, 1, parameters=1100, trained=100))
    assert (memory["weights"], memory["gradients"], memory["optimizer"]) == (4400, 400, 800)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--freeze nonsense", "--freeze nonsense names no layer"),
        ("--teacher r/nothing", "There is no file or folder 'r/nothing'"),
        ("--xla on --deterministic", "XLA cannot compile .* --deterministic"),
    ],
)
def test_a_dry_run_refuses_what_the_training_refuses(options, words, tmp_path):
    command = ["digits", "--data", "digits", "--workdir", str(tmp_path / "run"), "--dry-run", *SMALL, *options.split()]
    with pytest.raises(UserError, match=words):
        pretrain.main(command)
    assert not [*tmp_path.iterdir()]


def test_a_dry_run_refuses_the_directory_of_another_run(tmp_path):
    workdir = tmp_path / "run"
    Run.at(workdir).start({"command": "pretrain", "recipe_name": "digits"}, tuple("0123456789"))
    with pytest.raises(UserError, match="already holds another run, which differs in"):
        pretrain.main(["digits", "--data", "digits", "--workdir", str(workdir), *SMALL, "--dry-run"])


BFLOAT16 = Execution(precision="bfloat16")


def of_imagenet(name: str, chips: str, execution: Execution = BFLOAT16, **how):
    examples, classes = dry_run.DATA_SETS["imagenet-1k"]
    options = {"num_examples": examples, "num_classes": classes, "execution": execution}
    return dry_run.budget(RECIPES[name], name, chips, **options, **how)


def test_the_published_run_takes_under_seven_hours_at_a_quarter_of_the_peak():
    """big_vision: ViT-S/16, 90 epochs, TPUv3-8."""
    actual = of_imagenet("vit-s16-i1k-better-plain", "v3-8")
    assert actual.steps == 90 * (1_281_167 // 1024)
    assert actual.flops == pytest.approx(3 * 2 * 4.6e9 * 90 * 1.281e6, rel=0.02)
    assert 6.5 < actual.hours(0.26) < 7.0


def test_memory_is_that_of_the_compiled_step_or_an_estimate_of_divided_weights():
    assert of_imagenet("vit-b16-i21k", "v5e-64").memory == 7.39e9  # of 64 images
    assert of_imagenet("vit-b16-i21k", "v5e-128").compiled
    whole, divided = (
        of_imagenet("vit-b16-i21k", "v5e-256", Execution(), shard_weights=shard_weights)
        for shard_weights in (False, True)
    )
    assert not whole.compiled
    assert whole.memory - divided.memory == pytest.approx(16 * 87.2e6 * 255 / 256, rel=0.01)
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
        dry_run.slice_of(chips)
    with pytest.raises(UserError, match="shared evenly by 24 replicas .* give --batch-size 4080"):
        of_imagenet("vit-b16-i1k", "v5e-24")
