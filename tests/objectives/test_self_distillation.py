"""Self-distillation: crops, loss against NumPy, center, teacher, gradients of the prototypes, runs."""

import dataclasses
import math
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import UserError, ViTConfig
from keras_vit.files.keras_model import load_model
from keras_vit.models.self_supervised import Center
from training.data.dataset import Split
from training.data.pipeline import training_batches
from training.data.sources import array_split
from training.loop import pretrain as pretraining
from training.loop.build import build_trainer, rebuilt
from training.objectives.patches import Resized
from training.objectives.self_distillation import SelfDistillation
from training.options.common import DataOptions, Execution
from training.options.train import PretrainOptions
from training.recipes.pretrain import RECIPES
from training.recipes.recipe import PretrainRecipe, Schedule

TINY = PretrainRecipe(
    model=ViTConfig(patch_size=2, hidden_size=8, num_layers=2, num_heads=2, mlp_dim=16), image_size=(8, 8),
    channels=1, target="self-distillation", prototypes=12, head_width=16, local_crops=3, local_size=4, ema_decay=0.9,
    steps=6, batch_size=8, learning_rate=1e-2, flip=True,
)  # fmt: skip


def split(count: int = 16, size: int = 12) -> Split:
    pixels = np.random.default_rng(0).integers(0, 256, (count, size, size, 1), np.uint8)
    return array_split(pixels, np.arange(count) % 2, ("even", "odd"))


def batches(recipe: PretrainRecipe, **changes):
    arguments = {"num_classes": 2, "seed": 0, "first_step": 0, "num_steps": 2} | changes
    return list(training_batches(split(), recipe, recipe.preprocessing(1), **arguments))


def trainer(recipe: PretrainRecipe = TINY, num_steps: int = 6, **execution):
    keras.utils.set_random_seed(0)
    return build_trainer(lambda: recipe.build(2), recipe, num_steps, execution=Execution(xla="off", **execution))


def test_every_image_has_two_large_crops_and_small_ones_all_different():
    (large, small), labels = batches(TINY)[0]
    assert (large.shape, small.shape, labels.shape) == ((8, 2, 8, 8, 1), (8, 3, 4, 4, 1), (8, 2))
    crops = [large[0, 0], large[0, 1]]
    assert not np.array_equal(*crops)
    assert len({small[0, i].numpy().tobytes() for i in range(3)}) == 3
    assert -1.0 <= tf.reduce_min(large) < tf.reduce_max(large) <= 1.0
    (alone, _) = batches(dataclasses.replace(TINY, local_crops=0))[0]
    np.testing.assert_array_equal(alone, large)


def test_any_step_has_the_same_crops_again_on_any_number_of_workers():
    whole = batches(TINY)[1][0]
    parts = [batches(TINY, first_step=1, num_steps=1, part=(i, 2))[0][0] for i in range(2)]
    for crops, *of_workers in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(crops, tf.concat(of_workers, axis=0))


def test_the_loss_is_that_of_the_paper():
    random = np.random.default_rng(1)
    student, teacher = random.normal(size=(5, 4, 6)) * 0.3, random.normal(size=(2, 4, 6)) * 0.1

    def probabilities(x):
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)

    # As in main_dino.py: all pairs of crops but the same ones.
    pairs = [(t, s) for t in range(2) for s in range(5) if t != s]
    expected = np.mean(
        [
            -np.sum(probabilities(teacher[t] / 0.04) * np.log(probabilities(student[s] / 0.1)), axis=-1)
            for t, s in pairs
        ],
        axis=0,
    )
    outputs = {"student": tf.constant(student, tf.float32), "teacher": tf.constant(teacher, tf.float32)}
    losses, sums = SelfDistillation(TINY, 6).measure(None, None, outputs, tf.ones(4))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    entropy = -np.sum(probabilities(teacher / 0.04) * np.log(probabilities(teacher / 0.04)), axis=-1).mean(0)
    np.testing.assert_allclose([float(x) for x in sums], [expected.sum(), entropy.sum(), 4.0], rtol=1e-5)


