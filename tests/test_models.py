"""Named models and their anatomy: exact parameter counts, heads, sizes, initial weights, dropout."""

import dataclasses

import keras
import numpy as np
import pytest

import keras_vit
from conftest import TINY, TINY_IMAGE, randomize
from keras_vit import MODELS, UserError, ViTConfig

# vit_jax models_test.py and facts computed from the papers' tables: parameters at 224 pixels, 1000 and 21843 classes.
OFFICIAL_COUNTS = {
    "testing": (21_390, None),
    "testing-unpooled": (21_370, None),
    "ViT-Ti_16": (5_717_416, 9_740_115),
    "ViT-S_16": (22_050_664, 30_075_219),
    "ViT-S_32": (22_878_952, 30_903_507),
    "ViT-S_16-gap-norep": (22_049_896, None),
    "ViT-S_32-gap-norep": (22_878_184, None),
    "ViT-B_8": (86_576_872, 102_605_139),
    "ViT-B_16": (86_567_656, 102_595_923),
    "ViT-B_32": (88_224_232, 104_252_499),
    "ViT-B_16-gap-norep": (86_566_120, None),
    "ViT-B_32-gap-norep": (88_222_696, None),
    "ViT-L_16": (304_326_632, 325_690_707),
    "ViT-L_32": (306_535_400, 327_899_475),
    "ViT-H_14": (632_045_800, 658_745_683),
    "ViT-g_14": (1_012_611_432, None),
    "ViT-G_14": (1_844_440_680, None),
}
MAP_HEAD_COUNTS = {"ViT-Ti_16": 444_672, "ViT-S_16": 1_774_080, "ViT-B_16": 7_087_104}


def count(config: ViTConfig, num_classes: int) -> int:
    """Parameters at 224 pixels. Deep models are extrapolated from 1 and 2 blocks: all blocks are alike."""
    if config.num_layers <= 2:
        return keras_vit.build(config, num_classes=num_classes).count_params()
    one, two = (count(dataclasses.replace(config, num_layers=layers), num_classes) for layers in (1, 2))
    return one + (config.num_layers - 1) * (two - one)


