"""Soups of runs: the mean of their weights, what a greedy soup keeps, and what is refused."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import PIL.Image
import pytest

import keras_vit
from keras_vit import UserError
from keras_vit.files.keras_model import load_model
from keras_vit.files.remote import to_path
from keras_vit.run import Run
from tests.support import randomize
from training import soup
from training.data.known_images import check_split
from training.options.common import DataOptions

CONFIG = keras_vit.ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
DIGITS = tuple("0123456789")


def make_run(folder, accuracy: float, model) -> str:
    run = Run.at(folder)
    run.start({"command": "finetune", "source": {"data": "digits"}}, DIGITS)
    run.write_metrics([{"epoch": 1, "val_accuracy": accuracy}])
    run.save_model(model)
    return str(folder)


def build(**fields):
    config = dataclasses.replace(CONFIG, **fields)
    return randomize(keras_vit.build(config, image_size=8, channels=1, num_classes=10))


@pytest.fixture(name="saved", scope="module")
def _saved(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs")
    model = build()
    for number, accuracy in enumerate((0.3, 0.5, 0.4)):
        make_run(folder / f"run{number}", accuracy, model)
        model.set_weights([1.1 * weight + 0.01 for weight in model.get_weights()])
    return folder


@pytest.fixture(name="runs")
def _runs(saved, tmp_path) -> list[str]:
    """Copies of three runs with 30, 50 and 40% accuracy."""
    return [str(shutil.copytree(run, tmp_path / run.name)) for run in sorted(saved.iterdir())]


def test_a_uniform_soup_is_a_run_with_the_mean_of_the_weights(runs, tmp_path):
    soup.main([*runs, "--output", str(tmp_path / "soup")])
    model, labels = keras_vit.load(tmp_path / "soup")
    assert labels == DIGITS
    every = [load_model(run).get_weights() for run in runs]
    for mean, *weights in zip(model.get_weights(), *every, strict=True):
        np.testing.assert_allclose(mean, np.mean(weights, axis=0), rtol=1e-5, atol=1e-6)
    assert json.loads((tmp_path / "soup" / "config.json").read_text())["settings"]["runs"] == runs
    before = (tmp_path / "soup" / "model.keras").read_bytes()
    soup.main([*runs, "--output", str(tmp_path / "soup")])
    assert (tmp_path / "soup" / "model.keras").read_bytes() == before


@pytest.mark.slow
def test_a_greedy_soup_begins_with_the_best_run_and_keeps_what_does_not_harm(runs, tmp_path):
    # The last run is the best one again, the first is noise that can only harm.
    shutil.copy(Run.at(tmp_path / "run1").path / "model.keras", Run.at(tmp_path / "run2").path / "model.keras")
    soup.main([*runs, "--output", str(tmp_path / "soup"), "--greedy"])
    lines = Run.at(tmp_path / "soup").metrics()
    assert [line["run"] for line in lines] == [runs[1], runs[2], runs[0]]
    assert [line["kept"] for line in lines[:2]] == [True, True]
    assert lines[0]["val_accuracy"] == lines[1]["val_accuracy"]
    kept = [load_model(line["run"]).get_weights() for line in lines if line["kept"]]
    for mean, *weights in zip(load_model(tmp_path / "soup").get_weights(), *kept, strict=True):
        np.testing.assert_allclose(mean, np.mean(weights, axis=0), rtol=1e-5, atol=1e-6)
    assert lines[2]["kept"] == (lines[2]["val_accuracy"] >= lines[0]["val_accuracy"])


def test_runs_that_do_not_fit_are_refused(runs, tmp_path):
    wide = make_run(tmp_path / "wide", 0.1, build(mlp_dim=24))
    letters, other = (str(shutil.copytree(runs[0], tmp_path / name)) for name in ("letters", "other"))
    Run.at(to_path(letters)).path.joinpath("labels.txt").write_text("\n".join("abcdefghij"))
    trained_on(other, "folder:x", (9, 1))
    (tmp_path / "link").symlink_to(runs[0])
    one = "takes two different runs or more, but was given"
    for others, words in (
        ([*runs[1:], wide], "wide differ in config.mlp_dim"),
        ([letters], "have different classes"),
        ([other, "--greedy"], "differ in data .there 'digits', here 'folder:x'.;"),
        ([], one),
        ([f"{runs[0]}/"], one),
        ([f"{tmp_path}/../{tmp_path.name}/link"], one),
        (["nowhere"], "There is no run directory 'nowhere'"),
    ):
        with pytest.raises(UserError, match=words):
            soup.main([runs[0], *others, "--output", str(tmp_path / "soup")])
    assert not (tmp_path / "soup").exists()


def trained_on(run: str, data: str, images: tuple[int, int], fingerprint: int | None = None, **seed) -> None:
    """Let the config.json of a run say that it was trained on these images."""
    file = Run.at(to_path(run)).path / "config.json"
    config = json.loads(file.read_text())
    counts = dict(zip(("train", "evaluation"), images, strict=True))
    config["settings"] |= {"source": {"data": data, **seed}, "images": counts}
    file.write_text(json.dumps(config | ({"images_fingerprint": fingerprint} if fingerprint else {})))


@pytest.mark.slow
def test_a_soup_says_on_which_images_its_runs_were_trained(runs, tmp_path):
    for run in runs:
        trained_on(run, f"folder:{tmp_path}/pictures", (9, 1), 5, split_seed=2)
    soup.main([*runs, "--output", str(tmp_path / "soup")])
    config = json.loads((tmp_path / "soup" / "config.json").read_text())
    assert config["images_fingerprint"] == 5
    assert config["settings"]["images"] == {"train": 9, "evaluation": 1}
    with pytest.raises(UserError, match="trained on another split of folder:.*give --split-seed 2"):
        check_split(Run.open(tmp_path / "soup"), DataOptions(f"folder:{tmp_path}/pictures"))


def test_a_greedy_soup_is_not_chosen_on_images_that_its_runs_may_know(runs, tmp_path):
    for number in range(20):
        file = tmp_path / "pictures" / DIGITS[number % 10] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.effect_noise((8, 8), 50.0).save(file)
    for run in runs:
        trained_on(run, f"folder:{tmp_path}/pictures", (9, 11), 5)
    with pytest.raises(UserError, match="was trained when .* had other images"):
        soup.main([*runs, "--output", str(tmp_path / "soup"), "--greedy"])
    assert not (tmp_path / "soup").exists()


def test_a_soup_of_runs_on_different_data_or_on_splits_of_a_folder_names_none(runs, tmp_path):
    trained_on(runs[0], "tfds:mnist", (9, 1))
    for run, images in zip(runs[1:], ((9, 1), (10, 2)), strict=True):
        trained_on(run, f"folder:{tmp_path}/pictures", images)
    for split in ("train", "test"):  # the evaluation images stay apart
        (tmp_path / "pictures" / split).mkdir(parents=True)
    soup.main([*runs, "--output", str(tmp_path / "soup")])
    assert not {"source", "images"} & json.loads((tmp_path / "soup" / "config.json").read_text())["settings"].keys()


@pytest.mark.parametrize("other", [{"split_seed": 3}, {"images": (10, 2)}, {"fingerprint": 6}])
def test_a_soup_of_different_splits_of_one_folder_is_refused(other, runs, tmp_path):
    for run, changes in ((runs[0], {}), (runs[1], other)):
        trained_on(run, f"folder:{tmp_path}/pictures", **{"images": (9, 1), "fingerprint": 5, **changes})
    with pytest.raises(UserError, match="were trained on different splits of"):
        soup.main([*runs[:2], "--output", str(tmp_path / "soup")])
