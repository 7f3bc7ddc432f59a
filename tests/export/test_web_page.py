"""The page that classifies images in the browser with model.onnx."""

import base64
import dataclasses
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess

import keras
import numpy as np
import PIL
import pytest
import tensorflow as tf
from PIL import Image, PngImagePlugin

import keras_vit
from export.onnx import export as onnx_export
from export.onnx.export import FACTS, PAGE, check_page, write_page
from export.source import ExportedModel, Provenance, random_images
from export.tasks import Classification, embedding_of
from keras_vit import Preprocessing, UserError, preprocessing_of
from keras_vit.images.decode import turned as turned_upright
from tests.browser import Page, find_browser, open_browser
from tests.exports import onnx_of
from tests.support import TINY, encoded, randomize, serving

LABELS = ("wren", "ant", "Żubr", "bee <b>", "newt", "eel", "cod")
SIZE = (16, 24)
MEANS = ((-2.1, -2.0, -1.8), (2.2, 2.4, 2.6))
RULES = (
    Preprocessing(SIZE),
    Preprocessing(SIZE, resize="crop", value_range=MEANS),
    Preprocessing(SIZE, resize="pad"),
    Preprocessing(SIZE, resize="resize-small", crop_from=28, value_range=(0.0, 1.0)),
    Preprocessing(SIZE, 1),
    Preprocessing(SIZE, 1, resize="crop"),
    Preprocessing(SIZE, interpolation="bicubic", library="transformers", background=None),
    Preprocessing(SIZE, resize="resize-small", crop_from=28, library="timm", background=None, exif_orientation=False),
)
_IMAGES = pathlib.Path(__file__).parents[1] / "fixtures" / "pixels"
# Rules beside those of the processors of transformers and timm.
_FURTHER = (
    *RULES,
    *(
        Preprocessing(SIZE, interpolation=interpolation, library="transformers", background=None)
        for interpolation in ("nearest", "box", "lanczos3")
    ),
    Preprocessing(SIZE, resize="crop", interpolation="bicubic", library="timm"),
    Preprocessing(SIZE, resize="crop", interpolation="bicubic"),
    Preprocessing(SIZE, interpolation="nearest"),
    Preprocessing(SIZE, interpolation="lanczos3", antialias=True),
    Preprocessing(SIZE, resize="pad", crop_from=(20, 29), background=None, library="timm", value_range=MEANS),
    Preprocessing(SIZE, resize="pad", interpolation="bicubic", library="transformers", background=None),
    Preprocessing(SIZE, resize="resize-small", crop_from=(19, 31), interpolation="bicubic", library="timm"),
    Preprocessing(SIZE, resize="resize-small", crop_from=27, interpolation="bilinear", antialias=True),
    Preprocessing(SIZE, crop_from=(21, 30), library="transformers", interpolation="lanczos3"),
    Preprocessing(SIZE, resize="resize-small", crop_from=(21, 30), interpolation="area"),
)
_PAGE = pathlib.Path(onnx_export.__file__).with_name(PAGE)
# Where the page loads ONNX Runtime Web from, and its version.
CDN, VERSION = re.findall(r'"(https://.*/onnxruntime-web@([\d.]+)/dist/)', _PAGE.read_text(encoding="utf-8"))[0]


def build(preprocessing: Preprocessing) -> keras.Model:
    return randomize(keras_vit.build(TINY, preprocessing=preprocessing, num_classes=7))


def photos() -> dict[str, bytes]:
    """Images of several sizes and formats, smooth as photographs are."""
    rng = np.random.default_rng(4)
    found = {}

    def add(name: str, size: tuple[int, int], mode: str = "RGB", **options) -> None:
        noise = rng.integers(0, 256, (5, 7, len(Image.new(mode, (1, 1)).getbands())), dtype=np.uint8)
        image = Image.fromarray(noise[..., 0] if mode == "L" else noise, mode).resize(size, Image.Resampling.BICUBIC)
        found[name] = encoded(image, name.rpartition(".")[2].replace("jpg", "jpeg"), **options)

    turned = Image.Exif()
    turned[0x0112] = 6
    gamma = PngImagePlugin.PngInfo()
    gamma.add(b"gAMA", (100_000).to_bytes(4, "big"))
    add("small.png", (9, 5))
    add("same.png", SIZE[::-1])
    add("wide.png", (211, 60), pnginfo=gamma)
    add("tall.png", (77, 300), exif=turned)
    add("gray.png", (64, 50), "L")
    add("turned.webp", (50, 40), exif=turned, lossless=True)
    add("photo.jpg", (320, 200), quality=95, exif=turned)
    add("transparent.png", (40, 30), "RGBA")
    return found