def closed_form(config: ViTConfig, num_classes: int) -> int:
    """Parameters at 224 pixels from the sizes alone."""
    width, mlp, patch = config.hidden_size, config.mlp_dim, config.patch_size
    tokens = (224 // patch) ** 2 + (config.classifier == "token")
    block = 4 * width * (width + 1) + 2 * width * mlp + mlp + width + 4 * width
    embedding = (3 * patch**2 + 1) * width + (config.classifier == "token") * width + tokens * width
    return embedding + config.num_layers * block + 2 * width + (width + 1) * num_classes


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_has_its_exact_parameter_count(name):
    config = MODELS[name]
    assert count(config, 1000) == closed_form(config, 1000)
    for classes, official in zip((1000, 21843), OFFICIAL_COUNTS.get(name, ()), strict=False):
        if official is not None:
            assert count(config, classes) == official


def test_a_whole_deep_model_has_the_count_extrapolated_from_two_blocks():
    assert keras_vit.build("ViT-Ti_16").count_params() == OFFICIAL_COUNTS["ViT-Ti_16"][0]


def test_every_official_count_belongs_to_a_named_model():
    assert OFFICIAL_COUNTS.keys() <= MODELS.keys()


@pytest.mark.parametrize("name", MAP_HEAD_COUNTS)
def test_attention_pooling_adds_its_exact_parameter_count(name):
    gap, pooled = (dataclasses.replace(MODELS[name], classifier=kind, num_layers=1) for kind in ("gap", "map"))
    assert count(pooled, 10) - count(gap, 10) == MAP_HEAD_COUNTS[name]


@pytest.mark.parametrize(
    ("classifier", "num_classes", "shape"),
    [
        ("token", 7, (5, 7)),
        ("gap", 7, (5, 7)),
        ("map", 7, (5, 7)),
        ("unpooled", 7, (5, 15, 7)),
        ("none", 0, (5, 15, 12)),
        ("token", 0, (5, 12)),
        ("gap", None, (5, 12)),
        ("unpooled", None, (5, 15, 12)),
    ],
)
def test_each_head_gives_its_shape(classifier, num_classes, shape, tiny_images):
    config = dataclasses.replace(TINY, classifier=classifier)
    model = keras_vit.build(config, image_size=TINY_IMAGE, num_classes=num_classes)
    assert model(tiny_images).shape == shape


def test_pre_logits_are_a_tanh_layer_that_ends_a_model_without_classes(tiny_images):
    config = dataclasses.replace(TINY, representation_size=9)
    features = keras_vit.build(config, image_size=TINY_IMAGE, num_classes=0)
    randomize(features)
    values = np.asarray(features(tiny_images))
    inside = keras_vit.intermediates(features, ["encoded"])(tiny_images)["encoded"]
    kernel, bias = features.get_layer("pre_logits").get_weights()
    np.testing.assert_allclose(values, np.tanh(np.asarray(inside)[:, 0] @ kernel + bias), rtol=1e-5, atol=1e-6)


def test_an_image_that_the_patch_does_not_divide_is_refused_by_side():
    with pytest.raises(
        UserError, match="image width must be a multiple of the patch width 6, but is 31; take 30 or 36"
    ):
        keras_vit.build(TINY, image_size=(12, 31))
    with pytest.raises(UserError, match="image height must be a multiple of the patch height 4, but is 3; take 4"):
        keras_vit.build(TINY, image_size=(3, 30))


def test_an_unknown_model_is_answered_with_the_nearest_names():
    with pytest.raises(UserError, match="no model named 'ViT-B16'; the nearest names are .*ViT-B_16"):
        keras_vit.build("ViT-B16")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_heads", 5, "hidden_size must be a multiple of num_heads"),
        ("mlp_dim", 0, "mlp_dim must be at least 1"),
        ("dropout_rate", 1.0, r"dropout_rate is a probability in \[0, 1\)"),
        ("classifier", "cls", "classifier must be one of token, gap"),
        ("gelu", "relu", "gelu must be one of tanh, erf"),
        ("patch_size", (4, 4, 4), "patch_size must be one number"),
    ],
)
def test_an_impossible_configuration_is_refused(field, value, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(TINY, **{field: value})


def test_a_model_without_head_refuses_classes():
    with pytest.raises(UserError, match="has no head for 1000 classes"):
        keras_vit.build(dataclasses.replace(TINY, classifier="none"), image_size=TINY_IMAGE)


def test_configurations_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MODELS["ViT-B_16"].num_layers = 3


def initial_weights() -> dict[str, np.ndarray]:
    config = dataclasses.replace(TINY, hidden_size=96, num_heads=2, mlp_dim=160, representation_size=64)
    model = keras_vit.build(config, image_size=(60, 90), num_classes=7)
    return {key: np.asarray(weight) for key, weight in keras_vit.checkpoint.weights_by_key(model).items()}


def test_initial_weights_are_the_official_ones():
    weights = initial_weights()
    block = "Transformer/encoderblock_1/"
    for key in ("cls", "embedding/bias", "head/kernel", "head/bias", "pre_logits/bias", f"{block}LayerNorm_0/bias"):
        assert not weights[key].any(), key
    for key in (f"{block}MultiHeadDotProductAttention_1/{name}/bias" for name in ("query", "key", "value", "out")):
        assert not weights[key].any(), key
    assert (weights[f"{block}LayerNorm_2/scale"] == 1.0).all()

    # Glorot-uniform on 2-D kernels: the bound is reached but not passed, the deviation is bound / sqrt(3).
    for key, fans in (("query", 96 + 96), ("out", 96 + 96)):
        kernel, bound = weights[f"{block}MultiHeadDotProductAttention_1/{key}/kernel"], np.sqrt(6 / fans)
        assert 0.98 * bound < np.abs(kernel).max() <= bound
        assert kernel.std() == pytest.approx(bound / np.sqrt(3), rel=0.03)
    kernel, bound = weights[f"{block}MlpBlock_3/Dense_0/kernel"], np.sqrt(6 / (96 + 160))
    assert 0.98 * bound < np.abs(kernel).max() <= bound
    assert weights[f"{block}MlpBlock_3/Dense_1/bias"].std() == pytest.approx(1e-6, rel=0.3)

    # Truncated normal with variance 1 / fan_in (lecun_normal): nothing beyond two of the untruncated deviations.
    for key, fan_in in (("embedding/kernel", 4 * 6 * 3), ("pre_logits/kernel", 96)):
        deviation = 1 / np.sqrt(fan_in)
        assert weights[key].std() == pytest.approx(deviation, rel=0.05)
        assert np.abs(weights[key]).max() < 2.0 * deviation / 0.8796 + 1e-6
    positions = weights["Transformer/posembed_input/pos_embedding"]
    assert positions.std() == pytest.approx(0.02, rel=0.03)
    assert np.abs(positions).max() > 0.06  # not truncated at two deviations


def test_stochastic_depth_grows_linearly_from_zero_and_drops_whole_examples():
    config = dataclasses.replace(TINY, num_layers=3, stochastic_depth_rate=0.5)
    model = keras_vit.build(config, image_size=TINY_IMAGE, num_classes=0)
    names = [layer.name for layer in model.layers]
    assert not any(name.startswith("Transformer.encoderblock_0.stochastic") for name in names)
    rates = [model.get_layer(f"Transformer.encoderblock_{block}.stochastic_depth_1").rate for block in (1, 2)]
    assert rates == [0.25, 0.5]
    branch = np.asarray(
        model.get_layer("Transformer.encoderblock_2.stochastic_depth_0")(np.ones((64, 3, 2)), training=True)
    )
    assert set(np.unique(branch)) == {0.0, 2.0}
    assert (branch == branch[:, :1, :1]).all()


def test_dropout_sits_after_positions_attention_and_both_dense_layers():
    config = dataclasses.replace(TINY, num_layers=1, dropout_rate=0.1, attention_dropout_rate=0.2)
    model = keras_vit.build(config, image_size=TINY_IMAGE, num_classes=0)
    dropouts = [layer.name for layer in model.layers if isinstance(layer, keras.layers.Dropout)]
    block = "Transformer.encoderblock_0"
    assert dropouts == [
        "Transformer.posembed_input.dropout",
        f"{block}.dropout",
        f"{block}.MlpBlock_3.dropout_0",
        f"{block}.MlpBlock_3.dropout_1",
    ]
    assert model.get_layer(f"{block}.MultiHeadDotProductAttention_1").dropout.rate == 0.2


def test_training_mode_drops_attention_and_inference_does_not(tiny_images):
    config = dataclasses.replace(TINY, attention_dropout_rate=0.5)
    model = randomize(keras_vit.build(config, image_size=TINY_IMAGE, num_classes=3))
    calm = [np.asarray(model(tiny_images, training=False)) for _ in range(2)]
    np.testing.assert_array_equal(*calm)
    assert not np.allclose(model(tiny_images, training=True), calm[0])


def test_intermediates_have_their_names_and_shapes(tiny_images):
    model = keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7)
    inside = keras_vit.intermediates(model)(tiny_images)
    shapes = {name: tuple(value.shape) for name, value in inside.items()}
    assert shapes == {
        "patch_embedding": (5, 3, 5, 12),
        "embedded": (5, 16, 12),
        "block_0": (5, 16, 12),
        "attention_0": (5, 3, 16, 16),
        "block_1": (5, 16, 12),
        "attention_1": (5, 3, 16, 16),
        "encoded": (5, 16, 12),
        "pre_logits": (5, 12),
        "logits": (5, 7),
    }
    np.testing.assert_allclose(np.asarray(inside["attention_1"]).sum(-1), 1.0, rtol=1e-6)


def test_an_unknown_intermediate_is_answered_with_the_nearest_names():
    model = keras_vit.build(TINY, image_size=TINY_IMAGE)
    with pytest.raises(UserError, match="no intermediate 'attn_1'; the nearest names are .*attention_1"):
        keras_vit.intermediates(model, ["attn_1"])


def test_a_foreign_model_is_refused():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(UserError, match="was not built by keras_vit"):
        keras_vit.intermediates(model)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_lower_precision_stays_near_float32(policy, tiny_images):
    exact = randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7))
    keras.config.set_dtype_policy(policy)
    try:
        low = keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7)
    finally:
        keras.config.set_dtype_policy("float32")
    low.set_weights(exact.get_weights())
    low_logits = np.asarray(keras.ops.cast(low(tiny_images), "float32"))
    np.testing.assert_allclose(low_logits, np.asarray(exact(tiny_images)), atol=0.15)
