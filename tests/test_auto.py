"""`training.auto`: what it chooses, and the run that it leaves."""

import itertools
import json
import pathlib
import re
import shlex
import shutil

import numpy as np
import PIL.Image
import pytest

import keras_vit
from keras_vit import Preprocessing, UserError, ViTConfig
from keras_vit.cli.commands import COMMANDS
from keras_vit.cli.progress import duration
from keras_vit.run import Run
from tests.support import FIXTURES, randomize
from training import auto
from training.data.sources import DataOptions, open_source
from training.experiments import auto as choices

CONFIG = ViTConfig(patch_size=8, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)


@pytest.fixture(name="images", scope="module")
def _images(tmp_path_factory) -> pathlib.Path:
    """Two classes of 20 wide images: the left or the right end is bright, which a center crop does not show."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for label in ("left", "right"):
        (folder / label).mkdir()
        for number in range(20):
            pixels = rng.integers(0, 60, (16, 48, 3), np.uint8)
            pixels[:, slice(0, 12) if label == "left" else slice(36, 48)] += 180
            PIL.Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


@pytest.fixture(name="backbone", scope="module")
def _backbone(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("backbone") / "backbone.keras"
    preprocessing = Preprocessing((16, 16), resize="resize-small", crop_from=(16, 16))
    randomize(keras_vit.build(CONFIG, preprocessing=preprocessing, num_classes=None)).save(path)
    return path


def test_without_a_gpu_the_features_stay_frozen_and_whole_images_are_shown(images, backbone, tmp_path, capsys):
    workdir = str(tmp_path / "my run")
    data = ["--data", f"folder:{images}", "--group", r"\d+"]
    auto.main([*data, "--checkpoint", str(backbone), "--workdir", workdir])
    printed = capsys.readouterr().out
    assert "The backbone stays frozen, because there is no GPU; its features take about " in printed
    assert printed.count("is kept for evaluation") == 1  # the images are looked at once
    assert printed.count("40 images in 20 groups") == 1
    assert "Whole images (--resize pad): on 36 training images" in printed
    [measured] = re.findall(r"5-fold cross-validation on all images: accuracy .*", printed)
    run = Run.open(workdir)
    assert measured in (run.directory / "linear_probe.md").read_text()
    assert json.loads((run.directory / "linear_probe.json").read_text())["resize"] == "pad"
    assert run.preprocessing.resize == "pad"
    assert run.labels == ("left", "right")
    assert (run.directory / "evaluation.md").is_file()
    lines = printed.splitlines()
    shown = [shlex.split(line) for line in lines[lines.index("Next:") + 1 :]]
    assert [COMMANDS.keys() & {*line} for line in shown] == [{"predict"}, {"inspect"}, {"saved-model"}]
    assert all(workdir in line for line in shown)
    with pytest.raises(UserError, match="holds a finished run; choose another --workdir"):
        auto.main(["--data", f"folder:{images}", "--checkpoint", str(backbone), "--workdir", workdir])
    kept = choices.with_own_head(run, open_source(DataOptions(f"folder:{images}")), None, None)
    assert "so auto keeps its own" in capsys.readouterr().out
    for old, new in zip(run.model.weights, kept.weights, strict=True):
        np.testing.assert_array_equal(np.array(old), np.array(new))


def test_minutes_that_suffice_fine_tune_and_others_do_not(images, backbone, monkeypatch, capsys):
    run, source = Run.open(str(backbone)), open_source(DataOptions(f"folder:{images}"))
    monkeypatch.setattr(choices, "step_seconds", lambda model, batch_size: 10.0)
    assert choices.finetuning_epochs(run, source, minutes=0.1) == 0
    assert "0.1 minutes allow only 0 epochs" in capsys.readouterr().out
    assert choices.finetuning_epochs(run, source, minutes=5) >= 3
    assert "a step of" in capsys.readouterr().out


@pytest.mark.parametrize(("resize", "seconds"), [(None, 360 + 40 + 360), ("pad", 400)])
def test_the_announced_time_has_the_comparison_of_crops(resize, seconds, images, backbone, monkeypatch, capsys):
    run, source = Run.open(str(backbone)), open_source(DataOptions(f"folder:{images}"))
    monkeypatch.setattr(choices, "image_seconds", lambda model: 10.0)
    assert choices.finetuning_epochs(run, source, None, resize) == 0
    assert f"its features take about {duration(seconds)} here" in capsys.readouterr().out


def test_a_checkpoint_is_opened_at_the_image_size_of_its_preprocessing(tmp_path):
    folder = shutil.copytree(FIXTURES / "hf_vit", tmp_path / "hf_vit")
    own = Run.open(str(folder)).model.input_shape
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 64, "width": 64}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    assert Run.open(str(folder)).model.input_shape == (None, 64, 64, 3) != own
    assert Run.open(str(folder), image_size=(48, 48)).model.input_shape == (None, 48, 48, 3)


@pytest.mark.parametrize(("cropped", "chosen"), [(0.75, "pad"), (0.9, None)])
def test_images_are_cropped_only_where_that_is_better_than_noise(
    cropped, chosen, images, backbone, monkeypatch, capsys
):
    accuracies = iter([cropped, 0.74])
    monkeypatch.setattr(choices, "_probed", lambda *_: next(accuracies))
    assert choices.resize_for(Run.open(str(backbone)), open_source(DataOptions(f"folder:{images}"))) == chosen
    assert ("within the noise" in capsys.readouterr().out) == (chosen == "pad")


@pytest.fixture(name="offline")
def _offline(tmp_path, monkeypatch) -> None:
    """The hub is not asked, and nothing of it is in the cache."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))