def expected(model: keras.Model, preprocessing: Preprocessing, photo: bytes) -> np.ndarray:
    """Probabilities (7,) of the Keras model."""
    image = preprocessing(preprocessing.decode(tf.constant(photo)).numpy())
    return tf.nn.softmax(model.predict_on_batch(np.asarray(image)[None])[0] / 2.0).numpy()


def shown(page: Page) -> dict[str, float]:
    """The classes on the page with their probabilities."""
    rows = page.evaluate(
        "[...document.querySelectorAll('#classes li')].map(row => [row.querySelector('span').textContent, "
        "row.querySelector('meter').value])"
    )
    return dict(rows)


def classify(page: Page, file: pathlib.Path, *, drop: bool = False) -> str:
    """Give a file to the page, and return what it says when it is done."""
    page.drop("#drop", file) if drop else page.choose("input", file)
    said = "document.getElementById('status').textContent"
    page.wait_for(f"!document.querySelector('input').disabled && {said}.includes({json.dumps(file.name)})")
    return page.evaluate(said)


def test_a_page_needs_a_classifier_and_images_that_a_browser_has():
    model = build(Preprocessing(SIZE, 4))
    samples = random_images(RULES[0])
    with pytest.raises(UserError, match="this is a classifier of 4"):
        check_page(Classification(ExportedModel(model, LABELS, samples)))
    with pytest.raises(UserError, match="--web is for classifiers"):
        check_page(embedding_of(ExportedModel(model, (), samples)))


def test_the_page_is_written_with_what_it_needs_to_know(tmp_path):
    origin = Provenance(name="runs/birds", weights="augreg:B_16", license="Apache-2.0", temperature=1.5)
    write_page(tmp_path, RULES[3], LABELS, origin)
    assert {path.name for path in tmp_path.iterdir()} == {"classify.html", "classify.json"}
    facts = json.loads((tmp_path / "classify.json").read_text(encoding="utf-8"))
    assert Preprocessing(**facts.pop("preprocessing")) == RULES[3]
    assert facts == {
        "model": "birds", "weights": "augreg:B_16", "license": "Apache-2.0", "labels": list(LABELS), "temperature": 1.5,
        "multi_label": False, "promise": [],
    }  # fmt: skip


def run_script(script: str):
    """Value of an expression after the functions of the page that need no document, in Node or else in a browser."""
    functions = re.findall(r"<script>\n(.*?)</script>", _PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    if node := shutil.which("node"):
        program = f"{functions}\nprocess.stdout.write(JSON.stringify({script}))"
        return json.loads(subprocess.run([node, "-"], input=program, stdout=-1, check=True, text=True).stdout)
    find_browser()
    with open_browser() as page:
        return page.evaluate(f"(() => {{ {functions}\nreturn {script}; }})()")


def processors() -> list[Preprocessing]:
    names = json.loads((_IMAGES / "index.json").read_text())["processors"]
    return [preprocessing_of(keras_vit.from_checkpoint(_IMAGES / name)) for name in names]


@pytest.mark.parametrize("rules", [processors, pytest.param(lambda: _FURTHER, marks=pytest.mark.slow)])
def test_the_page_makes_the_pixels_of_the_model(rules):
    photos = []
    for path in sorted((_IMAGES / "pictures").iterdir()):
        with Image.open(path) as image:
            image.thumbnail((160, 160))
            photos.append(np.asarray(image.convert("RGB")))
    photos += [photos[0][:7, :5], photos[0][:100, :30]]
    # A third of the images for each rule.
    cases = [
        (rule, np.asarray(rule.to_channels(photo)))
        for number, rule in enumerate(rules())
        for photo in photos[number % 3 :: 3]
    ]
    given = [
        {
            "sides": image.shape[:2],
            "bytes": base64.b64encode(image.tobytes()).decode(),
            "rule": dataclasses.asdict(rule),
        }
        for rule, image in cases
    ]
    results = run_script(
        f"{json.dumps(given)}.map(({{ sides, bytes, rule }}) => Array.from("
        "resize(Uint8Array.from(atob(bytes), text => text.charCodeAt(0)), sides, rule)))"
    )
    for (rule, image), pixels in zip(cases, results, strict=True):
        wanted = np.asarray(rule.resized(image), np.float32)
        tolerance = 0 if rule.dtype == "uint8" else 2e-3
        if rule.dtype == "uint8" and PIL.__version__ < "13":  # which resizes rows first, whatever the shape
            tolerance = 3
        message = f"{image.shape[:2]} by {rule}"
        np.testing.assert_allclose(np.reshape(pixels, wanted.shape), wanted, atol=tolerance, err_msg=message)


def test_the_page_turns_an_image_by_its_orientation():
    image = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    stored = json.dumps({"pixels": image.flatten().tolist(), "width": 3, "height": 2})
    results = run_script(f"[1, 2, 3, 4, 5, 6, 7, 8].map(orientation => turn({stored}, 3, orientation))")
    for orientation, found in enumerate(results, 1):
        turned = turned_upright(image, orientation)
        assert [found["height"], found["width"]] == list(turned.shape[:2])
        assert list(found["pixels"].values()) == turned.flatten().tolist()


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_the_page_finds_the_exif_orientation_and_hides_it_from_a_browser_that_turns_images(kind):
    files, wanted = [], []
    for order, mark in (("<", b"II"), (">", b"MM")):
        for orientation in range(1, 10):
            exif = b"Exif\0\0" + struct.pack(f"{order}2sHIHHHIHHI", mark, 42, 8, 1, 0x0112, 3, 1, orientation, 0, 0)
            files.append(encoded(Image.new("RGB", (3, 2)), kind, exif=exif))
            known = orientation if orientation <= 8 else 1
            wanted.append([known, known if kind == "webp" else 1])
    files += [b"", b"\xff", files[0][:40], files[0][:30]]
    given = json.dumps([list(file) for file in files])
    assert run_script(
        f"{given}.map(file => Uint8Array.from(file)).map(bytes => [takeOrientation(bytes), takeOrientation(bytes)])"
    ) == wanted + 4 * [[1, 1]]


def test_the_page_normalizes_as_the_model():
    rules, pixels = (RULES[0], RULES[1], RULES[4]), np.arange(12, dtype=np.uint8) * 23
    given = json.dumps([dataclasses.asdict(rule) for rule in rules])
    results = run_script(f"{given}.map(rule => Array.from(normalize({pixels.tolist()}, rule)))")
    for rule, found in zip(rules, results, strict=True):
        wanted = np.asarray(rule.normalize(pixels.reshape(-1, rule.channels))).reshape(-1)
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def runtime_of_page() -> pathlib.Path:
    """The folder dist of the npm package that the page names; skips the test where it is not."""
    folder = os.environ.get("ONNXRUNTIME_WEB")
    if folder is None:
        pytest.skip(f"Set ONNXRUNTIME_WEB to the folder dist of the npm package onnxruntime-web {VERSION}.")
    package = json.loads((pathlib.Path(folder).parent / "package.json").read_text(encoding="utf-8"))
    assert package["version"] == VERSION
    return pathlib.Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [3, 1])
