"""Text towers against the recorded outputs of transformers, and what is refused."""

import functools
import json
import shutil

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import keras_vit
from keras_vit.text.checkpoint import open_text
from tests.support import FIXTURES, changed_folder, loaded
from tests.text.towers import (
    ALL,
    CLIP,
    LEGACY,
    SIGLIP,
    TOWERS,
    golden,
    logits_of,
    texts_of,
    tokenizer_json,
    with_tokenizer,
)


def embed(model: keras.Model, ids: np.ndarray) -> np.ndarray:
    return keras.ops.convert_to_numpy(model(ids.astype(np.int32), training=False))


tower = functools.cache(lambda name: keras_vit.text_tower(TOWERS / name))


@pytest.mark.parametrize("name", ALL)
def test_embeddings_are_those_of_transformers(name):
    io = golden(name)
    np.testing.assert_allclose(embed(tower(name), io["input_ids"]), io["text_embeds"], rtol=0, atol=2e-6)


def test_a_saved_tower_loads_and_gives_the_same(tmp_path):
    ids = golden(CLIP)["input_ids"]
    tower(CLIP).save(tmp_path / "text.keras")
    again = keras.models.load_model(tmp_path / "text.keras")
    np.testing.assert_allclose(embed(again, ids), embed(tower(CLIP), ids), rtol=0, atol=1e-6)


def test_a_causal_tower_takes_texts_without_their_padding():
    ids = golden(CLIP)["input_ids"]
    np.testing.assert_allclose(embed(tower(CLIP), ids[:2, :3]), embed(tower(CLIP), ids)[:2], rtol=0, atol=1e-6)
    with pytest.raises(
        keras_vit.UserError, match=f"takes up to {ids.shape[1]} tokens, but these texts have {2 * ids.shape[1]}"
    ):
        tower(CLIP)(np.tile(ids, 2))


def with_arrays(folder, edit):
    """A folder with other arrays."""
    (file,) = folder.glob("*.safetensors")
    arrays = edit(load_file(file))
    file.unlink()
    save_file(arrays, file)
    return folder


def test_the_fields_that_config_json_lacks_have_the_defaults_of_their_class(tmp_path):
    fields = json.loads((TOWERS / CLIP / "config.json").read_text())["text_config"]
    del fields["hidden_act"], fields["layer_norm_eps"]
    found = keras_vit.text_tower(changed_folder(TOWERS / CLIP, tmp_path / "clip", text_config=fields))
    np.testing.assert_allclose(embed(found, golden(CLIP)["input_ids"]), golden(CLIP)["text_embeds"], atol=2e-6)


def test_the_end_token_2_is_that_of_metaclip_2_but_not_of_clip(tmp_path):
    metaclip = keras_vit.text_tower(changed_folder(TOWERS / LEGACY, tmp_path / "x", model_type="metaclip_2"))
    ids = golden(LEGACY)["input_ids"].copy()
    ids[:, 3] = 2
    np.testing.assert_allclose(embed(metaclip, ids), embed(metaclip, ids[:, :4]), rtol=0, atol=1e-6)
    assert np.abs(embed(metaclip, ids) - embed(tower(LEGACY), ids)).max() > 0.1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 5}, "width 32 of the text tower is no multiple of its 5 heads"),
        ({"hidden_act": "relu"}, "unsupported hidden_act='relu'"),
        ({"vocab_size": 51}, "vocab_size=51"),
        ({"eos_token_id": 50}, "number below 50"),
        ([1], "should give 'text_config' as an object"),
    ],
)
def test_a_config_that_does_not_belong_to_the_arrays_is_one_sentence(fields, message, tmp_path):
    if isinstance(fields, dict):
        fields = json.loads((TOWERS / CLIP / "config.json").read_text())["text_config"] | fields
    with pytest.raises(keras_vit.UserError, match=message):
        open_text(changed_folder(TOWERS / CLIP, tmp_path / "clip", text_config=fields))


BIAS, PATCHES = "text_model.encoder.layers.1.mlp.fc1.bias", "vision_model.embeddings.patch_embedding.weight"


