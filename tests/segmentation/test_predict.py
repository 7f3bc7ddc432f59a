"""Masks that are written are read back as what was found."""

import json
import pathlib

import numpy as np
import PIL.Image
import pytest
from pycocotools import mask as rle
from pycocotools.coco import COCO

from tests.segmentation.oracle import found_of, oracle
from training.data.annotations.coco import PanopticImage, read_coco, read_panoptic, write_panoptic_png
from training.data.annotations.masks import NONE, segments_of_mask
from training.segmentation.predict import MaskWriter, predict
from training.segmentation.segmenter import class_map


def written(kind: str, answers, labels, folder: pathlib.Path, stuff=()) -> pathlib.Path:
    """The folder into which the answers are predicted, with the images beside."""
    (folder / "images" / "inner").mkdir(parents=True)
    files = []
    for number, found in enumerate(answers):
        files.append(folder / "images" / ("inner" if number % 2 else ".") / f"{number}.png")
        PIL.Image.fromarray(np.full((*found.map.shape, 3), number, np.uint8)).save(files[-1])
    predict(oracle(kind, answers, labels, stuff), files, folder / "out", 0.0)
    return folder / "out"


def many(rng: np.random.Generator, classes: int, count: int):
    """So many segments of these classes on one map, with pixels of none."""
    side = int(np.ceil(np.sqrt(count + 1)))
    numbers = np.append(np.arange(count), [NONE] * (side**2 - count)).astype(np.int32)
    return found_of(rng.integers(0, classes, count), rng.permutation(numbers).reshape(side, side), masks=[])


@pytest.mark.parametrize(
    ("classes", "count"), [(1, 1), (3, 0), (66, 66), (80, 300), (200, 2000), (201, 999), (1, 2000)]
)
def test_panoptic_masks_are_read_as_they_were_found(classes, count, tmp_path):
    rng, names = np.random.default_rng(count), tuple(f"class {n}" for n in range(classes))
    answers, stuff = [many(rng, classes, count), many(rng, classes, 1)], tuple(range(0, classes, 2))
    output = written("panoptic", answers, names, tmp_path, stuff)
    read_names, photos = read_panoptic(output / "masks.json", tmp_path / "images")
    assert tuple(read_names.values()) == names
    numbers = {each: place for place, each in enumerate(sorted(read_names))}
    for found, photo in zip(answers, photos, strict=True):
        segments = photo.segments(numbers, found.map.shape)
        np.testing.assert_array_equal(segments.map, found.map)
        np.testing.assert_array_equal(segments.labels, found.labels)
        np.testing.assert_array_equal(segments.objects, ~np.isin(found.labels, stuff))
        np.testing.assert_array_equal(segments.areas, [1] * len(found.labels))


def test_ids_of_segments_have_a_range(tmp_path):
    numbers = np.array([[NONE, 0, 254, 255, 65_534, 65_535, 2**24 - 2]])
    write_panoptic_png(numbers, tmp_path / "a.png")
    infos = [{"id": int(number) + 1, "category_id": 1} for number in numbers[0, 1:]]
    segments = PanopticImage(tmp_path, infos, tmp_path / "a.png", set()).segments({1: 0})
    np.testing.assert_array_equal(segments.map, [[NONE, 0, 1, 2, 3, 4, 5]])
    with pytest.raises(AssertionError):
        write_panoptic_png(np.array([[2**24 - 1]]), tmp_path / "b.png")


def test_objects_that_overlap_are_read_as_they_were_found(tmp_path):
    masks = np.zeros((3, 10, 12), bool)
    masks[0, :6, :6], masks[1, 2:9, 2:9], masks[2] = True, True, True
    segments = np.where(masks[0], 0, np.where(masks[1], 1, 2)).astype(np.int32)
    found = found_of([74, 0, 5], segments, [0.9, 0.75, 0.5], masks)
    nothing = found_of([], np.full((4, 5), NONE, np.int32), [], np.zeros((0, 4, 5), bool))
    output = written("instance", [found, nothing], tuple(map(str, range(80))), tmp_path)
    theirs = COCO(str(output / "instances.json"))
    rows = theirs.imgToAnns[1]
    np.testing.assert_array_equal([theirs.annToMask(row) for row in rows], masks)
    assert [(row["category_id"] - 1, row["score"]) for row in rows] == [(74, 0.9), (0, 0.75), (5, 0.5)]
    assert len(theirs.loadRes(rows).anns) == 3
    names, coco_images = read_coco(output / "instances.json", tmp_path / "images")
    numbers = {each: each - 1 for each in names}
    ours = coco_images[0].segments(numbers, (10, 12))
    np.testing.assert_array_equal([rle.decode(mask) for mask in ours.masks], masks)
    np.testing.assert_array_equal(ours.labels, found.labels)
    _, images = read_panoptic(output / "masks.json", tmp_path / "images")
    on_map = images[0].segments(numbers, (10, 12))
    np.testing.assert_array_equal(on_map.labels[on_map.map], found.labels[segments])
    assert (images[1].segments(numbers, (4, 5)).map == NONE).all()


@pytest.mark.parametrize("classes", [2, 255, 256, 1000, 1001])
def test_classes_of_pixels_are_read_as_they_were_found(classes, tmp_path):
    answer = found_of(range(classes), np.arange(classes, dtype=np.int32)[None], masks=[])
    names = tuple(f"n{number}" for number in range(classes))
    output = written("semantic", [answer], names, tmp_path)
    if classes > 1000:
        names, photos = read_panoptic(output / "masks.json", tmp_path / "images")
        segments = photos[0].segments({each: each - 1 for each in names})
    else:
        segments = segments_of_mask(output / "masks" / "0.png")
        assert tuple((output / "labels.txt").read_text().split()) == names
    np.testing.assert_array_equal(segments.labels[segments.map], class_map(answer))
    assert not segments.objects.any()


def test_no_mask_replaces_another(tmp_path):
    writer = MaskWriter(oracle("panoptic", []), tmp_path)
    names = ["a-2.png", "b/a.png", "a.png", "a.bmp", "A.jpg", "c/a.png", "a.bmp.png"]
    for name in names:
        writer.add(pathlib.PurePath(name), found_of([0], np.zeros((2, 2), np.int32)))
    writer.finish()
    document = json.loads((tmp_path / "masks.json").read_text())
    assert [each["file_name"] for each in document["images"]] == names
    files = [each["file_name"] for each in document["annotations"]]
    assert files[:4] == ["a-2.png", "b/a.png", "a.png", "a.bmp.png"]
    assert len({file.lower() for file in files}) == len(names) == len([*(tmp_path / "masks").rglob("*.png")])
