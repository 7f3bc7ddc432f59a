"""Settings from config.json and from the caller, and contradictions with the arrays."""

import contextlib
import dataclasses
import pathlib
import re
import shutil
import warnings

import numpy as np
import pytest
import safetensors.numpy

import keras_vit
from keras_vit import ConvStem, ResNetConfig, UserError
from keras_vit.checkpoints.checkpoint import LoadOptions, open_checkpoint
from keras_vit.checkpoints.formats.layout import Layout
from keras_vit.checkpoints.formats.timm import TIMM
from keras_vit.checkpoints.infer_config import infer_blueprint
from keras_vit.checkpoints.save import convert
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.files.safetensors import read_json, write_json
from tests.support import FIXTURES, TINY, assert_equal_weights, changed_folder, loaded, randomize

MODERN = FIXTURES / "modern"

# Minimal configs are those of images that the original resizes in another way; tests of the warning look at it.
pytestmark = pytest.mark.filterwarnings("ignore:The original of")


def with_config(folder: pathlib.Path, name: str = "config.json", fixture: str = "hf_vit", **change) -> pathlib.Path:
    """A copy of a golden folder with changes in a config."""
    return changed_folder(FIXTURES / fixture, folder / fixture, file=name, **change)


def images_of(folder: pathlib.Path, **options) -> keras_vit.Preprocessing:
    """The preprocessing of the model of a checkpoint, which is not built."""
    return infer_blueprint(open_checkpoint(folder), str(folder), LoadOptions(**options)).preprocessing


def lines_of(description: keras_vit.Description) -> list[str]:
    """The lines of a description, with single spaces."""
    return [" ".join(line.split()) for line in str(description).splitlines()]


def test_describe_needs_no_settings_that_are_not_in_the_file(official_file):
    timm = keras_vit.describe(FIXTURES / "timm_vit.safetensors")
    assert (timm.config, timm.fields["num_heads"], timm.fields["hidden_size"]) == (None, None, 48)
    assert "num_heads not in the file" in lines_of(timm)
    rectangle = keras_vit.describe(FIXTURES / "vit_nonsquare.npz")
    assert rectangle.image_size is None
    assert "image size not in the file" in lines_of(rectangle)
    description = keras_vit.describe(FIXTURES / "vit_nonsquare.npz", stored_grid=(4, 6))
    assert (description.image_size, description.config.num_heads) == ((32, 48), 4)
    bit = keras_vit.describe(FIXTURES / "hf_bit")
    assert bit.image_size is None
    assert "gelu not in the file; default: erf, as in the original code" in lines_of(timm)
    assert "gelu erf" in lines_of(keras_vit.describe(FIXTURES / "hf_vit"))
    assumed = "num_heads not in the file; default: the 3 of the official model of this width"
    assert assumed in lines_of(keras_vit.describe(official_file))


@pytest.mark.parametrize(
    ("fixture", "change", "sentence"),
    [
        ("hf_bit", {"hidden_act": "gelu"}, "unsupported hidden_act='gelu'; supported: relu"),
        ("hf_bit", {"output_stride": 16}, "unsupported output_stride=16; supported: 32"),
        ("hf_bit", {"embedding_dynamic_padding": True}, "unsupported embedding_dynamic_padding=True; supported: False"),
        ("hf_bit_bottleneck_same", {"embedding_dynamic_padding": False}, "embedding_dynamic_padding=False"),
        ("hf_bit", {"global_padding": "same"}, "global_padding null, or 'bottleneck' with 'same'"),
        ("hf_vit_in21k", {"pooler_act": "relu"}, "unsupported pooler_act='relu'; supported: tanh"),
        ("hf_vit", {"hidden_act": "swish"}, "unsupported hidden_act='swish'; supported: "),
        ("hf_vit", {"backbone_config": [1]}, ".backbone_config. as an object"),
        ("brought/hf_ijepa", {"model_type": "vit"}, "unsupported model_type='vit'; supported: ijepa"),
        ("hf_vit", {"patch_size": 4}, r"patch_size=\(4, 4\), but the arrays are of a model with \(8, 8\)"),
        ("hf_vit", {"num_hidden_layers": 12}, "num_hidden_layers=12, but .* with 3"),
        ("hf_vit", {"hidden_size": 64}, "hidden_size=64, but .* with 48"),
        ("hf_vit", {"intermediate_size": 97}, "intermediate_size=97, but .* with 96"),
        ("hf_vit", {"image_size": 30}, r"image_size=\(30, 30\), but the arrays hold .* 16 patches"),
        ("hf_vit", {"patch_size": "x"}, "'patch_size' as one or two numbers of pixels, but gives 'x'"),
        ("hf_vit", {"model_type": "swin"}, "unsupported model_type='swin'; supported: vit"),
        ("hf_vit", {"model_type": "vit_mae"}, "unsupported model_type='vit_mae'; supported: vit"),
        ("hf_vit", {"model_type": "vit_msn", "hidden_act": "relu"}, "unsupported hidden_act='relu'"),
    ],
)
def test_a_config_that_contradicts_the_arrays_is_refused(fixture, change, sentence, tmp_path):
    folder = with_config(tmp_path, fixture=fixture, **change)
    for read in (keras_vit.from_checkpoint, keras_vit.describe):
        with pytest.raises(UserError, match=sentence):
            read(folder)


