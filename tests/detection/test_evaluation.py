"""COCO's metrics: equal to pycocotools' on files, with intervals; the page of misses and false alarms."""

import json
import pathlib

import numpy as np
import PIL.Image
import pytest

import keras_vit
from keras_vit import DetectionConfig, UserError
from tests.segmentation.oracle import measured_by_pycocotools
from tests.support import TINY, TINY_IMAGE, randomize
from training import detect as command
from training.data.annotations.images import Box, BoxedImage
from training.data.annotations.open_boxes import open_boxes
from training.detection.detector import Objects
from training.detection.evaluation import measured, mistakes
from training.evaluation.average_precision import STATS
from training.options.dense import BoxesOptions

pytestmark = pytest.mark.usefixtures("models_read_once")

SIZE = (200, 300)


def image_of(name: str, corners: np.ndarray, classes: np.ndarray, size: tuple[int, int] = SIZE) -> BoxedImage:
    rows = zip(corners.astype(np.float32).tolist(), classes.tolist(), strict=True)
    boxes = tuple(Box(label, (x, y, right - x, bottom - y)) for (x, y, right, bottom), label in rows)
    return BoxedImage(pathlib.Path(name), size, boxes)


@pytest.fixture(name="images", scope="module")
def _images(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("images")
    for name in ("JPEGImages", "Annotations"):
        (folder / name).mkdir()
    for number in range(5):
        PIL.Image.new("RGB", (60, 40)).save(folder / "JPEGImages" / f"{number}.png")
    return folder


def random_boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    """(n, 4) left, top, right, bottom, of which many overlap, in whole pixels of an image of 60 x 40."""
    begins = rng.integers(0, 20, (count, 2))
    return np.concatenate([begins, begins + rng.integers(1, 20, (count, 2))], axis=1)


def random_objects(rng: np.random.Generator, truth: np.ndarray) -> Objects:
    """Detections near boxes and elsewhere, of three classes, with equal scores among them."""
    near = truth[rng.random(len(truth)) < 0.8] + rng.integers(-1, 2, 4)
    corners = np.clip(np.concatenate([near, near + 1, random_boxes(rng, 4)]), 0, [60, 40] * 2).astype(np.float32)
    corners = corners[(corners[:, :2] < corners[:, 2:]).all(axis=1)]
    scores = np.sort(rng.integers(1, 8, len(corners)) / 8)[::-1]
    return Objects(corners, scores, rng.integers(0, 3, len(corners)))


def check_against_pycocotools(images: pathlib.Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids, categories = rng.permutation(50)[:5] + 1, [7, 3, 12]
    annotations, found = [], []
    for image in ids.tolist():
        truth = random_boxes(rng, int(rng.integers(0, 6)))
        for x, y, right, bottom in truth.tolist():
            own = {"bbox": [x, y, right - x, bottom - y], "category_id": categories[rng.integers(0, 2)]}
            area = float(rng.choice([20.0, 2000.0, 10000.0, (right - x) * (bottom - y)]))
            annotations.append(own | {"image_id": image, "area": area, "iscrowd": int(rng.random() < 0.2)})
        found.append(random_objects(rng, truth))
    if all(each["iscrowd"] for each in annotations):
        return
    document = {
        "images": [{"id": image, "file_name": f"{n}.png"} for n, image in enumerate(ids.tolist())],
        "categories": [{"id": number, "name": str(number)} for number in categories],
        "annotations": [each | {"id": number} for number, each in enumerate(annotations, 1)],
    }
    (images / "truth.json").write_text(json.dumps(document))
    guesses = [
        {"image_id": image, "category_id": sorted(categories)[label], "bbox": [x, y, right - x, bottom - y], "score": s}
        for image, objects in zip(ids.tolist(), found, strict=True)
        for (x, y, right, bottom), s, label in zip(
            objects.corners.tolist(), objects.scores.tolist(), objects.classes.tolist(), strict=True
        )
    ]
    expected = measured_by_pycocotools(images / "truth.json", guesses, "bbox")
    options = BoxesOptions(data=f"coco:{images / 'truth.json'}", images=str(images / "JPEGImages"))
    photos = sorted(open_boxes(options).all, key=lambda photo: photo.file)
    metrics = measured([str(n) for n in sorted(categories)], photos, found)
    ours = [-1.0 if metrics[name] is None else metrics[name] for name in STATS]
    np.testing.assert_array_equal(ours, expected.stats[list(STATS.values())])
    of_first = expected.eval["precision"][:, :, 0, 0, 2]
    of_first = of_first[of_first > -1].mean() if (of_first > -1).any() else None
    assert metrics["classes"]["3"]["ap"] == (None if of_first is None else pytest.approx(of_first, abs=1e-6))


def voc_reference(truth: list, found: list[Objects], num_classes: int) -> float:
    """VOCevaldet.m and VOCap.m; truth: of each image, (class, difficult, xmin, ymin, xmax, ymax) from 1 on."""
    values = []
    for label in range(num_classes):
        positives = sum(row[0] == label and not row[1] for rows in truth for row in rows)
        if not positives:
            continue
        rows = [
            (score, image, corners.astype(float) + np.array([1, 1, 0, 0]))
            for image, objects in enumerate(found)
            for corners, score, own in zip(objects.corners, objects.scores, objects.classes, strict=True)
            if own == label
        ]
        detected, tp, fp = set(), [], []
        for _, image, bb in sorted(rows, key=lambda row: -row[0]):
            best, match = -np.inf, None
            for number, (own, _, *gt) in enumerate(truth[image]):
                iw = min(bb[2], gt[2]) - max(bb[0], gt[0]) + 1
                ih = min(bb[3], gt[3]) - max(bb[1], gt[1]) + 1
                if own == label and iw > 0 and ih > 0:
                    union = (bb[2] - bb[0] + 1) * (bb[3] - bb[1] + 1) + (gt[2] - gt[0] + 1) * (gt[3] - gt[1] + 1)
                    if (overlap := iw * ih / (union - iw * ih)) > best:
                        best, match = overlap, (image, number)
            hit = best >= 0.5
            is_difficult = hit and truth[image][match[1]][1]
            tp.append(hit and not is_difficult and match not in detected)
            fp.append(not is_difficult and not tp[-1])
            detected |= {match} if tp[-1] else set()
        tp, fp = np.cumsum(tp), np.cumsum(fp)
        recall = np.concatenate([[0], tp / positives, [1]])
        precision = np.concatenate([[0], tp / np.maximum(tp + fp, 1), [0]])
        for i in range(len(precision) - 2, -1, -1):
            precision[i] = max(precision[i], precision[i + 1])
        changes = np.flatnonzero(recall[1:] != recall[:-1]) + 1
        values.append(float(np.sum((recall[changes] - recall[changes - 1]) * precision[changes])))
    return float(np.mean(values))


def check_against_voc(images: pathlib.Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth, found = [], []
    for image in range(5):
        corners = random_boxes(rng, int(rng.integers(1, 6)))
        rows = [
            (int(rng.integers(0, 2)), int(rng.random() < 0.3), x + 1, y + 1, r, b) for x, y, r, b in corners.tolist()
        ]
        truth.append([(0, 0, 1, 1, 9, 9), *rows])
        objects = "".join(
            f"<object><name>{'ab'[label]}</name><difficult>{difficult}</difficult><bndbox><xmin>{x}</xmin><ymin>{y}"
            f"</ymin><xmax>{r}</xmax><ymax>{b}</ymax></bndbox></object>"
            for label, difficult, x, y, r, b in truth[-1]
        )
        (images / "Annotations" / f"{image}.xml").write_text(f"<annotation>{objects}</annotation>")
        found.append(random_objects(rng, corners))
    (images / "labels.txt").write_text("a\nb\nc\n")
    data = open_boxes(BoxesOptions(data=f"voc:{images}"))
    photos = sorted(data.all, key=lambda photo: photo.file)
    metrics = measured(data.labels, photos, found, data.kind)
    assert metrics["voc_ap"] == pytest.approx(voc_reference(truth, found, 3), abs=1e-12)


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", [check_against_pycocotools, check_against_voc])
def test_metrics_of_random_annotations_are_those_of_the_tool(check, count, images, monkeypatch):
    monkeypatch.setattr("training.evaluation.average_precision._DRAWS", 1)
    for seed in range(count):
        check(images, seed)


def test_difficult_objects_are_neither_missed_nor_false_however_often_they_are_found():
    boxes = [Box(0, (0, 0, 10, 10)), Box(0, (20, 0, 10, 10), is_difficult=True), Box(0, (0, 20, 30, 10), is_crowd=True)]
    boxes += [Box(0, (50, 50, 9, 9), is_difficult=True), Box(0, (70, 50, 9, 9), is_crowd=True)]  # not found
    photo = BoxedImage(pathlib.Path("a.png"), SIZE, tuple(boxes))
    corners = np.array([[0, 0, 10, 10], [20, 0, 30, 10], [20, 0, 29, 10], [0, 20, 9, 30], [22, 0, 26, 3]], np.float32)
    found = Objects(corners, np.linspace(0.9, 0.5, 5), np.zeros(5, int))
    missed, false = mistakes(photo, found)
    assert not missed.any()
    np.testing.assert_array_equal(false, [False, False, False, False, True])
    assert measured(["a"], [photo], [found])["ap"] == pytest.approx(1.0)
    assert photo.targets[0].tolist() == [[0, 0, 10, 10], [20, 0, 30, 10], [50, 50, 59, 59]]


def test_intervals_of_equal_images_are_points_and_no_object_is_refused():
    corners, classes = np.array([[0, 0, 50, 60], [20, 20, 90, 80]], np.float32), np.array([0, 1])
    photo, found = image_of("a.png", corners, classes), Objects(corners, np.array([1.0, 0.5]), classes)
    metrics = measured(("cat", "dog", "eel"), [photo] * 3, [found] * 3)
    assert metrics["ap"] == pytest.approx(1.0)
    assert metrics["intervals"]["ap"] == pytest.approx([1.0, 1.0])
    assert metrics["classes"]["eel"] == {"objects": 0, "ap": None, "ap50": None, "interval": None}
    missed = Objects(corners[:0], np.zeros(0), classes[:0])
    metrics = measured(("cat", "dog"), [photo] * 3, [found, found, missed])
    low, high = metrics["intervals"]["ap50"]
    assert low < metrics["ap50"] < high
    empty = BoxedImage(photo.file, SIZE, ())
    with pytest.raises(UserError, match="No evaluation image has a box that counts"):
        measured(("cat", "dog"), [empty], [found])


def test_misses_and_false_alarms_are_named():
    corners = np.array([[0, 0, 10, 10], [20, 20, 40, 40], [50, 50, 70, 70]], np.float32)
    photo = image_of("a.png", corners, np.array([0, 1, 1]))
    found = Objects(corners[[1, 0, 2]] + 1, np.array([0.9, 0.8, 0.7]), np.array([1, 0, 0]))
    missed, false = mistakes(photo, found)
    np.testing.assert_array_equal(missed, [False, False, True])
    np.testing.assert_array_equal(false, [False, False, True])


def test_the_command_writes_numbers_a_table_and_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("training.evaluation.average_precision._DRAWS", 5)
    model = randomize(keras_vit.detection_model(TINY, DetectionConfig(8), image_size=TINY_IMAGE))
    (tmp_path / "run").mkdir()
    keras_vit.with_classes(model, np.eye(2, 8)).save(tmp_path / "run" / "model.keras")
    (tmp_path / "run" / "labels.txt").write_text("ant\nbee\n")
    rows = ["path,x,y,w,h,label"]
    for number in range(3):
        PIL.Image.new("RGB", (30, 20), (255, 255, number)).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{number},2,9,9,{'ant' if number else 'bee'}")
    (tmp_path / "boxes.csv").write_text("\n".join(rows))
    data = ["--run", str(tmp_path / "run"), "--data", f"csv:{tmp_path / 'boxes.csv'}"]
    command.main(["evaluate", *data, "--output", str(tmp_path / "report")])
    report = json.loads((tmp_path / "report" / "detection.json").read_text())
    assert report["pictures"] == report["objects"] == 3
    assert "| ant" in (tmp_path / "report" / "detection.md").read_text()
    assert "missed: " in (tmp_path / "report" / "detection.html").read_text()
    assert "AP50" in capsys.readouterr().out
    # One that was trained may have seen all images but every tenth.
    (tmp_path / "run" / "config.json").write_text(json.dumps({"settings": {"source": {"data": "csv:other.csv"}}}))
    command.main(["evaluate", *data, "--output", str(tmp_path / "report")])
    assert json.loads((tmp_path / "report" / "detection.json").read_text())["pictures"] == 1
    assert "Measured on a tenth of the images" in capsys.readouterr().out
    (tmp_path / "run" / "labels.txt").write_text("ant\ncow\n")
    with pytest.raises(UserError, match="only the run has cow and only the data have bee"):
        command.main(["evaluate", *data, "--output", str(tmp_path / "report")])
