"""Files that lack a component of their family, and configs that contradict the arrays or themselves, are refused."""

import json
import pathlib
import re
import shutil

import pytest
import safetensors.numpy

import keras_vit
from keras_vit import UserError
from tests.support import FIXTURES, changed_folder

MODERN = FIXTURES / "modern"

# Folder -> the key parts that are removed, and what the message says.
REMOVED = [
    ("hf_clip", "position_embedding", "model_type='clip_vision_model' and thus positions=learned"),
    ("hf_siglip", "position_embedding", "and thus positions=learned"),
    ("hf_deit", "position_embeddings", "and thus positions=learned"),
    ("hf_dinov2_registers", "position_embeddings", "and thus positions=learned"),
    ("hf_mae", "position_embeddings", "and thus positions=learned"),
    ("hf_siglip", "head.", "classifier='gap', but 'map' is in config.json"),
    ("hf_dinov2", "layer_scale", "missing keys: "),
    ("hf_dinov3", "layer_scale", "missing keys: "),
    ("hf_dinov3", "cls_token", "and thus class tokens=1"),
    ("hf_deit_distilled", "distillation_classifier", "missing keys: distillation_classifier.weight"),
    ("hf_clip", "visual_projection", "missing keys: "),
    ("hf_deit", "classifier.", "missing keys: "),
    ("hf_dinov2_classifier", "classifier.bias", "missing keys: classifier.bias"),
    *(
        (name, "patch_embeddings.projection.bias", "embeddings.projection.bias")
        for name in ("hf_deit", "hf_dinov2", "hf_mae")
    ),
    ("hf_siglip", "patch_embedding.bias", "missing keys: embeddings.patch_embedding.bias"),
    *((name, "_proj.bias", "missing keys: ") for name in ("hf_siglip", "hf_clip")),
]
# File of timm, its architecture, the key parts that are removed, and what the message says.
REMOVED_OF_TIMM = [
    ("timm_deit3", "deit3_small_patch16_224", "pos_embed", "and thus pos_embed=learned"),
    ("timm_deit3", "deit3_small_patch16_224", "head.", "missing keys: "),
    ("timm_deit3", "deit3_small_patch16_224", "qkv.bias", "and thus qkv_bias=True"),
    ("timm_dinov2_reg", "vit_small_patch14_reg4_dinov2", "pos_embed", "and thus pos_embed=learned"),
    ("timm_dinov2_reg", "vit_small_patch14_reg4_dinov2", "proj.bias", "missing keys: "),
    ("timm_deit3", "deit3_small_patch16_224", ".ls", "missing keys: "),
    ("timm_clip", "vit_base_patch16_clip_quickgelu_224", "norm_pre", "and thus pre_norm=True"),
    ("timm_siglip", "vit_base_patch32_siglip_256", "attn_pool", "but 'map' is in config.json"),
    ("timm_dinov2_reg", "vit_small_patch14_reg4_dinov2", "reg_token", "and thus reg_tokens=4"),
]


@pytest.mark.parametrize(("name", "part", "words"), REMOVED)
def test_a_component_that_every_model_of_the_family_has_is_missed(name, part, words, tmp_path):
    fields = {"architectures": ["CLIPVisionModelWithProjection"]} if part == "visual_projection" else {}
    folder = changed_folder(MODERN / name, tmp_path / "x", **fields)
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    kept = {key: array for key, array in arrays.items() if part not in f".{key}"}
    assert len(kept) < len(arrays)
    safetensors.numpy.save_file(kept, folder / "model.safetensors")
    with pytest.raises(UserError, match=re.escape(words)):
        keras_vit.from_checkpoint(folder)


@pytest.mark.parametrize(("name", "architecture", "part", "words"), REMOVED_OF_TIMM)
def test_a_component_that_the_architecture_of_timm_has_is_missed(name, architecture, part, words, tmp_path):
    arrays = safetensors.numpy.load_file(MODERN / f"{name}.safetensors")
    safetensors.numpy.save_file(
        {key: array for key, array in arrays.items() if part not in key}, tmp_path / "model.safetensors"
    )
    width = arrays["patch_embed.proj.weight"].shape[0]
    arguments = {"embed_dim": width, "num_heads": 4, "img_size": 20}
    config = {"architecture": architecture, "model_args": arguments}
    config |= {"num_classes": arrays["head.weight"].shape[0]} if "head.weight" in arrays else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=re.escape(words)):
        keras_vit.from_checkpoint(tmp_path)


def test_two_configs_of_a_tower_that_differ_are_refused_and_equal_ones_are_not(tmp_path):
    tower = json.loads((MODERN / "hf_clip" / "config.json").read_text())

    def with_older(name: str, older: dict, drop: str = "") -> pathlib.Path:
        fields = {"model_type": "clip", "vision_config": tower, "vision_config_dict": older}
        return changed_folder(MODERN / "hf_clip", tmp_path / name, drop=[drop], **fields)

    size, alone = with_older("size", {"hidden_size": tower["hidden_size"]}), with_older("alone", tower, "vision_config")
    assert keras_vit.describe(size).config == keras_vit.describe(alone).config
    with pytest.raises(UserError, match="in vision_config' as 'relu', as vision_config_dict does"):
        keras_vit.from_checkpoint(with_older("other", {"hidden_act": "relu"}))


