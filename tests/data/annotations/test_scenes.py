"""Images with masks of every kind of data: what is read, and what is refused by name before training."""

import json
import os
import pathlib
import struct
import zlib

import numpy as np
import PIL.ExifTags
import PIL.Image
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from pycocotools import mask as rle

from keras_vit import UserError
from keras_vit.run import Run
from tests.segmentation import shapes
from tests.segmentation.shapes import LABELS, SIDE, scene
from training.data import tfds as tfds_data
from training.data.annotations.masks import NONE, UNCOUNTED, VOC_CLASSES, read_mask
from training.data.annotations.open_scenes import open_scenes
from training.options.dense import SceneOptions

WRITERS = {
    "folder": shapes.write_folder,
    "objects": lambda root, count: shapes.write_folder(root, count, objects=True),
    "coco": shapes.write_coco,
    "panoptic": shapes.write_panoptic,
    "voc": shapes.write_voc,
}


def truth(source, split: str, index: int) -> tuple[np.ndarray, np.ndarray]:
    target = getattr(source, split).target(tf.constant(index, tf.int64))
    return target["labels"].numpy(), target["segments"].numpy()


def open_data(data: str, task: str = "semantic", **options):
    return open_scenes(SceneOptions(data=data, **options), task)


@pytest.mark.parametrize("kind", ["folder", "objects", "panoptic", "voc"])
def test_classes_of_pixels_are_read(kind, tmp_path):
    source = open_data(WRITERS[kind](tmp_path / "d", 11))
    _, classes, segments = scene(0)  # the first is evaluated, as every tenth
    labels, found = truth(source, "evaluation", 0)
    expected = classes[segments]
    if kind == "voc":
        expected[0] = UNCOUNTED
    np.testing.assert_array_equal(found, expected)
    assert source.labels == (VOC_CLASSES if kind == "voc" else LABELS)
    np.testing.assert_array_equal(labels, np.unique(classes))
    assert (source.train.num_examples, source.evaluation.num_examples, source.held_out) == (9, 2, True)


def test_another_mask_makes_another_data_set(tmp_path):
    data = shapes.write_folder(tmp_path / "d", 11)
    before = open_data(data)
    assert open_data(data).train.fingerprint == before.train.fingerprint
    mask = sorted((tmp_path / "d" / "masks").iterdir())[1]
    numbers = np.asarray(PIL.Image.open(mask)).copy()
    numbers[0, 0] = (numbers[0, 0] + 1) % len(LABELS)
    PIL.Image.fromarray(numbers).save(mask)
    after = open_data(data)
    assert after.train.fingerprint != before.train.fingerprint
    assert after.evaluation.fingerprint == before.evaluation.fingerprint


@pytest.mark.parametrize("kind", ["objects", "coco", "panoptic", "voc"])
def test_objects_are_read(kind, tmp_path):
    source = open_data(WRITERS[kind](tmp_path / "d", 11), "instance")
    _, classes, segments = scene(0)
    labels, found = truth(source, "evaluation", 0)
    seen = [n for n in range(1, len(classes)) if (segments == n).any()]
    names = sorted(source.labels[label] for label in labels)
    expected = sorted((VOC_CLASSES if kind == "voc" else LABELS)[classes[n]] for n in seen)
    assert names == expected
    for number in seen:
        rows, columns = np.nonzero(segments[1:] == number)
        (own,) = np.unique(found[1:][rows, columns])
        np.testing.assert_array_equal(found[1:] == own, segments[1:] == number)
    assert (found[1:][segments[1:] == 0] == NONE).all()


@pytest.mark.parametrize(
    ("task", "labels", "pixels"),
    [("semantic", [0, 2], 1), ("instance", [2], UNCOUNTED), ("panoptic", [0, 2], UNCOUNTED)],
)
def test_a_class_with_objects_has_groups_as_in_cityscapes(task, labels, pixels, tmp_path):
    mask = np.array([[0, 2, 2001]] * 2, np.uint16)
    source = open_data(_write_masks(tmp_path / "d", [mask, mask]), task)
    assert source.batches.stuff == (0,)
    found, segments = truth(source, "evaluation", 0)
    assert found.tolist() == labels
    assert segments[0, 1] == pixels
    if task != "semantic":
        assert source.evaluation.truth(0).crowds.tolist() == [False, True, False]


