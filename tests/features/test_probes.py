"""Probes of frozen features: the closed form against the original's numbers, and what the commands leave and refuse."""

import dataclasses
import itertools
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import keras
import numpy as np
import PIL.Image
import pytest
import sklearn.linear_model
import sklearn.model_selection
import sklearn.neighbors
import sklearn.preprocessing
import tensorflow as tf

import keras_vit
import training.fewshot
from keras_vit import Preprocessing, UserError, ViTConfig
from keras_vit.cli import commands
from keras_vit.files.keras_model import load_model
from keras_vit.run import Run
from tests.support import FIXTURES, GOLDEN, TINY_STEM, others_slow, randomize, serving
from training import evaluate, finetune, knn, linear_probe
from training.data.sources import DataOptions, DataSet, array_split, digits
from training.features import attentive, extraction, linear_models, nearest_neighbors
from training.features import probe as probes
from training.features.linear_models import LeastSquares, few_shot, shots_of, shots_that_fit
from training.features.probe import Features
from training.options.features import FeatureOptions, FewshotOptions, KnnOptions, LinearProbeOptions

pytestmark = pytest.mark.usefixtures("models_read_once")

NAMES = ("ant", "bee", "cat")
CONFIG = ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)


@pytest.mark.parametrize("name", ["fewshot_primal", "fewshot_dual"])
def test_least_squares_are_the_originals_for_every_strength(name):
    golden = np.load(FIXTURES / f"{name}.io.npz")
    train = Features(golden["train_features"], golden["train_labels"])
    solved = LeastSquares(train, GOLDEN[name]["shape"]["classes"])
    query = Features(golden["query_features"], golden["query_labels"])
    for i, l2 in enumerate(golden["l2_reg"]):
        weights, scores = solved.weights(l2), solved.scores(query.values, l2)
        np.testing.assert_allclose(weights, golden["weights_float64"][i], rtol=1e-6)
        np.testing.assert_allclose(scores, golden["scores_float64"][i], rtol=1e-6, atol=1e-9)
        np.testing.assert_array_equal(scores.argmax(-1), golden["predictions"][i])
        assert solved.accuracy(query, l2) == pytest.approx(golden["accuracy_float64"][i], abs=1e-12)


def test_shots_are_the_first_of_a_random_order_of_each_class():
    labels = np.array([2, 0, 1, 0, 2, 1, 0, 2, 1, 1])
    few, more = (shots_of(labels, 3, shots, seed=1) for shots in (1, 3))
    assert labels[few].tolist() == [0, 1, 2]
    assert labels[more].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert more[::3].tolist() == few.tolist()
    rng = np.random.default_rng(1)  # big_vision's: one generator for all classes in turn
    assert few.tolist() == [rng.permutation(np.flatnonzero(labels == k))[0] for k in range(3)]
    assert any(shots_of(labels, 3, 1, seed).tolist() != few.tolist() for seed in range(5))


@pytest.fixture(name="clusters", scope="module")
def _clusters() -> tuple[Features, Features]:
    """Three overlapping classes in ten dimensions, 40 images of each to learn from and 50 to be asked."""
    rng = np.random.default_rng(4)
    centres = rng.normal(0.0, 1.0, (3, 10))
    sets = []
    for count in (40, 50):
        labels = np.repeat(np.arange(3), count)
        sets.append(Features((centres[labels] + rng.normal(0.0, 1.5, (3 * count, 10))).astype(np.float32), labels))
    return tuple(sets)


def test_a_swept_strength_is_chosen_without_the_evaluation_images(clusters):
    train, evaluation = clusters
    chosen = few_shot(train, evaluation, 3, shots=(5,), strengths=(1e-3, 1.0, 64.0, 1e6))[0]
    rng = np.random.default_rng(0)
    other = Features(evaluation.values, rng.permutation(evaluation.labels))
    assert few_shot(train, other, 3, shots=(5,), strengths=(1e-3, 1.0, 64.0, 1e6))[0]["l2"] == chosen["l2"]
    fixed = few_shot(train, evaluation, 3, shots=(5,), strengths=(chosen["l2"],))[0]
    assert fixed["accuracies"] == chosen["accuracies"]
    with pytest.raises(UserError, match="none is left to choose a strength on; give --l2"):
        few_shot(train, evaluation, 3, shots=(40,), strengths=(1.0, 2.0))


