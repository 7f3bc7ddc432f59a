"""timm's Eva layout: DINOv3, EUPE and LingBot-Vision, and the refusal of its other models."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

import keras_vit
from keras_vit import UserError
from keras_vit.files.safetensors import read_json
from tests.support import FIXTURES, assert_equal_arrays, changed_folder, loaded

TASKS = FIXTURES / "tasks"
DINOV3, EVA02 = "tasks/timm_dinov3", "brought/timm_eva02_tiny"
GOLDEN = {
    name: entry
    for name, entry in json.loads((TASKS / "index.json").read_text())["fixtures"].items()
    if name.startswith("timm_dinov3")
}


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        pytest.param(name, suffix, marks=[pytest.mark.slow] * (suffix != "" and name != "timm_dinov3_swiglu"))
        for name in GOLDEN
        for suffix in ("", "_large")
    ],
)
def test_tokens_and_features_agree_with_timm(name, suffix):
    """At the size of the file and at another, rectangular one."""
    recorded = np.load(TASKS / GOLDEN[name]["io"])
    images = recorded[f"images{suffix}"]
    model = loaded(TASKS / name, **({"image_size": images.shape[1:3]} if suffix else {}))
    inside = keras_vit.intermediates(model, ["encoded", "pre_logits"])(images)
    for ours, key in (("encoded", "features"), ("pre_logits", "logits")):
        np.testing.assert_allclose(inside[ours], recorded[key + suffix], **GOLDEN[name]["tolerance"], err_msg=key)


@pytest.mark.parametrize("name", GOLDEN)
def test_reading_and_writing_gives_the_same_arrays_and_model(name, tmp_path):
    model = loaded(TASKS / name)
    keras_vit.save_checkpoint(model, tmp_path / name, layout="timm")
    original, copy = (safetensors.numpy.load_file(f / name / "model.safetensors") for f in (TASKS, tmp_path))
    assert_equal_arrays(copy, original)
    assert keras_vit.describe(tmp_path / name).config == keras_vit.config_of(model)
    before, after = (read_json(folder / name / "config.json")["architecture"] for folder in (TASKS, tmp_path))
    assert before == after


@pytest.mark.parametrize("name", GOLDEN)
def test_timm_builds_the_model_of_a_folder_with_rotary_positions(name, tmp_path):
    timm = pytest.importorskip("timm", reason="timm and torch of benchmarks/requirements.txt are not installed")
    torch = pytest.importorskip("torch")
    model = keras_vit.from_checkpoint(TASKS / name, image_size=(28, 36))
    keras_vit.save_checkpoint(model, tmp_path / name, layout="timm")
    images = np.load(TASKS / GOLDEN[name]["io"])["images_large"]
    original = timm.create_model(f"local-dir:{tmp_path / name}", pretrained=True).eval()
    with torch.no_grad():
        expected = original(torch.from_numpy(images.transpose(0, 3, 1, 2))).numpy()
    np.testing.assert_allclose(model(images), expected, atol=2e-5, rtol=1e-4)


def test_a_bare_file_asks_how_the_model_pools(tmp_path):
    shutil.copy(TASKS / "timm_dinov3" / "model.safetensors", tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="or give classifier to keras_vit.from_checkpoint"):
        keras_vit.from_checkpoint(tmp_path / "x.safetensors", num_heads=4, image_size=20)
    recorded = np.load(TASKS / GOLDEN["timm_dinov3"]["io"])
    for classifier, expected in (("gap", recorded["logits"]), ("token", recorded["features"][:, 0])):
        options = {"num_heads": 4, "image_size": 20, "classifier": classifier}
        model = keras_vit.from_checkpoint(tmp_path / "x.safetensors", **options)
        np.testing.assert_allclose(model(recorded["images"]), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "architecture", "arguments", "sentence"),
    [
        (EVA02, "eva02_tiny_patch14_224", {"rope_type": "mixed"}, "unsupported rope_type='mixed'"),
        (EVA02, "eva02_tiny_patch14_224", {"scale_attn_inner": True}, "says scale_attn_inner=True"),
        (EVA02, "eva02_tiny_patch14_224", {"scale_mlp": True}, "says scale_mlp=True"),
        (EVA02, "eva02_tiny_patch14_224", {"num_heads": 5}, "multiple of num_heads"),
        (DINOV3, "vit_small_patch16_dinov3", {"rope_temperature": 10}, "unsupported rope_temperature=10"),
        (DINOV3, "vit_small_patch16_dinov3", {"num_reg_tokens": 3}, "num_reg_tokens=3, but .* with 4"),
        (DINOV3, "vit_small_patch16_dinov3_qkvb", {}, "qkv_bias=True, but the arrays are of a model with False"),
        (DINOV3, "vit_small_plus_patch16_dinov3", {}, "swiglu_mlp=True, but the arrays are of a model with False"),
        (DINOV3, "vit_small_patch16_dinov3", {"mlp_ratio": 3.0}, "mlp_ratio and thus=144, but the arrays"),
        (DINOV3, "vit_small_patch16_dinov3", {"global_pool": "map"}, "'map' is in config.json"),
        (DINOV3, "eva02_base_patch14_224", {}, "unsupported architecture='eva02_base_patch14_224'"),
    ],
)
def test_a_config_that_contradicts_the_arrays_is_refused(name, architecture, arguments, sentence, tmp_path):
    given = read_json(FIXTURES / name / "config.json")["model_args"] | arguments
    folder = changed_folder(FIXTURES / name, tmp_path / "x", architecture=architecture, model_args=given)
    with pytest.raises(UserError, match=sentence):
        keras_vit.from_checkpoint(folder)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (["patch_embed.proj.weight", "blocks.0.attn.q_proj.weight"], "Sapiens2"),
        (["patch_embed.proj.weight", "blocks.0.attn.q_bias", "pos_embed"], "EVA or Sapiens2"),
        (["patch_embed.proj.weight", "blocks.0.gamma_1", "blocks.0.attn.relative_position_bias_table"], "BEiT"),
        (["patch_embed.proj.weight", "blocks.0.attn.norm.weight", "blocks.0.mlp.fc1.weight"], "BEiT-3"),
        (["patch_embed.proj.weight", "patch_embed.norm.weight"], "AIMv2"),
        (["patch_embed.proj.weight", "patch_embed.norm.weight", "layers.0.blocks.0.norm1.weight"], "Swin"),
        (["patch_embed.proj.weight", "blocks.0.gamma_1", "blocks_token_only.0.gamma_1"], "CaiT"),
        (["embeds.proj.weight", "embeds.pos_embed"], "NaFlex"),
        (["patch_embed.proj.weight", "blocks.0.gamma_1", "blocks.0.attn.qkv.bias"], "RoPE-ViT"),
        (["visual.trunk.stem.weight", "text.cls"], "image tower is no Vision Transformer of timm"),
        (["visual.trunk.cls_token", "visual.trunk.patch_embed.proj.weight", "visual.head.mlp.fc1.weight"], "more than"),
        (["timm_model.patch_embed.proj.weight", "timm_model.patch_embed.norm.weight"], "timm's AIMv2"),
        (["module.patch_embed.proj.weight", "module.attn_pool.latent", "module.cls_token"], "global_pool='map'"),
    ],
)
def test_other_models_are_refused_by_name_also_where_a_wrapper_has_saved_them(keys, name, tmp_path):
    safetensors.numpy.save_file({key: np.zeros((4, 4), np.float32) for key in keys}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=f"{name}.* is not supported"):
        keras_vit.from_checkpoint(tmp_path / "x.safetensors")
