"""Any content of an annotation file gives boxes or a sentence."""

import contextlib
import io
import json

import hypothesis
import pytest
from hypothesis import strategies

from keras_vit import UserError
from tests.data.annotations.test_boxes import ROW, WRITERS, save_images
from training.data.annotations.open_boxes import open_boxes
from training.options.dense import BoxesOptions

NUMBERS = ["0", "1", "0.5", "-1", "1e9", "nan", "inf", "1e999", "", "x", "9" * 400, "\x00", "\u0661", "1_0"]
NAMES = ["a.jpg", "./a.jpg", "../a.jpg", "/etc/passwd", "b.jpg", "", "\x00", "a" * 5000, "cat", "=1+1", "\x1b[2J"]
NAMES.append("e\u0301")
WORDS = strategies.sampled_from(NUMBERS + NAMES)
ROWS = strategies.lists(WORDS, min_size=3, max_size=8)
CSV = strategies.lists(ROWS, max_size=6).map(lambda rows: "\n".join(["path,x,y,w,h,label", *map(",".join, rows)]))
LABELS = strategies.lists(ROWS, max_size=6).map(lambda rows: "\n".join(map(" ".join, rows)))
YAML = strategies.dictionaries(
    strategies.sampled_from(["names", "train", "val", "path", "nc"]),
    strategies.recursive(
        WORDS.map(json.dumps) | strategies.sampled_from(["images", "*a", "!!int 1", "<<", "labels"]),
        lambda inside: strategies.lists(inside, max_size=4).map(lambda parts: f"[{', '.join(parts)}]"),
    ),
).map(lambda fields: "\n".join(f"{name}: {value}" for name, value in fields.items()))
ELEMENTS = strategies.lists(
    strategies.tuples(strategies.sampled_from(["name", "xmin", "xmax", "difficult", "object", "size", "bndbox"]), WORDS)
).map(lambda rows: "".join(f"<{tag}>{text}</{tag}>" for tag, text in rows))
BOX = "<bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox>"
OBJECTS = strategies.tuples(*[WORDS] * 6).map(
    lambda words: f"<object><name>{words[0]}</name><difficult>{words[1]}</difficult>{BOX.format(*words[2:])}</object>"
)
XML = (ELEMENTS | OBJECTS).map(lambda text: f"<annotation>{text}</annotation>")
VALUES = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | WORDS,
    lambda inside: strategies.lists(inside, max_size=5) | strategies.dictionaries(WORDS, inside, max_size=3),
    max_leaves=9,
)
FIELDS = strategies.sampled_from(["bbox", "area", "iscrowd", "category_id", "image_id", "file_name", "id", "height"])


@strategies.composite
def coco(draw) -> str:
    """A file of which some fields have other values."""
    document = {
        "images": [{"id": n, "file_name": f"{name}.jpg", "height": 20, "width": 30} for n, name in enumerate("ab")],
        "annotations": [dict(ROW), ROW | {"image_id": 0}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    for _ in range(draw(strategies.integers(1, 3))):
        rows = document[draw(strategies.sampled_from(sorted(document)))]
        draw(strategies.sampled_from(rows))[draw(FIELDS)] = draw(VALUES)
    return json.dumps(document)


CONTENTS = {
    "csv": ("boxes.csv", CSV), "yolo": ("data.yaml", YAML), "labels": ("labels/a.txt", LABELS),
    "voc": ("Annotations/a.xml", XML), "coco": ("boxes.json", coco()),
}  # fmt: skip


def refusal_of(data: str, mode: str) -> str:
    """Open the boxes, which lie in their images; the message if they are refused."""
    try:
        images = open_boxes(BoxesOptions(data=data, bad_boxes=mode)).all
    except UserError as refused:
        return str(refused)
    for image in images:
        height, width = image.size
        assert (image.targets[0] >= 0).all()
        assert (image.targets[0] <= [width, height] * 2).all()
    return ""


def test_a_folder_of_images_with_too_long_a_name_is_refused(tmp_path):
    data = WRITERS["yolo"](tmp_path)
    (tmp_path / "data.yaml").write_text(f"names: [ant]\ntrain: {'a' * 400}\n")
    assert "File name too long" in refusal_of(data, "refuse")


@pytest.mark.parametrize("examples", [30, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", CONTENTS)
def test_any_content_is_boxes_or_a_sentence(kind, examples, tmp_path):
    name, contents = CONTENTS[kind]
    data = WRITERS["yolo" if kind == "labels" else kind](tmp_path)
    save_images(tmp_path)

    @hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @hypothesis.given(contents, strategies.sampled_from(["refuse", "clip"]))
    def check(content: str, mode: str) -> None:
        (tmp_path / name).write_text(content)
        with contextlib.redirect_stdout(io.StringIO()):
            message = refusal_of(data, mode)
        assert "\n" not in message
        assert "\x1b" not in message
        assert len(message) < 1000 + 3 * len(str(tmp_path))

    check()
