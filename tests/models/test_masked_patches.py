"""Masked patch prediction: which patches are hidden, the targets, and fine-tuning from such a run."""

import dataclasses
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import Preprocessing, UserError, ViTConfig
from keras_vit.files.keras_model import load_model
from keras_vit.models.self_supervised import CorruptPatches, RandomMasking, masked_autoencoder, masked_patch_model
from training import finetune
from training.data.sources import DataOptions
from training.loop import pretrain as pretraining
from training.objectives.masked_patches import MaskedPatches
from training.options.train import PretrainOptions
from training.recipes.pretrain import RECIPES
from training.recipes.recipe import Schedule

TINY = ViTConfig(patch_size=2, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20, classifier="gap")
RECIPE = dataclasses.replace(
    RECIPES["mnist-masked-patch"], model=TINY, image_size=(8, 8), epochs=2, batch_size=200,
    schedule=Schedule(warmup_steps=2),
)  # fmt: skip


SINCOS = dataclasses.replace(TINY, classifier="token", position_embedding="sincos-2d")
AUTOENCODER = dataclasses.replace(
    RECIPE, model=dataclasses.replace(SINCOS, classifier="gap"), target="patch-normalized-pixels", corruption=0.75,
    decoder_layers=1, decoder_width=32,
)  # fmt: skip


def objective(target: str, patch=(4, 6), channels=3, value_range=(-1.0, 1.0)) -> MaskedPatches:
    return MaskedPatches(target, patch, Preprocessing((8, 18), channels, value_range=value_range))


def images(channels=3, count=2) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (count, 8, 18, channels)).astype(np.float32)


def shown(pixels: np.ndarray) -> tf.Tensor:
    return tf.constant(pixels / 127.5 - 1.0, tf.float32)


def levels(mean: np.ndarray) -> np.ndarray:
    """Of a mean color from 0 to 255."""
    return np.minimum(np.floor(mean / 255 * 8), 7).astype(int)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_color_of_a_patch_is_a_class_of_three_bits_for_each_channel(channels):
    pixels, ours = images(channels), objective("patch-color", channels=channels)
    targets = ours.targets(shown(pixels)).numpy()
    assert (targets.shape, ours.num_outputs) == ((2, 6, 1), 8**channels)
    for number, row, column in itertools.product(range(2), range(2), range(3)):
        patch = pixels[number, 4 * row : 4 * row + 4, 6 * column : 6 * column + 6]
        expected = levels(patch.mean(axis=(0, 1))) @ [1, 8, 64][:channels]
        assert targets[number, 3 * row + column, 0] == expected


@pytest.mark.parametrize(
    ("color", "expected"),
    [((255, 0, 0), 7), ((0, 255, 0), 56), ((0, 0, 255), 448), ((255, 255, 255), 511), ((0, 0, 0), 0),
     ((31, 32, 63), 0 + 8 + 64), ((127, 128, 191), 3 + 4 * 8 + 5 * 64)],
)  # fmt: skip
def test_the_order_and_the_edges_of_the_512_colors(color, expected):
    pixels = np.broadcast_to(np.array(color, np.float32), (1, 8, 18, 3))
    assert set(objective("patch-color").targets(shown(pixels)).numpy().ravel()) == {expected}


def test_colors_do_not_depend_on_the_range_that_the_model_is_shown():
    low, high, pixels = np.array([0.0, -2.0, 1.0]), np.array([1.0, 2.0, 3.0]), images()
    given = tf.constant(pixels / 255 * (high - low) + low, tf.float32)
    found = objective("patch-color", value_range=(tuple(low), tuple(high))).targets(given)
    np.testing.assert_array_equal(found, objective("patch-color").targets(shown(pixels)))


def test_the_reduced_patch_has_sixteen_colors_of_equal_areas():
    pixels, ours = images(), objective("patch-4x4")
    targets = ours.targets(shown(pixels)).numpy()
    assert (targets.shape, ours.num_outputs) == ((2, 6, 16), 16 * 512)
    # Twice as many columns, so that each of the 4 cells has 3 whole ones of the 6.
    patch = np.repeat(pixels[1, 4:8, 6:12], 2, axis=1)
    expected = [levels(patch[y, 3 * x : 3 * x + 3].mean(axis=0)) @ [1, 8, 64] for y in range(4) for x in range(4)]
    np.testing.assert_array_equal(targets[1, 4], expected)


def test_pixels_are_predicted_row_by_row():
    pixels, ours = images(), objective("patch-pixels")
    targets = ours.targets(shown(pixels)).numpy()
    assert ours.num_outputs == 4 * 6 * 3
    np.testing.assert_allclose(targets[0, 5].reshape(4, 6, 3), shown(pixels)[0, 4:, 12:], atol=1e-6)