def test_panoptic_has_stuff_as_one_segment(tmp_path):
    source = open_data(WRITERS["panoptic"](tmp_path / "d", 11), "panoptic")
    assert source.batches.stuff == (0,)
    labels, found = truth(source, "evaluation", 0)
    np.testing.assert_array_equal(labels[found], scene(0)[1][scene(0)[2]])


def test_a_second_file_is_evaluated_on(tmp_path):
    data = shapes.write_coco(tmp_path / "d", 4)
    other = shapes.write_coco(tmp_path / "e", 3, first=20)
    source = open_data(data, "instance", eval_data=other)
    assert (source.train.num_examples, source.evaluation.num_examples, source.held_out) == (4, 3, False)


def test_a_run_is_evaluated_on_all_images_unless_it_may_know_some(tmp_path, capsys):
    mask = np.array([[0, 1, 1, 0]] * 4, np.uint8)
    data = _write_masks(tmp_path / "d", [mask] * 3, "abc")  # without the class c
    for number in range(3):
        PIL.Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / "d" / "images" / f"{number:02}.png")
    (tmp_path / "run").mkdir()
    published = open_scenes(SceneOptions(data=data), "semantic", Run.at(tmp_path / "run"))
    assert (published.evaluation.num_examples, published.held_out) == (3, False)
    (tmp_path / "run" / "labels.txt").write_text("0\n1\n2\n")
    unnamed = SceneOptions(data=_write_masks(tmp_path / "e", [0 * mask] * 2))
    assert open_scenes(unnamed, "semantic", Run.at(tmp_path / "run")).labels == ("0", "1", "2")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"settings": {"source": {"data": "folder:elsewhere"}}}))
    for known, count, words in (
        (None, 1, "Measured on a tenth of the images"),
        (np.array([7], np.uint64), 3, ""),
        (published.train.digests, 1, "1 of the 1 evaluation images is among the training images of"),
    ):
        if known is not None:
            Run.at(tmp_path / "run").save_training_images(known)
        capsys.readouterr()
        source = open_scenes(SceneOptions(data=data), "semantic", Run.at(tmp_path / "run"))
        assert (source.evaluation.num_examples, source.held_out) == (count, count < 3)
        assert words in capsys.readouterr().out


def test_names_that_are_no_utf_8_are_read_and_shown(tmp_path):
    data = shapes.write_folder(tmp_path / "d", 3)
    for folder in ("images", "masks"):
        file = tmp_path / "d" / folder / "000.png"
        os.rename(file, os.fsencode(file.parent) + b"/\xff.png")
    source = open_data(data)
    (row,) = (n for n in range(source.train.num_examples) if source.train.name(n).endswith("\\xff.png"))
    assert source.train.read(tf.constant(row, tf.int64))[0].numpy().startswith(b"\x89PNG")


def test_lists_of_voc_are_its_splits_and_letters_with_accents_are_one_character_or_two(tmp_path, capsys):
    data = shapes.write_voc(tmp_path / "d", 5, objects=False)
    for folder, name in (("JPEGImages", "my \u00e9"), ("SegmentationClass", "my e\u0301")):
        (file,) = (tmp_path / "d" / folder).glob("001.*")
        file.rename(file.with_stem(name))
    lists = tmp_path / "d" / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    for split, names in (("train", "my e\u0301\n000\n002\n"), ("val", "002\n")):
        (lists / f"{split}.txt").write_text(names)
    source = open_data(data)
    assert (source.train.num_examples, source.evaluation.num_examples) == (3, 1)
    assert "training also uses 1 of the evaluation images" in capsys.readouterr().out


def test_a_folder_with_splits_uses_them(tmp_path):
    shapes.write_folder(tmp_path / "training", 5)
    shapes.write_folder(tmp_path / "val", 3)
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd\n")
    source = open_data(f"folder:{tmp_path}")
    assert (source.train.num_examples, source.evaluation.num_examples) == (5, 3)


def open_objects(folder: pathlib.Path, size: tuple[int, int], rows: list[dict]):
    """Open images 1 and 2 of (width, height) with these annotations, all of one category."""
    images = [{"id": 1, "file_name": "a.png"}, {"id": 2, "file_name": "b.png"}]
    for image in images:
        PIL.Image.new("RGB", size).save(folder / image["file_name"])
    annotations = [{"image_id": 1, "category_id": 7} | row for row in rows]
    document = {"images": images, "annotations": annotations, "categories": [{"id": 7, "name": "x"}]}
    (folder / "c.json").write_text(json.dumps(document))
    return open_data(f"coco:{folder / 'c.json'}", "instance")


