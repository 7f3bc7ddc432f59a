"""The six layouts: load, save and adapt, and models that they cannot express."""

import dataclasses
import functools
import pathlib
import shutil

import keras
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import keras_vit
from keras_vit import ConvStem, ResNetConfig, UserError
from keras_vit.checkpoints.formats.layout import DEFAULTS
from keras_vit.checkpoints.save import convert
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.files.safetensors import read_json, write_json, write_safetensors
from tests.support import FIXTURES, TINY, TINY_IMAGE, TINY_STEM, assert_equal_weights, loaded, others_slow, randomize

# Files of every family, the settings that they do not contain, and their layout.
FILES = {
    "vit_token.npz": ({}, "npz"), "vit_token_linen.npz": ({}, "npz-linen"), "vit_token_rep.npz": ({}, "npz"),
    "vit_gap.npz": ({}, "npz"), "bv_vit_gap_sincos.npz": ({"image_size": 32}, "big_vision"),
    "bv_vit_tok_learn.npz": ({}, "big_vision"), "hybrid_stages2.npz": ({}, "npz"),
    "hybrid_odd_sizes.npz": ({"stored_grid": (2, 3)}, "npz"), "hf_vit": ({}, "huggingface"),
    "hf_vit_in21k": ({}, "huggingface"), "hf_bit": ({}, "huggingface"), "hf_bit_bottleneck_same": ({}, "huggingface"),
    "timm_vit.safetensors": ({"num_heads": 4}, "timm"), "timm_vit_avg.safetensors": ({"num_heads": 4}, "timm"),
    "timm_bit.safetensors": ({"num_groups": 8}, "timm"),
    "timm_hybrid.safetensors": ({"num_heads": 4, "num_groups": 8}, "timm"),
    "torchvision_vit.safetensors": ({"num_heads": 4}, "torchvision"),
    "torchvision_vit_rep.safetensors": ({"num_heads": 4}, "torchvision"),
    "torchvision_vit_convstem.safetensors": ({"num_heads": 4}, "torchvision"),
}  # fmt: skip
# With 32 groups, the only number of most layouts.
STEM = ResNetConfig((1, 2), 32, (128, 256), preactivation=False)
SUFFIXES = {"huggingface": "", "timm": ".safetensors", "torchvision": ".safetensors"}


def stored(name: str) -> keras.Model:
    """The model of a golden file, to look at."""
    return loaded(FIXTURES / name, **FILES[name][0])


def arrays_of(path: pathlib.Path) -> dict[str, np.ndarray]:
    path = path / "model.safetensors" if path.is_dir() else path
    return safetensors.numpy.load_file(path) if path.suffix == ".safetensors" else read_npz(path)


# Others have the keys of these but for a layer before the head, or the pooling.
SIBLINGS = {"vit_gap.npz", "hybrid_odd_sizes.npz", "hf_vit_in21k", "timm_vit_avg.safetensors"}
SIBLINGS |= {"vit_token_rep.npz", "bv_vit_tok_learn.npz"}


@pytest.mark.parametrize("name", others_slow(FILES, *(FILES.keys() - SIBLINGS)))
def test_loading_and_saving_gives_the_same_keys_and_arrays(name, tmp_path, monkeypatch):
    options, layout = dict(FILES[name][0]), FILES[name][1]
    monkeypatch.setattr(keras_vit.checkpoints.layouts, "NUM_GROUPS", options.get("num_groups", 32))
    model = loaded(FIXTURES / name, **options)
    written = tmp_path / f"written{SUFFIXES.get(layout, '.npz')}"
    keras_vit.save_checkpoint(model, written, layout=layout)
    original, copy = arrays_of(FIXTURES / name), arrays_of(written)
    original = {key.removeprefix("params/"): array for key, array in original.items()}
    assert copy.keys() == original.keys()
    for key, array in original.items():
        array = array.reshape(-1) if array.shape[:3] == (1, 1, 1) and "gn" in key else array  # older flax
        np.testing.assert_array_equal(copy[key], array, err_msg=key)
        assert copy[key].dtype == array.dtype, key
    options.pop("image_size", None)
    assert keras_vit.describe(FIXTURES / name, **options).layout == layout


