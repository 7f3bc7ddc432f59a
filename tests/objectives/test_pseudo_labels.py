"""Images without labels: mixtures and loss of Semi-ViT, batches, pseudo-labeled data, runs and what they keep."""

import dataclasses
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_vit import UserError
from keras_vit.files.keras_model import load_model
from keras_vit.run import load
from tests.support import assert_equal_weights
from training import finetune
from training.data.sources import DataSet, array_split
from training.data.unlabelled import semi_supervised_batches, with_pseudo_labels
from training.objectives.pseudo_labels import PseudoLabels, probabilistic_mixup
from training.recipes.finetune import FINETUNE_RECIPES
from training.recipes.recipe import PseudoLabelRecipe

RECIPE = FINETUNE_RECIPES["mnist-finetune"]
FIELDS = {field.name: getattr(RECIPE, field.name) for field in dataclasses.fields(RECIPE)}
SEMI = PseudoLabelRecipe(
    **FIELDS | {"ema_decay": 0.9, "image_size": (8, 8), "batch_size": 4, "label_smoothing": 0.0}, unlabelled_per_image=2
)


def test_the_defaults_are_those_published():
    assert (SEMI.confidence, SEMI.unlabelled_weight) == (0.6, 5.0)
    assert PseudoLabelRecipe(**FIELDS | {"ema_decay": 0.9999}).unlabelled_per_image == 5


def test_sure_images_are_hardly_changed_by_unsure_ones():
    images = tf.reshape(tf.constant([1.0, 3.0]), (2, 1, 1, 1))
    mixed, targets, confidence = probabilistic_mixup(images, tf.constant([[0.9, 0.1, 0.0], [0.3, 0.3, 0.4]]))
    share = 0.9 / 1.3
    np.testing.assert_allclose(tf.reshape(mixed, -1), [share + 3 * (1 - share), 3 * (1 - share) + share], rtol=1e-6)
    np.testing.assert_allclose(targets, [[share, 0, 1 - share], [share, 0, 1 - share]], rtol=1e-6)
    np.testing.assert_allclose(confidence, [0.9, 0.9])


def test_the_loss_counts_only_sure_images_and_means_over_all():
    random = np.random.default_rng(0)
    outputs = {
        "labeled": tf.constant(random.normal(size=(2, 3)), tf.float32),
        "mixed": tf.constant(random.normal(size=(2, 2, 3)), tf.float32),
        "targets": tf.constant(random.dirichlet(np.ones(3), (2, 2)), tf.float32),
        "confidence": tf.constant([[0.7, 0.5], [0.1, 0.2]]),
    }
    labels = tf.one_hot([0, 2], 3)
    losses, sums = PseudoLabels(SEMI).measure(None, labels, outputs, tf.ones(2))
    log = {name: np.array(tf.nn.log_softmax(outputs[name])) for name in ("labeled", "mixed")}
    expected = -np.sum(labels * log["labeled"], axis=-1)
    expected[0] += 5.0 * 0.5 * -np.sum(outputs["targets"][0, 0] * log["mixed"][0, 0])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(sums[0], expected.sum(), rtol=1e-5)


def pixels(count: int, value: int | None = None):
    images = np.random.default_rng(1).integers(0, 256, (count, 8, 8, 1), np.uint8)
    return images if value is None else np.full_like(images, value)


def test_batches_hold_two_views_of_each_image_and_continue_anywhere():
    labeled = array_split(pixels(8), np.arange(8) % 2, ("a", "b"))
    photos = array_split(pixels(16), np.zeros(16, np.int64), ("a", "b"))
    recipe = dataclasses.replace(SEMI, shift=0)
    arguments = {"num_classes": 2, "seed": 3}
    preprocessing = recipe.preprocessing(1)
    whole = list(
        semi_supervised_batches(photos, labeled, recipe, preprocessing, first_step=0, num_steps=3, **arguments)
    )
    (images, weak, strong), labels = whole[2]
    assert (images.shape, weak.shape, strong.shape) == ((4, 8, 8, 1), (4, 2, 8, 8, 1), (4, 2, 8, 8, 1))
    assert labels.shape == (4, 2)
    assert not np.array_equal(weak, strong)
    known = {np.round((image / 127.5 - 1.0), 4).astype(np.float32).tobytes() for image in pixels(16)}
    assert all(np.round(view, 4).astype(np.float32).tobytes() in known for view in np.array(weak).reshape(-1, 8, 8, 1))
    [again] = semi_supervised_batches(photos, labeled, recipe, preprocessing, first_step=2, num_steps=1, **arguments)
    for one, other in zip(tf.nest.flatten(whole[2]), tf.nest.flatten(again), strict=True):
        np.testing.assert_array_equal(one, other)


