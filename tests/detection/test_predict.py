"""Objects on images: from words, from an example, of a run; the table, CSV, COCO JSON and the page."""

import csv
import json
import pathlib
import urllib.request

import keras
import numpy as np
import PIL.Image
import pytest

import keras_vit
from keras_vit import DetectionConfig, UserError
from keras_vit.models.detection import box_iou
from keras_vit.run import Run
from tests.browser import open_browser
from tests.support import TINY, TINY_IMAGE, answering, randomize, serving
from tests.text.towers import with_tokenizer
from training import detect as command
from training.data.annotations.open_boxes import open_boxes
from training.detection.detector import open_detector
from training.detection.predict import DetectionPage
from training.options.dense import BoxesOptions
from training.prediction.server import open_server

pytestmark = pytest.mark.usefixtures("models_read_once")

WORDS = ["w1 w2", "w3"]
PIXELS = np.random.default_rng(0).integers(0, 256, (33, 57, 3), np.uint8)


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory):
    """OWLv2 with a tokenizer; a run of own classes; an image, and the same one turned by its EXIF orientation."""
    place = tmp_path_factory.mktemp("detect")
    with_tokenizer("hf_owlv2", place / "owl")
    model = randomize(keras_vit.detection_model(TINY, DetectionConfig(8), image_size=TINY_IMAGE))
    (place / "run").mkdir()
    keras_vit.with_classes(model, np.eye(3, 8)).save(place / "run" / "model.keras")
    (place / "run" / "labels.txt").write_text("ant\nbee\ncat\n")
    (place / "pictures").mkdir()
    PIL.Image.fromarray(PIXELS).save(place / "pictures" / "a.png")
    turned = PIL.Image.Exif()
    turned[0x0112] = 6  # turn it by 90 degrees to the right
    PIL.Image.fromarray(np.rot90(PIXELS).copy()).save(place / "pictures" / "b.png", exif=turned)
    (place / "pictures" / "broken.jpg").write_bytes(b"x")
    return place


@pytest.fixture(name="owl", scope="module")
def _owl(place) -> keras.Model:
    return keras_vit.from_checkpoint(place / "owl")


@pytest.fixture(autouse=True)
def _in_the_place(place, monkeypatch):
    monkeypatch.chdir(place)


def found_by(*arguments: str, name: str = "out.json") -> dict:
    command.main(["predict", *arguments, "--output", name, "pictures"])
    return json.loads(pathlib.Path(name).read_text())


def boxes_of(document: dict, number: int) -> list[tuple]:
    rows = [row for row in document["annotations"] if row["image_id"] == number]
    return [(*row["bbox"], row["category_id"], row["score"]) for row in rows]


def test_words_are_found_where_the_model_sees_them_and_saved_as_a_run(owl, place, tmp_path, capsys):
    words = ["--checkpoint", "owl", "--threshold", "0", "--save", str(tmp_path / "new"), "--classes", *WORDS]
    document = found_by(*words)
    texts = np.asarray(keras_vit.text_tower(place / "owl")(keras_vit.tokenizer(place / "owl")(WORDS)))
    preprocessing = keras_vit.preprocessing_of(owl)
    inputs = np.asarray(preprocessing(PIXELS))[None]
    outputs = keras_vit.with_queries(owl)({"image": inputs, "queries": texts[None]})
    logits = np.asarray(outputs["class_logits"])[0]
    corners = preprocessing.boxes_in_picture(np.asarray(outputs["boxes"])[0], (33, 57))
    corners = np.clip(corners, 0, [57, 33, 57, 33])
    shown = [n for n in np.argsort(-logits.max(-1)) if (corners[n, 2:] > corners[n, :2]).all()]
    expected = [(*corners[n, :2], *(corners[n, 2:] - corners[n, :2]), logits[n].argmax() + 1) for n in shown]
    found = boxes_of(document, 1)
    np.testing.assert_allclose([box[:5] for box in found], expected, atol=1e-3)
    np.testing.assert_allclose([box[5] for box in found], 1 / (1 + np.exp(-logits[shown].max(-1))), atol=1e-5)
    assert [each["name"] for each in document["categories"]] == WORDS
    printed = capsys.readouterr().out
    assert "| pictures/a.png | w" in printed
    assert "Skipped pictures/broken.jpg" in printed
    assert "saved-model --run" in printed
    assert found_by("--run", str(tmp_path / "new"), "--threshold", "0") == document
    with pytest.raises(UserError, match="--save accepts a new directory"):
        found_by(*words)


def test_boxes_are_those_of_the_upright_image():
    document = found_by("--run", "run", "--threshold", "0")
    assert [(each["height"], each["width"]) for each in document["images"]] == [(33, 57), (33, 57)]
    np.testing.assert_allclose(boxes_of(document, 1), boxes_of(document, 2), atol=1e-4)
    scores = [box[5] for box in boxes_of(document, 1)]
    least = str(scores[2])
    assert [box[5] for box in boxes_of(found_by("--run", "run", "--threshold", least), 1)] == scores[:3]