def test_a_timm_image_size_in_model_args_must_match_the_arrays(tmp_path):
    config = {"architecture": "vit_base_patch16_224", "pretrained_cfg": {"input_size": [3, 224, 224]}}
    folder = timm_folder(tmp_path, **config, model_args={"num_heads": 4})
    assert images_of(folder).image_size == (32, 32)
    for change, sentence in (({"img_size": 64}, "image_size="), ({"depth": 9}, "depth=9"), ({"embed_dim": 9}, "dim=9")):
        with pytest.raises(UserError, match=f"config.json says .*{sentence}"):
            keras_vit.from_checkpoint(timm_folder(tmp_path, **config, model_args={"num_heads": 4} | change))


@pytest.mark.parametrize("kind", ["vit_msn", None])
def test_gelu_and_epsilon_are_read_for_every_model_type(kind, tmp_path):
    folder = with_config(tmp_path, model_type=kind, hidden_act="gelu_new", layer_norm_eps=1e-7)
    config = keras_vit.describe(folder).config
    assert (config.gelu, config.layer_norm_epsilon) == ("tanh", 1e-7)


SQUARE = {"height": 32, "width": 32}
CROPPED = {"size": {"height": 40, "width": 40}, "crop_size": SQUARE}
STRETCHED = {"resize": "stretch", "crop_from": None}


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"do_normalize": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, {"value_range": (0.0, 1.0)}),
        ({"do_rescale": False, "do_normalize": False}, {"value_range": (0.0, 255.0)}),
        ({"do_normalize": None}, {"value_range": (0.0, 1.0)}),
        ({"do_rescale": None, "do_normalize": None}, {"value_range": (0.0, 255.0)}),
        ({"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [127.5] * 3}, {"value_range": (-1.0, 1.0)}),
        ({"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3}, {"value_range": (-1.0, 1.0)}),
        ({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}, {"value_range": (-2.0, 2.0)}),
        ({}, {"value_range": (-1.0, 1.0), "dtype": "uint8", "library": "transformers"}),
        ({"resample": 3, "size": 32}, STRETCHED | {"interpolation": "bicubic"}),
        ({"resample": 0, "size": 32}, STRETCHED | {"interpolation": "nearest"}),
        ({"do_resize": False}, STRETCHED | {"interpolation": "bilinear"}),
        ({"image_processor_type": "ViTFeatureExtractor", "size": 32, "resample": 2}, STRETCHED),
        ({"size": 32, "do_center_crop": True, "crop_size": 32, "resample": 2}, STRETCHED),
        ({"feature_extractor_type": "DeiTFeatureExtractor", **CROPPED}, {"crop_from": (40, 40)}),
        ({"image_processor_type": "BitImageProcessor", "size": 37, "crop_size": 32}, {"crop_from": 37}),
        ({"image_processor_type": "SiglipImageProcessor", "size": SQUARE}, STRETCHED | {"interpolation": "bicubic"}),
    ],
)
def test_the_images_are_those_of_the_processor(processor, expected, tmp_path):
    found = images_of(with_config(tmp_path, "preprocessor_config.json", **processor))
    assert found.image_size == (32, 32)
    for name, value in expected.items():
        assert getattr(found, name) == (pytest.approx(value) if name == "value_range" else value)


def test_a_mean_of_other_channels_is_warned_of(tmp_path):
    folder = with_config(tmp_path, "preprocessor_config.json", image_mean=[0.4, 0.5], image_std=[0.25, 0.5])
    with pytest.warns(UserWarning, match="says how 2 channels are normalized, but its images have 3"):
        assert images_of(folder).value_range == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("kind", "mean", "std"),
    [
        ("ViTImageProcessor", [0.5] * 3, [0.5] * 3),
        ("DINOv3ViTImageProcessorFast", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ("CLIPImageProcessor", [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]),
    ],
)
@pytest.mark.parametrize("given", [{}, {"image_mean": [0.1, 0.2, 0.3]}, {"image_std": [0.3, 0.2, 0.1]}], ids=str)
def test_a_missing_mean_or_deviation_is_that_of_the_processors_class(kind, mean, std, given, tmp_path):
    folder = with_config(tmp_path, "preprocessor_config.json", image_processor_type=kind, **given)
    black = images_of(folder).channel_ranges()[0]
    mean, std = given.get("image_mean", mean), given.get("image_std", std)
    np.testing.assert_allclose(black, -np.array(mean) / np.array(std), rtol=1e-12)


def test_the_processor_inside_processor_config_goes_first(tmp_path):
    inside = {"image_processor_type": "CLIPImageProcessor", "image_mean": [0.25] * 3, "image_std": [0.25] * 3}
    folder = with_config(tmp_path, "preprocessor_config.json", image_mean=[0.5] * 3, image_std=[0.5] * 3)
    write_json(folder / "processor_config.json", {"processor_class": "CLIPProcessor"})
    assert images_of(folder).value_range == (-1.0, 1.0)
    (folder / "processor_config.json").unlink()
    write_json(folder / "processor_config.json", {"processor_class": "CLIPProcessor", "image_processor": inside})
    assert images_of(folder).value_range == (-1.0, 3.0)


def test_images_that_the_processor_gives_in_another_size_are_said(tmp_path):
    folder = with_config(tmp_path, "preprocessor_config.json", size={"height": 48, "width": 48}, resample=2)
    with pytest.warns(UserWarning, match="images of 48x48 pixels, .* pass image_size=48"):
        images_of(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images_of(folder, image_size=48)


def timm_vit(folder: pathlib.Path, **pretrained) -> pathlib.Path:
    """A folder of timm whose config.json has these fields in its pretrained_cfg."""
    arguments = {"architecture": "vit_base_patch16_224", "model_args": {"num_heads": 4}}
    return timm_folder(folder, **arguments, pretrained_cfg=pretrained)


_TIMM = {"input_size": [3, 32, 32], "interpolation": "bilinear", "crop_mode": "squash", "crop_pct": 1.0}


@pytest.mark.parametrize("given", [{}, {"mean": None, "std": [0.5] * 3}, {"mean": [0.5] * 3}], ids=str)
def test_a_missing_mean_or_deviation_of_timm_is_that_of_imagenet(given, tmp_path):
    mean, std = given.get("mean") or [0.485, 0.456, 0.406], given.get("std") or [0.229, 0.224, 0.225]
    black = images_of(timm_vit(tmp_path, **_TIMM, **given)).channel_ranges()[0]
    np.testing.assert_allclose(black, -np.array(mean) / np.array(std), rtol=1e-12)


@pytest.mark.parametrize("layout", ["huggingface", "timm"])
def test_an_image_that_is_no_multiple_of_the_patch_loses_its_last_pixels(layout, tmp_path):
    """As in the original codes: of 35 pixels, patches of 8 cover 32."""
    if layout == "timm":
        folder = timm_vit(tmp_path, **_TIMM | {"input_size": [3, 35, 35]})
    else:
        folder = with_config(tmp_path, image_size=35)
    exact = loaded(FIXTURES / {"timm": "timm_vit.safetensors", "huggingface": "hf_vit"}[layout], num_heads=4)
    model = keras_vit.from_checkpoint(folder)
    assert model.input_shape == (None, 35, 35, 3)
    images = np.random.default_rng(0).uniform(-1, 1, (2, 35, 35, 3)).astype(np.float32)
    np.testing.assert_allclose(model(images), exact(images[:, :32, :32]), rtol=1e-5, atol=1e-6)
    assert images_of(folder, image_size=35).image_size == (35, 35)
    with pytest.raises(UserError, match="must be a multiple of the patch height 8, but is 36"):
        keras_vit.from_checkpoint(folder, image_size=36)
    if layout == "timm":
        assert keras_vit.adapt(model, num_classes=3).input_shape == model.input_shape
        with pytest.raises(UserError, match="must be a multiple of the patch height 8, but is 36"):
            keras_vit.adapt(model, image_size=36)


@pytest.mark.parametrize("layout", ["huggingface", "timm"])
def test_class_names_go_through_a_conversion(layout, tmp_path):
    named = tmp_path / "named"
    named.mkdir()
    names = ["cat", "dog", 'ü, "x"', "4", "5", "6", "7"]
    if layout == "timm":
        folder = timm_folder(named, architecture="vit_base_patch16_224", model_args={"num_heads": 4}, label_names=names)
    else:
        folder = with_config(named, id2label={str(index): name for index, name in enumerate(names)})
    convert(folder, tmp_path / "written", layout)
    for each in (folder, tmp_path / "written"):
        assert open_checkpoint(each).classes.labels == tuple(names)
    assert open_checkpoint(FIXTURES / "hf_vit").classes is None


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("hf_bit", {"num_heads": 4}, "num_heads=4 does not apply, because the file is of a ResNet; leave it out"),
        ("vit_token.npz", {"conv_stem_strides": (2, 2)}, "does not apply, because the file has no early convolutions"),
        ("vit_token.npz", {"position_embedding": "none"}, "does not apply, because the file has a table of them"),
        ("vit_token.npz", {"num_groups": 8}, "num_groups=8 does not apply, because the file has no GroupNorm"),
        ("bv_vit_gap_sincos.npz", {"stored_grid": (4, 4)}, "because the file has no table of position embeddings"),
        ("vit_token.npz", {"resampler": "cubic"}, "no resampler named 'cubic'; the nearest names are bicubic"),
        ("vit_token.npz", {"channel_rule": "sum"}, "channel_rule must be one of mean, repeat, but is 'sum'"),
        ("torchvision_vit_convstem.safetensors", {"conv_stem_strides": "222"}, "must be integers of at least 1"),
        ("vit_token.npz", {"gelu": "relu"}, "gelu must be one of tanh, erf"),
        ("vit_token.npz", {"keep_pre_logits": True}, "keep_pre_logits=True does not apply"),
        ("vit_token.npz", {"stored_grid": 4}, "stored_grid must be two integers of at least 1, but is 4"),
        ("vit_token.npz", {"num_heads": "4"}, "num_heads must be an integer of at least 1, but is '4'"),
        ("torchvision_vit_convstem.safetensors", {"conv_stem_strides": (2, 2)}, "as many channels as odd kernel sizes"),
    ],
)
def test_an_argument_that_does_not_apply_to_the_file_is_refused(name, options, sentence):
    heads = {"num_heads": 4} if name.startswith("torchvision") else {}
    with pytest.raises(UserError, match=sentence):
        keras_vit.from_checkpoint(FIXTURES / name, **heads | options)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("blocks.0.attn.q_norm.weight", r" \(it has norms of queries and keys\)"),
        ("blocks.0.attn.rel_pos.table", r" \(it has relative positions of timm\)"),
        ("something.weight", ""),
    ],
)
def test_unsupported_models_are_refused_before_missing_settings(key, kind, tmp_path):
    """Unexpected keys are reported before unknown heads and unsupported settings."""
    arrays = safetensors.numpy.load_file(FIXTURES / "timm_vit.safetensors") | {key: np.zeros((1, 4, 48), np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {"architecture": "vit_base_patch16_224", "global_pool": "map"})
    with pytest.raises(UserError, match=f"unsupported kind of model{kind}; unexpected keys: {key}"):
        keras_vit.from_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    assert f"unexpected 1 arrays: {key}" in lines_of(keras_vit.describe(tmp_path))


@pytest.mark.parametrize(("channels", "strides"), [((4, 4, 6, 6), (2, 2, 2, 2)), ((4, 4, 6, 6, 8), (2, 1, 2, 1, 2))])
def test_of_more_than_four_early_convolutions_those_that_widen_have_a_stride(channels, strides, tmp_path):
    stem = ConvStem(channels, (3,) * len(channels), strides)
    model = keras_vit.build(dataclasses.replace(TINY, patch_size=1, stem=stem), image_size=32, num_classes=3)
    with pytest.warns(UserWarning, match="GELU"):
        keras_vit.save_checkpoint(model, tmp_path / "x.safetensors", layout="torchvision")
    assert keras_vit.describe(tmp_path / "x.safetensors", num_heads=3).config.stem == stem


def test_a_header_of_safetensors_that_is_too_large_is_refused(tmp_path):
    with open(tmp_path / "x.safetensors", "wb") as stream:
        stream.write((2**24 + 8).to_bytes(8, "little"))
        stream.truncate(2**24 + 16)
    with pytest.raises(UserError, match="header is 16777224 bytes, too large"):
        keras_vit.from_checkpoint(tmp_path / "x.safetensors")


def test_arrays_in_fortran_order_are_the_same_weights(tmp_path):
    arrays = read_npz(FIXTURES / "hybrid_stages2.npz")
    write_npz(tmp_path / "x.npz", {key: np.asfortranarray(array) for key, array in arrays.items()})
    assert_equal_weights(keras_vit.from_checkpoint(tmp_path / "x.npz"), loaded(FIXTURES / "hybrid_stages2.npz"))


@pytest.mark.parametrize("shape", [(3, 700_001), (5, 0), ()])
def test_an_array_of_several_blocks_is_read_completely(shape, tmp_path):
    array = np.random.default_rng(0).random(shape, np.float32)
    write_npz(tmp_path / "x.npz", {"rows": array, "columns": np.asfortranarray(array)})
    for found in read_npz(tmp_path / "x.npz").values():
        np.testing.assert_array_equal(found, array)


@pytest.mark.slow
def test_training_a_loaded_model_does_not_change_the_file(tmp_path):
    shutil.copy(FIXTURES / "vit_token.npz", tmp_path / "x.npz")
    content = (tmp_path / "x.npz").read_bytes()
    model, again = (keras_vit.from_checkpoint(tmp_path / "x.npz", num_classes=2) for _ in range(2))
    model.compile("sgd", "mse")
    model.fit(np.ones((2, *model.input_shape[1:])), np.ones((2, 2)), epochs=2, verbose=0)
    assert np.abs(np.asarray(model.get_layer("head").bias)).min() > 0
    assert not np.asarray(again.get_layer("head").bias).any()
    assert (tmp_path / "x.npz").read_bytes() == content


def timm_folder(folder: pathlib.Path, fixture: str = "timm_vit", **config) -> pathlib.Path:
    """A folder with a golden file of timm and a config.json."""
    shutil.copy(FIXTURES / f"{fixture}.safetensors", folder / "model.safetensors")
    (folder / "config.json").unlink(missing_ok=True)
    write_json(folder / "config.json", config)
    return folder


# As timm 1.0.31 builds them: (num_heads, act_layer of the first block's MLP).
@pytest.mark.parametrize(
    ("architecture", "arguments", "facts"),
    [
        ("vit_base_patch16_224", {}, (12, "erf")),
        ("vit_base_patch16_224.augreg_in21k", {"num_heads": 4, "act_layer": None, "drop_path_rate": 0.1}, (4, "erf")),
        ("vit_base_patch16_gap_224", {}, (16, "erf")),
        ("vit_base_patch32_siglip_gap_256", {}, (12, "tanh")),
        ("vit_large_patch16_siglip_gap_512", {}, (16, "tanh")),
        ("vit_giantopt_patch16_siglip_gap_384", {}, (16, "tanh")),
        ("vit_giantopt_patch16_siglip_gap_384", {"act_layer": None, "fc_norm": None}, (16, "erf")),
        ("vit_base_patch16_224", {"act_layer": "gelu_tanh", "no_embed_class": False}, (12, "tanh")),
        ("vit_base_patch16_224", {"act_layer": "quick_gelu", "no_embed_class": True}, (12, "quick")),
        ("vit_giant_patch14_reg4_dinov2.lvd142m", {}, (24, "silu")),
        ("vit_so400m_patch14_siglip_384.webli", {}, (16, "erf")),
        ("resnetv2_50x1_bit", {"width_factor": 2, "output_stride": 32}, (None, None)),
    ],
)
def test_a_timm_architecture_and_its_arguments_determine_heads_and_gelu(architecture, arguments, facts):
    model = TIMM.read_config({"config.json": {"architecture": architecture, "model_args": arguments}}, Layout(()))
    assert (model.num_heads, model.gelu) == facts


@pytest.mark.parametrize(
    ("architecture", "arguments", "name"),
    [
        ("vit_base_patch16_rpn_224", {}, "architecture='vit_base_patch16_rpn_224'"),
        (None, {}, "architecture='None'"),
        (["vit_base_patch16_224"], {}, "architecture="),
        ("vit_base_patch16_224", {"act_layer": "relu"}, "act_layer='relu'"),
        ("vit_base_patch16_224", {"norm_layer": "rmsnorm"}, "norm_layer='rmsnorm'"),
        ("vit_base_patch16_224", {"block_fn": "ResPostBlock"}, "block_fn='ResPostBlock'"),
        ("vit_base_patch16_224", {"qk_norm": True}, "qk_norm=True"),
        ("vit_base_patch16_224", {"class_token": None}, "class_token=None"),
        ("vit_base_patch16_clip_224", {"norm_layer": None}, "norm_layer=None"),
        ("vit_base_patch16_224", {"mlp_layer": False}, "mlp_layer=False"),
        ("vit_tiny_r_s16_p8_224", {"padding_same": False}, "padding_same=False"),
        ("resnetv2_50x1_bit", {"output_stride": 16}, "output_stride=16"),
        ("resnetv2_50x1_bit", {"stem_type": "same"}, "stem_type='same'"),
    ],
)
def test_unsupported_timm_architectures_and_arguments_are_refused(architecture, arguments, name):
    with pytest.raises(UserError, match=re.escape(name)):
        TIMM.read_config({"config.json": {"architecture": architecture, "model_args": arguments}}, Layout(()))


def test_a_timm_folder_has_the_settings_of_its_architecture(tmp_path):
    folder = timm_folder(tmp_path, "timm_vit_avg", architecture="vit_base_patch32_siglip_gap_256", global_pool="avg")
    described = keras_vit.describe(folder)
    assert (described.config.num_heads, described.config.gelu, described.ambiguous) == (12, "tanh", ())
    timm_folder(tmp_path, "timm_vit_avg", architecture="vit_base_patch16_rpn_224", global_pool="avg")
    for read in (keras_vit.from_checkpoint, keras_vit.describe):
        with pytest.raises(UserError, match="vit_base_patch16_rpn_224"):
            read(folder)


def test_an_ambiguous_timm_file_is_refused_and_described(tmp_path):
    described = keras_vit.describe(FIXTURES / "timm_vit_avg.safetensors")
    assert described.ambiguous == ("block",)
    assert any(line.startswith("norms not in the file; default: before each") for line in lines_of(described))
    arrays = safetensors.numpy.load_file(FIXTURES / "timm_vit_avg.safetensors")
    residual_post_norm = {key: array for key, array in arrays.items() if not key.endswith("qkv.bias")}
    safetensors.numpy.save_file(residual_post_norm, tmp_path / "rpn.safetensors")
    with pytest.raises(UserError, match="config.json beside the file, .* architecture"):
        keras_vit.from_checkpoint(tmp_path / "rpn.safetensors", num_heads=4)
    assert keras_vit.describe(tmp_path / "rpn.safetensors").ambiguous == ("block",)
    before = {key.replace("fc_norm", "norm"): array for key, array in arrays.items()}
    safetensors.numpy.save_file(before, tmp_path / "gap.safetensors")
    with pytest.raises(UserError, match="config.json beside the file, .* give gelu"):
        keras_vit.from_checkpoint(tmp_path / "gap.safetensors", num_heads=4)
    assert keras_vit.describe(tmp_path / "gap.safetensors").ambiguous == ("gelu", "num_heads")


def test_rotary_models_with_the_arrays_of_clip_are_not_taken_for_it(tmp_path):
    file = MODERN / "timm_clip.safetensors"
    assert keras_vit.describe(file, num_heads=4).ambiguous == ("gelu", "position_embedding")
    assert "also rotary" in str(keras_vit.describe(file, num_heads=4))
    with pytest.raises(UserError, match="give position_embedding to"):
        keras_vit.from_checkpoint(file, num_heads=4, gelu="erf")
    model = keras_vit.from_checkpoint(file, num_heads=4, gelu="erf", position_embedding="learned")
    assert keras_vit.config_of(model).pre_norm
    with pytest.raises(UserError, match="position_embedding='none' does not apply"):
        keras_vit.from_checkpoint(file, num_heads=4, gelu="quick", position_embedding="none")


def test_a_bare_flexivit_resizes_positions_as_flexivit_does(tmp_path):
    file = MODERN / "timm_flexivit.safetensors"
    arguments = {"num_heads": 4, "img_size": keras_vit.describe(file).image_size[0]}
    named = timm_folder(tmp_path, "modern/timm_flexivit", architecture="flexivit_small", model_args=arguments)
    bare = keras_vit.from_checkpoint(file, num_heads=4, image_size=48)
    assert_equal_weights(bare, keras_vit.from_checkpoint(named, image_size=48))


def test_a_name_with_gap_means_the_mean_of_the_patches(tmp_path):
    folder = timm_folder(tmp_path, "modern/timm_siglip", architecture="vit_base_patch16_siglip_gap_224")
    with pytest.raises(UserError, match="has the weights of classifier='map', but 'gap' is in config.json"):
        keras_vit.from_checkpoint(folder)


def test_msn_of_newer_transformers_has_a_prefix_on_some_keys_only(tmp_path):
    config = dataclasses.replace(TINY, gelu="erf", layer_norm_epsilon=1e-6)
    model = randomize(keras_vit.build(config, image_size=(12, 30), num_classes=3))
    keras_vit.save_checkpoint(model, tmp_path / "hf", layout="huggingface")
    arrays = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    mixed = {key.replace("vit.encoder.", "encoder."): array for key, array in arrays.items()}
    (tmp_path / "msn").mkdir()
    safetensors.numpy.save_file(mixed, tmp_path / "msn" / "model.safetensors")
    bare = keras_vit.from_checkpoint(tmp_path / "msn", num_heads=3, stored_grid=(3, 5))
    assert_equal_weights(model, bare)
    fields = read_json(tmp_path / "hf" / "config.json")
    write_json(tmp_path / "msn" / "config.json", fields | {"model_type": "vit_msn"})
    assert keras_vit.config_of(bare) == keras_vit.describe(tmp_path / "msn").config == config


def test_a_mean_beside_a_class_token_is_read_and_written(tmp_path):
    """As timm's global_pool="avg" for a model with a class token, such as a fine-tuned MAE."""
    arrays = safetensors.numpy.load_file(FIXTURES / "timm_vit.safetensors")
    after = {key.replace("norm.", "fc_norm.") if key.startswith("norm.") else key: a for key, a in arrays.items()}
    safetensors.numpy.save_file(after, tmp_path / "x.safetensors")
    model = keras_vit.from_checkpoint(tmp_path / "x.safetensors", num_heads=4)
    images = np.random.default_rng(0).uniform(-1, 1, (2, *model.input_shape[1:])).astype(np.float32)
    inside = keras_vit.intermediates(model, ["block_2", "logits"])(images)
    mean = np.mean(np.asarray(inside["block_2"])[:, 1:], axis=1)
    norm = (mean - mean.mean(-1, keepdims=True)) / np.sqrt(mean.var(-1, keepdims=True) + 1e-6)
    expected = (norm * after["fc_norm.weight"] + after["fc_norm.bias"]) @ after["head.weight"].T + after["head.bias"]
    np.testing.assert_allclose(inside["logits"], expected, atol=2e-5, rtol=1e-4)
    keras_vit.save_checkpoint(model, tmp_path / "y.safetensors", layout="timm")
    written = safetensors.numpy.load_file(tmp_path / "y.safetensors")
    assert written.keys() == after.keys()
    assert all(np.array_equal(written[key], after[key]) for key in after)


def test_a_bottleneck_bit_without_config_is_refused_for_its_padding(tmp_path):
    shutil.copy(FIXTURES / "hf_bit_bottleneck_same" / "model.safetensors", tmp_path)
    with pytest.raises(UserError, match="put the config.json beside the file"):
        keras_vit.from_checkpoint(tmp_path)


def test_default_heads_are_for_official_models_only(official_file, tmp_path):
    arrays = safetensors.numpy.load_file(official_file)
    one_block = {key: array for key, array in arrays.items() if not re.match("blocks.[1-9]", key)}
    safetensors.numpy.save_file(one_block, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="no official model is 192 wide with 1 layers"):
        keras_vit.from_checkpoint(tmp_path / "x.safetensors")


# transformers 5.23.0 writes all fields, older versions those that differ from the defaults of the config classes.
def test_missing_fields_of_config_json_have_the_defaults_of_its_class(tmp_path):
    folder = with_config(tmp_path / "heads", drop=("num_attention_heads", "layer_norm_eps", "hidden_act"))
    config = keras_vit.describe(folder).config
    assert (config.num_heads, config.layer_norm_epsilon, config.gelu) == (12, 1e-12, "erf")
    msn = with_config(tmp_path / "msn", drop=("num_attention_heads", "layer_norm_eps"), model_type="vit_msn")
    config = keras_vit.describe(msn).config
    assert (config.num_heads, config.layer_norm_epsilon) == (12, 1e-6)
    for field, sentence in (("patch_size", r"patch_size=\(16, 16\)"), ("hidden_size", "hidden_size=768")):
        with pytest.raises(UserError, match=sentence):
            keras_vit.from_checkpoint(with_config(tmp_path / field, drop=[field]))
    with pytest.raises(UserError, match="'model_type' as a name, or num_attention_heads"):
        keras_vit.from_checkpoint(with_config(tmp_path / "none", drop=("model_type", "num_attention_heads")))


@pytest.mark.parametrize(
    ("fixture", "field", "sentence"),
    [
        ("hf_bit", "layer_type", None),
        ("hf_bit", "global_padding", None),
        ("hf_bit", "num_groups", "GroupNorm|num_groups|groups"),
        ("hf_bit", "depths", r"depths=\(3, 4, 6, 3\)"),
        ("hf_bit_bottleneck_same", "layer_type", "'layer_type' as 'preactivation' with"),
        ("hf_bit_bottleneck_same", "global_padding", "'bottleneck' with 'same'"),
        ("hf_bit_bottleneck_same", "embedding_dynamic_padding", "embedding_dynamic_padding=False; supported: True"),
    ],
)
def test_missing_fields_of_a_bit_config_have_defaults(fixture, field, sentence, tmp_path):
    folder = with_config(tmp_path, fixture=fixture, drop=[field])
    with contextlib.nullcontext() if sentence is None else pytest.raises(UserError, match=sentence):
        keras_vit.describe(folder)


@pytest.mark.parametrize("image_size", [None, 24, 48])
def test_a_processor_for_another_size_than_that_of_the_weights_shows_the_same_part(image_size, tmp_path):
    """DINOv2's weights are for 518 pixels, and its processor crops 224 of 256."""
    processor = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 10}, "resample": 4}
    folder = with_config(tmp_path, "preprocessor_config.json", **processor, crop_size={"height": 8, "width": 8})
    found = images_of(folder, image_size=image_size)
    size = image_size or 32
    assert (found.resize, found.image_size, found.crop_from) == ("resize-small", (size, size), round(1.25 * size))


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ({"resample": 9}, "resample=9"),
        ({"resample": "bicubic"}, "resample='bicubic'"),
        ({"do_flip_channel_order": True}, "do_flip_channel_order=True"),
        ({"do_pad": True}, "do_pad=True"),
        ({"do_center_crop": True, "crop_size": {"height": 640, "width": 24}}, "crop_size="),
        ({"resample": 5}, "resample=5"),
        ({"do_resize": False, "do_center_crop": True}, "do_resize=False"),
        ({"size": {"shortest_edge": 32}}, "size="),
        ({"size": {"longest_edge": 32}}, "size="),
        ({"image_processor_type": "ConvNextImageProcessor"}, "image_processor_type='ConvNext"),
        ({"do_normalize": "no"}, "'do_normalize' as true or false"),
    ],
)
def test_unsupported_processors_are_refused(processor, name, tmp_path):
    with pytest.raises(UserError, match=name):
        keras_vit.from_checkpoint(with_config(tmp_path, "preprocessor_config.json", **processor))


