"""Images through the image processors of transformers and timm: the same pixels and logits here."""

import functools
import json
import pathlib

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

import keras_vit
from keras_vit.images import graph, resizing
from tests.support import others_slow

FOLDER = pathlib.Path(__file__).parents[1] / "fixtures" / "pixels"
INDEX = json.loads((FOLDER / "index.json").read_text())


@functools.cache
def golden(processor: str):
    """(model, recorded arrays)."""
    return keras_vit.from_checkpoint(FOLDER / processor), dict(np.load(FOLDER / f"{processor}.npz"))


def assert_close(pixels, expected, value_range, *, equal):
    """No value more than two levels off, and at most 0.5% of them more than half a level; or all equal."""
    low, high = (np.asarray(end) for end in value_range)
    levels = np.abs(np.asarray(pixels) - expected) * 255.0 / (high - low)
    assert levels.max() <= (1e-3 if equal else 2.0)
    assert np.mean(levels > 0.5) <= 0.005


@pytest.mark.parametrize("processor", INDEX["processors"])
def test_a_pil_image_has_the_pixels_and_logits_of_the_original(processor):
    model, expected = golden(processor)
    preprocessing, inputs = keras_vit.preprocessing_of(model), []
    for name in INDEX["pictures"]:
        with PIL.Image.open(FOLDER / "pictures" / name) as image:
            inputs.append(np.asarray(preprocessing(image)))
        assert_close(inputs[-1], expected[name], preprocessing.value_range, equal=True)
    wanted = [expected[f"logits:{name}"] for name in INDEX["pictures"]]
    np.testing.assert_allclose(model(np.stack(inputs)), wanted, atol=2e-5)


@functools.cache
def _decoder(library: str):
    """All processors of a library share a graph, which takes seconds to build."""
    preprocessing = keras_vit.Preprocessing(8, library=library)
    return tf.function(preprocessing.decode, input_signature=[tf.TensorSpec((), tf.string)], autograph=False)


# Both libraries, all filters and rules of resizing.
@pytest.mark.parametrize(
    "processor", others_slow(INDEX["processors"], "hf_vit", "hf_clip", "timm_border", "timm_squash", "timm_full")
)
def test_a_file_in_a_graph_has_the_pixels_of_the_original(processor):
    model, expected = golden(processor)
    preprocessing = keras_vit.preprocessing_of(model)
    resized = tf.function(
        lambda image: preprocessing.normalize(preprocessing.resized(image)),
        input_signature=[tf.TensorSpec((None, None, preprocessing.channels), tf.uint8)],
        autograph=False,
    )
    for name in INDEX["pictures"]:
        image = _decoder(preprocessing.library)(tf.io.read_file(str(FOLDER / "pictures" / name)))
        pixels = resized(preprocessing.to_channels(image))
        assert_close(pixels, expected[name], preprocessing.value_range, equal=False)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "box", "lanczos3"])
def test_the_filters_in_a_graph_are_pillows_for_tall_wide_and_tiny_images(interpolation):
    rng = np.random.default_rng(6)
    for sides in ((301, 100), (100, 301), (1, 40), (40, 1), (50, 70), (256, 256)):
        image = rng.integers(0, 256, (*sides, 3), np.uint8)
        for size in ((48, 48), (224, 60)):
            found = graph.resize_bytes(tf.constant(image), size, interpolation).numpy()
            expected = resizing.resize_with_pillow(image, size, interpolation)
            assert np.abs(found.astype(int) - expected).max() <= 1
            assert np.mean(found != expected) <= 0.005


def test_images_are_padded_blurred_and_resized_as_owlv2_was_trained():
    """The Owlv2ImageProcessor of transformers 4.57.1, for 48 x 48 pixels; the noise is smaller than that."""
    expected, fixture = dict(np.load(FOLDER / "owlv2.npz")), FOLDER.parent / "tasks" / "hf_owlv2"
    preprocessing = keras_vit.preprocessing_of(keras_vit.from_checkpoint(fixture)).for_image_size(48)
    specification = [tf.TensorSpec((None, None, 3), tf.uint8)]
    in_graph = tf.function(preprocessing.__call__, input_signature=specification, autograph=False)
    photos = {"noise.pixels": expected.pop("noise")}
    for name in expected.keys() - photos.keys():
        with PIL.Image.open(FOLDER / "pictures" / name) as image:
            photos[name] = np.asarray(image.convert("RGB"))
    low, high = preprocessing.channel_ranges()
    for name, pixels in photos.items():
        for prepare in (preprocessing, in_graph):
            shares = (np.asarray(prepare(pixels)) - expected[name]) / np.subtract(high, low)
            assert np.abs(shares).max() < 1e-6, name