MODELS = {
    "token": TINY,
    "pre_logits": dataclasses.replace(TINY, representation_size=9),
    "gap": dataclasses.replace(TINY, classifier="gap"),
    "map": dataclasses.replace(TINY, classifier="map"),
    "sincos": dataclasses.replace(TINY, position_embedding="sincos-2d"),
    "no bias": dataclasses.replace(TINY, qkv_bias=False),
    "norm after pooling": dataclasses.replace(TINY, classifier="gap", norm_after_pooling=True),
    "hybrid": dataclasses.replace(TINY, patch_size=1, stem=STEM),
    "early convolutions": dataclasses.replace(TINY, patch_size=1, stem=ConvStem((4, 6), (3, 3), (2, 2))),
    "bit": dataclasses.replace(STEM, preactivation=True),
    "resnet": STEM,
    "no positions": dataclasses.replace(TINY, position_embedding="none"),
    "relative": dataclasses.replace(TINY, position_embedding="relative"),
    "every layer": dataclasses.replace(TINY, position_injection="every-layer"),
    "axial": dataclasses.replace(TINY, classifier="gap", axial=True),
}
EXPRESSIBLE = {
    "npz": {"token", "pre_logits", "gap", "map", "hybrid", "bit"},
    "npz-linen": {"token", "pre_logits", "gap", "map", "hybrid"},
    "big_vision": {"token", "pre_logits", "gap", "map", "sincos"},
    "huggingface": {"token", "gap", "no bias", "hybrid", "bit", "resnet"},
    "timm": {"no positions", "token", "gap", "map", "no bias", "norm after pooling", "hybrid", "bit"},
    "torchvision": {"token", "pre_logits", "early convolutions"},
}


def built(kind: str) -> keras.Model:
    return randomize(keras_vit.build(MODELS[kind], image_size=TINY_IMAGE, num_classes=7))


model_of = functools.cache(built)  # for tests that change nothing of it


# Every kind and every layout is in some fast row.
_SAVED = [
    pytest.param(kind, layout, marks=[pytest.mark.slow] * bool((row + column) % 6), id=f"{kind}-{layout}")
    for row, kind in enumerate(MODELS)
    for column, layout in enumerate(EXPRESSIBLE)
]


@pytest.mark.parametrize(("kind", "layout"), _SAVED)
def test_saving_and_loading_is_exact_or_refused(kind, layout, tmp_path):
    model = model_of(kind)
    path = tmp_path / f"model{SUFFIXES.get(layout, '.npz')}"
    if kind not in EXPRESSIBLE[layout]:
        with pytest.raises(UserError, match=f"layout {layout}"):
            keras_vit.save_checkpoint(model, path, layout=layout)
        assert list(tmp_path.iterdir()) == []
        return
    if layout == "big_vision" and "Transformer.posembed_input" in [layer.name for layer in model.layers]:
        model = built(kind)
        without_class_position(model)
    keras_vit.save_checkpoint(model, path, layout=layout)
    options = {"num_heads": 3} if layout in ("timm", "torchvision") and kind != "bit" else {}
    options |= {"gelu": "erf"} if (kind, layout) in (("gap", "timm"), ("map", "timm")) else {}
    again = keras_vit.from_checkpoint(path, image_size=TINY_IMAGE, **options)
    same = ("gelu", "layer_norm_epsilon", "stem", "group_norm_epsilon", "variance_epsilon", "deviation_epsilon")
    first, second = (
        {k: v for k, v in dataclasses.asdict(keras_vit.config_of(m)).items() if k not in same} for m in (model, again)
    )
    assert first == second
    assert_equal_weights(model, again)
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("config", "sentences"),
    [
        (dataclasses.replace(TINY, patch_size=1, stem=TINY_STEM), {"timm": "timm .* 2 groups.*choose huggingface"}),
        (
            dataclasses.replace(TINY_STEM, preactivation=True),
            {"npz": "npz .* 2 groups.*choose huggingface", "npz-linen": "cannot express this ResNet; huggingface can"},
        ),
    ],
    ids=["stem", "bit"],
)
def test_other_groups_than_32_are_refused_because_files_are_read_with_these(config, sentences, tmp_path):
    model = keras_vit.build(config, image_size=TINY_IMAGE, num_classes=3)
    for layout, sentence in sentences.items():
        with pytest.raises(UserError, match=sentence):
            keras_vit.save_checkpoint(model, tmp_path / f"x{SUFFIXES.get(layout, '.npz')}", layout=layout)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["torchvision", "npz"])
