"""The studies: their grids, and that what was interrupted ends in the same table."""

import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import ConvStem, ResNetConfig, ShiftedPatches, UserError
from keras_vit.files.atomic import locked
from keras_vit.models.complexity import costs
from training import study
from training.data.dataset import Split, random_subset
from training.data.sources import digits
from training.experiments import study_runs
from training.experiments.study_grids import STUDIES, data_size
from training.features import linear_models
from training.features.extraction import open_extractor
from training.features.probe import cached_features, splits_of
from training.recipes.pretrain import RECIPES, with_early_convolutions, with_shifted_patches

BASE = RECIPES["study-small"]
TINY = ["--image-size", "8", "8", "--model.patch-size", "2", "--model.hidden-size", "16", "--model.num-layers", "1"]
TINY += ["--model.num-heads", "2", "--model.mlp-dim", "16", "--steps", "6", "--warmup-steps", "1", "--shots", "2"]


def points(name: str) -> list:
    return STUDIES[name].grid(BASE, 60_000)


def test_position_embeddings_are_those_of_table_8_and_the_fixed_ones():
    models = [point.recipe.model for point in points("position-embedding")]
    found = {(model.position_embedding, model.position_injection) for model in models}
    learned = {(kind, place) for kind in ("learned", "learned-2d") for place in ("input", "every-layer", "shared")}
    assert found == learned | {("none", "input"), ("relative", "input"), ("sincos-2d", "input")}
    plain = {dataclasses.replace(m, position_embedding="none", position_injection="input") for m in models}
    assert len(plain) == 1  # nothing else differs


def test_heads_are_compared_at_the_papers_ratio_of_learning_rates():
    found = [(point.recipe.model.classifier, point.recipe.learning_rate) for point in points("head")]
    rate = BASE.learning_rate
    assert found == [("token", rate), ("gap", rate), ("gap", pytest.approx(rate * 3e-4 / 8e-4))]


def test_shapes_differ_from_the_base_in_one_dimension_each():
    fields = {
        "depth": {"num_layers"},
        "width": {"hidden_size"},
        "width of the MLP": {"mlp_dim"},
        "patch": {"patch_size"},
        "base": set(),
        "all": {"num_layers", "hidden_size", "mlp_dim"},
    }
    for point in points("shape"):
        base, model = dataclasses.asdict(BASE.model), dataclasses.asdict(point.recipe.model)
        assert {name for name in base if base[name] != model[name]} == fields[point.line], point.name
        assert dataclasses.replace(point.recipe, model=BASE.model) == BASE
    assert {point.line for point in points("shape")} == fields.keys()
    patches = {point.setting for point in points("shape") if point.line == "patch"}
    assert patches == {"4 pixels", "14 pixels"}


@pytest.mark.slow
def test_families_grow_in_operations():
    for line in ("ViT", "hybrid", "BiT"):
        models = [point.recipe.model for point in points("scaling") if point.line == line]
        flops = [costs(model, (28, 28), num_classes=10, channels=1).flops for model in models]
        assert flops == sorted(set(flops))
        assert len(flops) == 3


def test_subsets_are_1_10_and_100_per_cent_for_each_family():
    found = [(point.line, point.train_images) for point in points("data-size")]
    assert found == [(line, size) for line in ("ViT", "hybrid", "BiT") for size in (600, 6000, 60_000)]
    assert [point.train_images for point in data_size(BASE, 60_000, [500, 1000])] == [500, 1000] * 3
    bit = next(point.recipe.model for point in points("data-size") if point.line == "BiT")
    assert isinstance(bit, ResNetConfig)
    assert bit.preactivation


def test_the_models_for_small_data_have_the_grid_and_the_width_of_the_base():
    models = {point.line: point.recipe.model for point in points("small-data")}
    assert {model.grid((28, 28)) for model in models.values()} == {(4, 4)}
    assert {model.hidden_size for model in models.values()} == {BASE.model.hidden_size}
    shifted, compact = models["shifted patches and locality"], models["convolutions and sequence pooling"]
    assert shifted.locality_attention
    assert shifted.stem == ShiftedPatches(7)
    assert compact.stem == ConvStem((64,), (7,), (7,))
    assert compact.classifier == "sequence"
    assert with_early_convolutions(dataclasses.replace(BASE.model, patch_size=4)).stem.channels == (32, 64)


@pytest.mark.parametrize("change", [with_early_convolutions, with_shifted_patches])
def test_only_square_patches_are_replaced(change):
    with pytest.raises(UserError, match="square"):
        change(dataclasses.replace(BASE.model, patch_size=(4, 7)))


def test_a_smaller_subset_is_a_part_of_a_larger_one_and_another_for_each_seed():
    split = Split(50, lambda index: (tf.zeros(1), tf.cast(index, tf.int32)), "image {}".format)

    def members(count: int, seed: int) -> list[int]:
        part = random_subset(split, count, seed)
        assert part.name(0) == f"image {int(part.read(tf.constant(0))[1])}"
        return [int(part.read(tf.constant(i))[1]) for i in range(part.num_examples)]

    assert members(20, 1)[:7] == members(7, 1)
    assert len(set(members(20, 1))) == 20
    assert members(7, 1) != members(7, 2)