def test_polygons_crowds_and_what_lies_on_top(tmp_path):
    whole, part = [[0, 0, 20, 0, 20, 10, 0, 10]], [[5, 2, 10, 2, 10, 6, 5, 6]]
    crowd = {"size": [10, 20], "counts": [0, 30, 170]}  # the first three columns
    rows = [{"segmentation": part}, {"segmentation": whole}, {"segmentation": crowd, "iscrowd": 1, "area": 7}]
    source = open_objects(tmp_path, (20, 10), rows)
    labels, found = truth(source, "evaluation", 0)
    np.testing.assert_array_equal(labels, [0, 0])
    assert found[4, 7] == 0
    assert found[0, 15] == 1
    assert (found == 0).sum() == 20
    segments = source.evaluation.truth(0)  # whole, with the crowd
    np.testing.assert_array_equal([rle.area(mask) for mask in segments.masks], [20, 200, 30])
    np.testing.assert_array_equal(segments.crowds, [False, False, True])
    np.testing.assert_array_equal(segments.areas, [20, 200, 7])
    labels, found = truth(source, "train", 0)
    assert not len(labels)
    assert (found == NONE).all()


def test_pixels_of_a_crowd_alone_are_not_counted(tmp_path):
    crowd = {"iscrowd": 1, "segmentation": {"size": [4, 4], "counts": [0, 8, 8]}}
    square = {"image_id": 2, "segmentation": [[0, 0, 2, 0, 2, 2, 0, 2]]}
    with pytest.raises(UserError, match="have nothing that instance can measure"):
        open_objects(tmp_path, (4, 4), [crowd, square])
    rows = [crowd | {"image_id": 2}, square | {"image_id": 1}]
    _, found = truth(open_objects(tmp_path, (4, 4), rows), "train", 0)
    assert (found[:, :2] == UNCOUNTED).all()
    assert (found[:, 2:] == NONE).all()


def _write_masks(root: pathlib.Path, masks: list[np.ndarray], names: str = "") -> str:
    for part in ("images", "masks"):
        (root / part).mkdir(parents=True)
    for number, mask in enumerate(masks):
        PIL.Image.new("RGB", mask.shape[::-1]).save(root / "images" / f"{number:02}.png")
        PIL.Image.fromarray(mask).save(root / "masks" / f"{number:02}.png")
    if names:
        (root / "labels.txt").write_text("".join(f"{name}\n" for name in names))
    return f"folder:{root}"


@pytest.mark.parametrize(
    ("values", "names", "expected"),
    [
        ([0, 255], "ab", [0, 1]),
        ([0, 255], "", [0, 1]),
        ([0, 7], "ab", [0, 1]),
        ([0, 7, 255], "ab", [0, 1, UNCOUNTED]),
        ([0, 1, 255], "ab", [0, 1, UNCOUNTED]),
        ([0, 1, 255], "", [0, 1, UNCOUNTED]),
        ([0, 1, 2], "abc", [0, 1, 2]),
        ([0, 65_535], "ab", [0, 1]),
        ([0, 1, 65_535], "ab", [0, 1, UNCOUNTED]),
    ],
)
def test_two_values_are_two_classes(values, names, expected, tmp_path, capsys):
    mask = np.array([values * 2], np.uint16 if max(values) > 255 else np.uint8).repeat(4, axis=0)
    source = open_data(_write_masks(tmp_path / "d", [mask, mask, np.zeros_like(mask)], names))
    labels, found = truth(source, "evaluation", 0)
    np.testing.assert_array_equal(np.append(labels, [UNCOUNTED, NONE])[found], [expected * 2] * 4)
    segments = source.evaluation.truth(0)
    np.testing.assert_array_equal(np.append(segments.labels, [UNCOUNTED, NONE])[segments.map], [expected * 2] * 4)
    assert len(source.labels) == max(expected) + 1
    output = capsys.readouterr().out
    assert ("read as 0 and 1" in output) == (values[1] > 1)
    assert ("ignored" in output) == (UNCOUNTED in expected)


def test_numbers_without_names_are_classes_of_which_those_that_never_occur_are_said(tmp_path, capsys):
    mask = np.array([[0, 3, 3, 255]] * 4, np.uint8)
    assert open_data(_write_masks(tmp_path / "d", [mask, mask])).labels == ("0", "1", "2", "3")
    assert "2 of the 4 classes are in no training image: 1, 2." in capsys.readouterr().out


