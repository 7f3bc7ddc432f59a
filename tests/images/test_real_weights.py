"""A real DINOv2-S on images: from the file to the tokens, beside Pillow and ONNX Runtime, and in other arithmetic.

KERAS_VIT_DINOV2 names the folder: the model as transformers saves it, and reference.npz with `images` (B, 224, 224, 3),
normalized, and `last_hidden_state` (B, 257, 384) of another runtime. It may also have tokens.npz, the tokens
(257, 384) of each image of tests/fixtures/pixels by its name.
"""

import os
import pathlib

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

import keras_vit

IMAGES = pathlib.Path(__file__).parents[1] / "fixtures" / "pixels" / "pictures"
FOLDER = pathlib.Path(os.environ.get("KERAS_VIT_DINOV2", "missing"))
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="KERAS_VIT_DINOV2 does not name a folder of DINOv2-S/14"),
]


@pytest.fixture(name="model", scope="module")
def _model():
    return keras_vit.from_checkpoint(FOLDER, image_size=224)


@pytest.fixture(name="tokens", scope="module")
def _tokens(model):
    return keras_vit.intermediates(model, ["encoded"])


def as_the_processor_says(path: pathlib.Path) -> np.ndarray:
    """The smaller side to 256 with Pillow's bicubic filter, the center 224, normalized: (224, 224, 3)."""
    with PIL.Image.open(path) as image:
        image = image.convert("RGB")
    short = min(image.size)
    image = image.resize(tuple(256 * side // short for side in image.size), PIL.Image.Resampling.BICUBIC)
    left, top = ((side - 224) // 2 for side in image.size)
    return ((np.asarray(image)[top : top + 224, left : left + 224] / 255 - MEAN) / STD).astype(np.float32)


def test_tokens_are_those_of_onnx_runtime(tokens):
    with np.load(FOLDER / "reference.npz") as arrays:
        found = np.asarray(tokens(arrays["images"])["encoded"])
        np.testing.assert_allclose(found, arrays["last_hidden_state"], atol=2e-4)


@pytest.mark.parametrize("path", sorted(IMAGES.iterdir()), ids=lambda path: path.name)
def test_a_file_has_the_tokens_of_pillows_pixels(path, model, tokens):
    preprocessing = keras_vit.preprocessing_of(model)
    pixels = as_the_processor_says(path)
    graph = tf.function(lambda data: preprocessing.normalize(preprocessing.resized(preprocessing.decode(data))))
    in_graph = graph(tf.io.read_file(str(path))).numpy()
    with PIL.Image.open(path) as image:
        np.testing.assert_allclose(preprocessing(image), pixels, atol=1e-5)
    np.testing.assert_allclose(in_graph, pixels, atol=2.1 / 255 / STD.min())
    expected, found = (np.asarray(tokens(images[None])["encoded"])[0] for images in (pixels, in_graph))
    assert np.abs(found - expected).max() <= 5e-3 * np.abs(expected).max()
    if (FOLDER / "tokens.npz").is_file():
        with np.load(FOLDER / "tokens.npz") as reference:
            np.testing.assert_allclose(expected, reference[path.name], atol=1e-3 * np.abs(expected).max())