def test_the_usual_numbers_of_shots_that_every_class_has_are_run(capsys):
    labels = np.repeat([0, 1], [30, 12])
    assert shots_that_fit(labels, ("ant", "bee")) == [1, 5, 10]
    assert capsys.readouterr().out == "Left out: 25 shots, because 'bee' has only 12 training images.\n"
    assert shots_that_fit(np.repeat([0, 1], 25), ("ant", "bee")) == [1, 5, 10, 25]
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match="'bee' has 12 training images, fewer than the 25 or 50 shots"):
        shots_that_fit(labels, ("ant", "bee"), [5, 25, 50])
    with pytest.raises(UserError, match="'bee' has 0 training images"):
        shots_that_fit(np.zeros(30, int), ("ant", "bee"))


def test_nearest_neighbors_vote_as_scikit_learns(clusters):
    train, evaluation = clusters
    rows = nearest_neighbors.nearest_neighbors(train, evaluation, 3, neighbors=(1, 20), temperature=0.07)
    for row in rows:
        reference = sklearn.neighbors.KNeighborsClassifier(
            row["neighbors"], metric="cosine", weights=lambda distances: np.exp((1.0 - distances) / 0.07)
        ).fit(train.values, train.labels)
        assert row["accuracy"] == pytest.approx(reference.score(evaluation.values, evaluation.labels), abs=1e-12)
    assert rows[0]["accuracy"] != rows[1]["accuracy"]


def test_the_linear_probe_is_logistic_regression_on_standardised_features(clusters):
    train, evaluation = clusters
    fitted, found = linear_models.fit_probe(train, (0.1,))
    scaler = sklearn.preprocessing.StandardScaler().fit(train.values)
    reference = sklearn.linear_model.LogisticRegression(C=0.1).fit(scaler.transform(train.values), train.labels)
    expected = reference.score(scaler.transform(evaluation.values), evaluation.labels)
    assert fitted.score(evaluation.values, evaluation.labels) == expected
    assert found["converged"]
    assert not found["tried"]
    _, swept = linear_models.fit_probe(train, (1e-6, 0.1))
    assert [row["c"] for row in swept["tried"]] == [1e-6, 0.1]
    assert not linear_models.fit_probe(train, (1000.0,), max_iterations=2)[1]["converged"]


def test_a_strength_is_chosen_of_few_images_of_many_classes(clusters):
    train = clusters[0]
    for each, chosen_from in ((2, [0.01, 0.1, 1.0]), (1, [])):  # a tenth has not one of each class; none may miss
        rows = np.concatenate([np.flatnonzero(train.labels == label)[:each] for label in np.unique(train.labels)])
        _, found = linear_models.fit_probe(train.take(rows), (0.01, 0.1, 1.0))
        assert [row["c"] for row in found["tried"]] == chosen_from
    assert found["c"] == 0.1


def test_the_attentive_probe_computes_what_aim_does():
    """Against section 4.2 of the paper in NumPy: keys and values of the standardized tokens, heads, the mean query."""
    tokens = np.random.default_rng(0).normal(2.0, 3.0, (6, 5, 8)).astype(np.float32)
    model = attentive.fit_attentive(tokens, np.arange(6) % 3, 3, num_heads=2, epochs=2)
    query, key, value = (weight.numpy().astype(np.float64) for weight in model.get_layer("pooling").weights)
    kernel, bias = (weight.numpy() for weight in model.get_layer("head").weights)
    x = (tokens - tokens.mean((0, 1))) / tokens.std((0, 1))
    for image, found in zip(x, model.predict(tokens, verbose=0), strict=True):
        parts = []
        for head in (slice(0, 4), slice(4, 8)):
            scores = (image @ key)[:, head] @ query[head] / 2.0
            weights = np.exp(scores) / np.exp(scores).sum()
            parts.append(weights @ (image @ value)[:, head])
        np.testing.assert_allclose(found, np.concatenate(parts) @ kernel + bias, rtol=1e-4, atol=1e-5)