@pytest.mark.parametrize(("values", "names"), [([0, 255], "abc"), ([1, 255], "ab"), ([0, 1], "abc"), ([0, 0], "ab")])
def test_a_named_class_that_never_occurs_stops(values, names, tmp_path):
    mask = np.array([values] * 2, np.uint8)
    with pytest.raises(UserError, match="names classes that occur in no training mask"):
        open_data(_write_masks(tmp_path / "d", [mask, mask], names))


def test_pixels_outside_of_objects_are_background(tmp_path, capsys):
    data = shapes.write_coco(tmp_path / "d", 11)
    _, classes, segments = scene(0)
    source = open_data(data)
    assert source.labels == ("background", *LABELS[1:])
    labels, found = truth(source, "evaluation", 0)
    np.testing.assert_array_equal(labels[found], classes[segments])
    assert "ignored" not in capsys.readouterr().out
    ignoring = open_data(data, background="ignore")
    assert ignoring.labels == LABELS[1:]
    labels, found = truth(ignoring, "evaluation", 0)
    np.testing.assert_array_equal(np.append(labels + 1, 0)[found], classes[segments])
    assert "of the pixels of the evaluation masks are ignored" in capsys.readouterr().out
    assert open_data(data, "instance").labels == LABELS[1:]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_gray_masks_are_read_by_their_samples(bits, tmp_path):
    values = (np.arange(16).reshape(4, 4) % 2**bits).astype(np.uint8)
    rows = np.unpackbits(values[..., None], axis=-1)[..., -bits:].reshape(4, -1)
    raw = b"".join(b"\0" + np.packbits(row).tobytes() for row in rows)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, bits, 0, 0, 0, 0))
    file = tmp_path / "mask.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b""))
    np.testing.assert_array_equal(read_mask(file), values)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"format": "JPEG"}, "should be a PNG, or another file without loss, .* but is a JPEG"),
        ({"format": "WEBP"}, "is a WEBP"),
        ({"format": "TIFF", "compression": "jpeg"}, "is a TIFF"),
        ({"format": "PPM"}, "cannot be read"),
    ],
)
def test_masks_in_formats_that_change_values_are_refused(options, sentence, tmp_path):
    PIL.Image.new("L", (16, 16)).save(tmp_path / "mask.png", **options)
    with pytest.raises(UserError, match=sentence):
        read_mask(tmp_path / "mask.png")


