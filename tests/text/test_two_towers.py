"""An image tower that was trained further, written back beside its text tower."""

import json
import shutil

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import keras_vit
from keras_vit.files.safetensors import read_json
from tests.support import assert_equal_weights, loaded, others_slow
from tests.text.towers import ALL, CLIP, SIGLIP, TOWERS, golden, texts_of, with_tokenizer


def changed(model: keras.Model) -> keras.Model:
    """The model with other weights, as after training."""
    for weight in model.trainable_weights:
        weight.assign(weight * 0.5 + 0.01)
    return model


@pytest.mark.parametrize("name", others_slow(ALL, CLIP))
def test_only_the_image_tower_changes_and_it_is_that_of_the_model(name, tmp_path):
    folder = with_tokenizer(name, tmp_path / "towers")
    model = changed(keras_vit.zero_shot(folder, texts_of(name)))
    keras_vit.save_checkpoint(model, tmp_path / "new", layout="huggingface", two_towers=folder)
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "new"))
    assert before.keys() == after.keys()
    for key, array in before.items():
        is_same = array.tobytes() == after[key].tobytes()
        assert is_same != key.startswith(("vision_model.", "visual_projection")), key
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    again = keras_vit.zero_shot(tmp_path / "new", texts_of(name))
    images = golden(name)["images"]
    found, expected = (
        keras.ops.convert_to_numpy(keras_vit.intermediates(each, "pre_logits")(images)) for each in (again, model)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_weights_of_16_bits_stay_so_and_this_is_said(tmp_path):
    folder = tmp_path / "towers"
    shutil.copytree(TOWERS / CLIP, folder)
    arrays = {key: array.astype(np.float16) for key, array in load_file(folder / "model.safetensors").items()}
    save_file(arrays, folder / "model.safetensors")
    model = keras_vit.from_checkpoint(folder)
    with pytest.warns(UserWarning, match="have 16 bits"):
        keras_vit.save_checkpoint(model, tmp_path / "new", layout="huggingface", two_towers=folder)
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_classes": 3}, "is another image tower than that of .*lacks"),
        ({"image_size": 28}, "Adapt it to the image size of the checkpoint"),
    ],
)
def test_another_image_tower_is_one_sentence(changes, message, tmp_path):
    model = keras_vit.from_checkpoint(TOWERS / CLIP, **changes)
    with pytest.raises(keras_vit.UserError, match=message):
        keras_vit.save_checkpoint(model, tmp_path / "new", layout="huggingface", two_towers=TOWERS / CLIP)
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_of_one_tower_and_another_layout_are_refused(tmp_path):
    model = loaded(TOWERS / SIGLIP)
    alone = tmp_path / "alone"
    keras_vit.save_checkpoint(model, alone, layout="huggingface")
    with pytest.raises(keras_vit.UserError, match="has no text tower; leave two_towers out"):
        keras_vit.save_checkpoint(model, tmp_path / "new", layout="huggingface", two_towers=alone)
    with pytest.raises(keras_vit.UserError, match="two_towers is for the layout huggingface"):
        keras_vit.save_checkpoint(model, tmp_path / "new.npz", layout="big_vision", two_towers=TOWERS / SIGLIP)


other_images = pytest.mark.filterwarnings("ignore:The image converters of keras-hub")


@other_images
@pytest.mark.parametrize("name", [CLIP, SIGLIP])
def test_both_towers_become_a_preset_of_keras_hub(name, tmp_path):
    """Its CLIP has another epsilon in the last LayerNorm of the text tower, which is said."""
    model, recorded = loaded(TOWERS / name), golden(name)
    with pytest.warns(UserWarning, match="the preset is written without it|has the epsilon") as caught:
        keras_vit.save_two_towers(model, tmp_path / "new", TOWERS / name)
    said = " ".join(str(warning.message) for warning in caught)
    assert "the preset is written without it" in said
    assert ("has the epsilon 1e-05" in said) == (name == CLIP)
    ids = recorded["input_ids"].astype(np.int32)
    found, expected = (
        keras.ops.convert_to_numpy(keras_vit.text_tower(folder)(ids)) for folder in (tmp_path / "new", TOWERS / name)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 if name == CLIP else 0)
    assert_equal_weights(keras_vit.from_checkpoint(tmp_path / "new"), model)


@other_images
def test_the_vocabulary_of_clip_is_written_as_keras_hub_has_it(tmp_path):
    folder = with_tokenizer(CLIP, tmp_path / "towers")
    (folder / "tokenizer.json").unlink()
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<|startoftext|>": 3, "<|endoftext|>": 4}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.warns(UserWarning, match="epsilon"):
        keras_vit.save_two_towers(loaded(TOWERS / CLIP), tmp_path / "new", folder)
    assets = tmp_path / "new" / "assets" / "tokenizer"
    assert json.loads((assets / "vocabulary.json").read_text()) == vocabulary
    assert (assets / "merges.txt").read_text() == "a b\n"
    assert read_json(tmp_path / "new" / "preprocessor.json")["class_name"] == "CLIPPreprocessor"


def test_towers_of_other_sources_are_refused(tmp_path):
    model = loaded(TOWERS / CLIP)
    with pytest.raises(keras_vit.UserError, match="not those of SigLIP|numbers, texts of"):
        keras_vit.save_two_towers(loaded(TOWERS / SIGLIP), tmp_path / "x", TOWERS / CLIP)
    with pytest.raises(keras_vit.UserError, match="without a head of other classes"):
        keras_vit.save_two_towers(keras_vit.adapt(model, num_classes=3), tmp_path / "x", TOWERS / CLIP)
    assert not (tmp_path / "x").exists()