def test_writing_a_file_warns_of_an_epsilon_that_it_does_not_have(layout, tmp_path):
    config = dataclasses.replace(TINY, gelu="tanh" if layout == "npz" else "erf", layer_norm_epsilon=1e-3)
    model = keras_vit.build(config, image_size=TINY_IMAGE, num_classes=3)
    with pytest.warns(UserWarning, match=f"epsilon: 0.001 .* 1e-06 .* {layout}") as caught:
        keras_vit.save_checkpoint(model, tmp_path / f"x{SUFFIXES.get(layout, '.npz')}", layout=layout)
    assert sum(warning.category is UserWarning for warning in caught) == 1  # not of the GELU


def test_a_new_field_has_only_its_default_until_a_format_says_more():
    """It would be lost in files if it were in no table."""
    fields = {field.name: field.default for field in dataclasses.fields(keras_vit.ViTConfig)}
    assert DEFAULTS.keys() == fields.keys()
    assert all(DEFAULTS[name] == (default,) for name, default in fields.items() if isinstance(default, bool))


def without_class_position(model) -> None:
    """Set the position embedding of the class token to zero, because big_vision has none."""
    positions = model.get_layer("Transformer.posembed_input")
    if positions.weights and positions.num_prefix_tokens:
        table = np.array(positions.pos_embedding)
        table[:, 0] = 0.0
        positions.pos_embedding.assign(table)


def test_the_position_of_the_class_token_is_added_to_the_token_for_big_vision(tiny_model, tmp_path, tiny_images):
    keras_vit.save_checkpoint(tiny_model, tmp_path / "bv.npz", layout="big_vision")
    again = keras_vit.from_checkpoint(tmp_path / "bv.npz", image_size=TINY_IMAGE)
    np.testing.assert_array_equal(again(tiny_images), tiny_model(tiny_images))


def assert_pillow_form(read: keras_vit.Preprocessing, own: keras_vit.Preprocessing, library: str) -> None:
    """The preprocessing of a folder is that of the model, in the way of the library that reads it."""
    ways = {"library": library, "background": None, "antialias": True, "dtype": "uint8"}
    assert read == dataclasses.replace(own, **ways)


def test_a_saved_folder_has_the_settings_that_arrays_do_not_contain(tmp_path):
    config = dataclasses.replace(TINY, gelu="erf", layer_norm_epsilon=1e-7)
    model = keras_vit.build(config, image_size=TINY_IMAGE, num_classes=7)
    keras_vit.save_checkpoint(model, tmp_path / "hf", layout="huggingface")
    again = keras_vit.from_checkpoint(tmp_path / "hf")
    assert keras_vit.config_of(again) == config
    assert_pillow_form(keras_vit.preprocessing_of(again), keras_vit.preprocessing_of(model), "transformers")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "config.json", "model.safetensors", "preprocessor_config.json",
    }  # fmt: skip
    with pytest.raises(UserError, match="hf already exists"):
        keras_vit.save_checkpoint(model, tmp_path / "hf", layout="huggingface")


@pytest.mark.parametrize("prefix", ["opt/target/", "params/", "params/img/"])
def test_key_prefixes_are_removed_and_other_arrays_are_unused(prefix, tmp_path):
    original = read_npz(FIXTURES / "vit_token.npz")
    arrays = {f"{prefix}{key}": array for key, array in original.items()}
    arrays |= {"opt/state/step": np.array(7)}
    write_npz(tmp_path / "x.npz", arrays)
    model = keras_vit.from_checkpoint(tmp_path / "x.npz")
    assert_equal_weights(model, stored("vit_token.npz"))
    assert keras_vit.load_checkpoint(model, tmp_path / "x.npz").dropped == ("opt/state/step",)


def test_half_precision_is_loaded_exactly(tmp_path):
    original = read_npz(FIXTURES / "vit_token.npz")
    for kind in (ml_dtypes.bfloat16, np.float64):
        np.savez(tmp_path / "half.npz", **{key: array.astype(kind) for key, array in original.items()})
        weights = keras_vit.checkpoints.load.weights_by_key(keras_vit.from_checkpoint(tmp_path / "half.npz"))
        kernel = original["head/kernel"].astype(kind).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(weights["head/kernel"]), kernel)