@pytest.mark.parametrize(
    "fields",
    [
        {"interpolation": "bicubic"},
        {"interpolation": "nearest", "crop_from": (30, 32)},
        {"interpolation": "lanczos3", "resize": "resize-small", "crop_from": 40},
        {"dtype": "float32"},
    ],
)
def test_a_saved_processor_makes_the_pixels_of_the_model(fields, tmp_path):
    fields = {"library": "transformers", "background": None, **fields}
    preprocessing = keras_vit.Preprocessing((24, 24), value_range=(-2.0, 2.0), **fields)
    config = dataclasses.replace(TINY, patch_size=8)
    model = keras_vit.build(config, preprocessing=preprocessing, num_classes=3)
    keras_vit.save_checkpoint(model, tmp_path / "hf", layout="huggingface")
    assert images_of(tmp_path / "hf") == preprocessing


@pytest.mark.parametrize(
    ("size", "resize", "words"), [((16, 24), "crop", "'crop' to 16x24"), ((24, 24), "pad", "'pad' to 24x24")]
)
def test_what_transformers_cannot_resize_is_not_saved_for_it(size, resize, words, tmp_path):
    preprocessing = keras_vit.Preprocessing(size, resize=resize)
    model = keras_vit.build(dataclasses.replace(TINY, patch_size=8), preprocessing=preprocessing, num_classes=3)
    with pytest.raises(UserError, match=words):
        keras_vit.save_checkpoint(model, tmp_path / "hf", layout="huggingface")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("prefix", ["params/", "opt/target/", "params/img/"])