@pytest.mark.parametrize(
    ("read", "edit", "message"),
    [
        (
            keras_vit.text_tower,
            lambda arrays: {key: array for key, array in arrays.items() if key != BIAS},
            f"missing keys: {BIAS}",
        ),
        (keras_vit.text_tower, lambda arrays: arrays | {f"{BIAS}2": np.ones(4)}, f"unexpected keys: {BIAS}2"),
        (
            keras_vit.from_checkpoint,
            lambda arrays: arrays | {PATCHES: arrays[PATCHES].reshape(48, -1)},
            "is a SigLIP 2 NaFlex",
        ),
    ],
)
def test_other_arrays_are_refused_by_their_names(read, edit, message, tmp_path):
    folder = with_arrays(changed_folder(TOWERS / SIGLIP, tmp_path / "x"), edit)
    with pytest.raises(keras_vit.UserError, match=message):
        read(folder)


def test_weights_without_their_config_are_one_sentence(tmp_path):
    shutil.copy(TOWERS / LEGACY / "model.safetensors", tmp_path)
    with pytest.raises(keras_vit.UserError, match=r"config\.json cannot be read as .*No such file"):
        keras_vit.text_tower(tmp_path / "model.safetensors")


def test_the_config_of_open_clip_tells_what_its_arrays_do_not(tmp_path):
    shutil.copy(FIXTURES / "brought" / "openai_clip.safetensors", tmp_path / "open_clip_model.safetensors")
    vision = {"image_size": 12, "layers": 2, "width": 16, "head_width": 8, "patch_size": 4, "mlp_ratio": 2.0}
    text = {"context_length": 5, "vocab_size": 7, "width": 8, "heads": 2, "layers": 2}

    def write(**settings) -> None:
        model = {"embed_dim": 6, "quick_gelu": True, "vision_cfg": vision | settings, "text_cfg": text | settings}
        (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": model, "preprocess_cfg": {}}))

    write()
    io = np.load(FIXTURES / "brought" / "openai_clip.io.npz")
    images = logits_of(keras_vit.from_checkpoint(tmp_path), io["images"])
    np.testing.assert_allclose(images, io["image_embeds"], rtol=1e-4, atol=2e-5)
    assert keras_vit.text_tower(tmp_path).output_shape == (None, 6)
    write(qk_norm=True)
    for read in (keras_vit.from_checkpoint, keras_vit.text_tower):
        with pytest.raises(keras_vit.UserError, match="unsupported qk_norm=True"):
            read(tmp_path)


def big_vision_file(path):
    """The golden SigLIP towers under the keys of big_vision."""
    arrays = load_file(TOWERS / SIGLIP / "model.safetensors")
    heads = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    text, tower = "params/txt", "text_model"
    stored = {
        "params/t": arrays["logit_scale"],
        "params/b": arrays["logit_bias"],
        f"{text}/Embed_0/embedding": arrays[f"{tower}.embeddings.token_embedding.weight"],
        f"{text}/pos_embedding": arrays[f"{tower}.embeddings.position_embedding.weight"][None],
        f"{text}/head/kernel": arrays[f"{tower}.head.weight"].T,
        f"{text}/head/bias": arrays[f"{tower}.head.bias"],
        f"{text}/Encoder_0/encoder_norm/scale": arrays[f"{tower}.final_layer_norm.weight"],
        f"{text}/Encoder_0/encoder_norm/bias": arrays[f"{tower}.final_layer_norm.bias"],
    }
    for layer in range(2):
        old, new = f"{tower}.encoder.layers.{layer}", f"{text}/Encoder_0/encoderblock_{layer}"
        for before, after in (("layer_norm1", "LayerNorm_0"), ("layer_norm2", "LayerNorm_1")):
            stored[f"{new}/{after}/scale"] = arrays[f"{old}.{before}.weight"]
            stored[f"{new}/{after}/bias"] = arrays[f"{old}.{before}.bias"]
        for before, after in (("fc1", "Dense_0"), ("fc2", "Dense_1")):
            stored[f"{new}/MlpBlock_0/{after}/kernel"] = arrays[f"{old}.mlp.{before}.weight"].T
            stored[f"{new}/MlpBlock_0/{after}/bias"] = arrays[f"{old}.mlp.{before}.bias"]
        attention = f"{new}/MultiHeadDotProductAttention_0"
        for before, after in heads.items():
            stored[f"{attention}/{after}/kernel"] = arrays[f"{old}.self_attn.{before}.weight"].T.reshape(32, 4, 8)
            stored[f"{attention}/{after}/bias"] = arrays[f"{old}.self_attn.{before}.bias"].reshape(4, 8)
        stored[f"{attention}/out/kernel"] = arrays[f"{old}.self_attn.out_proj.weight"].T.reshape(4, 8, 32)
        stored[f"{attention}/out/bias"] = arrays[f"{old}.self_attn.out_proj.bias"]
    np.savez(path, **stored)
    return path


def stacked(path):
    """The same file with the blocks in one array, as big_vision's scan writes it."""
    arrays, found = dict(np.load(path)), {}
    for key, array in arrays.items():
        if "encoderblock_0" in key:
            blocks = [array, arrays[key.replace("encoderblock_0", "encoderblock_1")]]
            found[key.replace("encoderblock_0", "encoderblock")] = np.stack(blocks)
        elif "encoderblock_" not in key:
            found[key] = array
    np.savez(path, **found)
    return path


@pytest.mark.parametrize("form", [lambda path: path, stacked])
def test_the_text_tower_of_big_vision_is_read(form, tmp_path):
    io = golden(SIGLIP)
    found = embed(keras_vit.text_tower(form(big_vision_file(tmp_path / "siglip.npz"))), io["input_ids"])
    np.testing.assert_allclose(found, io["text_embeds"], rtol=0, atol=2e-6)


def test_both_towers_of_big_vision_make_a_model_of_texts_but_not_with_a_head_of_their_own(tmp_path):
    folder, io = with_tokenizer(SIGLIP, tmp_path / "tokens"), golden(SIGLIP)
    texts = dict(np.load(big_vision_file(folder / "siglip.npz")))
    for num_classes, message in ((None, None), (48, "has head/bias, unlike CLIP and SigLIP")):
        image_tower = keras_vit.from_checkpoint(TOWERS / SIGLIP, num_classes=num_classes)
        keras_vit.save_checkpoint(image_tower, folder / "images.npz", layout="big_vision")
        images = {f"params/img/{key}": array for key, array in np.load(folder / "images.npz").items()}
        np.savez(folder / "siglip.npz", **texts, **images)
        if message is None:
            model = keras_vit.zero_shot(folder / "siglip.npz", texts_of(SIGLIP))
            np.testing.assert_allclose(logits_of(model, io["images"]), io["logits_per_image"], rtol=0, atol=1e-5)
        else:
            with pytest.raises(keras_vit.UserError, match=message):
                keras_vit.zero_shot(folder / "siglip.npz", texts_of(SIGLIP))


@pytest.mark.parametrize("name", ["open_clip_timm_siglip", "open_clip_timm_gap"])
def test_both_towers_of_openclip_beside_an_image_tower_of_timm(name):
    folder = FIXTURES / "brought" / name
    with np.load(FIXTURES / "brought" / f"{name}.io.npz") as recorded:
        io = dict(recorded)
    texts = embed(keras_vit.text_tower(folder), io["token_ids"])
    np.testing.assert_allclose(texts, io["text"], rtol=0, atol=2e-6)
    images = logits_of(loaded(folder), io["images"])
    text = open_text(folder)
    pair = text.scale * (images / np.linalg.norm(images, axis=1, keepdims=True)) @ texts.T + (text.bias or 0.0)
    np.testing.assert_allclose(pair, io["pair"], rtol=1e-4, atol=1e-5)


def test_openclip_canonicalizes_the_texts_of_its_siglip(tmp_path):
    folder = shutil.copytree(FIXTURES / "brought" / "open_clip_timm_siglip", tmp_path / "x")
    words = {"</s>": 1, "w0": 0, **{f"w{number}": number for number in range(2, 48)}, "a": 48, "dog": 49}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(words)))
    ids = keras_vit.tokenizer(folder)(["A, Dog!", "a_dog"])
    np.testing.assert_array_equal(ids, [[48, 49] + [1] * 10] * 2)