def test_bfloat16_safetensors_are_loaded(tmp_path):
    original = safetensors.numpy.load_file(FIXTURES / "timm_vit.safetensors")
    halves = {key: array.astype(ml_dtypes.bfloat16) for key, array in original.items()}
    safetensors.numpy.save_file(halves, tmp_path / "half.safetensors")
    model = keras_vit.from_checkpoint(tmp_path / "half.safetensors", num_heads=4)
    np.testing.assert_array_equal(np.asarray(model.get_layer("head").bias), halves["head.bias"].astype(np.float32))
    assert keras_vit.describe(tmp_path / "half.safetensors", num_heads=4).types == ("bfloat16",)


def test_a_scanned_encoder_is_unstacked(tmp_path):
    original = read_npz(FIXTURES / "bv_vit_tok_learn.npz")
    blocks = {key for key in original if "encoderblock_0/" in key}
    stacked = {key: array for key, array in original.items() if "encoderblock_" not in key}
    for key in blocks:
        layers = [original[key.replace("encoderblock_0", f"encoderblock_{layer}")] for layer in range(3)]
        stacked[key.replace("encoderblock_0", "encoderblock")] = np.stack(layers)
    write_npz(tmp_path / "scan.npz", stacked)
    assert_equal_weights(keras_vit.from_checkpoint(tmp_path / "scan.npz"), stored("bv_vit_tok_learn.npz"))


def test_numbered_convolutions_of_bit_are_the_same_weights(tmp_path):
    model = model_of("bit")
    keras_vit.save_checkpoint(model, tmp_path / "bit.npz", layout="npz")
    arrays = read_npz(tmp_path / "bit.npz")
    numbered = {
        key.replace("standardized_conv2d/", f"standardized_conv2d_{index}/"): a
        for index, (key, a) in enumerate(arrays.items())
    }
    write_npz(tmp_path / "numbered.npz", numbered)
    again = keras_vit.from_checkpoint(tmp_path / "numbered.npz")
    assert_equal_weights(model, again)
    write_npz(tmp_path / "twice.npz", numbered | arrays)
    with pytest.raises(UserError, match="are the same weight; keep one of them"):
        keras_vit.from_checkpoint(tmp_path / "twice.npz")


def test_shards_are_one_checkpoint_and_stay_in_their_folder(tmp_path):
    arrays = arrays_of(FIXTURES / "hf_vit")
    write_json(tmp_path / "config.json", read_json(FIXTURES / "hf_vit" / "config.json"))
    names = {key: f"model-{index % 2}.safetensors" for index, key in enumerate(arrays)}
    for shard in set(names.values()):
        part = {key: array for key, array in arrays.items() if names[key] == shard}
        safetensors.numpy.save_file(part, tmp_path / shard)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": names})
    assert_equal_weights(keras_vit.from_checkpoint(tmp_path), stored("hf_vit"))
    for trick in ("../model-0.safetensors", "/etc/passwd", "model-0.bin"):
        write_json(tmp_path / "model.safetensors.index.json", {"weight_map": names | {"x": trick}})
        with pytest.raises(UserError, match=".safetensors files? of that folder"):
            keras_vit.from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "resampler"),
    [
        ("vit_token.npz", "bilinear-aligned"),
        ("hf_vit", "bicubic"),
        ("timm_vit.safetensors", "bicubic-antialias"),
        ("torchvision_vit.safetensors", "bicubic-aligned"),
    ],
)
def test_position_embeddings_are_resized_as_in_the_layout_by_default(name, resampler):
    table = np.asarray(stored(name).get_layer("Transformer.posembed_input").pos_embedding)
    for choice in (None, "bilinear") if name == "hf_vit" else (None,):
        model = keras_vit.from_checkpoint(FIXTURES / name, image_size=(48, 56), resampler=choice, **FILES[name][0])
        expected = keras_vit.resize_position_embedding(table, (4, 4), (6, 7), 1, choice or resampler)
        found = np.asarray(model.get_layer("Transformer.posembed_input").pos_embedding)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "name", ["vit_token.npz", "hybrid_stages2.npz", "hf_bit", "torchvision_vit_convstem.safetensors"]
)
def test_the_number_of_channels_can_be_changed(name):
    gray = keras_vit.from_checkpoint(FIXTURES / name, channels=1, **FILES[name][0])
    assert gray.input_shape[-1] == 1
    if name == "vit_token.npz":
        images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 1)).astype(np.float32)
        np.testing.assert_allclose(gray(images), stored(name)(np.repeat(images, 3, axis=-1)), atol=1e-5)


