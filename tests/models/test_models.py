"""Named models and their anatomy: exact parameter counts, heads, sizes, initial weights, dropout."""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterator

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit import MODELS, Preprocessing, ResNetConfig, UserError, ViTConfig
from keras_vit.checkpoints.formats.jax import BIG_TRANSFER, VIT_JAX
from keras_vit.checkpoints.key_mapping import untranslate
from keras_vit.checkpoints.load import weights_by_key
from keras_vit.errors import nearest
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import ModelConfig, identifying_fields
from tests.support import FIXTURES, TINY, TINY_IMAGE, TINY_STEM, others_slow, randomize

# vit_jax models_test.py and facts computed from the papers' tables: parameters at 224 pixels and 1000 classes.
_OFFICIAL = {
    "testing": 21_390, "testing-unpooled": 21_370, "ViT-Ti_16": 5_717_416, "ViT-S_16": 22_050_664,
    "ViT-S_32": 22_878_952, "ViT-S_16-gap-norep": 22_049_896, "ViT-S_32-gap-norep": 22_878_184,
    "ViT-M_16": 38_837_736, "ViT-M_32": 39_942_120, "ViT-B_8": 86_576_872, "ViT-B_16": 86_567_656,
    "ViT-B_32": 88_224_232, "ViT-B_16-gap-norep": 86_566_120, "ViT-B_32-gap-norep": 88_222_696,
    "ViT-L_16": 304_326_632, "ViT-L_32": 306_535_400, "ViT-So400m_14": 413_597_656, "ViT-H_14": 632_045_800,
    "ViT-g_14": 1_012_611_432, "ViT-G_14": 1_844_440_680, "R+ViT-Ti_16": 6_337_704, "R26+ViT-S_32": 36_431_912,
    "R26+ViT-B_32": 101_383_976, "R50+ViT-B_16": 98_659_112, "R50+ViT-B_32": 110_945_832, "R50+ViT-L_16": 316_483_624,
    "R50+ViT-L_32": 328_994_856, "BiT-R50x1": 25_549_352, "BiT-R50x2": 97_988_712, "BiT-R50x3": 217_319_080,
    "BiT-R101x1": 44_541_480, "BiT-R101x3": 387_934_888, "BiT-R152x1": 60_185_128, "BiT-R152x2": 236_335_208,
    "BiT-R152x4": 936_533_224, "BiT-R200x3": 568_633_000,
}  # fmt: skip
# Parameters of timm 1.0.31 (DeiT, DeiT III, FlexiViT) and transformers 5.23 without the [mask] token:
# (image size, classes or width of the projection, parameters).
COUNTS = {name: (224, 1000, parameters) for name, parameters in _OFFICIAL.items()} | {
    "DeiT-Ti_16-distilled": (224, 1000, 5_910_800), "DeiT-S_16-distilled": (224, 1000, 22_436_432),
    "DeiT-B_16-distilled": (224, 1000, 87_338_192), "DeiT3-S_16": (224, 1000, 22_059_496),
    "DeiT3-M_16": (224, 1000, 38_849_512), "DeiT3-B_16": (224, 1000, 86_585_320),
    "DeiT3-L_16": (224, 1000, 304_374_760), "DeiT3-H_14": (224, 1000, 632_126_440),
    "DINOv2-S_14": (518, 0, 22_056_192), "DINOv2-S_14-reg4": (518, 0, 22_057_728), "DINOv2-B_14": (518, 0, 86_579_712),
    "DINOv2-B_14-reg4": (518, 0, 86_582_784), "DINOv2-L_14": (518, 0, 304_367_616),
    "DINOv2-L_14-reg4": (518, 0, 304_371_712), "DINOv2-g_14": (518, 0, 1_136_479_232),
    "DINOv2-g_14-reg4": (518, 0, 1_136_485_376), "DINOv3-S_16": (224, 0, 21_596_160),
    "DINOv3-S+_16": (224, 0, 28_692_480), "DINOv3-B_16": (224, 0, 85_659_648), "DINOv3-L_16": (224, 0, 303_128_576),
    "DINOv3-H+_16": (224, 0, 840_591_360), "CLIP-B_32": (224, 512, 87_849_216), "CLIP-B_16": (224, 512, 86_192_640),
    "CLIP-L_14": (224, 768, 303_966_208), "OpenCLIP-H_14": (224, 1024, 632_076_800),
    "OpenCLIP-g_14": (224, 1024, 1_012_645_632), "OpenCLIP-G_14": (224, 1280, 1_844_907_264),
    "SigLIP-B_16": (224, 0, 92_884_224), "SigLIP-L_16": (224, 0, 315_894_784),
    "SigLIP-So400m_14": (224, 0, 427_680_704), "MAE-B_16": (224, 0, 85_798_656), "MAE-L_16": (224, 0, 303_301_632),
    "MAE-H_14": (224, 0, 630_764_800), "FlexiViT-S_16": (240, 1000, 22_061_416),
    "FlexiViT-B_16": (240, 1000, 86_589_160), "FlexiViT-L_16": (240, 1000, 304_355_304),
}  # fmt: skip
# Table 2 of "Early Convolutions Help Transformers See Better": millions, one digit.
PUBLISHED_MILLIONS = {"ViT_C-1GF": 4.6, "ViT_C-4GF": 17.8, "ViT_C-18GF": 81.6, "ViT_C-36GF": 167.8}