@pytest.mark.parametrize("kind", ["beit", ["vit"], {"vit": 1}])
def test_a_config_of_another_model_beside_a_file_of_timm_is_refused(kind, tmp_path):
    shutil.copyfile(MODERN / "timm_deit3.safetensors", tmp_path / "model.safetensors")
    fields = {"num_attention_heads": 4, "hidden_act": "gelu", "layer_norm_eps": 1e-3}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": kind}))
    with pytest.raises(UserError, match="config.json has the unsupported architecture"):
        keras_vit.from_checkpoint(tmp_path)


def test_without_a_model_type_the_arrays_tell_which_values_are_supported(tmp_path):
    keras_vit.describe(changed_folder(MODERN / "hf_dinov3", tmp_path / "own", drop=["model_type"]))
    with pytest.raises(UserError, match="unsupported rope_theta=50.0; supported: 100.0"):
        other = {"drop": ["model_type"], "rope_theta": 50.0}
        keras_vit.from_checkpoint(changed_folder(MODERN / "hf_dinov3", tmp_path / "other", **other))


def test_a_file_of_timm_alone_keeps_a_grid_whose_positions_are_a_square_number(tmp_path):
    model = keras_vit.build(keras_vit.ViTConfig(4, 48, 2, 3, 96), image_size=(16, 24), num_classes=7)
    keras_vit.save_checkpoint(model, path := tmp_path / "model.safetensors", layout="timm")
    again = keras_vit.from_checkpoint(path, num_heads=3)
    assert again.input_shape == (None, 16, 24, 3)
    assert keras_vit.config_of(again).prefix_positions
    larger = keras_vit.from_checkpoint(path, num_heads=3, image_size=(32, 48))
    assert keras_vit.config_of(larger).prefix_positions


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mlp_ratio": 3.0}, "mlp_ratio and thus="),
        ({"qkv_bias": False}, "qkv_bias=False"),
        ({"in_chans": 1}, "in_chans=1, but 'patch_embed.proj.weight' has 3"),
    ],
)
@pytest.mark.filterwarnings("ignore:The original of")  # whose resizing the config does not say
def test_an_argument_of_timm_that_the_arrays_contradict_is_refused(arguments, words, tmp_path):
    shutil.copyfile(MODERN / "timm_deit3.safetensors", tmp_path / "model.safetensors")
    arrays = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    width, hidden = (len(arrays[key]) for key in ("patch_embed.proj.weight", "blocks.0.mlp.fc1.weight"))
    right = {"embed_dim": width, "num_heads": 4, "mlp_ratio": hidden / width, "qkv_bias": True, "in_chans": 3}
    config = {"architecture": "deit3_small_patch16_224", "model_args": right}
    (tmp_path / "config.json").write_text(json.dumps(config))
    keras_vit.from_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_args": right | arguments}))
    with pytest.raises(UserError, match=re.escape(words)):
        keras_vit.from_checkpoint(tmp_path)


def test_the_mlp_ratio_of_timms_packed_swiglu_counts_gate_and_value(tmp_path):
    config = keras_vit.ViTConfig(4, 48, 2, 24, 64, gated_mlp=True, gelu="silu", layer_scale=0.1)
    model = keras_vit.build(config, image_size=16, num_classes=0)
    keras_vit.save_checkpoint(model, tmp_path / "saved", layout="timm")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["model_args"]["mlp_ratio"] > 2 * 64 / 48
    assert keras_vit.config_of(keras_vit.from_checkpoint(tmp_path / "saved")).mlp_dim == 64


@pytest.mark.parametrize("name", ["hf_deit", "hf_dinov2_classifier"])
def test_a_config_of_transformers_with_other_classes_or_channels_is_refused(name, tmp_path):
    classes = keras_vit.describe(MODERN / name).num_classes
    for number, (fields, words) in enumerate(
        (
            ({"id2label": dict.fromkeys(map(str, range(classes + 1)), "n")}, f"classes in id2label={classes + 1}"),
            ({"drop": ["id2label"], "num_labels": classes + 1}, f"num_labels={classes + 1}"),
            ({"num_channels": 1}, "num_channels=1"),
        )
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            keras_vit.from_checkpoint(changed_folder(MODERN / name, tmp_path / str(number), **fields))


def test_a_gated_dinov2_whose_config_does_not_say_so_is_refused(tmp_path):
    keras_vit.describe(MODERN / "hf_dinov2_swiglu")
    drop = ["model_type", "use_swiglu_ffn", "mlp_ratio"]
    with pytest.raises(UserError, match="says no use_swiglu_ffn and thus a gated MLP=False"):
        keras_vit.from_checkpoint(changed_folder(MODERN / "hf_dinov2_swiglu", tmp_path / "x", drop=drop))