def test_a_mask_of_another_size_is_not_decoded(tmp_path, monkeypatch):
    PIL.Image.new("L", (4000, 4000)).save(tmp_path / "mask.png")
    monkeypatch.setattr(PIL.Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(UserError, match="has 4000x4000 pixels, but the image 16x16"):
        read_mask(tmp_path / "mask.png", (16, 16))


@pytest.mark.parametrize("name", ["mask.png", "mask.tif"])
def test_a_mask_is_seen_upright_like_its_image(name, tmp_path):
    exif, values = PIL.Image.Exif(), np.arange(6, dtype=np.uint8).reshape(2, 3)
    exif[PIL.ExifTags.Base.Orientation] = 6  # turn it clockwise
    PIL.Image.fromarray(values).save(tmp_path / name, exif=exif)
    np.testing.assert_array_equal(read_mask(tmp_path / name, (3, 2)), np.rot90(values, -1))


def test_a_mask_with_a_palette_holds_its_indices(tmp_path):
    mask = PIL.Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3), "P")
    mask.putpalette([255 - value for value in range(768 // 3) for _ in range(3)])
    mask.save(tmp_path / "mask.png")
    np.testing.assert_array_equal(read_mask(tmp_path / "mask.png"), np.arange(6).reshape(2, 3))


def _mask(name: str, values: np.ndarray):
    return lambda root: PIL.Image.fromarray(values).save(root / "masks" / name)


FOLDERS = {
    "a missing mask": (lambda r: (r / "masks" / "001.png").unlink(), "masks lacks 1 .*images has, first 001"),
    "an extra mask": (lambda r: (r / "images" / "001.png").unlink(), "images lacks 1 .*masks has, first 001"),
    "no masks": (lambda r: [f.unlink() for f in (r / "masks").iterdir()], "masks lacks 4 of the files"),
    "another size": (_mask("001.png", np.zeros((3, 4), np.uint8)), "001.png has 3x4 pixels, but the image 48x48"),
    "a number too high": (_mask("001.png", np.full((SIDE, SIDE), 9, np.uint8)), "names 4 classes, 0 to 3, but"),
    "fractions": (lambda r: _tiff(r), "float32 values up to"),
    "colors": (_mask("001.png", np.zeros((SIDE, SIDE, 3), np.uint8)), "but is a PNG of the shape"),
    "no image": (lambda r: (r / "images" / "001.png").write_bytes(b"x"), "001.png .not JPEG, PNG"),
    "half an image": (lambda r: _cut(r / "images" / "001.png"), "001.png"),
    "half a mask": (lambda r: _cut(r / "masks" / "001.png"), "its mask 001.png cannot be read"),
    "two names": (lambda r: (r / "images" / "001.jpg").write_bytes((r / "images" / "001.png").read_bytes()),
                  "have the same name"),
    "one class": (lambda r: _one_class(r), "have 1 of 8 classes, which is too few"),
    "nothing counted": (lambda r: [_mask(f.name, np.full((SIDE, SIDE), 255, np.uint8))(r)
                                   for f in (r / "masks").iterdir()], "have 0 of 4 classes"),
    "a name twice": (lambda r: (r / "labels.txt").write_text("a\na\nb\nc\n"), "names the class 'a' twice"),
    "labels of bytes": (lambda r: (r / "labels.txt").write_bytes(b"\xff\n"), "as UTF-8 text"),
}  # fmt: skip


def _tiff(root: pathlib.Path) -> None:
    (root / "masks" / "001.png").unlink()
    PIL.Image.fromarray(np.zeros((SIDE, SIDE), np.float32)).save(root / "masks" / "001.tif")
    (root / "masks" / "001.tif").rename(root / "masks" / "001.png")


def _cut(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[:60])


def _one_class(root: pathlib.Path) -> None:
    for mask in (root / "masks").iterdir():
        PIL.Image.new("L", (SIDE, SIDE), 7).save(mask)
    (root / "labels.txt").unlink()


@pytest.mark.parametrize("case", FOLDERS)
def test_a_broken_folder_is_one_sentence(case, tmp_path):
    data = shapes.write_folder(tmp_path / "d", 4)
    damage, sentence = FOLDERS[case]
    damage(tmp_path / "d")
    with pytest.raises(UserError, match=sentence) as refused:
        open_data(data)
    assert str(refused.value).count(". ") == 0


COCO = {
    "no list": (lambda r, d: d.pop("annotations"), "a list as annotations, but has nothing"),
    "no category": (lambda r, d: d["annotations"][0].pop("category_id"), r"number as annotations\[0\].category_id"),
    "unknown category": (lambda r, d: d["annotations"][0].update(category_id=99), "uses the category 99"),
    "unknown image": (lambda r, d: d["annotations"][0].update(image_id=99), "uses the image 99"),
    "missing file": (lambda r, d: d["images"][0].update(file_name="gone.png"), "1 of 4 files .* such as gone.png"),
    "two ids": (lambda r, d: d["images"][1].update(id=d["images"][0]["id"]), "has two images with '"),
    "two categories": (lambda r, d: d["categories"][1].update(id=10), "has two categories with '10'"),
    "a name of two lines": (lambda r, d: d["categories"][1].update(name="a\n"), "the class 'a.n' with a line break"),
    "a name of no text": (lambda r, d: d["categories"][1].update(name=3), r"a text as categories\[1\].name, but has 3"),
    "no segmentation": (lambda r, d: d["annotations"][0].pop("segmentation"), "should be polygons of 3 points"),
    "another size": (lambda r, d: d["annotations"][0]["segmentation"].update(size=[5, 5]), r"the size \[48, 48\], but"),
    "a list": (lambda r, d: d.update(images=[1]), r"an object as images\[0\], but has 1"),
}  # fmt: skip


PANOPTIC = {
    "an image twice": (lambda r, d: d["annotations"][1].update(image_id=0), "two annotations of an image with '0'"),
    "a path upwards": (lambda r, d: d["annotations"][1].update(file_name="../1.png"), "1.png, outside of"),
    "an id twice": (
        lambda r, d: d["annotations"][1]["segments_info"].append(d["annotations"][1]["segments_info"][0]),
        "has two segments of 001.png with '",
    ),
    "an id of void": (
        lambda r, d: d["annotations"][1]["segments_info"][0].update(id=0),
        "a number from 1 to 16,777,215 as",
    ),
    "an area of words": (lambda r, d: d["annotations"][1]["segments_info"][0].update(area="x"), "finite number"),
    "another size": (lambda r, d: PIL.Image.new("RGB", (9, 7)).save(r / "panoptic" / "001.png"), "7x9 pixels, but the"),
    "no PNG": (lambda r, d: (r / "panoptic" / "001.png").unlink(), "its mask 001.png cannot be read"),
    "an unlisted segment": (lambda r, d: d["annotations"][1]["segments_info"].pop(), "its 001.png uses the segment"),
    "unknown category": (lambda r, d: d["annotations"][1]["segments_info"][0].update(category_id=9), "the category 9"),
    "no infos": (lambda r, d: d["annotations"][1].pop("segments_info"), r"a list as annotations\[1\].segments_info"),
}


BROKEN = [("coco", case) for case in COCO] + [("panoptic", case) for case in PANOPTIC]


@pytest.mark.parametrize(("kind", "case"), BROKEN)
def test_a_broken_file_in_a_format_of_coco_is_one_sentence(kind, case, tmp_path):
    data = WRITERS[kind](tmp_path / "d", 4)
    file = pathlib.Path(data.partition(":")[2])
    document = json.loads(file.read_text())
    damage, sentence = (COCO if kind == "coco" else PANOPTIC)[case]
    damage(tmp_path / "d", document)
    file.write_text(json.dumps(document))
    with pytest.raises(UserError, match=sentence) as refused:
        open_data(data, "instance" if kind == "coco" else kind)
    assert str(refused.value).count(". ") == 0


@pytest.mark.parametrize(
    ("count", "task", "words"),
    [(4, "panoptic", "no objects of their own"), (1, "semantic", "holds 1 images, and needs")],
)
def test_masks_of_classes_alone_have_no_objects_and_one_image_is_too_few(count, task, words, tmp_path):
    with pytest.raises(UserError, match=words):
        open_data(shapes.write_folder(tmp_path / "d", count), task)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"data": "scenes"}, "accepts folder:PATH, coco:FILE.json"),
        ({"data": "folder:gone"}, "There is no folder 'gone'"),
        ({"data": "coco:gone.json"}, "There is no file 'gone.json'"),
        ({"data": "folder:tests"}, "tests/masks'; .* takes a folder with images and masks inside"),
        ({"data": "voc:tests"}, "There is no folder 'tests/JPEGImages'"),
        ({"data": "tests"}, "for this folder, give folder:tests"),
        ({"data": "folder:gs://x/y"}, "copy the files to this machine"),
        ({"data": "tfds:x", "images": "tests"}, "--images applies only to --data coco:FILE or panoptic:FILE"),
        ({"data": "tfds:x", "eval_data": "coco:x"}, "--eval-data applies only to"),
    ],
)
def test_data_that_cannot_be_are_refused_before_anything_is_imported(options, sentence):
    with pytest.raises(UserError, match=sentence):
        SceneOptions(**options)


