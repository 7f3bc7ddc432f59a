"""Texts as the classes of an ordinary model: the logits of two towers, saving, adapting, and what is refused."""

import hashlib
import json

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit.models.build import saved_classes
from keras_vit.text.classes import TEMPLATES
from tests.support import FIXTURES, others_slow
from tests.text.towers import ALL, CLIP, SIGLIP, TOWERS, golden, logits_of, texts_of, with_tokenizer


@pytest.mark.parametrize("name", others_slow(ALL, CLIP, SIGLIP))
def test_logits_are_those_of_both_towers(name, tmp_path):
    model = keras_vit.zero_shot(with_tokenizer(name, tmp_path / name), texts_of(name))
    io = golden(name)
    np.testing.assert_allclose(logits_of(model, io["images"]), io["logits_per_image"], rtol=0, atol=1e-5)
    assert keras_vit.classes_of(model) == tuple(texts_of(name))
    assert saved_classes(model).multi_label == (name == SIGLIP)


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return with_tokenizer(CLIP, tmp_path_factory.mktemp("towers") / CLIP)


@pytest.fixture(name="clip", scope="module")
def _clip(folder) -> keras.Model:
    return keras_vit.zero_shot(folder, texts_of(CLIP))


def test_a_class_of_several_texts_in_several_templates_has_their_mean(folder):
    tower = keras_vit.text_tower(folder)
    tokenize = keras_vit.tokenizer(folder)
    embeddings = keras.ops.convert_to_numpy(tower(tokenize(["w3 w5", "w5 w4", "w3 w6", "w6 w4"])))
    mean = embeddings.mean(axis=0)
    classes = {"several": ["w5", "w6"], "one": "w7 w8"}
    model = keras_vit.zero_shot(folder, classes, templates=["w3 {}", "{} w4"])
    kernel = keras.ops.convert_to_numpy(model.get_layer("head").kernel)[:, 0]
    expected = mean / np.linalg.norm(mean)
    np.testing.assert_allclose(kernel / np.linalg.norm(kernel), expected, rtol=0, atol=1e-6)
    saved = saved_classes(model)
    assert saved.texts == (("w5", "w6"), ("w7 w8",))
    assert saved.templates == ("w3 {}", "{} w4")


def test_the_templates_of_clip_are_those_of_open_clip():
    """Digest of `open_clip.OPENAI_IMAGENET_TEMPLATES` (3.3.0)."""
    templates = TEMPLATES["clip"]
    assert len(templates) == 80
    assert hashlib.sha256("\n".join(templates).encode()).hexdigest().startswith("4f976686fb651bb5")


def test_many_classes_are_embedded_in_batches_as_one_by_one(folder):
    names = [f"w{number % 40 + 2} w{number // 40 + 2}" for number in range(600)]
    many, few = (keras_vit.zero_shot(folder, part).get_layer("head").kernel for part in (names, names[590:]))
    np.testing.assert_allclose(np.asarray(many)[:, 590:], np.asarray(few), rtol=0, atol=1e-5)


def test_a_saved_model_keeps_classes_and_logits(clip, tmp_path):
    images = golden(CLIP)["images"]
    clip.save(tmp_path / "model.keras")
    again = keras_vit.from_checkpoint(tmp_path / "model.keras")
    assert saved_classes(again) == saved_classes(clip)
    np.testing.assert_allclose(logits_of(again, images), logits_of(clip, images), rtol=0, atol=1e-6)


def test_pre_logits_are_the_normalized_embedding_of_the_image(clip):
    io = golden(CLIP)
    found = logits_of(keras_vit.intermediates(clip, "pre_logits"), io["images"])
    np.testing.assert_allclose(found, io["image_embeds"], rtol=0, atol=2e-6)
    headless = keras_vit.adapt(clip, num_classes=0, keep_pre_logits=True)
    np.testing.assert_allclose(logits_of(headless, io["images"]), io["image_embeds"], rtol=0, atol=2e-6)
    assert keras_vit.classes_of(headless) is None


def test_another_image_size_keeps_the_classes_and_another_head_does_not(folder):
    model = keras_vit.zero_shot(folder, texts_of(CLIP), image_size=28)
    assert keras_vit.preprocessing_of(model).image_size == (28, 28)
    assert saved_classes(keras_vit.adapt(model, image_size=20)) == saved_classes(model)
    fresh = keras_vit.adapt(model, num_classes=len(texts_of(CLIP)))
    assert keras_vit.classes_of(fresh) is None
    assert not np.asarray(fresh.get_layer("head").kernel).any()


@pytest.mark.parametrize(
    ("classes", "templates", "message"),
    [
        (["w2", "w3", "w2"], None, "names the class 'w2' twice"),
        (["w2", " "], None, "' ' is empty"),
        ({"cat": ["w3", ""]}, None, "'cat' is empty or has an empty one"),
        ([3], None, "3 is empty"),
        (["w2"], "a photo", "A template must have {} where the class goes"),
    ],
)
def test_wrong_classes_and_templates_are_one_sentence(classes, templates, message, folder):
    with pytest.raises(keras_vit.UserError, match=message):
        keras_vit.zero_shot(folder, classes, templates)


def test_a_checkpoint_without_text_tower_or_tokenizer_is_one_sentence():
    with pytest.raises(keras_vit.UserError, match="has no text tower"):
        keras_vit.zero_shot(FIXTURES / "hf_vit", ["cat"])
    with pytest.raises(keras_vit.UserError, match=r"has no tokenizer: neither tokenizer\.json"):
        keras_vit.zero_shot(TOWERS / CLIP, ["cat"])


def test_a_tokenizer_of_another_vocabulary_is_one_sentence(tmp_path):
    folder = with_tokenizer(CLIP, tmp_path / "clip")
    content = json.loads((folder / "tokenizer.json").read_text())
    del content["model"]["vocab"]["w48"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(keras_vit.UserError, match="has 49 tokens .* but its text tower has 50"):
        keras_vit.zero_shot(folder, ["w2"])