def test_the_attentive_probe_tells_apart_what_one_patch_shows():
    """One token in sixteen, anywhere, has the class; beside others like it, which their key gives away."""
    rng, count = np.random.default_rng(0), 500
    labels = rng.integers(0, 2, count)
    tokens = rng.normal(size=(count, 16, 8)).astype(np.float32)
    tokens[..., 0], tokens[..., 1] = 4.0 * rng.choice([-1.0, 1.0], (count, 16)), 0.0
    place = (np.arange(count), rng.integers(0, 16, count))
    tokens[(*place, 0)] = 4.0 * (2.0 * labels - 1.0)
    tokens[(*place, 1)] = 4.0
    model = attentive.fit_attentive(tokens[:400], labels[:400], 2, num_heads=2, epochs=25)
    right = np.argmax(model.predict(tokens[400:], verbose=0), axis=-1) == labels[400:]
    train, evaluation = (Features(tokens[rows].mean(axis=1), labels[rows]) for rows in (slice(400), slice(400, None)))
    linear, _ = linear_models.fit_probe(train, (1.0,))
    assert right.mean() > 0.95
    assert linear.score(evaluation.values, evaluation.labels) < 0.75


@pytest.mark.slow
def test_the_attentive_probe_stands_in_the_report(run, tmp_path):
    results = linear_models.probe(*_opened(LinearProbeOptions, run.path, tmp_path, c=(0.1,), attentive=2))
    assert 0.1 < results["attentive"] < 1.0
    report = (run.path / "linear_probe.md").read_text()
    assert "| attentive probe |" in report
    assert f" {results['attentive']:.1%} |" in report


def model_of_digits(config: ViTConfig = CONFIG) -> keras.Model:
    return randomize(keras_vit.build(config, preprocessing=Preprocessing((8, 8), channels=1), num_classes=10))


@pytest.fixture(name="saved", scope="module")
def _saved(tmp_path_factory) -> pathlib.Path:
    """A run directory with an untrained model for the digits, and beside it a cache of its features."""
    run = Run.at(tmp_path_factory.mktemp("probes") / "run")
    run.start({"command": "test"}, tuple("0123456789"))
    run.save_model(model_of_digits())
    return run.path


@pytest.fixture(name="run")
def _run(saved, tmp_path) -> Run:
    """A copy of the run."""
    return Run.at(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture(name="cache")
def _cache(saved) -> str:
    """The features of the run, computed once for all tests."""
    return str(saved.parent / "cache")


def _opened(kind: type[FeatureOptions], run: pathlib.Path, tmp_path, data: DataSet | None = None, **fields) -> tuple:
    """A run, the digits or other data, and the options of a command."""
    options = kind(run=str(run), **{"source": DataOptions("digits"), "cache": str(tmp_path / "cache"), **fields})
    size, heads = options.image_size, options.num_heads
    return Run.open(options.run, image_size=size, num_heads=heads), data or digits(), options


def test_each_command_leaves_a_page_and_numbers_and_reads_the_cache(run, tmp_path, compute_no_more, capsys):
    rows = linear_models.fewshot(*_opened(FewshotOptions, run.path, tmp_path, shots=(1, 5)))
    assert rows[0]["mean"] == pytest.approx(np.mean(rows[0]["accuracies"]))
    assert rows[0]["mean"] < rows[1]["mean"]
    assert len(set(rows[0]["accuracies"])) > 1
    assert json.loads((run.path / "fewshot.json").read_text())["results"] == rows
    assert f"| {rows[1]['mean']:.1%} |" in (run.path / "fewshot.md").read_text()
    assert len(list((tmp_path / "cache").iterdir())) == 2
    compute_no_more()
    nearest = nearest_neighbors.knn(*_opened(KnnOptions, run.path, tmp_path, neighbors=(1, 2000)))
    assert [row["neighbors"] for row in nearest] == [1]
    assert "Left out: 2000 neighbors, because there are only 1,437 training images." in capsys.readouterr().out
    linear_models.probe(*_opened(LinearProbeOptions, run.path, tmp_path, c=(0.1,)))
    assert {"knn.md", "knn.json", "linear_probe.md", "linear_probe.json"} <= {p.name for p in run.path.iterdir()}
    assert "12 features of 1,437 training and 360 evaluation images of 10 classes" in capsys.readouterr().out


def test_a_checkpoint_at_an_address_is_downloaded_and_probed(run, cache, tmp_path, monkeypatch):
    keras_vit.save_checkpoint(load_model(run.path), run.path / "x.npz", layout="npz")
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))
    output = str(tmp_path / "report")
    options = ["--data", "digits", "--output", output, "--num-heads", "3", "--image-size", "8", "--neighbors", "1"]
    with serving(run.path) as address:
        knn.main(["--run", f"{address}/x.npz", *options])
    expected = nearest_neighbors.knn(*_opened(KnnOptions, run.path, tmp_path, neighbors=(1,), cache=cache))
    assert json.loads((tmp_path / "report" / "knn.json").read_text())["results"] == expected