def test_an_unknown_number_of_heads_is_refused():
    with pytest.raises(UserError, match="no official model is 48 wide .* give num_heads"):
        keras_vit.from_checkpoint(FIXTURES / "timm_vit.safetensors")
    with pytest.raises(UserError, match=r"The file has 4 heads .*, not 3"):
        keras_vit.from_checkpoint(FIXTURES / "vit_token.npz", num_heads=3)
    config = dataclasses.replace(keras_vit.describe(FIXTURES / "vit_token.npz").config, num_heads=3)
    with pytest.raises(UserError, match=r"The file has 4 heads .*, not 3"):
        keras_vit.load_checkpoint(keras_vit.build(config, image_size=32, num_classes=7), FIXTURES / "vit_token.npz")


def test_describe_names_the_official_model_without_reading_arrays(official_file):
    found = keras_vit.describe(official_file)
    assert (found.name, found.layout, found.num_classes, found.image_size) == ("ViT-Ti_16", "timm", 5, (224, 224))
    assert "5,525,381 in 152 arrays of float32" in str(found)


def test_an_adapted_model_equals_its_adapted_file(tiny_model, tmp_path):
    keras_vit.save_checkpoint(tiny_model, tmp_path / "x.npz", layout="npz")
    changes = {"image_size": (16, 36), "num_classes": 4, "patch_size": (8, 6), "channels": 1}
    one = keras_vit.adapt(tiny_model, **changes)
    other = keras_vit.from_checkpoint(tmp_path / "x.npz", stored_grid=(3, 5), **changes)
    assert one.input_shape == other.input_shape == (None, 16, 36, 1)
    assert_equal_weights(one, other)


@pytest.mark.parametrize("kind", others_slow(MODELS, "pre_logits", "bit"))
def test_every_kind_of_model_is_adapted_to_other_classes(kind, tiny_images):
    model = model_of(kind)
    if kind != "bit":
        np.testing.assert_array_equal(keras_vit.adapt(model)(tiny_images), model(tiny_images))
    more = keras_vit.adapt(model, num_classes=9)
    np.testing.assert_array_equal(more(tiny_images), np.zeros((5, 9)))
    features = keras_vit.intermediates(more, ["pre_logits"])(tiny_images)["pre_logits"]
    if MODELS[kind] is not MODELS["pre_logits"]:
        np.testing.assert_allclose(features, keras_vit.intermediates(model)(tiny_images)["pre_logits"], rtol=1e-5)


def test_a_value_range_per_channel_becomes_the_mean_for_another_number_of_channels():
    gray = keras_vit.adapt(stored("torchvision_vit.safetensors"), channels=1)
    low, high = keras_vit.preprocessing_of(gray).value_range
    np.testing.assert_allclose(low, -(0.485 / 0.229 + 0.456 / 0.224 + 0.406 / 0.225) / 3, rtol=1e-6)
    np.testing.assert_allclose(high, (0.515 / 0.229 + 0.544 / 0.224 + 0.594 / 0.225) / 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("layout", "name", "suffix"),
    [("npz", "x.safetensors", ".npz"), ("timm", "x.pth", ".safetensors"), ("torchvision", "x", ".safetensors")],
)
def test_a_wrong_file_suffix_is_refused(layout, name, suffix, tiny_model, tmp_path):
    with pytest.raises(UserError, match=f"{name} should end in {suffix}, as files of the layout {layout}"):
        keras_vit.save_checkpoint(tiny_model, tmp_path / name, layout=layout)
    assert list(tmp_path.iterdir()) == []


@functools.cache
def other_weights(name: str) -> keras.Model:
    """A model like that of a golden file, with other weights."""
    return randomize(keras_vit.from_checkpoint(FIXTURES / name, **FILES[name][0]))


