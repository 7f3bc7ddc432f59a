"""The code in reports that prepares an image: it gives the pixels of the model's preprocessing."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from PIL import Image

import keras_vit
from export.texts import preprocessing_code, preprocessing_section
from keras_vit import Preprocessing, preprocessing_of

FOLDER = pathlib.Path(__file__).parents[1] / "fixtures" / "pixels"
PROCESSORS = json.loads((FOLDER / "index.json").read_text())["processors"]
SIZE = (16, 24)
MEANS = ((-2.1, -2.0, -1.8), (2.2, 2.4, 2.6))
PILLOW = Preprocessing(SIZE, library="transformers", interpolation="bicubic", background=None)
RULES = [
    PILLOW,
    dataclasses.replace(PILLOW, value_range=MEANS, background="white", exif_orientation=False),
    dataclasses.replace(PILLOW, crop_from=(21, 31), interpolation="lanczos3"),
    dataclasses.replace(PILLOW, crop_from=(21, 31), library="timm", interpolation="nearest"),
    dataclasses.replace(PILLOW, resize="crop", interpolation="bilinear"),
    dataclasses.replace(PILLOW, resize="pad", interpolation="box", value_range=MEANS),
    dataclasses.replace(PILLOW, resize="pad", background="white"),
    dataclasses.replace(PILLOW, resize="pad", crop_from=(19, 30), library="timm", value_range=MEANS),
    dataclasses.replace(PILLOW, resize="pad", crop_from=(19, 31)),
    *(
        dataclasses.replace(PILLOW, resize="resize-small", crop_from=crop_from, library=library)
        for crop_from in (27, (21, 31))
        for library in ("transformers", "timm")
    ),
    Preprocessing(SIZE, resize="resize-small", crop_from=27, interpolation="bicubic", antialias=True, dtype="uint8"),
    dataclasses.replace(PILLOW, channels=1, resize="pad"),
    dataclasses.replace(PILLOW, resize="pad", padding="after", background="gray"),
    dataclasses.replace(PILLOW, resize="pad", padding="after", crop_from=(19, 31)),
    Preprocessing(SIZE),
    Preprocessing(SIZE, resize="resize-small", crop_from=27, value_range=MEANS),
    Preprocessing(SIZE, 1, resize="pad"),
]


@pytest.fixture(name="photos", scope="module")
def _images(tmp_path_factory):
    """Files of several sizes and modes, one of them turned."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(2)
    turned = Image.Exif()
    turned[0x0112] = 6
    sizes = {"wide": (91, 33, 3), "tall": (31, 120, 3), "odd": (47, 44, 4), "small": (5, 9, 3), "gray": (60, 35, 1)}
    for name, (*size, channels) in sizes.items():
        pixels = rng.integers(0, 256, (*size[::-1], channels), dtype=np.uint8)
        image = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
        image.save(folder / f"{name}.png", exif=turned if name == "tall" else Image.Exif())
    return sorted(folder.iterdir())


def prepared(preprocessing: Preprocessing, path: pathlib.Path, **options) -> np.ndarray:
    names: dict = {}
    exec("\n".join(preprocessing_code(preprocessing, **options)), names)
    return names["prepare"](path)


@pytest.mark.parametrize("number", range(len(RULES)))
def test_the_code_gives_the_pixels_of_the_model(number, photos):
    rule = RULES[number]
    for path in photos:
        with Image.open(path) as image:
            wanted, color = np.asarray(rule(image)), image.mode != "L"
        found, pixels = prepared(rule, path), prepared(rule, path, raw_pixels=True)
        assert (found.dtype, found.shape, pixels.dtype) == (np.float32, (1, *wanted.shape), np.uint8)
        # Pillow's gray of a color may round the other way.
        np.testing.assert_allclose(found[0], wanted, atol=2.1 / 255 if rule.channels == 1 and color else 1e-6)
        levels = 0.51 if rule.dtype == "float32" else 0.01
        lows, highs = (np.asarray(end) for end in rule.value_range)
        assert np.all(np.abs(np.asarray(rule.normalize(pixels)) - found) <= levels * (highs - lows) / 255)


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_code_gives_the_pixels_of_the_original(name):
    preprocessing = preprocessing_of(keras_vit.from_checkpoint(FOLDER / name))
    expected = np.load(FOLDER / f"{name}.npz")
    assert not any("keras_vit" in line for line in preprocessing_code(preprocessing))
    for photo in sorted((FOLDER / "pictures").iterdir()):
        np.testing.assert_allclose(prepared(preprocessing, photo)[0], expected[photo.name], atol=1e-6)


def test_the_section_says_what_is_done_where_there_is_no_code():
    section = preprocessing_section(Preprocessing(SIZE, 5), raw_pixels=True)
    assert Preprocessing(SIZE, 5).summary() in section[2]
    assert "```python" not in section