def test_the_cache_knows_another_model_other_data_and_a_broken_file(tmp_path):
    model = model_of_digits()
    images, labels = np.random.default_rng(0).integers(0, 256, (7, 8, 8, 1), np.uint8), np.arange(7) % 2

    def features(batch_size: int = 100, preprocessing: Preprocessing | None = None) -> Features:
        own = preprocessing or keras_vit.preprocessing_of(model)
        extractor = extraction.open_extractor(model, own, batch_size=batch_size)
        return probes.cached_features(extractor, array_split(images, labels, ("a", "b")), tmp_path)

    first = features()
    (file,) = tmp_path.rglob("*.parquet")
    assert first.values.shape == (7, 12)
    assert first.labels.tolist() == labels.tolist()

    file.write_bytes(file.read_bytes()[:100])
    np.testing.assert_allclose(features(batch_size=3).values, first.values, atol=1e-6)

    images[3, 0, 0, 0] ^= 1
    assert (features().values[3] != first.values[3]).any()
    assert len(list(tmp_path.iterdir())) == 2
    features(preprocessing=Preprocessing((8, 8), 1, crop_from=(10, 10)))
    model.weights[3].assign(model.weights[3] + 0.5)
    assert (features().values != first.values).any()
    assert len(list(tmp_path.iterdir())) == 4


def test_the_square_crop_is_the_papers():
    image = np.random.default_rng(0).integers(0, 256, (20, 31, 3), np.uint8)
    own = keras_vit.preprocessing_of(keras_vit.build(CONFIG, image_size=(8, 4), num_classes=2))

    def options(crop_from: int) -> FeatureOptions:
        return FeatureOptions(run="runs/x", source=DataOptions("digits"), crop_from=crop_from)

    cropped = options(10).preprocessing(own)(image)
    whole = tf.image.resize(image, (10, 10)).numpy()
    np.testing.assert_allclose(cropped, whole[1:9, 3:7] / 127.5 - 1.0, atol=1e-5)
    with pytest.raises(UserError, match=r"crop_from must be at least both sides of \(8, 4\),"):
        options(7).preprocessing(own)


@pytest.mark.slow
def test_random_weights_are_others_and_always_the_same(run, tmp_path):
    found = [
        probes.open_features(*_opened(FeatureOptions, run.path, tmp_path, random_weights=random)).train.values
        for random in (False, True, True)
    ]
    assert not np.allclose(found[0], found[1])
    np.testing.assert_array_equal(found[1], found[2])
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_what_cannot_be_probed_is_refused(run, tmp_path):
    with pytest.raises(UserError, match="is not a run directory to put the report into;"):
        shutil.copy(run.path / "model.keras", tmp_path / "alone.keras")
        linear_models.fewshot(*_opened(FewshotOptions, tmp_path / "alone.keras", tmp_path))
    for option in ("shots", "seeds", "l2"):
        with pytest.raises(UserError, match=f"--{option} must be"):
            training.fewshot.main(["--run", str(run.path), "--data", "digits", f"--{option}", "0"])
    known = digits().train
    one = dataclasses.replace(digits(), train=known.take(np.flatnonzero(known.labels == 0)))
    with pytest.raises(UserError, match="The training data have one class, '0'; at least two are needed"):
        linear_models.fewshot(*_opened(FewshotOptions, run.path, tmp_path, one))
    with pytest.raises(UserError, match="features of 2 of 3 images are not finite numbers"):
        Features(np.array([[0.0, np.nan], [0.0, 1.0], [np.inf, 1.0]]), np.arange(3))
    with pytest.raises(UserError, match="--random-weights applies only to measurements"):
        LinearProbeOptions(run="x", source=DataOptions("digits"), workdir="y", random_weights=True)
    tokens = keras_vit.build(dataclasses.replace(CONFIG, classifier="unpooled"), image_size=8, num_classes=0)
    resnet = keras_vit.build(TINY_STEM, image_size=32, num_classes=3)
    for model, features in ((tokens, "pre_logits"), (resnet, "token"), (resnet, "patches")):
        with pytest.raises(UserError, match=f"no features {features}"):
            extraction.feature_model(model, features)