def test_a_file_with_two_models_is_refused(prefix, tmp_path):
    arrays = read_npz(FIXTURES / "vit_token.npz")
    write_npz(tmp_path / "x.npz", arrays | {f"{prefix}{key}": array + 1 for key, array in arrays.items()})
    with pytest.raises(UserError, match=f"one each under no prefix and '{prefix}'"):
        keras_vit.from_checkpoint(tmp_path / "x.npz")


def test_a_long_list_of_keys_is_shortened(tmp_path):
    arrays = read_npz(FIXTURES / "vit_token.npz")
    model = loaded(FIXTURES / "vit_token.npz")
    write_npz(tmp_path / "x.npz", arrays | {f"{number:05}{'x' * 300}": np.zeros(1) for number in range(2000)})
    with pytest.raises(UserError, match="unexpected keys: .* and 1990 more") as caught:
        keras_vit.load_checkpoint(model, tmp_path / "x.npz")
    assert len(str(caught.value)) < 3000


# transformers 5.23.0 and timm 1.0.31: logits were off by as much as their size.
def test_a_fifth_stage_is_refused_because_torch_dilates_it(tmp_path, monkeypatch):
    model = keras_vit.build(ResNetConfig((1,) * 5, 32, (128,) * 5), image_size=32, num_classes=3)
    keras_vit.save_checkpoint(model, tmp_path / "x.npz", layout="npz")
    assert len(keras_vit.describe(tmp_path / "x.npz").config.block_units) == 5
    for layout, name in (("huggingface", "x"), ("timm", "x.safetensors")):
        with pytest.raises(UserError, match=f"{layout} cannot express a ResNet of 5 stages"):
            keras_vit.save_checkpoint(model, tmp_path / name, layout=layout)
    monkeypatch.setattr(keras_vit.checkpoints.layouts, "TORCH_STAGES", 5)
    keras_vit.save_checkpoint(model, tmp_path / "x", layout="huggingface")
    with pytest.raises(UserError, match="has 5 stages"):
        keras_vit.from_checkpoint(tmp_path / "x")