def corrupted(share=0.5, count=2000, training=True):
    keras.utils.set_random_seed(2)
    layer = CorruptPatches(share)
    patches = np.random.default_rng(1).normal(size=(count, 9, 4)).astype(np.float32)
    seen, chosen = (np.array(part) for part in layer(patches, training=training))
    return patches, seen, chosen.astype(bool), np.array(layer.mask_token)


def test_half_of_the_patches_are_corrupted_80_10_10():
    patches, seen, chosen, mask = corrupted()
    assert set(chosen.sum(axis=1)) == {4}  # of 9
    np.testing.assert_array_equal(seen[~chosen], patches[~chosen])
    masked = (seen == mask).all(axis=-1)
    kept = (seen == patches).all(axis=-1) & chosen
    other = chosen & ~masked & ~kept
    shares = [part.sum() / chosen.sum() for part in (masked, other, kept)]
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.015)  # 8,000 draws: 3 sigma
    for number, place in np.argwhere(other):
        assert (seen[number, place] == patches[number]).all(axis=-1).any()  # of the same image


def test_all_places_are_corrupted_alike_and_each_image_and_step_otherwise():
    _, _, chosen, _ = corrupted()
    np.testing.assert_allclose(chosen.mean(axis=0), 4 / 9, atol=0.04)
    assert len({row.tobytes() for row in chosen}) > 100
    layer, patches = CorruptPatches(0.5), np.ones((3, 9, 4), np.float32)
    first, second = (np.array(layer(patches, training=True)[1]) for _ in range(2))
    assert (first != second).any()


def test_outside_training_every_image_is_corrupted_in_the_same_places():
    patches, _, chosen, _ = corrupted(training=False)
    assert len({row.tobytes() for row in chosen}) == 1
    again = CorruptPatches(0.5)(patches[:7], training=False)
    np.testing.assert_array_equal(np.array(again[1]).astype(bool), chosen[:7])


def test_only_what_was_corrupted_counts():
    ours, pixels = objective("patch-color"), images()
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 6, 512)).astype(np.float32)
    chosen = np.array([[1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1]], np.float32)
    targets = ours.targets(shown(pixels)).numpy()[..., 0]
    logits[0, 3, targets[0, 3]] = 50.0  # one right answer
    outputs = {"predictions": tf.constant(logits), "corrupted": tf.constant(chosen)}
    losses, (total, right, seen) = ours.measure(shown(pixels), None, outputs, tf.constant([1.0, 0.0]))
    log_sum = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))
    expected = log_sum - np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(losses, [expected[0, [0, 3, 4]].mean(), 0.0], rtol=1e-4)
    np.testing.assert_allclose(total, expected[0, [0, 3, 4]].mean(), rtol=1e-4)
    # Of images, because int32 cannot count the patches of JFT.
    assert (float(right), float(seen)) == (pytest.approx(1 / 3), 1.0)


def test_the_squared_error_is_a_mean_over_the_pixels_of_a_patch():
    ours, pixels = objective("patch-pixels"), images()
    outputs = {"predictions": ours.targets(shown(pixels)) + 0.5, "corrupted": tf.ones((2, 6))}
    losses, (total, _, seen) = ours.measure(shown(pixels), None, outputs, tf.ones(2))
    np.testing.assert_allclose(losses, [0.25, 0.25], rtol=1e-5)
    np.testing.assert_allclose(total / seen, 0.25, rtol=1e-5)


@pytest.mark.parametrize("final_norm", [True, False])
def test_without_corruption_the_encoder_is_that_of_the_plain_model(final_norm):
    config = dataclasses.replace(TINY, classifier="token", position_injection="every-layer", final_norm=final_norm)
    preprocessing = Preprocessing((8, 6), 1)
    masked = masked_patch_model(config, preprocessing, outputs=5, corruption=0.5, name="masked")
    plain = keras_vit.build(config, preprocessing=preprocessing, num_classes=None)
    own = {weight.path: weight for weight in masked.weights}
    assert own.keys() - {weight.path for weight in plain.weights} == {
        "corruption/mask_token", "mask_head/kernel", "mask_head/bias"
    } | {path for path in own if path.endswith("seed_generator_state")}  # fmt: skip
    for weight in plain.weights:
        weight.assign(own[weight.path])
    given = np.random.default_rng(0).uniform(-1, 1, (2, 8, 6, 1)).astype(np.float32)
    patches = masked.get_layer("patches").output
    shown_patches, _ = masked.get_layer("corruption").output
    through = keras.Model(shown_patches, masked.output["predictions"])
    predictions = through(keras.Model(masked.input, patches)(given))
    encoded = keras_vit.intermediates(plain, ["encoded"])(given)["encoded"][:, 1:]
    expected = keras.ops.matmul(encoded, own["mask_head/kernel"]) + own["mask_head/bias"]
    np.testing.assert_allclose(predictions, expected, atol=1e-5)