def test_pseudo_labels_stand_beside_repeated_labels():
    labeled = array_split(pixels(2, 7), np.array([0, 1]), ("a", "b"))
    source = DataSet(("a", "b"), labeled, labeled)
    photos = array_split(pixels(20, 9), np.zeros(20, np.int64), ("a", "b"))
    kept, shares = np.arange(4, 16), np.tile([[0.2, 0.8]], (12, 1))
    train = with_pseudo_labels(source, photos, kept, shares, times=3).train
    assert train.num_examples == 2 * 2 + 12
    values = [int(train.read(tf.constant(i, tf.int64))[0][0, 0, 0]) for i in range(16)]
    assert values == [7] * 4 + [9] * 12
    np.testing.assert_allclose(train.target(tf.constant(3, tf.int64)), [0, 1])
    np.testing.assert_allclose(train.target(tf.constant(4, tf.int64)), [0.2, 0.8])


@pytest.fixture(name="folders", scope="module")
def _folders(tmp_path_factory) -> pathlib.Path:
    """Images of two classes, dark and bright, with labels and without."""
    root, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name, count in (("train/dark", 6), ("train/bright", 6), ("test/dark", 4), ("test/bright", 4), ("more", 24)):
        (root / name).mkdir(parents=True)
        for number in range(count):
            low = 0 if "dark" in name or (name == "more" and number % 2) else 150
            image = random.integers(low, low + 100, (8, 8, 1), np.uint8)
            keras.utils.save_img(root / name / f"{number}.png", image, scale=False)
    (root / "labeled").mkdir()
    for split in ("train", "test"):
        (root / split).rename(root / "labeled" / split)
    return root


def command(upstream, folders, workdir, *more: str) -> list[str]:
    options = ["--checkpoint", str(upstream.path), "--recipe", "mnist-finetune", "--image-size", "8", "8"]
    options += ["--data", f"folder:{folders}/labeled", "--unlabelled", f"folder:{folders}/more", "--batch-size", "4"]
    return [*options, "--epochs", "None", "--steps", "3", "--warmup-steps", "1", "--workdir", str(workdir), *more]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["noisy-student", "ema-teacher"])
def test_the_better_run_on_the_evaluation_images_is_kept_and_said(way, upstream, folders, tmp_path, capsys):
    rounds = ["--rounds", "1"] if way == "noisy-student" else []
    finetune.main(command(upstream, folders, tmp_path / "run", "--learn-by", way, "--confidence", "0.4", *rounds))
    printed, report = capsys.readouterr().out, (tmp_path / "run" / "few_labels.md").read_text()
    assert "labels alone" in report
    assert "Kept: " in printed
    model, labels = load(tmp_path / "run")
    assert (model.output_shape, labels) == ((None, 2), ("bright", "dark"))
    kept = "labels" if "Kept: the labels alone" in printed else {"noisy-student": "round-1"}.get(way, way)
    expected = load_model(tmp_path / f"run-{kept}")
    assert_equal_weights(model, expected)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--unlabelled", "pictures"], "There is no folder 'pictures'"),
        (["--unlabelled", "folder:gone"], "There is no folder 'gone'"),
        (["--dry-run"], "without --dry-run"),
        (["--learn-by", "ema-teacher", "--rounds", "3"], "rounds"),
    ],
)
def test_mistakes_are_said_before_anything_is_trained(more, words, folders, tmp_path):
    options = ["--checkpoint", "runs", "--data", f"folder:{folders}/labeled", "--workdir", str(tmp_path / "run")]
    unlabelled = [] if "--unlabelled" in more else ["--unlabelled", f"folder:{folders}/more"]
    with pytest.raises(UserError, match=words):
        finetune.main([*options, *unlabelled, *more])
