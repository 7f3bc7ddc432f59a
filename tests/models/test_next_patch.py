"""Prediction of the next patch (AIM): what a patch sees, the loss and its gradients, and the weights that remain."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import Preprocessing, UserError, ViTConfig
from keras_vit.models.self_supervised import PrefixMask, next_patch_model
from training.objectives.masked_patches import MaskedPatches
from training.recipes.pretrain import RECIPES

CONFIG = ViTConfig(
    patch_size=2, hidden_size=8, num_layers=2, num_heads=2, mlp_dim=12, classifier="gap", position_embedding="sincos-2d"
)
SIZE, OUTPUTS = (4, 6), 4


def model_of(**changes) -> keras.Model:
    head = {"outputs": OUTPUTS, "head_layers": 1, "head_width": 6, "name": "aim", **changes}
    model, rng = next_patch_model(CONFIG, Preprocessing(SIZE, 1), **head), np.random.default_rng(11)
    for weight in model.trainable_weights:
        weight.assign(rng.normal(float(weight.path.endswith("gamma")), 0.3, weight.shape))
    return model


def images(count: int = 3) -> np.ndarray:
    return np.random.default_rng(3).uniform(-1.0, 1.0, (count, *SIZE, 1)).astype(np.float32)


def weights(model: keras.Model) -> dict[str, np.ndarray]:
    return {weight.path: np.asarray(weight, np.float64) for weight in model.weights}


# The reference: NumPy, one image, one patch after the other.


def norm(x, w, name):
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * w[f"{name}/gamma"] + w[f"{name}/beta"]


def dense(x, w, name):
    return x @ w[f"{name}/kernel"] + w[f"{name}/bias"]


def gelu(x):
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def mlp(x, w, name):
    return dense(gelu(dense(x, w, f"{name}.Dense_0")), w, f"{name}.Dense_1")


def patches_of(image):
    (height, width), side = SIZE, CONFIG.patch_size
    return np.array(
        [image[y : y + side, x : x + side].reshape(-1) for y in range(0, height, side) for x in range(0, width, side)]
    )


def reference_loss(w, image, prefix: int) -> float:
    """The mean squared error of the patches behind the prefix, each predicted from those before it."""
    pixels = patches_of(image.astype(np.float64))
    x = pixels @ w["embedding/kernel"].reshape(-1, CONFIG.hidden_size) + w["embedding/bias"]
    x = x + keras_vit.models.positions.sincos_2d((2, 3), CONFIG.hidden_size)
    for layer in range(CONFIG.num_layers):
        block = f"Transformer.encoderblock_{layer}"
        attention, y = f"{block}.MultiHeadDotProductAttention_1", norm(x, w, f"{block}.LayerNorm_0")
        heads = [dense(y, w, f"{attention}.{part}").reshape(6, 2, 4) for part in ("query", "key", "value")]
        rows = []
        for place in range(6):
            seen = prefix if place < prefix else place + 1
            logits = np.einsum("hd,mhd->hm", heads[0][place], heads[1][:seen]) / 2.0
            shares = np.exp(logits - logits.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            rows.append(np.einsum("hm,mhd->hd", shares, heads[2][:seen]).reshape(-1))
        x = x + dense(np.array(rows), w, f"{attention}.out")
        x = x + mlp(norm(x, w, f"{block}.LayerNorm_2"), w, f"{block}.MlpBlock_3")
    x = dense(norm(x, w, "Transformer.encoder_norm"), w, "head_embedding")
    x = x + mlp(norm(x, w, "head.norm_0"), w, "head.mlp_0")
    predicted = dense(norm(x, w, "head_norm"), w, "mask_head")
    centered = pixels - pixels.mean(-1, keepdims=True)
    targets = centered / np.sqrt((centered**2).sum(-1, keepdims=True) / (OUTPUTS - 1) + 1e-6)
    return float(np.mean([((predicted[place - 1] - targets[place]) ** 2).mean() for place in range(prefix, 6)]))


@pytest.fixture(name="aim", scope="module")
def _aim() -> keras.Model:
    return model_of()


def loss_of(model: keras.Model, given: np.ndarray) -> tf.Tensor:
    objective = MaskedPatches("next-patch", (2, 2), Preprocessing(SIZE, 1))
    return objective.measure(tf.constant(given), None, model(given, training=False), tf.ones(len(given)))[0]


def test_the_loss_is_that_of_the_reference(aim):
    given = images()
    expected = [reference_loss(weights(aim), image, prefix=3) for image in given]
    np.testing.assert_allclose(loss_of(aim, given), expected, rtol=2e-5)


def test_prefixes_are_of_all_lengths_alike_and_are_not_predicted():
    keras.utils.set_random_seed(0)
    bias, behind = PrefixMask()(np.zeros((4000, 6, 8), np.float32), training=True)
    lengths = 6 - np.asarray(behind).sum(axis=1)
    np.testing.assert_allclose(np.bincount(lengths.astype(int), minlength=6)[1:] / 4000, 0.2, atol=0.025)
    seen = np.asarray(bias)[:, 0] == 0.0
    for number in range(5):
        length = int(lengths[number])
        expected = np.tril(np.ones((6, 6), bool)) | (np.arange(6) < length)
        np.testing.assert_array_equal(seen[number], expected)


def test_the_encoder_is_that_of_the_plain_model(aim):
    plain = keras_vit.build(CONFIG, preprocessing=Preprocessing(SIZE, 1), num_classes=None)
    own = {weight.path for weight in aim.weights}
    assert {weight.path for weight in plain.weights} <= own
    others = {path.split("/")[0].split(".")[0] for path in own - {weight.path for weight in plain.weights}}
    assert others == {"head_embedding", "head", "head_norm", "mask_head"} | others & {"prefix"}


def test_without_layers_the_head_is_one_dense_layer():
    names = [layer.name for layer in model_of(head_layers=0).layers]
    assert "head_embedding" not in names and "mask_head" in names  # noqa: PT018


@pytest.mark.parametrize("changes", [{"classifier": "token"}, {"num_registers": 2}, {"position_embedding": "relative"}])
def test_a_model_that_reads_more_than_patches_is_refused(changes):
    with pytest.raises(UserError, match="next-patch reads patches alone"):
        dataclasses.replace(RECIPES["mnist-next-patch"], model=dataclasses.replace(CONFIG, **changes))


def test_the_values_of_the_paper():
    recipe = RECIPES["aim-vit-s16"]
    assert (recipe.target, recipe.decoder_layers, recipe.decoder_width) == ("next-patch", 12, 2048)
    assert (recipe.batch_size, recipe.steps, recipe.learning_rate, recipe.weight_decay) == (4096, 500_000, 1e-3, 0.05)
    assert (recipe.schedule.warmup_steps, recipe.clip_norm) == (31_250, 1.0)