@contextlib.contextmanager
def weights_without_memory() -> Iterator[None]:
    """Models made inside have shapes alone; Keras, which would draw the weights later, is made to forget them."""
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        keras.utils.clear_session(free_memory=False)


def count(config: ModelConfig, image_size: int = 224, num_classes: int = 1000) -> int:
    """Parameters; from the second on, all blocks, and all units of a stage, are alike, and only two are built."""
    resnet = config if isinstance(config, ResNetConfig) else config.stem
    units = resnet.block_units if isinstance(resnet, ResNetConfig) else ()
    if units:
        two = dataclasses.replace(resnet, block_units=tuple(min(2, number) for number in units))
        shallow = two if config is resnet else dataclasses.replace(config, stem=two)
    else:
        shallow = config
    if isinstance(shallow, ViTConfig):
        shallow = dataclasses.replace(shallow, num_layers=min(2, shallow.num_layers))
    with weights_without_memory():
        weights = keras_vit.build(shallow, image_size=image_size, num_classes=num_classes).weights
        sizes = {weight.path: math.prod(weight.shape) for weight in weights}
    total = sum(sizes.values())
    for path, size in sizes.items():
        if stage := re.search(r"block(\d)\.unit0?2\.", path):
            total += size * (units[int(stage[1]) - 1] - 2)
        elif "encoderblock_1." in path:
            total += size * (config.num_layers - 2)
    return total


def small_first(names) -> list:
    """The names, those of large models as slow cases."""
    large = ("L_", "H_", "H+", "g_", "G_", "So400m", "R50+", "R101", "R152", "R200", "x2", "x3")
    return [pytest.param(n, marks=pytest.mark.slow) if any(part in n for part in large) else n for n in names]


@pytest.mark.parametrize("name", small_first(COUNTS))
def test_every_named_model_has_its_exact_parameter_count(name):
    image_size, num_classes, parameters = COUNTS[name]
    assert count(MODELS[name], image_size, num_classes) == parameters


@pytest.mark.parametrize("name", small_first(PUBLISHED_MILLIONS))
def test_early_convolutions_have_the_published_counts(name):
    assert round(count(MODELS[name]) / 1e6, 1) == PUBLISHED_MILLIONS[name]