def test_without_any_checkpoint_it_says_so(offline, capsys):
    assert choices.usable_checkpoint(None) is None
    assert "Could not download hf:facebook/dinov2-small" in capsys.readouterr().out
    assert choices.usable_checkpoint("runs/mine") == "runs/mine"


def test_an_interrupted_fine_tuning_goes_on_with_its_epochs(images, backbone, tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    workdir.mkdir()
    settings = {"command": "finetune", "recipe": {"epochs": 7, "resize": "pad"}}
    (workdir / "config.json").write_text(json.dumps({"settings": settings}))
    calls = []

    def train(arguments, source) -> None:
        calls.append(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(choices.by_recipe, "finetune", train)
    with pytest.raises(KeyboardInterrupt):
        auto.main(["--data", f"folder:{images}", "--checkpoint", str(backbone), "--workdir", str(workdir)])
    assert calls[0][4:8] == ["--epochs", "7", "--resize", "pad"]
    (workdir / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json cannot be read as the settings of a run"):
        choices.unfinished_recipe(str(workdir))


@pytest.mark.slow
def test_a_run_from_a_model_that_knows_the_classes_has_its_weights(images, backbone, tmp_path, capsys):
    runs = [str(backbone), str(tmp_path / "run"), str(tmp_path / "again")]
    for start, workdir in itertools.pairwise(runs):
        auto.main(["--data", f"folder:{images}", "--run", start, "--workdir", workdir])
    assert "so auto keeps its own" in capsys.readouterr().out
    for old, new in zip(*(Run.open(run).model.weights for run in runs[1:]), strict=True):
        np.testing.assert_array_equal(np.array(old), np.array(new))


@pytest.mark.slow
@pytest.mark.parametrize("start", ["checkpoint", "scratch"])
def test_the_other_ways_end_with_an_evaluated_run(start, images, backbone, offline, tmp_path, capsys):
    data, options = f"folder:{images}", ["--checkpoint", str(backbone), "--minutes", "2"]
    if start == "scratch":  # where an image may have several classes
        rows = [f"{image},{image.parent.name}|wide" for image in sorted(images.glob("*/*.png"))]
        (tmp_path / "images.csv").write_text("\n".join(["path,labels", *rows]))
        data, options = f"csv:{tmp_path / 'images.csv'}", []
    auto.main(["--data", data, "--group", r"\d+(?=\.)", "--workdir", str(tmp_path / "run"), *options])
    assert (tmp_path / "run" / "evaluation.md").is_file()
    printed = capsys.readouterr().out
    assert printed.count("Next:") == 1
    assert printed.count("is kept for evaluation") == printed.count("images belong together") == 1
    assert printed.count("40 images in 20 groups") == (start == "checkpoint")