def test_a_run_without_classes_says_what_it_needs(tmp_path):
    keras_vit.build(TINY, image_size=8, channels=1, num_classes=None).save(tmp_path / "model.keras")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "labels.txt").write_text("0\n1\n")
    with pytest.raises(UserError, match="add a head with keras-vit finetune"):
        keras_vit.load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [RECIPE, AUTOENCODER], ids=["patches", "autoencoder"])
def test_a_run_learns_and_its_features_are_fine_tuned_to_classes(recipe, tmp_path):
    options = PretrainOptions(source=DataOptions("digits"), workdir=str(tmp_path / "masked"), recipe=recipe)
    finished = pretraining.pretrain(options, "tiny-masked")
    losses = [record["loss"] for record in finished.metrics()]
    assert losses[-1] < losses[0]
    assert (finished.path / "curves.png").is_file()
    command = ["--data", "digits", "--recipe", "mnist-finetune", "--steps", "2", "--batch-size", "8"]
    command += ["--warmup-steps", "1", "--image-size", "8", "8", "--learning-rate", "1e-9"]
    finetune.main([*command, "--checkpoint", str(finished.path), "--workdir", str(tmp_path / "fine")])
    before = load_model(finished.path)
    assert keras_vit.config_of(before) == recipe.model
    assert not any("mask" in weight.path or "decoder" in weight.path for weight in before.weights)
    after, _ = keras_vit.load(tmp_path / "fine")
    assert after.output_shape == (None, 10)
    old = {weight.path: np.array(weight) for weight in before.weights}
    for path, value in old.items():
        new = next(np.array(weight) for weight in after.weights if weight.path == path)
        np.testing.assert_allclose(new, value, atol=1e-6, err_msg=path)


def test_normalized_pixels_have_the_mean_and_the_sample_variance_of_their_patch_removed():
    pixels, ours = images(), objective("patch-normalized-pixels")
    targets = ours.targets(shown(pixels)).numpy()
    assert (targets.shape, ours.num_outputs, ours.metrics) == ((2, 6, 72), 72, ("loss",))
    patch = np.asarray(shown(pixels))[1, 4:, 6:12].ravel().astype(np.float64)
    expected = (patch - patch.mean()) / np.sqrt(patch.var(ddof=1) + 1e-6)
    np.testing.assert_allclose(targets[1, 4], expected, atol=1e-5)
    flat = ours.targets(tf.zeros((1, 8, 18, 3))).numpy()
    np.testing.assert_array_equal(flat, 0.0)


def test_a_quarter_of_the_patches_is_visible_in_other_places_for_each_image_and_step():
    keras.utils.set_random_seed(2)
    layer, patches = RandomMasking(0.75), np.random.default_rng(1).normal(size=(500, 9, 4)).astype(np.float32)
    visible, masked, places = (np.array(part) for part in layer(patches, training=True))
    assert visible.shape == (500, 2, 4)  # int(9 * 0.25)
    assert set(masked.sum(axis=1)) == {7}
    for number in range(500):
        for place in np.flatnonzero(masked[number] == 0):
            np.testing.assert_array_equal(visible[number, places[number, place]], patches[number, place])
    np.testing.assert_allclose(masked.mean(axis=0), 7 / 9, atol=0.06)  # 3 sigma
    assert (np.array(layer(patches, training=True)[1]) != masked).any()
    fixed = np.array(layer(patches, training=False)[1])
    assert len({row.tobytes() for row in fixed}) == 1


def autoencoder(config: ViTConfig = SINCOS, size=(8, 6)) -> keras.Model:
    return masked_autoencoder(
        config, Preprocessing(size, 1), outputs=4, corruption=0.75, decoder_layers=2, decoder_width=32, name="mae"
    )


@pytest.mark.parametrize("classifier", ["token", "gap"])
def test_predictions_follow_from_the_visible_patches_alone(classifier):
    model = autoencoder(dataclasses.replace(SINCOS, classifier=classifier))
    given = np.random.default_rng(0).uniform(-1, 1, (2, 8, 6, 1)).astype(np.float32)
    outputs = {name: np.array(value) for name, value in model(given).items()}
    hidden = outputs["corrupted"][0].reshape(4, 3).repeat(2, axis=0).repeat(2, axis=1).astype(bool)[..., None]
    other = np.where(hidden, given + 1.0, given)
    np.testing.assert_array_equal(model(other)["predictions"], outputs["predictions"])
    changed = np.where(hidden, given, given + 1.0)
    assert not np.allclose(model(changed)["predictions"], outputs["predictions"])
    # A place that was masked is known to the decoder by its position alone.
    of_masked = outputs["predictions"][0][outputs["corrupted"][0] == 1]
    assert len(np.unique(of_masked.round(5), axis=0)) == len(of_masked)