def test_an_example_is_found_and_boxes_on_one_object_are_one(owl):
    arguments = ("--checkpoint", "owl", "--like", "pictures/b.png", "--box", "5", "4", "30", "20", "--threshold", "0")
    document = found_by(*arguments, "--save", "like")
    preprocessing = keras_vit.preprocessing_of(owl)
    inputs = np.asarray(preprocessing(PIXELS))[None]
    box = preprocessing.boxes_in_input([[5, 4, 35, 24]], (33, 57))
    embeddings, _ = keras_vit.query_embeddings(owl, inputs, box)
    logits = np.asarray(keras_vit.with_classes(owl, embeddings)(inputs)["class_logits"])
    found = np.array(boxes_of(document, 1))
    assert found[0, 5] <= 1 / (1 + np.exp(-logits.max())) + 1e-5
    assert document["categories"] == [{"id": 1, "name": "b"}]
    corners = np.concatenate([found[:, :2], found[:, :2] + found[:, 2:4]], axis=1)
    ious = np.asarray(box_iou(corners[:, None], corners[None])[0])
    assert (ious - np.eye(len(ious)) <= 0.3 + 1e-6).all()
    assert boxes_of(found_by("--run", "like", "--threshold", "0"), 1) == boxes_of(document, 1)


def test_the_csv_is_one_that_training_reads_and_an_empty_image_is_a_row(tmp_path):
    command.main(["predict", "--run", "run", "--threshold", "0", "--top", "2", "--output", "out.csv", "pictures"])
    data = open_boxes(BoxesOptions(data="csv:out.csv"))
    assert [len(image.targets[0]) for image in data.all] == [2, 2]
    command.main(["predict", "--run", "run", "--threshold", "1", "--output", "out.csv", "pictures"])
    assert [row["label"] for row in csv.DictReader(pathlib.Path("out.csv").read_text().splitlines())] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_shows_the_boxes_without_scrolling_sideways(width, place):
    command.main(["predict", "--run", "run", "--threshold", "0", "--top", "3", "--output", "out.html", "pictures"])
    with serving(place) as address, open_browser() as page:
        page.open(f"{address}/out.html", width=width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelectorAll('rect').length") == 6
        assert not page.problems


def test_the_page_is_one_file_and_names_cannot_write_into_it():
    pathlib.Path("run/labels.txt").write_text("<b>ant</b>\nbee\ncat\n")
    command.main(["predict", "--run", "run", "--threshold", "0", "--output", "out.html", "pictures"])
    page = pathlib.Path("out.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<b>ant" not in page
    assert page.count("<svg") == 2
    assert "broken.jpg" in page
    pathlib.Path("run/labels.txt").write_text("ant\nbee\ncat\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "owl"], "has no classes of its own"),
        (["--run", "run", "--classes", "cat", "dog"], "has classes of its own"),
        (["--run", "owl", "--classes", "cat", "--like", "pictures/a.png"], "--like applies only to"),
        (["--run", "owl", "--box", "1", "2", "3", "4"], "--box applies only to --like"),
        (["--run", "owl", "--like", "picture/a.png"], "did you mean pictures/a.png"),
        (["--run", "owl", "--like", "pictures/a.png", "--box", "1", "2", "0", "4"], "left, top, width and height"),
        (["--run", "owl", "--like", "pictures/a.png", "--box", "60", "2", "5", "4"], "has no more than a pixel on"),
        (["--run", "owl", "--like", "pictures/a.png", "--box", "0", "0", "1", "1"], "width and height in pixels"),
        (["--run", "run", "--threshold", "2"], "--threshold must be in"),
        (["--run", "run", "--output", "out.txt"], "--output accepts a file"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, words):
    with pytest.raises(UserError, match=words):
        command.main(["predict", *arguments, "./pictures"])


def test_a_classifier_is_no_detector(tmp_path):
    keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=2).save(tmp_path / "x.keras")
    with pytest.raises(UserError, match="is not a detector"):
        command.main(["predict", "--run", str(tmp_path / "x.keras"), "pictures"])


def test_the_page_in_the_browser_shows_the_boxes_of_a_dropped_image():
    page = DetectionPage(open_detector(Run.open("run")), top=3, threshold=0.0)
    with answering(open_server(page, 0, "Find objects")) as address:
        with urllib.request.urlopen(address) as answer:
            assert "<h1>Find objects</h1>" in answer.read().decode()
        data = pathlib.Path("pictures/a.png").read_bytes()
        with urllib.request.urlopen(urllib.request.Request(address, data)) as answer:
            assert answer.read().decode().count("<rect") == 3
