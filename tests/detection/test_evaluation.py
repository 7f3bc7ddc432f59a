"""COCO's metrics: equal to pycocotools' on files, with intervals; the page of misses and false alarms."""

import contextlib
import io
import json
import pathlib

import numpy as np
import PIL.Image
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import keras_vit
from keras_vit import DetectionConfig, UserError, inspection
from tests.support import TINY, TINY_IMAGE, randomize
from training import detect as command
from training.detection.annotations import Picture
from training.detection.detector import Objects
from training.detection.evaluation import measured, mistakes
from training.detection.predict import found_document

LABELS = ("cat", "dog", "eel")
SIZE = (200, 300)


def recorded(count: int = 30) -> tuple[list[Picture], list[Objects]]:
    """Pictures with up to five boxes, most of which are found, a little displaced, beside false alarms."""
    rng, pictures, found = np.random.default_rng(0), [], []
    for number in range(count):
        n = int(rng.integers(0, 6))
        begins, sides = rng.uniform(0, 100, (n, 2)), rng.uniform(8, 150, (n, 2))
        corners, classes = np.concatenate([begins, begins + sides], axis=1), rng.integers(0, 2, n)
        pictures.append(Picture(pathlib.Path(f"{number}.png"), SIZE, corners.astype(np.float32), classes))
        moved = corners + rng.normal(0, 0.06, (n, 4)) * np.tile(sides, 2)
        # More than 10 of a class, so that recall with 100 objects differs from that with 10.
        false = np.sort(rng.uniform(0, 200, (30, 2, 2)), axis=1).reshape(30, 4)
        every = np.concatenate([moved, false])[rng.random(n + 30) < 0.8]
        labels = np.concatenate([classes, rng.integers(0, 2, 30)])[: len(every)]
        found.append(Objects(every, rng.random(len(every)), labels))
    return pictures, found


def test_metrics_are_those_of_pycocotools_on_files(tmp_path):
    pictures, found = recorded()
    metrics = measured(LABELS, pictures, found)
    truth = [Objects(picture.corners, np.ones(len(picture.classes)), picture.classes) for picture in pictures]
    images = [inspection.Image(str(picture.file), np.zeros((*SIZE, 3), np.uint8)) for picture in pictures]
    for name, objects in (("truth", truth), ("found", found)):
        document = found_document(LABELS, list(zip(images, objects, strict=True)))
        (tmp_path / name).write_text(json.dumps(document if name == "truth" else document["annotations"]))
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(tmp_path / "truth"))
        expected = COCOeval(coco, coco.loadRes(str(tmp_path / "found")), "bbox")
        expected.evaluate()
        expected.accumulate()
        expected.summarize()
    names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar")
    np.testing.assert_allclose([metrics[name] for name in names], expected.stats[[0, 1, 2, 3, 4, 5, 8]], atol=1e-6)
    of_cat = expected.eval["precision"][:, :, 0, 0, 2]
    assert metrics["classes"]["cat"]["ap"] == pytest.approx(of_cat[of_cat > -1].mean(), abs=1e-6)
    assert metrics["classes"]["eel"] == {"objects": 0, "ap": None, "ap50": None, "interval": None}
    for name in ("ap", "ap50"):
        low, high = metrics["intervals"][name]
        assert low < metrics[name] < high


def test_intervals_of_equal_pictures_are_points_and_no_object_is_refused():
    pictures, found = recorded()
    picture, objects = max(zip(pictures, found, strict=True), key=lambda pair: len(pair[0].classes))
    found = Objects(picture.corners, np.linspace(1, 0.5, len(picture.classes)), picture.classes)
    metrics = measured(LABELS, [picture] * 3, [found] * 3)
    assert metrics["ap"] == pytest.approx(1.0)
    assert metrics["intervals"]["ap"] == pytest.approx([1.0, 1.0])
    empty = Picture(picture.file, SIZE, np.zeros((0, 4), np.float32), np.zeros(0, np.int32))
    with pytest.raises(UserError, match="None of the pictures has a box"):
        measured(LABELS, [empty], [objects])


def test_misses_and_false_alarms_are_named():
    corners = np.array([[0, 0, 10, 10], [20, 20, 40, 40], [50, 50, 70, 70]], np.float32)
    picture = Picture(pathlib.Path("a.png"), SIZE, corners, np.array([0, 1, 1]))
    found = Objects(corners[[1, 0, 2]] + 1, np.array([0.9, 0.8, 0.7]), np.array([1, 0, 0]))
    missed, false = mistakes(picture, found)
    np.testing.assert_array_equal(missed, [False, False, True])
    np.testing.assert_array_equal(false, [False, False, True])


def test_the_command_writes_numbers_a_table_and_a_page(tmp_path, capsys):
    model = randomize(keras_vit.detection_model(TINY, DetectionConfig(8), image_size=TINY_IMAGE))
    (tmp_path / "run").mkdir()
    keras_vit.with_classes(model, np.eye(2, 8)).save(tmp_path / "run" / "model.keras")
    (tmp_path / "run" / "labels.txt").write_text("ant\nbee\n")
    rows = ["path,x,y,w,h,label"]
    for number in range(3):
        PIL.Image.new("RGB", (30, 20), "white").save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{number},2,9,9,{'ant' if number else 'bee'}")
    (tmp_path / "boxes.csv").write_text("\n".join(rows))
    data = ["--run", str(tmp_path / "run"), "--data", f"csv:{tmp_path / 'boxes.csv'}"]
    command.main(["evaluate", *data, "--output", str(tmp_path / "report")])
    report = json.loads((tmp_path / "report" / "detection.json").read_text())
    assert report["pictures"] == report["objects"] == 3
    assert "| ant" in (tmp_path / "report" / "detection.md").read_text()
    assert "missed: " in (tmp_path / "report" / "detection.html").read_text()
    assert "AP50" in capsys.readouterr().out
    # One that was trained may have seen all pictures but every tenth.
    (tmp_path / "run" / "config.json").write_text(json.dumps({"settings": {"command": "detect"}}))
    command.main(["evaluate", *data, "--output", str(tmp_path / "report")])
    assert json.loads((tmp_path / "report" / "detection.json").read_text())["pictures"] == 1
    assert "Every tenth picture is measured" in capsys.readouterr().out
    (tmp_path / "run" / "labels.txt").write_text("ant\ncow\n")
    with pytest.raises(UserError, match="only the run has cow and only the data have bee"):
        command.main(["evaluate", *data, "--output", str(tmp_path / "report")])
