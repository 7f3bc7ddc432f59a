"""The header checks of a tf.data graph are those of the Python code, on whole and on damaged files."""

import io

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from keras_vit.files.image_formats import color_key, format_problem
from training.input import image_header

GRAY = np.random.default_rng(0).integers(0, 256, (7, 11), np.uint8)


def encoded(kind: str, mode: str = "L", **options) -> bytes:
    stream = io.BytesIO()
    PIL.Image.fromarray(GRAY).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


SIGNATURE = [tf.TensorSpec((), tf.string)]  # so that they are traced once
supported = tf.function(image_header.is_supported, SIGNATURE, autograph=False)
keyed = tf.function(image_header.has_color_key, SIGNATURE, autograph=False)
ANIMATION = {"save_all": True, "append_images": [PIL.Image.fromarray(GRAY[::-1])]}
FILES = {
    "gray PNG": encoded("PNG"),
    "gray PNG with a color key": encoded("PNG", transparency=3),
    "PNG with a color key": encoded("PNG", "RGB", transparency=(1, 2, 3)),
    "PNG with a palette": encoded("PNG", "P", transparency=3),
    "PNG with alpha": encoded("PNG", "RGBA"),
    "GIF": encoded("GIF"),
    "animated GIF": encoded("GIF", **ANIMATION),
    "gray BMP": encoded("BMP"),
    "BMP": encoded("BMP", "RGB"),
    "BMP with alpha": encoded("BMP", "RGBA"),
    "black and white BMP": encoded("BMP", "1"),
    "WebP": encoded("WEBP", "RGB"),
    "animated WebP": encoded("WEBP", "RGB", **ANIMATION),
    "TIFF": encoded("TIFF"),
    "words": b"words",
    "nothing": b"",
}


@pytest.mark.parametrize("name", FILES)
def test_the_graph_and_python_judge_files_alike(name):
    rng, data = np.random.default_rng(1), FILES[name]
    files = [data, *(data[:length] for length in rng.integers(0, len(data) + 1, 15))]
    for position in rng.integers(0, min(len(data), 90) or 1, 60 if data else 0):
        files.append(data[:position] + rng.bytes(1) + data[position + 1 :])
    for file in files:
        assert bool(supported(tf.constant(file))) == (format_problem(file) is None), file[:90]
        assert bool(keyed(tf.constant(file))) == (color_key(file) is not None), file[:90]


def test_a_later_frame_that_is_larger_than_the_screen_is_refused():
    data = encoded("GIF", **ANIMATION)
    later = data.rindex(b"\x2c\0\0\0\0\x0b\0")
    assert later != data.index(b"\x2c\0\0\0\0\x0b\0")
    assert image_header.is_supported(tf.constant(data))
    assert not image_header.is_supported(tf.constant(data[: later + 5] + b"\x0c" + data[later + 6 :]))