def test_the_encoder_sees_a_quarter_of_the_patches_and_is_that_of_the_plain_model():
    model = autoencoder()
    assert model.get_layer("Transformer.encoder_norm").output.shape == (None, 1 + 3, 12)  # of 12 patches
    assert model.get_layer("decoder_norm").output.shape == (None, 1 + 12, 32)
    plain = keras_vit.build(SINCOS, preprocessing=Preprocessing((8, 6), 1), num_classes=None)
    own = {weight.path: weight for weight in model.weights}
    assert all(own[weight.path].shape == weight.shape for weight in plain.weights)
    assert {path.split("/")[0].split(".")[0] for path in own.keys() - {weight.path for weight in plain.weights}} == {
        "decoder", "decoder_embedding", "decoder_norm", "decoder_patches", "mask_head",
    }  # fmt: skip


def test_every_visible_patch_has_its_place_in_the_encoder():
    """The positions are added before patches are left out."""
    model = autoencoder()
    positions = model.get_layer("Transformer.posembed_input").output[:, 1:]  # without the class token
    visible, _, places = model.get_layer("masking").output
    given = np.zeros((1, 8, 6, 1), np.float32)
    tokens, seen, order = (np.array(part) for part in keras.Model(model.input, [positions, visible, places])(given))
    for place in range(12):
        if order[0, place] < 3:
            np.testing.assert_array_equal(seen[0, order[0, place]], tokens[0, place])


@pytest.mark.slow
def test_in_bfloat16_the_same_patches_are_masked_and_the_loss_is_close():
    pixels = shown(np.random.default_rng(5).integers(0, 256, (4, 8, 6, 1)).astype(np.float32))
    losses, masked = [], []
    ours = MaskedPatches("patch-normalized-pixels", (2, 2), Preprocessing((8, 6), 1))
    policy = keras.config.dtype_policy()
    for precision in ("float32", "mixed_bfloat16"):
        keras.utils.set_random_seed(2)
        keras.config.set_dtype_policy(precision)
        try:
            outputs = autoencoder()(pixels)
        finally:
            keras.config.set_dtype_policy(policy)
        masked.append(np.array(outputs["corrupted"], np.float32))
        losses.append(ours.measure(pixels, None, outputs, tf.ones(4))[0].numpy())
    np.testing.assert_array_equal(*masked)
    assert losses[1].dtype == np.float32
    np.testing.assert_allclose(*losses, rtol=0.05)  # bfloat16 has 8 bits


def test_the_recipes_of_the_papers():
    recipe = RECIPES["mae-vit-b16"]
    assert (recipe.batch_size, recipe.learning_rate, recipe.weight_decay) == (4096, 2.4e-3, 0.05)
    assert (recipe.epochs, recipe.schedule.warmup_steps // (1_281_167 // 4096)) == (800, 40)
    assert (recipe.corruption, recipe.decoder_layers, recipe.decoder_width) == (0.75, 8, 512)
    recipe = RECIPES["masked-patch"]
    assert (recipe.model, recipe.target, recipe.corruption) == (keras_vit.MODELS["ViT-B_16"], "patch-color", 0.5)
    assert (recipe.steps, recipe.batch_size, recipe.learning_rate) == (1_000_000, 4096, 2e-4)
    assert (recipe.schedule.decay, recipe.schedule.warmup_steps) == ("cosine", 10_000)
    assert RECIPES["masked-patch-15-percent"].corruption == 0.15


RELATIVE = dataclasses.replace(TINY, position_embedding="relative")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mixup": 0.2}, "--mixup applies only to --target classes"),
        ({"corruption": 0.0}, r"corruption must be in \(0, 1\], but is 0.0"),
        ({"model": keras_vit.MODELS["BiT-R50x1"]}, "is for a ViT that cuts the image itself"),
        ({"image_size": (2, 2)}, "needs at least 2 patches, but the image has 1"),
        ({"model": RELATIVE, "decoder_layers": 2}, "needs position_embedding sincos-2d or learned"),
        ({"decoder_layers": 1, "decoder_width": 40}, "must be a multiple of 32, but is 40"),
        ({"model": SINCOS, "decoder_layers": 1, "corruption": 1.0}, "should leave some visible and some masked"),
        ({"target": "classes", "decoder_layers": 1}, "--decoder-layers applies only to a --target of patches"),
    ],
)
def test_a_recipe_that_means_nothing_is_refused(change, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(RECIPE, **change)