ATTENTION = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/"


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("hybrid_stages2.npz", {"gn_root/scale": np.ones((2, 1, 1, 16))}, "'gn_root/scale' has shape"),
        ("vit_token.npz", {f"{ATTENTION}key/kernel": np.ones((48, 2, 24))}, "The file has 2 heads"),
        ("vit_token.npz", {f"{ATTENTION}out/kernel": np.ones((2, 24, 48))}, "The file has 2 heads"),
        ("vit_token.npz", {"head/bias": np.full(7, 1e39)}, "'head/bias' has values that are not finite"),
        ("vit_token.npz", {"Transformer/posembed_input/pos_embedding": np.ones((2, 17, 48))}, "pos_embedding"),
        ("timm_bit.safetensors", {"head.fc.weight": np.ones((7, 256, 3, 3), np.float32)}, "'head.fc.weight' has shape"),
        ("timm_bit.safetensors", {"head.fc.weight": np.ones((7, 256, 0, 0), np.float32)}, "'head.fc.weight' should"),
    ],
)
def test_an_array_that_fits_no_weight_is_refused_before_any_is_assigned(name, change, sentence, tmp_path):
    arrays, path = arrays_of(FIXTURES / name) | change, tmp_path / name
    (write_npz if path.suffix == ".npz" else write_safetensors)(path, arrays)
    model = other_weights(name)
    before = model.get_weights()
    with pytest.raises(UserError, match=sentence):
        keras_vit.load_checkpoint(model, path)
    assert_equal_weights(before, model)
    with pytest.raises(UserError, match=sentence):
        keras_vit.from_checkpoint(path, **FILES[name][0])


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"global_pool": "max"}, "global_pool='max'; supported: token, avg, map"),
        ({"global_pool": "avg"}, "global_pool='avg' and thus fc_norm=True, but the arrays are of a model with False"),
        ({"model_args": {"no_embed_class": True}}, "no_embed_class"),
    ],
)
def test_a_timm_config_that_contradicts_the_arrays_is_refused(config, sentence, tmp_path):
    shutil.copy(FIXTURES / "timm_vit.safetensors", tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {"architecture": "vit_base_patch16_224"} | config)
    with pytest.raises(UserError, match=sentence):
        keras_vit.from_checkpoint(tmp_path, num_heads=4)


def test_a_square_number_of_tokens_is_a_square_grid_in_pytorch_codes_only():
    timm, jax = FIXTURES / "timm_vit.safetensors", FIXTURES / "vit_token.npz"
    table = np.asarray(stored("timm_vit.safetensors").get_layer("Transformer.posembed_input").pos_embedding)
    wide = keras_vit.from_checkpoint(timm, num_heads=4, image_size=(16, 64)).get_layer("Transformer.posembed_input")
    expected = keras_vit.resize_position_embedding(table, (4, 4), (2, 8), 1, "bicubic-antialias")
    np.testing.assert_array_equal(np.asarray(wide.pos_embedding), expected)
    model = keras_vit.from_checkpoint(jax, image_size=(16, 64))
    assert keras_vit.load_checkpoint(model, jax).resized == ()


def test_load_checkpoint_reads_config_json(tiny_model, tmp_path):
    keras_vit.save_checkpoint(tiny_model, tmp_path / "hf", layout="huggingface")
    wider = keras_vit.build(TINY, image_size=(12, 60), num_classes=7)
    assert keras_vit.load_checkpoint(wider, tmp_path / "hf").resized
    heads = keras_vit.build(dataclasses.replace(TINY, num_heads=4), image_size=TINY_IMAGE, num_classes=7)
    with pytest.raises(UserError, match="a model with num_heads=3, but this one has 4"):
        keras_vit.load_checkpoint(heads, tmp_path / "hf")


def test_models_with_equal_keys_but_other_settings_are_refused(tmp_path):
    keras_vit.save_checkpoint(model_of("norm after pooling"), tmp_path / "x.safetensors", layout="timm")
    with pytest.raises(UserError, match="norm_after_pooling=True, but this one has False"):
        keras_vit.load_checkpoint(model_of("gap"), tmp_path / "x.safetensors")


def test_an_array_in_a_shard_that_does_not_list_it_is_refused(tmp_path):
    arrays = arrays_of(FIXTURES / "hf_vit")
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    safetensors.numpy.save_file({"classifier.bias": arrays["classifier.bias"] + 1}, tmp_path / "b.safetensors")
    listed = dict.fromkeys(arrays, "a.safetensors") | {"other": "b.safetensors"}
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": listed})
    with pytest.raises(UserError, match="b.safetensors .* 'classifier.bias' is only in"):
        keras_vit.from_checkpoint(tmp_path)