# Of the masks of the classes.
VALUES = np.arange(len(LABELS))


class Scenes(tfds.core.GeneratorBasedBuilder):
    """Two splits of scenes."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "mask": tfds.features.Image(shape=(None, None, 1)),
        }
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(0), "test": self._generate_examples(10)}

    def _generate_examples(self, first):
        for number in range(first, first + 4):
            image, classes, segments = scene(number)
            yield number, {"image": image, "mask": VALUES[classes[segments]][..., None].astype(np.uint8)}


@pytest.mark.parametrize("two", [False, True])
def test_a_data_set_of_tfds_is_read_and_two_values_are_two_classes(two, tmp_path, monkeypatch, capsys):
    values = np.array([0, 255, 0, 255]) if two else VALUES
    monkeypatch.setattr("tests.data.annotations.test_scenes.VALUES", values)
    Scenes(data_dir=tmp_path).download_and_prepare()
    monkeypatch.setattr(tfds_data, "tfds_builder", lambda name, data_dir: Scenes(data_dir=data_dir))
    source = open_data("tfds:scenes", data_dir=str(tmp_path))
    assert source.labels == tuple("01" if two else "0123")
    _, found = truth(source, "train", 0)
    expected = [np.minimum(values, 1)[classes[segments]] if two else classes[segments]
                for _, classes, segments in map(scene, range(4))]  # fmt: skip
    assert any(np.array_equal(found, one) for one in expected)
    segments = source.train.truth(0)
    np.testing.assert_array_equal(segments.labels[segments.map], found)
    output = capsys.readouterr().out
    assert ("values 0 and 255, read as 0 and 1" in output) == two
    assert "ignored" not in output
    with pytest.raises(UserError, match="no objects of their own, which --task instance needs"):
        open_data("tfds:scenes", "instance", data_dir=str(tmp_path))