def test_the_page_has_the_numbers_of_keras_for_every_rule_of_resizing(channels, tmp_path):
    """Exact but for rounding where the browser decodes as TensorFlow does; JPEG is decoded a level of a pixel apart."""
    runtime, _ = runtime_of_page(), find_browser()
    for package in onnx_export.PACKAGES:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -r {onnx_export.REQUIREMENTS}")
    rules = [rule for rule in RULES if rule.channels == channels]
    model, folder, origin = build(rules[0]), tmp_path / "portable", Provenance(temperature=2.0)
    onnx_of(model, LABELS, random_images(rules[0]), folder, web=True, origin=origin)
    files = {tmp_path / name: content for name, content in photos().items()}
    for file, content in files.items():
        file.write_bytes(content)
    (tmp_path / "text.png").write_text("no image")
    with open_browser() as page, serving(folder) as address:
        page.served[CDN] = runtime
        for rule in rules:
            write_page(folder, rule, LABELS, origin)
            page.open(f"{address}/{PAGE}", width=390)
            page.wait_for("!document.querySelector('input').disabled")
            for file, content in files.items():
                assert classify(page, file, drop=rule == rules[0]) == f"The most likely classes of {file.name}:"
                found, wanted = shown(page), expected(model, rule, content)
                assert list(found) == [LABELS[index] for index in np.argsort(-wanted)[:5]], (rule, file.name)
                difference = np.abs(np.array(list(found.values())) - np.sort(wanted)[:-6:-1]).max()
                assert difference < (1e-3 if file.suffix == ".jpg" else 1e-5), (rule, file.name)
            assert "ms" in page.evaluate("document.getElementById('times').textContent")
            assert page.overflow() <= 0
        assert classify(page, tmp_path / "text.png") == "text.png is not an image that this browser can read."
        assert page.problems == []


@pytest.mark.slow
def test_the_page_says_what_it_cannot_do(tmp_path):
    find_browser()
    write_page(tmp_path, RULES[0], LABELS, Provenance())
    said = "document.getElementById('status').textContent"
    with open_browser() as page:
        page.open((tmp_path / PAGE).as_uri())
        page.wait_for(f"{said}.includes('run python -m http.server in this folder')")
        with serving(tmp_path) as address:
            (tmp_path / FACTS).unlink()
            page.open(f"{address}/{PAGE}")
            page.wait_for(f"{said} == 'The model cannot be loaded: classify.json is not beside this page.'")
