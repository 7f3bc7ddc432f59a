"""Our numbers are those of the tools whose names they bear: random annotations through both."""

import contextlib
import io
import json
import pathlib

import numpy as np
import PIL.Image
import pytest
from pycocotools import mask as rle
from pycocotools.coco import COCO

from tests.segmentation.oracle import found_of, measured_by_pycocotools, oracle, segments_of, split_of
from training.data.annotations.masks import NONE, UNCOUNTED
from training.data.annotations.open_scenes import open_scenes
from training.evaluation import average_precision
from training.options.dense import SceneOptions
from training.segmentation import evaluation
from training.segmentation.evaluation import evaluate, panoptic_counts

# Random sets of a fast test, and of a slow one.
SETS = [pytest.param(range(6), id="6"), pytest.param(range(6, 1006), marks=pytest.mark.slow, id="1000")]
CATEGORIES = {3: "a", 7: "b", 8: "c", 20: "d"}  # of the last, neither truth nor predictions have any
IMAGES = 4


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch):
    """Intervals, which are not compared, take most of the time."""
    for module in (average_precision, evaluation):
        monkeypatch.setattr(module, "_DRAWS", 2)


def blob(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """A random ellipse or box (h, w) bool, sometimes empty."""
    y, x = (rng.uniform(0, side) for side in size)
    height, width = rng.uniform(0.3, 14, 2)
    down, across = ((np.mgrid[: size[0], : size[1]] + 0.5) - np.array([y, x])[:, None, None]) / np.array(
        [height, width]
    )[:, None, None]
    return np.maximum(abs(down), abs(across)) < 1 if rng.random() < 0.5 else down**2 + across**2 < 1


def moved(rng: np.random.Generator, mask: np.ndarray) -> np.ndarray:
    return np.roll(mask, tuple(rng.integers(-2, 3, 2)), (0, 1))


def sizes_of(rng: np.random.Generator) -> list[tuple[int, int]]:
    return [tuple(rng.integers(16, 40, 2).tolist()) for _ in range(IMAGES)]


def write_images(root: pathlib.Path, sizes: list[tuple[int, int]]) -> list[dict]:
    """Images whose pixels are their numbers, and their rows of a file in COCO's format."""
    for number, size in enumerate(sizes):
        PIL.Image.fromarray(np.full((*size, 3), number, np.uint8)).save(root / f"{number}.png")
    return [{"id": n + 1, "file_name": f"{n}.png", "height": h, "width": w} for n, (h, w) in enumerate(sizes)]


def random_objects(rng: np.random.Generator, sizes: list[tuple[int, int]], seen: list[int]) -> list[dict]:
    """Annotations of COCO that overlap, some of them crowds, with areas that are not those of the masks."""
    rows: list[dict] = []
    for image, size in enumerate(sizes):
        for _ in range(rng.integers(0, 6)):
            mask = blob(rng, size)
            encoded = rle.encode(np.asfortranarray(mask, np.uint8))
            segmentation: object = {"size": list(size), "counts": encoded["counts"].decode()}
            if rng.random() < 0.3:
                left, top, width, height = rng.uniform(0, 7, 4)
                right, bottom = left + width + 2, top + height + 2
                segmentation = [[left, top, right, top, right, bottom, left, bottom]]
            is_crowd = int(rng.random() < 0.2)
            rows.append(
                {"id": len(rows) + 1, "image_id": image + 1, "category_id": int(rng.choice(seen)), "iscrowd": is_crowd,
                 "area": float(rng.choice([100.0, 2000.0, 20_000.0]) * rng.uniform(0.5, 1.5)),
                 "bbox": rle.toBbox(encoded).tolist(), "segmentation": segmentation}
            )  # fmt: skip
    return rows


def random_answer(rng: np.random.Generator, coco: COCO, image: int, size: tuple[int, int]):
    """Moved and invented objects with scores that are often equal, the highest first."""
    masks = [moved(rng, coco.annToMask(each).astype(bool)) for each in coco.imgToAnns[image] if rng.random() < 0.8]
    masks += [blob(rng, size) for _ in range(rng.integers(0, 3))]
    masks = [mask for mask in masks if mask.any()]
    true = [each["category_id"] for each in coco.imgToAnns[image]]
    categories = [int(rng.choice([*true, 3, 7])) for _ in masks]
    order = np.argsort(-(scores := rng.integers(1, 5, len(masks)) / 5), kind="stable")
    labels = [sorted(CATEGORIES).index(categories[n]) for n in order]
    stacked = np.array([masks[n] for n in order], bool).reshape(-1, *size)
    return found_of(labels, np.full(size, NONE, np.int32), scores[order], stacked), [categories[n] for n in order]


def results_of(answers: list) -> list[dict]:
    """Return the answers as a file of results in COCO's format has them."""
    return [
        {"image_id": image, "category_id": category, "score": score,
         "segmentation": rle.encode(np.asfortranarray(mask, np.uint8))}
        for image, (found, categories) in enumerate(answers, 1)
        for mask, category, score in zip(found.masks, categories, found.scores.tolist(), strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("seeds", SETS)
def test_mask_ap_is_that_of_pycocotools(seeds, tmp_path):
    segmenter, compared = oracle("instance", [], tuple(CATEGORIES[each] for each in sorted(CATEGORIES))), 0
    for seed in seeds:
        rng, root = np.random.default_rng(seed), tmp_path / str(seed)
        root.mkdir()
        sizes, seen = sizes_of(rng), [3, 7] if seed % 2 else [3, 8]
        rows = random_objects(rng, sizes, seen)
        categories = [{"id": each, "name": name} for each, name in CATEGORIES.items()]
        images = write_images(root, sizes)
        rng.shuffle(images)
        document = {"images": images, "annotations": rows, "categories": categories}
        file = root / "all.json"
        file.write_text(json.dumps(document))
        with contextlib.redirect_stdout(io.StringIO()):
            coco = COCO(str(file))
            answers = [random_answer(rng, coco, image, size) for image, size in enumerate(sizes, 1)]
            if all(row["iscrowd"] for row in rows) or not any(len(found.labels) for found, _ in answers):
                continue
            expected = measured_by_pycocotools(file, results_of(answers), "segm").stats
            data = open_scenes(SceneOptions(data=f"coco:{file}", eval_data=f"coco:{file}"), "instance")
        object.__setattr__(segmenter, "answers", [found for found, _ in answers])
        metrics = evaluate(segmenter, data.evaluation).metrics
        for name, place in average_precision.STATS.items():
            assert (-1 if metrics[name] is None else metrics[name]) == expected[place], (seed, name)
        compared += 1
    assert compared > 0.9 * len(seeds)


def panoptic_api(truths: list, answers: list, categories: list[int]) -> dict[str, float]:
    """PQ, SQ and RQ by the rules of `pq_compute_single_core` and `pq_average` of panopticapi's evaluation.py.

    truths and answers: for each image the ids (h, w), 0 void, and the rows of segments_info by id.
    """
    stats = {each: np.zeros(4) for each in categories}  # IoU, true positives, false positives, false negatives
    for (true_ids, true_rows), (found_ids, found_rows) in zip(truths, answers, strict=True):
        both = {
            (t, f): int(((true_ids == t) & (found_ids == f)).sum())
            for t in np.unique(true_ids).tolist()
            for f in np.unique(found_ids).tolist()
        }
        areas = {f: int((found_ids == f).sum()) for f in found_rows}
        true_matched, found_matched = set(), set()
        for (t, f), common in both.items():
            if not common or t not in true_rows or f not in found_rows or true_rows[t]["iscrowd"]:
                continue
            if true_rows[t]["category_id"] != found_rows[f]["category_id"]:
                continue
            iou = common / (areas[f] + true_rows[t]["area"] - common - both.get((0, f), 0))
            if iou > 0.5:
                stats[true_rows[t]["category_id"]] += [iou, 1, 0, 0]
                true_matched.add(t)
                found_matched.add(f)
        crowds = {}
        for t, row in true_rows.items():
            if t in true_matched:
                continue
            if row["iscrowd"]:
                crowds[row["category_id"]] = t
                continue
            stats[row["category_id"]][3] += 1
        for f, row in found_rows.items():
            if f in found_matched:
                continue
            void = both.get((0, f), 0)
            if row["category_id"] in crowds:
                void += both.get((crowds[row["category_id"]], f), 0)
            if void / areas[f] <= 0.5:
                stats[row["category_id"]][2] += 1
    present = [row for row in stats.values() if row[1:].any()]
    weights = [row[1] + 0.5 * row[2] + 0.5 * row[3] for row in present]
    return {
        "pq": float(np.mean([row[0] / weight for row, weight in zip(present, weights, strict=True)])),
        "sq": float(np.mean([row[0] / row[1] if row[1] else 0.0 for row in present])),
        "rq": float(np.mean([row[1] / weight for row, weight in zip(present, weights, strict=True)])),
    }


def random_panoptic(rng: np.random.Generator, size: tuple[int, int], categories: list[int]):
    """Ids (h, w), and rows of segments_info: things, stuff, crowds, void, and sometimes a segment without pixels."""
    ids, rows = np.zeros(size, np.int64), {}
    ids[: rng.integers(0, size[0] + 1)] = 70_000
    rows[70_000] = {"category_id": 20, "iscrowd": 0}
    for _ in range(rng.integers(0, 7)):
        number = int(rng.integers(1, 2**24))
        ids[blob(rng, size)] = number
        rows[number] = {"category_id": int(rng.choice(categories)), "iscrowd": int(rng.random() < 0.25)}
    ids[blob(rng, size)] = 0
    kept = {number: row for number, row in rows.items() if (ids == number).any() or rng.random() < 0.3}
    for number, row in kept.items():
        count = int((ids == number).sum())
        row |= {"id": number, "area": max(count + (int(rng.integers(0, 9)) if rng.random() < 0.2 else 0), 1)}
    return ids, kept


def answer_of_ids(rng: np.random.Generator, ids: np.ndarray, rows: dict):
    """The segments moved, without some and with other classes and pieces; and the same as ids and rows."""
    found = np.roll(ids, tuple(rng.integers(-2, 3, 2)), (0, 1))
    found[blob(rng, ids.shape)] = 2**24 - 1
    numbers = [each for each in np.unique(found).tolist() if each and rng.random() < 0.9]
    table = {each: place for place, each in enumerate(numbers)}
    segments = np.array([table.get(each, NONE) for each in found.ravel().tolist()], np.int32).reshape(ids.shape)
    own = {each: rows[each]["category_id"] if each in rows and rng.random() < 0.8 else 3 for each in numbers}
    labels = [sorted(CATEGORIES).index(own[each]) for each in numbers]
    as_rows = {place + 1: {"category_id": own[each]} for each, place in table.items()}
    return found_of(labels, segments), (segments + 1, as_rows)


def test_segments_that_share_half_of_their_union_do_not_match():
    truth, answer = segments_of([0], np.array([[0, 0, 0, NONE]])), np.array([[NONE, 0, 0, NONE]])
    answer[0, 3] = 0
    assert panoptic_counts(truth, (np.array([0]), answer), 1).tolist() == [[2 / 3, 1, 0, 0]]  # the last is void
    truth = segments_of([0, 1], np.array([[0, 0, 0, 1]]))
    assert panoptic_counts(truth, (np.array([0]), answer), 2).tolist() == [[0, 0, 1, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize("seeds", SETS)
def test_panoptic_quality_is_that_of_panopticapi(seeds, tmp_path):
    segmenter = oracle("panoptic", [], tuple(CATEGORIES[each] for each in sorted(CATEGORIES)))
    for seed in seeds:
        rng, root = np.random.default_rng(seed), tmp_path / str(seed)
        (root / "all").mkdir(parents=True)
        sizes = sizes_of(rng)
        truths = [random_panoptic(rng, size, [3, 7] if seed % 2 else [3, 8]) for size in sizes]
        truths[0][0][:2, :2] = 5
        truths[0][1][5] = {"id": 5, "category_id": 3, "iscrowd": 0, "area": 4}
        answers = [answer_of_ids(rng, *truth) for truth in truths]
        annotations = []
        for number, (ids, rows) in enumerate(truths):
            colors = np.stack([ids % 256, ids // 256 % 256, ids // 65_536], axis=-1).astype(np.uint8)
            PIL.Image.fromarray(colors).save(root / "all" / f"{number}.png")
            annotations.append(
                {"image_id": number + 1, "file_name": f"{number}.png", "segments_info": list(rows.values())}
            )
        categories = [{"id": each, "name": name, "isthing": int(each != 20)} for each, name in CATEGORIES.items()]
        document = {"images": write_images(root, sizes), "annotations": annotations, "categories": categories}
        (root / "all.json").write_text(json.dumps(document))
        data = f"panoptic:{root / 'all.json'}"
        with contextlib.redirect_stdout(io.StringIO()):
            source = open_scenes(SceneOptions(data=data, eval_data=data), "panoptic")
        object.__setattr__(segmenter, "answers", [found for found, _ in answers])
        metrics = evaluate(segmenter, source.evaluation).metrics
        expected = panoptic_api(truths, [ids for _, ids in answers], sorted(CATEGORIES))
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-13), (seed, name)


def mean_iou_of_torchmetrics(truths: list[np.ndarray], answers: list[np.ndarray], classes: int) -> float:
    """`multiclass_jaccard_index(average="macro")`: the mean over the classes of truth or predictions."""
    counted = np.concatenate([truth.ravel() >= 0 for truth in truths])
    truth, answer = (np.concatenate([each.ravel() for each in maps])[counted] for maps in (truths, answers))
    common = [np.sum((truth == each) & (answer == each)) for each in range(classes)]
    union = [np.sum((truth == each) | (answer == each)) for each in range(classes)]
    return float(np.mean([c / u for c, u in zip(common, union, strict=True) if u]))


@pytest.mark.parametrize("seeds", SETS)
def test_mean_iou_is_that_of_torchmetrics(seeds):
    classes = 6
    segmenter = oracle("semantic", [], tuple("abcdef"))
    for seed in seeds:
        rng, truths, answers = np.random.default_rng(seed), [], []
        for size in sizes_of(rng):
            truth = rng.choice([0, 1, 2, UNCOUNTED], size, p=[0.5, 0.3, 0.1, 0.1])  # 3 to 5 are not in the truth
            noise = rng.integers(0, 4 + seed % 2, size)
            truths.append(truth.astype(np.int32))
            answers.append(np.where(rng.random(size) < 0.6, np.maximum(truth, 0), noise).astype(np.int32))
        segments = [segments_of(range(3), truth, objects=[False] * 3) for truth in truths]
        found = [found_of(range(classes), answer) for answer in answers]
        object.__setattr__(segmenter, "answers", found)
        metrics = evaluate(segmenter, split_of(segments)).metrics
        assert metrics["mean_iou"] == pytest.approx(mean_iou_of_torchmetrics(truths, answers, classes), rel=1e-13)
        pixels = np.concatenate([truth.ravel() for truth in truths])
        assert metrics["ignored"] == pytest.approx(np.mean(pixels < 0))
