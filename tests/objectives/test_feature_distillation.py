"""Distillation of features: the loss beside torch's, any sizes, what is trained and what is left at the end."""

import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import Preprocessing, ResNetConfig, UserError
from keras_vit.files.keras_model import load_model
from tests.support import FIXTURES, randomize
from training import pretrain
from training.objectives.distillation import (
    FeatureDistillation,
    feature_losses,
    feature_student,
    open_feature_teacher,
    summary_and_patches,
)


def test_the_loss_is_that_of_torch_on_recorded_arrays():
    # Recorded with torch 2.14: cosine_similarity, smooth_l1_loss, interpolate(mode="bilinear", align_corners=False).
    arrays = np.load(FIXTURES / "feature_distillation.npz")
    actual, expected = (
        {name: tf.constant(arrays[f"{side}_{name}"]) for name in ("summary", "patches")}
        for side in ("found", "expected")
    )
    losses, cosines = feature_losses(actual, expected)
    np.testing.assert_allclose(losses, arrays["losses"], rtol=1e-5)
    np.testing.assert_allclose(cosines, arrays["cosines"], rtol=1e-5, atol=1e-6)


def test_the_teacher_sees_the_images_in_its_own_range_size_and_channels(tmp_path):
    config = keras_vit.ViTConfig(patch_size=3, hidden_size=12, num_layers=1, num_heads=2, mlp_dim=8)
    own = Preprocessing((12, 12), 3, value_range=(0.0, 1.0))
    teacher = randomize(keras_vit.build(config, preprocessing=own, num_classes=4))
    teacher.save(tmp_path / "teacher.keras")
    opened = open_feature_teacher(str(tmp_path / "teacher.keras"), Preprocessing((8, 8), 1))
    image = np.full((1, 8, 8, 1), -0.5, np.float32)
    features = summary_and_patches(teacher)(np.full((1, 12, 12, 3), 0.25, np.float32))
    for name, value in opened(image).items():
        np.testing.assert_allclose(value, features[name], rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="sees gray images, but this model colors"):
        gray = keras_vit.build(config, image_size=12, channels=1, num_classes=4)
        gray.save(tmp_path / "gray.keras")
        open_feature_teacher(str(tmp_path / "gray.keras"), Preprocessing((8, 8), 3))


def test_a_resnet_learns_from_a_transformer(tmp_path):
    config = keras_vit.ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=2, mlp_dim=8)
    teacher = keras_vit.build(config, image_size=16, num_classes=0)
    student = keras_vit.build(ResNetConfig((1, 1), 8, (16, 32), num_groups=4), image_size=32, num_classes=None)
    model = feature_student(student, summary_and_patches(teacher))
    assert model.output["summary"].shape == (None, 12)
    assert model.output["patches"].shape == (None, 4, 4, 12)


def test_features_of_a_teacher_are_standardized_by_moving_statistics_and_evaluation_leaves_these(tmp_path):
    config = keras_vit.ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=2, mlp_dim=8)
    model = randomize(keras_vit.build(config, image_size=16, num_classes=0))
    model.save(tmp_path / "teacher.keras")
    objective, weights = FeatureDistillation(str(tmp_path / "teacher.keras")), tf.ones(6)
    teacher = summary_and_patches(model)
    student = objective.prepare(keras_vit.build(config, image_size=16, num_classes=None))
    statistics, means = student.get_layer("patches_statistics"), []
    for seed in (0, 1):
        images = tf.random.stateless_uniform((6, 16, 16, 3), (seed, 0), -1.0, 1.0)
        known = {n: student.get_layer(f"{n}_statistics").standardized(x) for n, x in teacher(images).items()}
        losses, _ = objective.measure(images, None, student(images), weights)
        # By the statistics before the step, which all replicas have in common; UNIC does so, too.
        np.testing.assert_allclose(losses, feature_losses(student(images), known)[0], rtol=1e-5)
        features = teacher(images)["patches"].numpy().reshape(-1, 12)
        means.append((features.mean(0), (features**2).mean(0)))
        share = 1.0 / (1.0 + 0.99) if seed else 1.0  # of the newest batch
        mean, square = ((1 - share) * first + share * last for first, last in zip(means[0], means[-1], strict=True))
        expected = (features - mean) / np.sqrt(square - mean**2)
        np.testing.assert_allclose(statistics.standardized(features), expected, rtol=1e-3, atol=1e-3)
    before = [np.array(variable) for variable in statistics.statistics]
    losses, _ = objective.evaluation().measure(images, None, student(images), weights)
    np.testing.assert_array_equal(before[0], statistics.total)
    wanted = {n: student.get_layer(f"{n}_statistics").standardized(x) for n, x in teacher(images).items()}
    np.testing.assert_allclose(losses, feature_losses(student(images), wanted)[0], rtol=1e-5)


@pytest.mark.slow
def test_a_run_learns_and_ends_without_head_and_projections(upstream, tmp_path):
    command = ["digits", "--data", "digits", "--epochs", "2", "--batch-size", "200", "--warmup-steps", "2"]
    command += ["--model.patch-size", "2", "--model.num-layers", "1", "--model.hidden-size", "12"]
    command += ["--model.mlp-dim", "20", "--teacher", str(upstream.path), "--distil", "features"]
    pretrain.main([*command, "--workdir", str(tmp_path / "run")])
    model = load_model(tmp_path / "run")
    assert model.output_shape == (None, 12)
    assert not any("projection" in weight.path for weight in model.weights)
