"""Files that people bring from other codes, against what these codes computed with them."""

import dataclasses
import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import keras_vit
from keras_vit import UserError
from keras_vit.checkpoints.formats.timm_models import TIMM_MODELS, current_name
from tests.support import FIXTURES, assert_equal_arrays, loaded, others_slow

BROUGHT = FIXTURES / "brought"
GOLDEN = json.loads((BROUGHT / "index.json").read_text())
# What the other codes call the outputs.
OUTPUTS = {"logits": "logits", "image_embeds": "logits", "pooler_output": "pre_logits", "last_hidden_state": "encoded"}


def brought(name: str, **options):
    return loaded(BROUGHT / name, **GOLDEN[name].get("options", {}), **options)


def recorded(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(BROUGHT / f"{name.removesuffix('.safetensors')}.io.npz"))


def written(name: str, folder: pathlib.Path, layout: str) -> pathlib.Path:
    """A folder of the model, whose arrays are those of the original."""
    keras_vit.save_checkpoint(brought(name), folder / "x", layout=layout)
    original, copy = (safetensors.numpy.load_file(f / "model.safetensors") for f in (BROUGHT / name, folder / "x"))
    assert_equal_arrays(copy, {key: array for key, array in original.items() if "mask_token" not in key})
    return folder / "x"


def timm_reads(folder: pathlib.Path, images: np.ndarray) -> np.ndarray:
    timm, torch = (pytest.importorskip(package) for package in ("timm", "torch"))
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        return model(torch.from_numpy(images.transpose(0, 3, 1, 2))).numpy()


# Of each, a fast one has the keys and arithmetic: another size, head or width of the same family.
SLOW = {"memory_msn", "memory_deit", "memory_dinov2_swiglu", "hf_metaclip2", "hf_chinese_clip_vision"}
SLOW |= {
    "timm_eva02_base",
    "timm_so150m2_rectangular",
    "timm_eva02_tiny",
    "timm_pe_core_base",
    "timm_pe_spatial_gigantic",
}
SLOW |= {"open_clip_linear", "open_clip_timm_siglip", "meta_dinov2.safetensors", "timm_no_final_norm_avg"}


@pytest.mark.parametrize("name", others_slow(GOLDEN, *(GOLDEN.keys() - SLOW)))
def test_the_outputs_are_those_of_the_code_that_wrote_the_file(name):
    size = {"image_size": 20} if name.startswith("meta_dinov3") else {}  # which is not in its files
    io, model, output = recorded(name), brought(name, **size), OUTPUTS[GOLDEN[name]["output"]]
    assert model.input_shape[1:] == io["images"].shape[1:]
    found = keras_vit.intermediates(model, output)(io["images"])
    np.testing.assert_allclose(found, io[GOLDEN[name]["output"]], rtol=1e-4, atol=2e-5)


def test_a_model_that_averages_its_patches_is_written_as_ijepa(tmp_path):
    name = "hf_ijepa_classifier"
    folders = BROUGHT / name, written(name, tmp_path, "huggingface")
    read, copy = (json.loads((folder / "config.json").read_text()) for folder in folders)
    for field in ("architectures", "model_type", "num_attention_heads", "patch_size", "intermediate_size"):
        assert copy[field] == read[field]


def test_gated_blocks_of_dinov3_keep_their_activation(tmp_path):
    config = keras_vit.config_of(brought("memory_dinov3"))
    config = dataclasses.replace(config, gated_mlp=True, gelu="quick")
    model = keras_vit.build(config, image_size=16, num_classes=0)
    keras_vit.save_checkpoint(model, tmp_path / "x", layout="huggingface")
    assert keras_vit.describe(tmp_path / "x").config.gelu == "quick"


RESIZED = [name for name in GOLDEN if "large_size" in GOLDEN[name]]


@pytest.mark.parametrize("name", RESIZED)
def test_at_another_size_positions_are_those_of_the_code_that_wrote_the_file(name):
    io, model = recorded(name), brought(name, image_size=tuple(GOLDEN[name]["large_size"]))
    np.testing.assert_allclose(model(io["images_large"]), io["pooler_output_large"], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("rope_embed.periods", [1.0], "'rope_embed.periods' should be that of DINOv3 of the base 100"),
        ("blocks.1.attn.qkv.bias_mask", 1.0, "bias_mask' should be that of DINOv3 without a bias of the key"),
    ],
)
def test_buffers_that_change_what_is_computed_are_refused(key, value, sentence, tmp_path):
    arrays = safetensors.numpy.load_file(BROUGHT / "meta_dinov3.safetensors")
    arrays[key] = np.broadcast_to(np.float32(value), arrays[key].shape).copy()
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=sentence):
        keras_vit.from_checkpoint(tmp_path / "x.safetensors")


def test_periods_that_were_rounded_to_bfloat16_are_accepted(tmp_path):
    arrays = safetensors.numpy.load_file(BROUGHT / "meta_dinov3.safetensors")
    arrays["rope_embed.periods"] = arrays["rope_embed.periods"].astype(ml_dtypes.bfloat16)
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    config = keras_vit.describe(tmp_path / "x.safetensors").config
    assert (config.num_heads, config.key_bias) == (4, False)  # the heads are in the periods