def test_a_standardized_kernel_stays_float32_in_mixed_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = keras_vit.build(MODELS["bit"], image_size=TINY_IMAGE, num_classes=3)
        layer = model.get_layer("resnet.root_block.standardized_conv2d")
        layer.kernel.assign(1.0 + 1e-4 * np.random.default_rng(0).normal(size=layer.kernel.shape))
        images = np.random.default_rng(1).uniform(-1, 1, (2, 18, 36, 3)).astype(np.float32)
        mixed = np.asarray(layer(images), np.float32)
    finally:
        keras.config.set_dtype_policy("float32")
    exact = keras_vit.models.layers.StandardizedConv2D(**{k: v for k, v in layer.get_config().items() if k != "dtype"})
    exact.build(images.shape)
    exact.kernel.assign(np.asarray(layer.kernel))
    np.testing.assert_allclose(mixed, exact(images), atol=0.3)


TIMM = dataclasses.replace(TINY, hidden_size=48, gelu="erf")
TIMM_FOLDERS = {
    "token": TIMM,
    "tanh": dataclasses.replace(TIMM, gelu="tanh"),
    "gap, norm after pooling": dataclasses.replace(TIMM, classifier="gap", norm_after_pooling=True),
    "map": dataclasses.replace(TIMM, classifier="map"),
    "registers": dataclasses.replace(TIMM, num_registers=4, layer_scale=0.1, prefix_positions=False),
    "clip": dataclasses.replace(TIMM, pre_norm=True, patch_bias=False, layer_norm_epsilon=1e-5, gelu="quick"),
    "gated": dataclasses.replace(TIMM, gated_mlp=True, gelu="silu", layer_scale=0.1),
    "two heads": dataclasses.replace(TIMM, distillation="head"),
    "no bias": dataclasses.replace(TIMM, qkv_bias=False),
}


@pytest.mark.parametrize("name", others_slow(TIMM_FOLDERS, "tanh", "registers", "clip", "gated", "two heads"))
def test_a_folder_of_timm_is_the_model_when_it_is_read_again(name, tmp_path, tiny_images):
    config, folder = TIMM_FOLDERS[name], tmp_path / "vit_v1.5"  # a dot is no suffix
    model = randomize(keras_vit.build(config, image_size=TINY_IMAGE, num_classes=7))
    keras_vit.save_checkpoint(model, folder, layout="timm")
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    again = keras_vit.from_checkpoint(folder)
    assert keras_vit.config_of(again) == config
    assert_pillow_form(keras_vit.preprocessing_of(again), keras_vit.preprocessing_of(model), "timm")
    np.testing.assert_array_equal(again(tiny_images), model(tiny_images))


def test_converting_to_a_folder_of_timm_leaves_no_setting_to_the_reader(tmp_path, capsys):
    randomize(keras_vit.build(TIMM_FOLDERS["tanh"], image_size=TINY_IMAGE, num_classes=7)).save(tmp_path / "x.keras")
    for target in ("folder", "bare.safetensors"):
        convert(tmp_path / "x.keras", tmp_path / target, "timm")
        assert ("GELU: tanh in this model" in capsys.readouterr().out) == (target != "folder")


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM_FOLDERS)
def test_timm_builds_the_model_of_a_folder(name, tmp_path, tiny_images):
    timm = pytest.importorskip("timm", reason="timm and torch of benchmarks/requirements.txt are not installed")
    import torch

    model = randomize(keras_vit.build(TIMM_FOLDERS[name], image_size=TINY_IMAGE, num_classes=7))
    keras_vit.save_checkpoint(model, tmp_path / "timm", layout="timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tiny_images.transpose(0, 3, 1, 2).copy())).numpy()
    np.testing.assert_allclose(logits, model(tiny_images), atol=2e-5)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dataclasses.replace(TINY, patch_size=1, stem=STEM), "only by the name of one of its own sizes"),
        (dataclasses.replace(TIMM, layer_norm_epsilon=1e-12), "no architecture with LayerNorm's epsilon 1e-12"),
    ],
)
def test_what_no_arguments_of_timm_describe_is_refused_as_a_folder(config, words, tmp_path):
    model = keras_vit.build(config, image_size=TINY_IMAGE, num_classes=7)
    with pytest.raises(UserError, match=words):
        keras_vit.save_checkpoint(model, tmp_path / "timm", layout="timm")
    assert not list(tmp_path.iterdir())
