"""What a ViT for few images can have: shifted patches, locality self-attention, sequence pooling."""

import dataclasses

import numpy as np
import pytest
import scipy.special

import keras_vit
from keras_vit import ShiftedPatches, UserError
from keras_vit.models.attention import HeadScale, NoSelfAttention
from keras_vit.models.layers import WeightedMean
from keras_vit.models.vit import ShiftAndCut
from tests.support import TINY, TINY_IMAGE, randomize


def test_a_shifted_patch_has_the_pixels_of_the_image_and_of_four_shifted_copies():
    images = np.random.default_rng(1).normal(size=(2, 8, 12, 3)).astype(np.float32)
    found = np.asarray(ShiftAndCut(4)(images)).reshape(2, 2, 3, 4, 4, 5, 3)
    # Row and column of the pixel of the image that a copy shows at (0, 0).
    for copy, (down, right) in enumerate([(0, 0), (2, 2), (2, -2), (-2, 2), (-2, -2)]):
        for row in range(8):
            for column in range(12):
                inside = 0 <= row + down < 8 and 0 <= column + right < 12
                expected = images[:, row + down, column + right] if inside else np.zeros((2, 3))
                place = found[:, row // 4, column // 4, row % 4, column % 4, copy]
                np.testing.assert_array_equal(place, expected)


def test_locality_self_attention_is_the_softmax_of_scaled_products_without_the_diagonal(tiny_images):
    model = randomize(keras_vit.build(dataclasses.replace(TINY, locality_attention=True), image_size=TINY_IMAGE))
    name = "Transformer.encoderblock_0.MultiHeadDotProductAttention_1"
    norm = model.get_layer("Transformer.encoderblock_0.LayerNorm_0")
    outputs = [norm.output, *(model.get_layer(f"{name}.{part}").output for part in ("query", "key"))]
    inside = keras_vit.intermediates(model, ["attention_0"])(tiny_images)["attention_0"]
    _, query, key = (np.asarray(values) for values in type(model)(model.input, outputs)(tiny_images))
    heads, width = 3, 4
    query, key = (x.reshape(len(x), -1, heads, width).transpose(0, 2, 1, 3) for x in (query, key))
    scale = np.asarray(model.get_layer(f"{name}.scaled_query").scale)
    logits = query @ key.transpose(0, 1, 3, 2) * scale[:, None, None] / np.sqrt(width)
    logits[..., np.arange(logits.shape[-1]), np.arange(logits.shape[-1])] = -np.inf
    np.testing.assert_allclose(inside, scipy.special.softmax(logits, axis=-1), rtol=1e-4, atol=1e-6)


def test_the_temperature_begins_at_that_of_attention_and_no_token_attends_to_itself():
    query = np.random.default_rng(2).normal(size=(1, 5, 6)).astype(np.float32)
    np.testing.assert_array_equal(HeadScale(3)(query), query)
    mask = np.asarray(NoSelfAttention()(query))[0, 0]
    assert np.all((mask < -1e4) == np.eye(5, dtype=bool))
    assert np.all(np.isfinite(mask.astype(np.float16)))


def test_sequence_pooling_is_the_mean_with_the_softmax_of_the_logits():
    rng = np.random.default_rng(3)
    tokens, logits = rng.normal(size=(2, 5, 6)).astype(np.float32), rng.normal(size=(2, 5, 1)).astype(np.float32)
    expected = np.sum(scipy.special.softmax(logits, axis=1) * tokens, axis=1)
    np.testing.assert_allclose(WeightedMean()(tokens, logits), expected, rtol=1e-5, atol=1e-6)


def test_sizes_and_channels_that_shifted_patches_do_not_take_are_refused():
    config = dataclasses.replace(TINY, patch_size=1, stem=ShiftedPatches(3))
    with pytest.raises(UserError, match="image height must be a multiple of the patch height 3, but is 25"):
        keras_vit.build(config, image_size=25)
    with pytest.raises(UserError, match="shifted patches are normalized over all"):
        keras_vit.adapt(keras_vit.build(config, image_size=TINY_IMAGE), channels=1)


@pytest.mark.parametrize(
    "changes", [{"stem": ShiftedPatches(3), "patch_size": 1}, {"locality_attention": True}, {"classifier": "sequence"}]
)
def test_another_size_is_taken_and_a_layout_of_other_codes_refused(changes, tmp_path):
    model = keras_vit.build(dataclasses.replace(TINY, num_layers=1, **changes), image_size=TINY_IMAGE, num_classes=3)
    assert keras_vit.adapt(model, image_size=24).output_shape == (None, 3)
    for layout in ("npz", "timm", "huggingface"):
        with pytest.raises(UserError):
            keras_vit.save_checkpoint(model, tmp_path / layout, layout=layout)
    assert not list(tmp_path.iterdir())