def test_probing_a_run_on_images_that_it_may_know_is_refused(run, tmp_path):
    config = json.loads((run.path / "config.json").read_text())
    config["settings"] = {"source": {"data": "folder:pictures"}, "images": {"train": 9, "evaluation": 1}}
    (run.path / "config.json").write_text(json.dumps(config))
    data = dataclasses.replace(digits(), held_out=True)
    opened = _opened(FeatureOptions, run.path, tmp_path, data, source=DataOptions("folder:pictures"))
    with pytest.raises(UserError, match="when folder:pictures had 10 images, instead of 1,797"):
        probes.open_features(*opened)


@pytest.mark.parametrize(
    "config",
    [pytest.param(CONFIG, marks=pytest.mark.slow), dataclasses.replace(CONFIG, num_registers=2, classifier="gap")],
)
def test_features_are_the_class_token_the_mean_of_the_patches_or_both(config, run, tmp_path):
    model = model_of_digits(config)
    run.save_model(model)
    batch = keras_vit.preprocessing_of(model)
    images = tf.stack([batch(digits().train.example(tf.constant(index))[0]) for index in range(3)])
    encoded = np.array(keras_vit.intermediates(model, ["encoded"])(images)["encoded"])
    token, mean = encoded[:, 0], encoded[:, config.num_prefix_tokens :].mean(axis=1)
    expected = {"mean": mean}
    if config.has_class_token:
        expected |= {"token": token, "both": np.concatenate([token, mean], axis=-1)}
    for kind, values in expected.items():
        found = probes.open_features(*_opened(FeatureOptions, run.path, tmp_path, features=kind)).train.values
        np.testing.assert_allclose(found[:3], values, atol=1e-5)
    assert len(list((tmp_path / "cache").iterdir())) == 2 * len(expected)
    if not config.has_class_token:
        with pytest.raises(UserError, match="no features both"):
            probes.open_features(*_opened(FeatureOptions, run.path, tmp_path, features="both"))


@pytest.mark.parametrize(
    ("kind", "classes"), others_slow(itertools.product(["pre_logits", "token", "mean", "both"], [2, 10]), ("token", 2))
)
def test_a_probe_with_a_workdir_is_a_run_with_its_logits(kind, classes, run, tmp_path):
    data = digits()
    rows = np.array([i for i in range(150) if data.train.labels[i] < classes])
    images, labels = zip(*(data.train.example(tf.constant(i)) for i in rows), strict=True)
    split = array_split(np.stack(images).astype(np.uint8), np.array(labels), data.labels[:classes])
    few = dataclasses.replace(data, labels=data.labels[:classes], train=split, evaluation=split)
    workdir = str(tmp_path / "probe")
    options = {"c": (0.1,), "features": kind, "workdir": workdir, "resize": "pad"}
    opened = _opened(LinearProbeOptions, run.path, tmp_path, few, **options)
    found = linear_models.probe(*opened)

    probe = Run.open(workdir)
    assert probe.labels == data.labels[:classes]
    assert probe.preprocessing.resize == "pad"
    assert probe.settings["source"]["data"] == "digits"
    assert (probe.path / "samples.npz").is_file()
    known = probes.open_features(*opened)
    fitted, _ = linear_models.fit_probe(known.train, (0.1,))
    expected = fitted.decision_function(known.train.values)
    logits = probe.model.predict(probe.preprocessing(list(images)), verbose=0)
    shown = logits[:, 1] - logits[:, 0] if classes == 2 else logits
    np.testing.assert_allclose(shown, expected, atol=2e-4)
    assert (logits.argmax(1) == np.array(labels)).mean() == pytest.approx(found["accuracy"])
    assert (tmp_path / "probe" / "linear_probe.md").is_file()


