"""From a decoded image to the model's input: sizes, channels, values."""

import warnings

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import Preprocessing, UserError
from keras_vit.images.decode import on_white
from keras_vit.images.preprocessing import to_channels
from tests.support import TINY, TINY_IMAGE

PADDING = Preprocessing((9, 11), resize="pad")
CENTER = Preprocessing((9, 11), resize="resize-small", crop_from=13)
SIGNATURE = [tf.TensorSpec((None, None, None), tf.uint8)]  # so that they are traced once
pad_in_graph, center_in_graph = (tf.function(rule.resized, SIGNATURE) for rule in (PADDING, CENTER))


def photo(height: int, width: int, channels: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (height, width, channels), dtype=np.uint8)


def test_official_values_are_those_of_vit_jax():
    values = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    found = np.asarray(Preprocessing((16, 16), channels=1)(values))
    np.testing.assert_array_equal(found, (values.astype(np.float32) - np.float32(127.5)) / np.float32(127.5))


def test_an_image_of_the_right_size_stays_uint8_until_it_is_normalised():
    image = photo(6, 9, 3)
    fitted = Preprocessing((6, 9)).resized(image)
    assert fitted.dtype == np.uint8
    np.testing.assert_array_equal(fitted, image)


def test_stretching_is_the_plain_bilinear_resize():
    image = photo(11, 23, 3)
    expected = tf.image.resize(image, (6, 9), method="bilinear", antialias=False)
    np.testing.assert_array_equal(Preprocessing((6, 9)).resized(image), expected)


def test_cropping_averages_what_it_shrinks():
    """Stripes of one pixel become gray; without antialiasing they alias to black or white."""
    stripes = np.zeros((40, 90, 1), np.uint8)
    stripes[:, ::2] = 200
    fitted = np.asarray(Preprocessing((5, 5), channels=1, resize="crop").resized(stripes))
    np.testing.assert_allclose(fitted, 100.0, atol=5.0)
    window = stripes[:, 25:65].astype(np.float32)
    np.testing.assert_allclose(fitted, tf.image.resize(window, (5, 5), antialias=True), rtol=1e-5)


@pytest.mark.parametrize("size", [(30, 90), (90, 31), (5, 3), (4, 40), (9, 11), (1, 200), (500, 333)])
def test_padding_shows_the_whole_image_on_white(size):
    """The antialiased resize in the aspect ratio of the image, centered; in a graph without known sides as well."""
    image = photo(*size, 3)
    step = max(size[0] / 9, size[1] / 11)
    resized = np.maximum(np.round(np.array(size) / step), 1).astype(int)
    top, left = ((9, 11) - resized) // 2
    expected = np.full((9, 11, 3), 255.0, np.float32)
    expected[top : top + resized[0], left : left + resized[1]] = tf.image.resize(image, resized, antialias=True)
    np.testing.assert_allclose(PADDING.resized(image), expected, atol=1e-2)
    np.testing.assert_allclose(pad_in_graph(image), expected, atol=1e-2)


@pytest.mark.parametrize("size", [(37, 50), (50, 33), (10, 8), (23, 13), (13, 13), (9, 11)])
def test_the_centre_of_the_resized_image_is_that_of_big_vision(size):
    """resize_small(13), by areas and to whole pixels, then central_crop(9, 11)."""
    image = photo(*size, 3)
    resized = np.round(np.array(size, np.float32) * np.float32(13 / min(size))).astype(int)
    areas = tf.image.resize(image, resized, method="area").numpy()
    top, left = (resized - (9, 11)) // 2
    expected = areas[top : top + 9, left : left + 11]
    np.testing.assert_allclose(CENTER.resized(image), expected, atol=1e-2)
    np.testing.assert_allclose(center_in_graph(image), expected, atol=1e-2)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_any_image_becomes_rgb_or_gray(channels):
    image = photo(5, 7, channels)
    rgb, gray = (np.asarray(to_channels(tf.constant(image), wanted)) for wanted in (3, 1))
    np.testing.assert_array_equal(rgb, image[..., :3] if channels >= 3 else np.repeat(image[..., :1], 3, axis=-1))
    luma = image[..., :3] @ np.array([0.299, 0.587, 0.114]) if channels >= 3 else image[..., 0]
    assert (gray.shape, gray.dtype) == ((5, 7, 1), np.uint8)
    assert np.abs(gray[..., 0] - luma).max() <= 0.5001


@pytest.mark.parametrize("channels", [2, 4])
@pytest.mark.parametrize("wanted", [1, 3])
def test_transparent_images_are_put_on_white(channels, wanted):
    image = photo(5, 7, channels)
    image[0, :3, -1] = (0, 255, 128)
    alpha = image[..., -1:].astype(float) / 255
    colors = image[..., :3] if channels == 4 else np.repeat(image[..., :1], 3, axis=-1)
    seen = np.round(colors * alpha + 255 * (1 - alpha)).astype(np.uint8)
    preprocessing = Preprocessing((5, 7), channels=wanted)
    np.testing.assert_array_equal(np.asarray(preprocessing.to_channels(image)), to_channels(seen, wanted))
    graph = tf.function(preprocessing.to_channels, SIGNATURE)
    np.testing.assert_array_equal(graph(image), to_channels(seen, wanted))
    dropped = Preprocessing((5, 7), channels=wanted, background=None).to_channels(image)
    np.testing.assert_array_equal(dropped, to_channels(colors, wanted))