@pytest.mark.slow
def test_the_teacher_has_the_averaged_weights_and_prototypes_are_fixed_in_the_first_hundredth_of_a_run():
    trained = trainer(num_steps=100)
    (large, small), labels = batches(TINY)[0]
    for average in trained.ema:
        average.assign(average * 0.5)
    with keras.StatelessScope(list(zip(trained.network.trainable_variables, trained.ema, strict=True))):
        outputs = [trained.network(large[:, i], training=False)["student"] for i in range(2)]
    prototypes = trained.network.get_layer("prototypes").kernel
    values = [prototypes.numpy()]
    trained.train_on_batch((large, small), labels)
    center = trained.network.get_layer("center").center
    np.testing.assert_allclose(center, 0.1 * np.mean(outputs, axis=(0, 1)), rtol=1e-4, atol=1e-7)
    evaluated = trained.network(large[:, 0])
    np.testing.assert_allclose(evaluated["teacher"], evaluated["student"] - center, rtol=1e-6)
    values.append(prototypes.numpy())
    trained.train_on_batch((large, small), labels)
    np.testing.assert_array_equal(*values)
    assert not np.array_equal(prototypes, values[0])


def test_the_decay_of_the_teacher_rises_to_one_and_the_center_moves_as_far_in_parts_of_a_batch():
    decay = SelfDistillation(TINY, 1000).averaging(0.996)
    np.testing.assert_allclose([decay(0), decay(500), decay(1000)], [0.996, 0.998, 1.0], rtol=1e-6)
    whole, parts = Center(), Center()
    x = np.random.default_rng(3).normal(size=(8, 5)).astype(np.float32)
    for layer in (whole, parts):
        layer.build((None, 5))
    whole.update(x)
    for _ in range(4):
        parts.update(x, 4)
    np.testing.assert_allclose(whole.center, parts.center, rtol=1e-5)


def test_crops_are_padded_where_the_model_is_shown_padded_images():
    recipe = dataclasses.replace(TINY, resize="pad", local_crops=0)
    pixels = np.zeros((16, 8, 40, 1), np.uint8)
    data = array_split(pixels, np.zeros(16, np.int64), ("a", "b"))
    options = {"num_classes": 2, "seed": 0, "first_step": 0, "num_steps": 1}
    [(large, _)] = training_batches(data, recipe, recipe.preprocessing(1), **options)
    assert np.mean(large == 1.0) > 0.2  # white above and below a wide window


@pytest.mark.slow
def test_the_gradient_is_that_of_the_student_alone():
    trained = trainer(dataclasses.replace(TINY, steps=1000), 1000)
    crops, labels = batches(TINY)[0]
    trained.train_on_batch(crops, labels)  # the center is no longer zero
    measure = trained._gradients
    gradients, sums, _ = measure(crops, labels)
    kernel = trained.network.get_layer("Transformer.encoderblock_0.MlpBlock_3.Dense_0").kernel
    index = [v.path for v in trained.network.trainable_variables].index(kernel.path)
    value, step = kernel.numpy(), 1e-2
    losses = []
    for sign in (1.0, -1.0):
        moved = value.copy()
        moved[0, 0] += sign * step
        kernel.assign(moved)  # of the student; the teacher's average stays
        losses.append(float(measure(crops, labels)[1][0]) / 8)
    np.testing.assert_allclose(gradients[index][0, 0], (losses[0] - losses[1]) / (2 * step), rtol=2e-2, atol=1e-5)
    assert float(sums[2]) == 8.0