@pytest.fixture(name="done", scope="module")
def _done(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("study")
    study.main(["head", "--data", "digits", *TINY, "--seeds", "1", "--jobs", "2", "--workdir", str(workdir)])
    return workdir


@pytest.mark.slow
def test_a_study_leaves_runs_numbers_table_and_figure(done):
    results = json.loads((done / "results.json").read_text())
    assert [row["line"] for row in results["rows"]] == ["class token", "mean of the tokens", "mean of the tokens"]
    for row in results["rows"]:
        run = done / "runs" / f"{row['name']}-seed0"
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert row["curve"] == [[record["step"], record["val_accuracy"]] for record in records]
        assert row["accuracy"] == {"values": [records[-1]["val_accuracy"]], "mean": records[-1]["val_accuracy"],
                                   "interval": None}  # fmt: skip
        model, _ = keras_vit.load(run)
        assert row["parameters"] == model.count_params()
    assert (done / "figure.png").read_bytes().startswith(b"\x89PNG")
    page = (done / "results.md").read_text()
    assert "learning rate 0.00075" in page
    assert f"{results['rows'][0]['parameters']:,}" in page


@pytest.mark.slow
def test_a_finished_study_is_reported_again_without_training(done, capsys):
    before = (done / "results.json").read_text()
    written = {path: path.stat().st_mtime_ns for path in (done / "runs").rglob("*")}
    study.main(["head", "--data", "digits", *TINY, "--seeds", "1", "--workdir", str(done)])
    assert (done / "results.json").read_text() == before
    assert "3 of 3 runs are finished already." in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (done / "runs").rglob("*")} == written


@pytest.mark.slow
def test_runs_of_another_study_are_refused(done):
    command = ["head", "--data", "digits", *TINY, "--seeds", "1", "--workdir", str(done)]
    with pytest.raises(UserError, match=r"differs in .*point.recipe.weight_decay \(there 0.05, here 0.1\)"):
        study.main([*command, "--weight-decay", "0.1"])


@pytest.mark.slow
def test_the_few_shot_accuracy_is_that_of_the_command(done, tmp_path):
    run = next((done / "runs").glob("token-*-seed0"))
    source = digits()
    model, _ = keras_vit.load(run)
    preprocessing = RECIPES["study-small"].preprocessing(1)
    preprocessing = dataclasses.replace(preprocessing, image_size=(8, 8))
    extractor = open_extractor(model, preprocessing)
    train, evaluation = (cached_features(extractor, split, tmp_path) for split in splits_of(source).values())
    expected = linear_models.few_shot(train, evaluation, len(source.labels), shots=[2], seeds=3)
    assert study_runs.few_shot_accuracy(model, source, 2) == pytest.approx(expected[0]["mean"], abs=1e-9)


def test_intervals_are_student_s():
    summary = study_runs.mean_and_interval([0.90, 0.92, 0.97])
    half = 4.302653 * np.std([0.90, 0.92, 0.97], ddof=1) / math.sqrt(3)  # t(0.975, 2) of any table
    np.testing.assert_allclose(summary["interval"], [0.93 - half, 0.93 + half], rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["heads"], "There is no study named 'heads'; the nearest names are"),
        (["head", "--train-images", "100"], "--train-images applies only to studies of"),
        (["head", "--recipe", "digits"], "and --steps"),
        (["head", "--shots", "1000"], "has 139 training images, fewer than the 1000 shots"),
        (["data-size", "--train-images", "5"], "A subset must have from 128 images, a batch, to 1437"),
        (["head", "--target", "patch-color"], "learns classes"),
    ],
)
def test_mistakes_are_named(arguments, words, tmp_path):
    with pytest.raises(UserError, match=words):
        study.main([*arguments, "--data", "digits", "--workdir", str(tmp_path)])


def test_a_second_study_in_the_same_directory_is_refused(short_lock_wait, tmp_path):
    with locked(tmp_path), pytest.raises(UserError, match=f"Another process, {os.getpid()} on .*, writes into"):
        study.main(["head", "--data", "digits", *TINY, "--workdir", str(tmp_path)])


@pytest.mark.slow
def test_a_study_killed_in_the_middle_ends_with_the_same_table(done, tmp_path):
    command = [sys.executable, "-m", "training.study", "head", "--data", "digits", *TINY, "--seeds", "1", "--jobs", "2"]
    command += ["--workdir", str(tmp_path / "killed")]
    root = pathlib.Path(__file__).parents[2]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(root)})
    while not list((tmp_path / "killed").glob("runs/*/trial.json")):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(2)  # for its runs to notice
    assert len(list((tmp_path / "killed").glob("runs/*/trial.json"))) < 3
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, check=True)
    rows = [json.loads((folder / "results.json").read_text())["rows"] for folder in (done, tmp_path / "killed")]
    assert rows[0] == rows[1]