def test_the_classifier_of_clip_reads_tokens_without_a_last_norm(tmp_path):
    model = brought("hf_clip_classifier")
    config = keras_vit.config_of(model)
    assert (config.final_norm, config.classifier, config.has_class_token) == (False, "gap", True)
    images = np.random.default_rng(0).uniform(-1.0, 1.0, (2, 24, 24, 3)).astype(np.float32)
    found = keras_vit.intermediates(model, ["block_1", "encoded", "pre_logits"])(images)
    np.testing.assert_array_equal(found["encoded"], found["block_1"])
    np.testing.assert_allclose(found["pre_logits"], np.mean(found["block_1"][:, 1:], axis=1), atol=1e-6)
    maps = keras_vit.feature_maps(model, [-1])(images)["block_1"]
    np.testing.assert_array_equal(np.reshape(maps, (2, 9, 24)), found["block_1"][:, 1:])
    with pytest.raises(UserError, match="cannot express"):
        keras_vit.save_checkpoint(model, tmp_path / "x", layout="huggingface")


def test_an_image_tower_of_timm_without_its_config_needs_the_pooling(tmp_path):
    shutil.copy(BROUGHT / "open_clip_defaults" / "open_clip_model.safetensors", tmp_path)
    with pytest.raises(UserError, match="or give classifier to"):
        keras_vit.from_checkpoint(tmp_path / "open_clip_model.safetensors", num_heads=12)
    io = recorded("open_clip_defaults")
    model = keras_vit.from_checkpoint(tmp_path / "open_clip_model.safetensors", num_heads=12, classifier="gap")
    np.testing.assert_allclose(model(io["images"]), io["image_embeds"], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "current"),
    [
        ("vit_small_patch8_224_dino", "vit_small_patch8_224"),
        ("deit3_large_patch16_384_in21ft1k", "deit3_large_patch16_384"),
        ("vit_giant_patch14_224_clip_laion2b", "vit_giant_patch14_clip_224"),
        ("vit_base_resnet50_224_in21k", "vit_base_r50_s16_224"),
        ("resnetv2_152x4_bitm_in21k", "resnetv2_152x4_bit"),
        ("resnetv2_50x1_bit_distilled", "resnetv2_50x1_bit"),
        ("resnetv2_152x2_bit_teacher_384", "resnetv2_152x2_bit"),
        ("vit_small_patch14_dinov2.lvd142m", "vit_small_patch14_dinov2.lvd142m"),
    ],
)
def test_the_deprecated_names_of_timm_are_those_of_their_architectures(name, current):
    assert current_name(name) == current
    assert current.partition(".")[0] in TIMM_MODELS


@pytest.mark.parametrize("name", ["hf_metaclip2_towers", "hf_chinese_clip"])
def test_the_text_tower_beside_an_image_tower_is_skipped(name):
    report = keras_vit.load_checkpoint(brought(name), BROUGHT / name)
    assert any(key.startswith("text_model.") for key in report.dropped)


@pytest.mark.parametrize("name", ["timm_no_final_norm", "timm_no_final_norm_avg"])
def test_a_model_of_timm_without_a_last_norm_is_written_and_read_by_timm(name, tmp_path):
    model, images = brought(name), recorded(name)["images"]
    assert not keras_vit.config_of(model).final_norm
    folder = written(name, tmp_path, "timm")
    shutil.copy(folder / "model.safetensors", tmp_path / "bare.safetensors")
    with pytest.raises(UserError, match="missing keys: norm|Several models"):  # config.json says that there are none
        keras_vit.from_checkpoint(tmp_path / "bare.safetensors", num_heads=3, image_size=model.input_shape[1:3])
    np.testing.assert_allclose(model(images), timm_reads(folder, images), rtol=1e-4, atol=2e-5)


ROTARY = ("timm_eva02_tiny", "timm_eva02_base", "timm_eva02_clip", "timm_pe_core_tiny", "timm_pe_core_base")
ROTARY += ("timm_pe_core_gigantic", "timm_pe_spatial_tiny", "timm_pe_spatial_gigantic", "timm_pe_lang_large")


@pytest.mark.parametrize("name", others_slow(ROTARY, "timm_eva02_clip", "timm_pe_core_tiny", "timm_pe_spatial_tiny"))
def test_eva_02_and_perception_encoders_at_another_size_written_and_read_by_timm(name, tmp_path):
    io = recorded(name)
    other = brought(name, image_size=io["images_other"].shape[1:3])
    np.testing.assert_allclose(other(io["images_other"]), io["logits_other"], rtol=1e-4, atol=2e-5)
    model, folder = brought(name), written(name, tmp_path, "timm")
    assert keras_vit.describe(folder).config == keras_vit.config_of(model)
    np.testing.assert_allclose(model(io["images"]), timm_reads(folder, io["images"]), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["timm_eva02_clip", "timm_pe_core_tiny"])
def test_rotary_positions_beside_others_need_the_config(name, tmp_path):
    shutil.copy(BROUGHT / name / "model.safetensors", tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="put the config.json beside the file"):
        keras_vit.from_checkpoint(tmp_path / "x.safetensors", num_heads=3)