def shapes(name: str, num_classes: int) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of the released file of a model, without memory for its weights."""
    with weights_without_memory():
        model = keras_vit.build(name, num_classes=num_classes)
        weights = {key: np.broadcast_to(np.float32(0), w.shape) for key, w in weights_by_key(model).items()}
    config = MODELS[name]
    num_heads = config.num_heads if isinstance(config, ViTConfig) else 1
    released = VIT_JAX if isinstance(config, ViTConfig) else BIG_TRANSFER
    written = Blueprint(config, Preprocessing(224), num_classes)
    arrays = untranslate(weights, released.layout_for(written).rules, num_heads)
    return {key: array.shape for key, array in arrays.items()}


_REFERENCE = json.loads((FIXTURES / "vit_shapes.json").read_text())["models"]
_REFERENCE |= {f"BiT-{n}": m for n, m in json.loads((FIXTURES / "bit_shapes.json").read_text())["models"].items()}


@pytest.mark.parametrize("name", others_slow(_REFERENCE, "ViT-Ti_16", "R+ViT-Ti_16", "R26+ViT-S_32", "BiT-R50x1"))
def test_keys_and_shapes_are_those_of_the_released_files(name):
    expected = {key: tuple(shape) for key, shape in _REFERENCE[name]["params_without_head"].items()}
    assert {key: shape for key, shape in shapes(name, 5).items() if "head/" not in key} == expected


@pytest.mark.parametrize(
    ("classifier", "num_classes", "shape"),
    [
        ("unpooled", 7, (15, 7)), ("none", 0, (15, 12)), ("token", 0, (12,)), ("gap", None, (12,)),
        ("unpooled", None, (15, 12)),
    ],
)  # fmt: skip
def test_each_head_gives_its_shape(classifier, num_classes, shape):
    config = dataclasses.replace(TINY, classifier=classifier, num_layers=1)
    assert keras_vit.build(config, image_size=TINY_IMAGE, num_classes=num_classes).output_shape == (None, *shape)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("vit_b16", "ViT-B_16"), ("vit-b/16-in21k", "ViT-B_16"), ("vit_base_patch16_224", "ViT-B_16"),
        ("ViT-H_16", "ViT-H_14"), ("vit-large", "ViT-L_16"), ("deit_tiny_patch16_224", "DeiT-Ti_16-distilled"),
        ("vit_giant_patch14_dinov2", "DINOv2-g_14"), ("siglip2-base", "SigLIP-B_16"), ("clip-b32", "CLIP-B_32"),
        ("flexivit_small", "FlexiViT-S_16"), ("r50", "BiT-R50x1"), ("mae_vit_base_patch16", "MAE-B_16"),
    ],
)  # fmt: skip
def test_the_nearest_name_has_the_family_size_and_patch(name, first):
    assert nearest(name, keras_vit.MODELS).split(", ")[0] == first


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_heads": 5}, "hidden_size must be a multiple of num_heads"),
        ({"hidden_size": 12.0}, "hidden_size must be an integer of at least 1, but is 12.0"),
        ({"classifier": "cls"}, "classifier must be one of token, gap"),
        ({"gelu": "relu"}, "gelu must be one of tanh, erf"),
        ({"patch_size": (4, 4, 4)}, "patch_size must be two integers"),
        ({"position_embedding": "fourier"}, "position_embedding must be one of learned, learned-2d"),
        ({"position_embedding": "sincos-2d", "hidden_size": 18}, "a hidden_size that 4 divides, not 18"),
        ({"position_embedding": "relative", "position_injection": "shared"}, "not for every layer"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon must be between 0 and 1, but is nan"),
        ({"axial": True}, "An axial model has no class token"),
        ({"classifier": "gap", "norm_after_pooling": True, "final_norm": False}, "norm_after_pooling places the last"),
        ({"norm_after_pooling": True}, "belongs to the classifier 'gap'"),
        ({"stem": keras_vit.ResNetConfig((1,))}, "in front of a hybrid is post-activation"),
        ({"stem": keras_vit.ShiftedPatches(4)}, "Shifted patches have their own size; give patch_size 1 instead of"),
        ({"locality_attention": True, "position_embedding": "relative"}, "Locality self-attention is for"),
        ({"classifier": "sequence", "num_registers": 2}, "Classifier 'sequence' reads all tokens"),
    ],
)
def test_an_impossible_configuration_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(TINY, **fields)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ResNetConfig, {"block_units": (0,)}),
        (ResNetConfig, {"block_units": (1,), "num_groups": 0}),
        (ResNetConfig, {"block_units": (1,), "root_channels": 2, "stage_channels": (10,), "num_groups": 2}),
        (ResNetConfig, {"block_units": (1, 1), "stage_channels": (64,)}),
        (ResNetConfig, {"block_units": (1,), "axial_heads": 2}),
        (ResNetConfig, {"block_units": (1,), "variance_epsilon": float("nan")}),
        (keras_vit.ConvStem, {"channels": (4,), "kernel_sizes": (2,), "strides": (2,)}),
        (keras_vit.ConvStem, {"channels": (4,), "kernel_sizes": (3,), "strides": (0,)}),
    ],
)
def test_an_impossible_resnet_or_stem_is_refused(kind, fields):
    with pytest.raises(UserError):
        kind(**fields)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (TINY, {"image_size": (12, 31)}, "width must be a multiple of the patch width 6, but is 31; take 30 or 36"),
        (TINY, {"image_size": (3, 30)}, "height must be a multiple of the patch height 4, but is 3; take 4"),
        (dataclasses.replace(TINY, classifier="none"), {"image_size": TINY_IMAGE}, "has no head for 1000 classes"),
        ("ViT-B16", {}, "no model named 'ViT-B16'; the nearest names are ViT-B_16"),
        ("R+ViT-Ti_16", {"image_size": 24}, "feature map of 6x6, which holds no patch of 8x8"),
        *(("testing", {"image_size": size}, "image_size must be one integer or") for size in ("32", (32.5, 32), None)),
        *(
            ("testing", {"image_size": 32, "num_classes": number}, f"at least 0, but is {number!r}")
            for number in (2.0, True, "10", -1)
        ),
    ],
)
def test_what_cannot_be_built_is_refused(config, options, words):
    with pytest.raises(UserError, match=words):
        keras_vit.build(config, **options)


def test_initial_weights_are_the_official_ones():
    config = dataclasses.replace(TINY, hidden_size=96, num_heads=2, mlp_dim=160, representation_size=64)
    model = keras_vit.build(config, image_size=(60, 90), num_classes=7)
    weights = {key: np.asarray(weight) for key, weight in weights_by_key(model).items()}
    block = "Transformer/encoderblock_1/"
    for key in ("cls", "embedding/bias", "head/kernel", "head/bias", "pre_logits/bias", f"{block}LayerNorm_0/bias"):
        assert not weights[key].any(), key
    for key in (f"{block}MultiHeadDotProductAttention_1/{name}/bias" for name in ("query", "key", "value", "out")):
        assert not weights[key].any(), key
    assert (weights[f"{block}LayerNorm_2/scale"] == 1.0).all()

    # Glorot-uniform on 2-D kernels: the bound is reached but not passed, the deviation is bound / sqrt(3).
    attention = "MultiHeadDotProductAttention_1"
    for key, fans in ((f"{attention}/query", 96 + 96), (f"{attention}/out", 96 + 96), ("MlpBlock_3/Dense_0", 96 + 160)):
        kernel, bound = weights[f"{block}{key}/kernel"], np.sqrt(6 / fans)
        assert 0.98 * bound < np.abs(kernel).max() <= bound
        assert kernel.std() == pytest.approx(bound / np.sqrt(3), rel=0.03)
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


def test_intermediates_have_their_names_and_shapes(tiny_model, tiny_images):
    inside = keras_vit.intermediates(tiny_model)(tiny_images)
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


@pytest.mark.parametrize("policy", others_slow(["mixed_bfloat16", "mixed_float16", "bfloat16"], "mixed_bfloat16"))
def test_lower_precision_stays_near_float32(policy, tiny_model, tiny_images):
    low = randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7, dtype=policy))
    logits = keras.ops.cast(low(tiny_images), "float32")
    np.testing.assert_allclose(logits, tiny_model(tiny_images), atol=0.15)


def test_relative_logits_are_the_querys_products_with_the_vector_of_each_offset():
    layer = keras_vit.models.attention.RelativePositions(2)
    query = np.random.default_rng(0).normal(size=(3, 4, 6)).astype(np.float32)  # 4 tokens, 2 heads of 3
    logits = np.asarray(layer(query))
    table = np.asarray(layer.embedding)
    assert table.shape == (7, 3)
    for head, q, k in np.ndindex(2, 4, 4):
        expected = query[:, q, 3 * head : 3 * head + 3] @ table[k - q + 3] / np.sqrt(3)
        np.testing.assert_allclose(logits[:, head, q, k], expected, rtol=1e-5, atol=1e-7)


def test_a_2d_embedding_is_the_columns_half_before_the_rows():
    config = dataclasses.replace(TINY, position_embedding="learned-2d")
    layer = keras_vit.build(config, image_size=TINY_IMAGE).get_layer("Transformer.posembed_input")
    table = np.asarray(layer(np.zeros((1, 16, 12), np.float32)))[0]
    np.testing.assert_array_equal(table[0], layer.prefix[0])
    for row, column in np.ndindex(3, 5):
        halves = np.concatenate([layer.column[0, column], layer.row[row, 0]])
        np.testing.assert_array_equal(table[1 + 5 * row + column], halves)


def test_shared_positions_are_one_table_and_separate_ones_are_one_for_each_layer():
    shared, separate = (
        keras_vit.build(dataclasses.replace(TINY, position_injection=kind), image_size=TINY_IMAGE)
        for kind in ("shared", "every-layer")
    )
    assert separate.count_params() - shared.count_params() == 16 * 12
    tables = {key for key in weights_by_key(separate) if key.endswith("pos_embedding")}
    assert tables == {f"Transformer/encoderblock_{layer}/posembed_input/pos_embedding" for layer in (0, 1)}


def test_a_token_of_an_axial_block_sees_its_row_and_its_column_only():
    config = dataclasses.replace(TINY, axial=True, classifier="none", num_layers=1)
    model = randomize(keras_vit.build(config, image_size=TINY_IMAGE, num_classes=0))
    images = np.zeros((2, *TINY_IMAGE, 3), np.float32)
    images[1, 4:8, 12:18] = 1.0  # the patch in row 1 and column 2 of 3x5
    rows_only = keras_vit.intermediates(model, ["attention_0_row", "attention_0_column"])(images)
    assert rows_only["attention_0_row"].shape == (2 * 3, 3, 5, 5)
    assert rows_only["attention_0_column"].shape == (2 * 5, 3, 3, 3)
    row_block = keras.Model(model.input, model.get_layer("Transformer.encoderblock_0.row").output)(images)
    changed = np.abs(row_block[1] - row_block[0]).max(axis=-1).reshape(3, 5) > 1e-6
    np.testing.assert_array_equal(changed, np.arange(3)[:, None] == [1] * 5)
    both = model(images)
    assert (np.abs(both[1] - both[0]).max(axis=-1) > 1e-7).all()


def test_an_axial_resnet_has_attention_where_the_3x3_convolutions_were():
    config = keras_vit.ResNetConfig((1, 1), 4, (8, 16), preactivation=False, num_groups=2, axial_heads=2)
    model = keras_vit.build(config, image_size=(32, 48), num_classes=0)
    assert "block1.unit1.row_attention" in [layer.name for layer in model.layers]
    assert "block1.unit1.conv2" not in [layer.name for layer in model.layers]
    maps = keras_vit.intermediates(model)(np.zeros((1, 32, 48, 3), np.float32))
    assert maps["resnet_block1"].shape == (1, 8, 12, 8)
    assert maps["resnet_block2"].shape == (1, 4, 6, 16)
    odd = keras_vit.build(config, image_size=(36, 52), num_classes=0)  # 9 rows and 13 columns, halved
    assert keras_vit.intermediates(odd).output["resnet_block2"].shape == (None, 5, 7, 16)


_OF_EVERY_KIND = {
    "transformer": dataclasses.replace(TINY, representation_size=5, dropout_rate=0.5, attention_dropout_rate=0.5),
    "hybrid": dataclasses.replace(TINY, patch_size=1, stem=TINY_STEM),
    "early convolutions": dataclasses.replace(TINY, patch_size=1, stem=keras_vit.ConvStem((4, 8), (3, 3), (2, 2))),
    "BiT": dataclasses.replace(TINY_STEM, preactivation=True),
    "axial resnet": dataclasses.replace(TINY_STEM, axial_heads=2),
}
_SOME_KINDS = others_slow(_OF_EVERY_KIND, "BiT")


def _of_numpy(value):
    """The same with every number as NumPy gives it, as far down as there are any."""
    if dataclasses.is_dataclass(value):
        return type(value)(**{field.name: _of_numpy(getattr(value, field.name)) for field in dataclasses.fields(value)})
    kinds = {tuple: np.array, int: np.int64, float: np.float64, bool: np.bool_}
    return kinds.get(type(value), lambda same: same)(value)


@pytest.mark.parametrize("name", _SOME_KINDS)
def test_a_model_of_numpys_numbers_is_saved_and_is_that_of_pythons(name, tmp_path):
    config = _OF_EVERY_KIND[name]
    preprocessing = Preprocessing(TINY_IMAGE, 3, "resize-small", ((0.0, 0.0, 0.0), (1.0, 0.5, 1.0)), 32)
    model = keras_vit.build(_of_numpy(config), preprocessing=_of_numpy(preprocessing), num_classes=np.int64(7))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    expected = keras_vit.build(config, preprocessing=preprocessing, num_classes=7)
    assert repr(keras_vit.config_of(model)) == repr(keras_vit.config_of(again)) == repr(config)
    assert repr(keras_vit.preprocessing_of(again)) == repr(preprocessing)
    assert [weight.shape for weight in again.weights] == [weight.shape for weight in expected.weights]


@pytest.mark.parametrize("name", _SOME_KINDS)
def test_models_are_channels_last_whatever_keras_is_set_to(name, tiny_images, tmp_path):
    expected = randomize(keras_vit.build(_OF_EVERY_KIND[name], image_size=TINY_IMAGE))(tiny_images)
    keras.config.set_image_data_format("channels_first")  # as some users have it
    try:
        model = randomize(keras_vit.build(_OF_EVERY_KIND[name], image_size=TINY_IMAGE))
        np.testing.assert_array_equal(model(tiny_images), expected)
        model.save(tmp_path / "model.keras")
        np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(tiny_images), expected)
        pixels = np.random.default_rng(0).integers(0, 256, (31, 17, 1), np.uint8)
        assert keras_vit.preprocessing_of(model)(pixels).shape == (*TINY_IMAGE, 3)
    finally:
        keras.config.set_image_data_format("channels_last")


# Files that were written with fewer fields know a model by these.
IDENTIFYING = """
    attention_dropout_rate axial classifier distillation dropout_rate final_norm gated_mlp gelu head_bias
    hidden_size key_bias layer_norm_epsilon layer_scale locality_attention mlp_dim norm_after_pooling
    normalized num_heads num_layers num_registers patch_bias patch_size position_embedding position_injection
    pre_norm prefix_positions qkv_bias representation representation_size stem stochastic_depth_rate
    with_class_token
"""


def test_files_know_a_model_by_the_same_fields_until_a_newer_one_is_set():
    config = ViTConfig(4, 12, 1, 3, 20)
    assert identifying_fields(dataclasses.asdict(config)).keys() == set(IDENTIFYING.split())
    newer = dataclasses.asdict(dataclasses.replace(config, mlp_norm=True))
    assert identifying_fields(newer).keys() - set(IDENTIFYING.split()) == {"mlp_norm"}
