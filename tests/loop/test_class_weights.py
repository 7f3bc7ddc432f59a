"""Class weights: those of scikit-learn and the steps of Keras' `fit`, and what a run says of them."""

import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.utils.class_weight import compute_class_weight

import keras_vit
from keras_vit import UserError
from keras_vit.files.keras_model import load_model
from tests.loop.test_trainer import TINY, batches, flat, trainer
from tests.support import others_slow, randomize, replaced
from training import pretrain
from training.data.dataset import Split, class_weights
from training.data.sources import array_split, open_source
from training.objectives.objective import Classification
from training.options.common import DataOptions


def images_of(labels: list[int], names: tuple[str, ...] = ("a", "b", "c", "d")) -> Split:
    noise = np.random.default_rng(0).integers(0, 256, (len(labels), 8, 8, 1), np.uint8)
    return array_split(noise, np.array(labels), names)


def test_weights_are_those_of_scikit_learn_with_mean_one_over_the_images():
    labels = [0] * 5 + [1] * 2 + [3]  # none of class 2
    weights = class_weights(images_of(labels), 4)
    np.testing.assert_allclose(
        weights[[0, 1, 3]], compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=labels)
    )
    assert weights[2] == 0.0
    assert weights[labels].mean() == pytest.approx(1.0)


def test_labels_that_are_not_known_give_no_weights():
    with pytest.raises(UserError, match="--class-weights .* are not of digits"):
        class_weights(Split(3, images_of([0, 1, 2]).read), 3)


CASES = [("softmax", 1), ("softmax", 2), ("sigmoid", 1), ("sigmoid", 2)]


@pytest.mark.parametrize(("loss", "accumulation"), others_slow(CASES, ("softmax", 1)))
def test_steps_and_loss_are_those_of_fit_with_class_weight(loss, accumulation):
    weights = np.array([0.5, 3.0, 1.25], np.float32)
    keras.utils.set_random_seed(3)
    stock = randomize(keras_vit.build(TINY, image_size=16, num_classes=3))
    of_logits = {
        "softmax": keras.losses.CategoricalCrossentropy(from_logits=True),
        # Keras takes the mean over the classes, where the objective takes the sum.
        "sigmoid": lambda y, x: 3.0 * keras.losses.binary_crossentropy(y, x, from_logits=True),
    }[loss]
    stock.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), of_logits, metrics=["categorical_accuracy"], jit_compile=False
    )
    history = stock.fit(batches(3), class_weight=dict(enumerate(weights)), shuffle=False, verbose=0).history
    ours = trainer(objective=Classification(loss, class_weights=weights), accumulation=accumulation)
    logs = [ours.train_on_batch(*batch, return_dict=True) for batch in batches(3)]
    np.testing.assert_allclose(flat(ours.network.weights), flat(stock.weights), atol=2e-6)
    assert np.mean([log["loss"] for log in logs]) == pytest.approx(history["loss"][0], rel=1e-5)
    accuracy = np.mean([log["accuracy"] for log in logs])
    assert accuracy == pytest.approx(history["categorical_accuracy"][0])  # all images count alike


def test_a_mixed_image_has_the_mean_weight_of_its_classes():
    logits, labels = tf.constant([[1.0, 2.0], [1.0, 2.0]]), tf.constant([[0.25, 0.75], [1.0, 0.0]])
    alike, weighted = (
        Classification(class_weights=weights).measure(None, labels, logits, tf.ones(2))[0]
        for weights in (None, np.array([4.0, 2.0], np.float32))
    )
    np.testing.assert_allclose(weighted / alike, [2.5, 4.0], rtol=1e-6)


@pytest.fixture(name="uneven")
def _uneven(tmp_path) -> pathlib.Path:
    """A folder with images of three classes, few of the last."""
    folder = tmp_path / "pictures"
    for part, counts in (("train", (20, 8, 4)), ("test", (2, 1, 1))):
        for name, count in zip(("ant", "bee", "cat"), counts, strict=True):
            (folder / part / name).mkdir(parents=True)
            split = images_of([0] * count)
            for number in range(count):
                pixels, _ = split.example(tf.constant(number, tf.int64))
                (folder / part / name / f"{number}.png").write_bytes(tf.io.encode_png(pixels).numpy())
    return folder


ARGUMENTS = [
    "digits", "--data", "digits", "--batch-size", "8", "--warmup-steps", "0", "--epochs", "1", "--label-smoothing", "0",
    "--model.num-layers", "1", "--model.hidden-size", "12", "--model.mlp-dim", "20",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_says_its_weights_and_evaluates_without_them(uneven, tmp_path, capsys):
    run, data = tmp_path / "run", f"folder:{uneven}"
    arguments = replaced(ARGUMENTS, "--data", data, "--workdir", str(run))
    pretrain.main([*arguments, "--class-weights"])
    assert "Class weights: 0.53 (ant) to 2.67 (cat); the mean over all images is 1." in capsys.readouterr().out
    assert json.loads((run / "config.json").read_text())["settings"]["recipe"]["class_weights"] is True
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    model = load_model(run)
    split = open_source(DataOptions(data)).evaluation
    pixels = np.stack([np.asarray(split.example(tf.constant(n, tf.int64))[0]) for n in range(4)])
    logits = np.asarray(model(keras_vit.preprocessing_of(model)(pixels)))
    losses = keras.losses.sparse_categorical_crossentropy(np.array([0, 0, 1, 2]), logits, from_logits=True)
    assert last["val_loss"] == pytest.approx(float(np.mean(losses)), rel=1e-4)
    with pytest.raises(UserError, match="differs in recipe.class_weights"):
        pretrain.main(arguments)