def test_small_crops_see_resized_positions():
    trained = trainer()
    table = trained.network.get_layer("Transformer.posembed_input").pos_embedding
    table.assign(np.random.default_rng(2).normal(size=table.shape))
    (_, small), _ = batches(TINY)[0]
    recipe = dataclasses.replace(TINY, image_size=(4, 4), local_crops=0)
    actual = Resized(trained.network, lambda: recipe.build(num_classes=0))(small[:, 0], training=False)["student"]
    expected = keras_vit.adapt(rebuilt(trained.network), image_size=(4, 4))
    head = keras.Model(trained.network.get_layer("pool").output, trained.network.get_layer("prototypes").output)
    np.testing.assert_allclose(actual, head(expected(small[:, 0])), rtol=1e-4, atol=1e-5)


def options(workdir, **changes) -> PretrainOptions:
    recipe = dataclasses.replace(TINY, accumulation=2, batch_size=64, schedule=Schedule(warmup_steps=1))
    fields = {"execution": Execution(checkpoint_every=1, evaluate_every=3, deterministic=True)} | changes
    return PretrainOptions(source=DataOptions("digits"), workdir=str(workdir), recipe=recipe, **fields)


@pytest.mark.slow
def test_a_run_learns_and_is_fine_tuned(tmp_path):
    run = pretraining.pretrain(options(tmp_path / "run"), "tiny-dino")
    first, last = run.metrics()
    assert last["loss"] < first["loss"]
    assert 0.0 < last["val_entropy"] < math.log(12)
    assert last["val_loss"] > last["val_entropy"]
    model = load_model(run.path)
    assert keras_vit.config_of(model) == TINY.model
    assert not any("proto" in weight.path or "project" in weight.path for weight in model.weights)
    assert keras_vit.from_checkpoint(run.path, num_classes=3).output_shape == (None, 3)


@pytest.mark.slow
def test_two_replicas_end_where_one_device_does(tmp_path):
    # Processes of their own: devices are made before TensorFlow starts.
    command = [sys.executable, "-m", "training.pretrain", "mnist-dino", "--data", "digits", "--model.patch-size", "2"]
    command += ["--model.hidden-size", "12", "--model.num-layers", "1", "--image-size", "8", "8", "--local-size", "4"]
    command += ["--head-width", "16", "--prototypes", "12", "--steps", "4", "--warmup-steps", "1"]
    command += ["--batch-size", "32", "--deterministic"]
    models = []
    for devices in ("single", "mirrored --replicas 2"):
        options = ["--strategy", *devices.split(), "--workdir", str(tmp_path / devices)]
        subprocess.run([*command, *options], check=True, capture_output=True)
        models.append(load_model(tmp_path / devices))
    for one, other in zip(*(model.weights for model in models), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_the_recipe_of_the_paper():
    recipe = RECIPES["dino-vit-s16"]
    assert (recipe.prototypes, recipe.head_width, recipe.local_crops, recipe.local_size) == (65_536, 2048, 8, 96)
    assert (recipe.batch_size, recipe.learning_rate, recipe.ema_decay, recipe.clip_norm) == (1024, 2e-3, 0.996, 3.0)
    assert (recipe.epochs, recipe.schedule.warmup_steps // (1_281_167 // 1024)) == (300, 10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ema_decay": None}, "learns from the moving average of the weights; give --ema-decay 0.996"),
        ({"model": keras_vit.MODELS["BiT-R50x1"]}, "is for a ViT"),
        ({"patch_dropout": 0.5}, "--patch-dropout applies only to --target classes"),
        ({"local_size": 16}, r"local-size must be at most --image-size, \(8, 8\), but is 16"),
        ({"local_size": 5}, "patch"),
        ({"head_width": 12}, "must be a multiple of 8, but is 12"),
        ({"inception_crop": True}, "--inception-crop applies only to other targets"),
    ],
)
def test_a_recipe_that_means_nothing_is_refused(change, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(TINY, **change)


def test_a_model_whose_weights_depend_on_the_size_is_refused():
    recipe = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, position_embedding="relative"))
    with pytest.raises(UserError, match="resizes learned positions only"):
        trainer(recipe)