def test_the_next_command_has_the_options_that_change_the_features():
    given = {"image_size": (28, 28), "features": "both", "neighbors": (5,), "batch_size": 2, "output": "knn"}
    command = KnnOptions(run="vit", source=DataOptions("folder:a b"), **given).probe_command()
    shown = "linear-probe --checkpoint vit --data folder:a b --image-size 28 28 --features both --workdir runs/probe"
    assert " ".join(command) == shown


def test_few_shots_with_a_workdir_are_a_run_with_their_scores(run, cache, tmp_path, capsys):
    workdir = str(tmp_path / "few")
    opened = _opened(FewshotOptions, run.path, tmp_path, shots=(1, 5), workdir=workdir, cache=cache)
    rows = linear_models.fewshot(*opened)
    assert "few contains the model that 5 shots with the first seed gave" in capsys.readouterr().out
    probe, data = Run.open(workdir), digits()
    known = probes.open_features(*opened)
    chosen = linear_models.shots_of(known.train.labels, 10, 5, seed=0)
    solution = linear_models.LeastSquares(known.train.take(chosen), 10)
    images, labels = zip(*(data.evaluation.example(tf.constant(i)) for i in range(360)), strict=True)
    logits = probe.model.predict(probe.preprocessing(list(images)), verbose=0)
    scores = solution.scores(known.evaluation.values, 1024.0)
    centered = [values - values.mean(axis=-1, keepdims=True) for values in (logits, scores)]
    temperature = np.sqrt(np.mean(centered[1] ** 2) / np.mean(centered[0] ** 2))
    np.testing.assert_allclose(centered[0] * temperature, centered[1], atol=1e-3)
    assert np.mean(logits.argmax(1) == np.array(labels)) == rows[1]["accuracies"][0]
    assert probe.settings["command"] == "fewshot"


def test_a_probe_of_a_checkpoint_with_its_workdir_prints_commands_that_follow(run, cache, tmp_path, capsys):
    workdir = str(tmp_path / "a probe")
    arguments = ["--run", str(run.path), "--data", "digits", "--cache", cache, "--c", "0.1"]
    linear_probe.main([*arguments, "--workdir", workdir])
    lines = capsys.readouterr().out.splitlines()
    shown = [shlex.split(line) for line in lines[lines.index("Next:") + 1 :]]
    assert [commands.COMMANDS.keys() & {*line} for line in shown] == [{"evaluate"}, {"predict"}, {"inspect"}]
    assert all(workdir in line for line in shown)
    with pytest.raises(UserError, match="holds a finished run; choose another --workdir"):
        linear_probe.main([*arguments, "--workdir", workdir])


def test_folds_measure_all_images_and_keep_copies_together(clusters):
    known = Features.of_all(clusters)
    count = len(known.labels)
    found = linear_models.cross_validated(known, 0.1, 5, np.arange(count))
    probe = linear_models.new_probe(0.1)
    values, labels = known.values, known.labels
    splits = sklearn.model_selection.StratifiedGroupKFold(5, shuffle=True, random_state=0)
    scores = [
        probe.fit(values[a], labels[a]).score(values[b], labels[b])
        for a, b in splits.split(values, labels, np.arange(count))
    ]
    assert found["mean"] == pytest.approx(np.mean(scores))
    assert found["standard_error"] == pytest.approx(np.std(scores, ddof=1) / 5**0.5)
    # 2.776: the 97.5% quantile of Student's distribution with 4 degrees of freedom, as printed in tables
    width = 2.776 * found["standard_error"]
    assert found["interval"] == pytest.approx([found["mean"] - width, min(found["mean"] + width, 1.0)], abs=1e-4)
    sure = Features(np.repeat(np.eye(2, dtype=np.float32), 10, axis=0), np.repeat([0, 1], 10))
    alike = linear_models.cross_validated(sure, 1.0, 5, np.arange(20))  # all right in each fold: Wilson's interval
    assert (alike["mean"], alike["interval"]) == (1.0, pytest.approx([20 / (20 + 1.96**2), 1.0], abs=1e-4))
    # Noise that no one can tell apart, but each image twice: a copy in the training fold would give it away.
    rng = np.random.default_rng(0)
    noise = Features(
        np.repeat(rng.normal(size=(60, 200)), 2, axis=0).astype(np.float32), np.repeat(np.arange(60) % 2, 2)
    )
    grouped = linear_models.cross_validated(noise, 1.0, 5, np.repeat(np.arange(60), 2))
    assert grouped["mean"] < 0.8 < linear_models.cross_validated(noise, 1.0, 5, np.arange(120))["mean"]
    with pytest.raises(UserError, match="--folds 99 cannot be made of these images"):
        linear_models.cross_validated(known, 0.1, 99, np.arange(count))
    with pytest.raises(UserError, match="made of these images .*one class.*of more groups"):
        linear_models.cross_validated(noise, 1.0, 5, np.where(noise.labels == 1, 99, np.arange(120)))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["linear-probe", "finetune"])