def test_every_color_and_alpha_is_blended_to_the_nearest_number_and_the_same_in_numpy():
    levels = np.arange(256, dtype=np.uint8)
    image = np.stack(np.meshgrid(levels, levels), axis=-1)  # (256, 256, 2)
    color, alpha = (image[..., index].astype(np.float64) for index in range(2))
    expected = np.round(255.0 - (255.0 - color) * alpha / 255.0)
    np.testing.assert_array_equal(on_white(image)[..., 0], expected)
    np.testing.assert_array_equal(to_channels(tf.constant(image), 1, "white")[..., 0], expected)


def test_a_model_stored_before_there_was_a_background_goes_on_dropping_alpha():
    model = keras_vit.build(TINY, preprocessing=Preprocessing(TINY_IMAGE), num_classes=2)
    assert keras_vit.preprocessing_of(model).background == "white"
    del next(layer for layer in model.layers if hasattr(layer, "preprocessing")).preprocessing["background"]
    assert keras_vit.preprocessing_of(model).background is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image_size": (0, 4)}, r"image_size must be two integers of at least 1, but is \(0, 4\)"),
        ({"channels": 0}, "channels must be an integer of at least 1, but is 0"),
        ({"resize": "zoom"}, "resize must be one of stretch, crop, pad"),
        ({"resize": "resize-small"}, "crop_from is required for resize-small .*, but resize-small has crop_from None"),
        ({"resize": "crop", "crop_from": 9}, "crop_from .* does not apply to crop, but crop has crop_from 9"),
        ({"crop_from": (9, 3)}, r"crop_from must be at least both sides of \(4, 4\), but is \(9, 3\)"),
        ({"crop_from": (9,)}, r"crop_from must be two integers of at least 1, but is \(9,\)"),
        ({"interpolation": "hamming"}, "interpolation must be one of nearest, bilinear"),
        ({"dtype": "int8"}, "dtype must be one of float32, uint8"),
        ({"library": "pillow"}, "library must be one of tensorflow, transformers, timm"),
        ({"value_range": (1.0, 1.0)}, "low below high"),
        ({"resize": "pad", "background": None}, "resize pad fills what the image leaves free"),
    ],
)
def test_impossible_preprocessing_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        Preprocessing(**{"image_size": (4, 4), **fields})


def test_images_that_cannot_get_the_channels_are_refused():
    with pytest.raises(UserError, match="An image with 3 channels cannot be converted to 5"):
        Preprocessing((4, 4), channels=5).resized(photo(4, 4, 3))


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("cat.jpg", "an array of pixels or a PIL image, but is a str"),
        (b"\xff\xd8", "but is a bytes"),
        (np.zeros((8, 8)), r"numbers \(h, w, C\), or a batch \(B, h, w, C\), but is float64 of shape \(8, 8\)"),
        (np.zeros((3, 8, 9), np.uint8), r"channels of an image should come last, but its shape is \(3, 8, 9\)"),
        (np.full((8, 8, 3), np.nan, np.float32), "but has NaN"),
    ],
)
def test_what_is_no_image_is_refused(image, words):
    with pytest.raises(UserError, match=words):
        Preprocessing(8)(image)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.full((8, 8, 3), 1.0, np.float32), "the largest is 1; multiply images of 0 to 1 by 255"),
        (np.full((8, 8, 3), 60_000, np.uint16), "they are 60000 to 60000; scale them"),
        (np.full((8, 8, 3), -2.0, np.float32), "they are -2 to -2; scale them"),
        (PIL.Image.fromarray(np.full((8, 8), 255, np.int32)), "its largest value is 255, so it is black"),
    ],
)
def test_values_that_cannot_be_pixels_are_warned_of(image, words):
    with pytest.warns(UserWarning, match=words):
        Preprocessing(8)(image)


@pytest.mark.parametrize("image", [np.zeros((8, 8, 3)), np.full((2, 8, 8, 1), 255.4), np.ones((8, 8, 3), np.uint8)])
def test_values_that_can_be_pixels_are_not_warned_of(image):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Preprocessing(8)(image)


@pytest.mark.parametrize(
    "fields", [{"interpolation": "box", "resize": "pad"}, {"interpolation": "gaussian", "library": "transformers"}]
)
def test_a_filter_that_has_no_meaning_there_is_refused(fields):
    with pytest.raises(UserError, match=f"{fields['interpolation']} is for resize-small of float32"):
        Preprocessing((4, 4), **fields)


def test_another_resize_has_its_usual_filter_in_tensorflows_way_and_the_models_own_in_pillows():
    ours = Preprocessing((4, 4), resize="resize-small", crop_from=6).with_resize("stretch", None)
    assert ours == Preprocessing((4, 4))
    timm = {"library": "timm", "interpolation": "bicubic"}
    assert Preprocessing((4, 4), resize="resize-small", crop_from=6, **timm).with_resize("stretch", None) == (
        Preprocessing((4, 4), **timm)
    )
    blurred = Preprocessing((4, 4), library="transformers", dtype="float32", interpolation="gaussian")
    assert blurred.with_resize("pad", None).interpolation == "gaussian"
    assert blurred.with_resize("crop", None).interpolation == "bilinear"


def test_a_model_that_begins_to_pad_places_transparent_images_on_white():
    clear = np.zeros((2, 4, 4), np.uint8)  # black, and transparent
    for library in ("transformers", "tensorflow"):
        dropping = Preprocessing((4, 4), background=None, library=library)
        assert (np.asarray(dropping.with_resize("pad", None)(clear)) == 1.0).all()
        assert dropping.with_resize("crop", None).background is None
    padding = Preprocessing((4, 4), background=None, library="timm", resize="pad")
    assert padding.with_resize("pad", None) == padding  # as timm does