@pytest.mark.parametrize(
    ("pretrained", "fields"),
    [
        ({}, {"resize": "resize-small", "crop_from": 36, "interpolation": "bicubic"}),
        ({"crop_mode": "squash", "crop_pct": 1.0}, {"resize": "stretch", "crop_from": None}),
        ({"crop_mode": "squash", "crop_pct": 0.8}, {"resize": "stretch", "crop_from": (40, 40)}),
        ({"crop_mode": "border", "crop_pct": 0.9}, {"resize": "pad", "crop_from": (35, 35)}),
        ({"crop_pct": 0.9, "interpolation": "lanczos"}, {"crop_from": 35, "interpolation": "lanczos3"}),
        ({"crop_pct": 0.9, "test_input_size": [3, 32, 32], "test_crop_pct": 1.0}, {"crop_from": 32}),
    ],
)
def test_images_are_resized_as_pretrained_cfg_says(pretrained, fields, tmp_path):
    found = dataclasses.asdict(images_of(timm_vit(tmp_path, **pretrained), image_size=32))
    assert {name: found[name] for name in fields} == fields


@pytest.mark.parametrize("change", [{"interpolation": "hamming"}, {"crop_mode": "zoom"}, {"crop_pct": 2.0}])
def test_another_resize_of_timm_is_refused(change, tmp_path):
    with pytest.raises(UserError, match=next(iter(change))):
        keras_vit.from_checkpoint(timm_vit(tmp_path, **change))