def test_reports_say_what_a_split_image_by_image_would_show(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for scene in range(30):  # of random colors, so that a class is known from a copy alone
        pixels = rng.integers(0, 256, (8, 8))
        for shot in range(3):
            (folder := tmp_path / "pictures" / f"{scene % 2}").mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray((pixels * (1.0 - 0.05 * shot)).astype(np.uint8)).save(folder / f"{shot}-{scene}.png")
    config = dataclasses.replace(CONFIG, patch_size=2, hidden_size=192)
    model = keras_vit.build(config, preprocessing=Preprocessing((8, 8), channels=1), num_classes=2)
    randomize(model).save(tmp_path / "model.keras")
    trained = str(tmp_path / "trained")
    options = ["--checkpoint", str(tmp_path / "model.keras"), "--data", f"folder:{tmp_path / 'pictures'}"]
    if command == "finetune":
        finetune.main([*options, "--workdir", trained, "--steps", "1", "--batch-size", "8", "--image-size", "8"])
    else:
        linear_probe.main([*options, "--workdir", trained, "--c", "0.1"])
    printed = capsys.readouterr().out
    evaluate.main(["--run", trained])
    split = json.loads((tmp_path / "trained" / "evaluation.json").read_text())["split"]
    assert (split["groups"], split["measured"]) == (30, 90)
    assert split["grouped"] + 0.1 < split["by_image"]
    assert split["sentence"] in printed
    assert split["sentence"] in (tmp_path / "trained" / "report.html").read_text()
    (tmp_path / "trained" / "split.json").unlink()
    evaluate.main(["--run", trained])
    report = (tmp_path / "trained" / "evaluation.md").read_text()
    assert "90 images in 30 groups, of which each is either" in report


def test_a_probe_of_a_changed_model_is_not_saved(run):
    model = load_model(run.path)
    changed = keras.Model(model.input, model.get_layer("head")(2.0 * model.get_layer("head").input))
    with pytest.raises(UserError, match="was changed after keras_vit built it.*leave --workdir out"):
        probes.with_linear_head(changed, "pre_logits", Preprocessing((8, 8), 1), np.zeros((12, 2)), np.zeros(2))


@pytest.mark.slow
def test_a_run_on_jax_says_what_a_split_image_by_image_would_show(upstream, tmp_path):
    rng = np.random.default_rng(0)
    for label in "ab":
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(20):
            image = rng.integers(0, 200, (16, 16), np.uint8)
            for copy in (0, 1):
                PIL.Image.fromarray(image + copy).save(tmp_path / "images" / label / f"{number}-{copy}.png")
    command = ["--recipe", "mnist-finetune", "--image-size", "8", "8", "--batch-size", "4", "--epochs", "None"]
    command += ["--steps", "3", "--warmup-steps", "1", "--data", f"folder:{tmp_path}/images"]
    command += ["--checkpoint", str(upstream.path), "--workdir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "training.finetune", *command], capture_output=True, text=True, timeout=300,
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "% if drawn image by image." in done.stdout
