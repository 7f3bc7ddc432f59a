"""Images with boxes: four formats, one structure; what is broken is one sentence."""

import json
import os
import pathlib

import numpy as np
import PIL.Image
import pytest

from keras_vit import UserError
from training.data.annotations.open_boxes import open_boxes
from training.detection.fit import box_data_set
from training.options.dense import BoxesOptions

# Of each image: left, top, right, bottom, class.
BOXES = {"a": [(2, 3, 12, 9, "cat"), (10, 0, 30, 20, "dog")], "b": [], "c": [(0, 0, 7, 19, "cat")]}
SIZE = {"a": (30, 20), "b": (30, 20), "c": (20, 30)}  # width, height, seen upright


def save_images(folder: pathlib.Path) -> None:
    """The image c is stored lying, and its EXIF orientation turns it."""
    folder.mkdir(parents=True, exist_ok=True)
    turned = PIL.Image.Exif()
    turned[0x0112] = 6
    for name in BOXES:
        exif = {"exif": turned} if name == "c" else {}
        PIL.Image.new("RGB", (30, 20), "white").save(folder / f"{name}.jpg", **exif)


def write_yolo(root: pathlib.Path) -> str:
    save_images(root / "images")
    (root / "labels").mkdir()
    for name, boxes in BOXES.items():
        (w, h), lines = SIZE[name], []
        for left, top, right, bottom, label in boxes:
            x, y = (left + right) / 2 / w, (top + bottom) / 2 / h
            lines.append(f"{['cat', 'dog'].index(label)} {x} {y} {(right - left) / w} {(bottom - top) / h}\n")
        if lines:
            (root / "labels" / f"{name}.txt").write_text("".join(lines))
    (root / "data.yaml").write_text("path: .\ntrain: images\nnames: {0: cat, 1: dog}\n")
    return f"yolo:{root / 'data.yaml'}"


def write_voc(root: pathlib.Path) -> str:
    save_images(root / "JPEGImages")
    (root / "Annotations").mkdir()
    for name, boxes in BOXES.items():
        width, height = SIZE[name]
        objects = "".join(
            f"<object><name>{label}</name><bndbox><xmin>{left + 1}</xmin><ymin>{top + 1}</ymin><xmax>{right}</xmax>"
            f"<ymax>{bottom}</ymax></bndbox></object>"
            for left, top, right, bottom, label in boxes
        )
        size = f"<size><width>{width}</width><height>{height}</height></size>"
        (root / "Annotations" / f"{name}.xml").write_text(f"<annotation>{size}{objects}</annotation>")
    return f"voc:{root}"


def write_csv(root: pathlib.Path) -> str:
    save_images(root)
    rows = ["path,x,y,w,h,label"]
    for name, boxes in BOXES.items():
        rows += [f"{name}.jpg,{x},{y},{right - x},{bottom - y},{label}" for x, y, right, bottom, label in boxes]
        rows += [] if boxes else [f"{name}.jpg,,,,,"]
    (root / "boxes.csv").write_text("\n".join(rows))
    return f"csv:{root / 'boxes.csv'}"


def write_coco(root: pathlib.Path) -> str:
    save_images(root)
    numbers = {name: number for number, name in enumerate(BOXES, 5)}
    document = {
        "images": [
            {"id": number, "file_name": f"{name}.jpg", "width": SIZE[name][0], "height": str(SIZE[name][1])}
            for name, number in numbers.items()
        ],
        "categories": [{"id": 9, "name": "dog"}, {"id": 3, "name": "cat"}],
        "annotations": [
            {"image_id": numbers[name], "category_id": 3 if label == "cat" else 9, "bbox": [x, y, r - x, b - y]}
            for name, boxes in BOXES.items()
            for x, y, r, b, label in boxes
        ],
    }
    (root / "boxes.json").write_text(json.dumps(document))
    return f"coco:{root / 'boxes.json'}"


WRITERS = {"yolo": write_yolo, "voc": write_voc, "csv": write_csv, "coco": write_coco}


@pytest.mark.parametrize("kind", WRITERS)
def test_all_formats_give_the_same_boxes_of_the_upright_image(kind, tmp_path):
    data = open_boxes(BoxesOptions(data=WRITERS[kind](tmp_path)))
    assert data.labels == ("cat", "dog")
    photos = {photo.file.stem: photo for photo in data.all}
    assert len(data.evaluation) == 1
    for name, boxes in BOXES.items():
        assert photos[name].size == SIZE[name][::-1]
        np.testing.assert_allclose(photos[name].targets[0], np.reshape([box[:4] for box in boxes], (-1, 4)), atol=1e-4)
        assert [data.labels[number] for number in photos[name].targets[1]] == [box[4] for box in boxes]


ROWS = """path,x,y,w,h,label
a.jpg,2,3,10,6,cat
a.jpg,12,9,-10,-6,cat
a.jpg,25,15,10,3,cat
a.jpg,40,3,10,6,cat
a.jpg,4,4,0,5,cat
a.jpg,4,4,5,5,newt
b.jpg,,,,,
"""


def test_bad_boxes_are_counted_and_named_then_refused_or_clipped(tmp_path, capsys):
    save_images(tmp_path)
    (tmp_path / "boxes.csv").write_text(ROWS)
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    with pytest.raises(UserError) as refused:
        open_boxes(BoxesOptions(data=f"csv:{tmp_path / 'boxes.csv'}"))
    for words in ("Of 6 boxes", "1 with swapped corners", "2 outside of", "1 without area", "1 of an unknown class"):
        assert words in str(refused.value)
    data = open_boxes(BoxesOptions(data=f"csv:{tmp_path / 'boxes.csv'}", bad_boxes="clip"))
    (photo,) = [each for each in data.all if each.file.stem == "a"]
    np.testing.assert_array_equal(photo.targets[0], [[2, 3, 12, 9], [2, 3, 12, 9], [25, 15, 30, 18]])
    assert "Corrected or left out, of 6 boxes" in capsys.readouterr().out


def test_shares_and_pixels_are_not_mixed_up(tmp_path):
    save_images(tmp_path)
    for kind, text in (("csv", "path,x,y,w,h,label\na.jpg,0.1,0.1,0.5,0.5,cat\nb.jpg,0.2,0.2,0.9,0.9,cat\n"),
                       ("coco", _coco(annotations=[ROW | {"bbox": [0.1, 0.1, 0.5, 0.5]}]))):  # fmt: skip
        (tmp_path / "boxes").write_text(text)
        for mode in ("refuse", "clip"):
            with pytest.raises(UserError, match="shares of the image instead of pixels"):
                open_boxes(BoxesOptions(data=f"{kind}:{tmp_path / 'boxes'}", bad_boxes=mode))
    (tmp_path / "boxes").write_text("path,x,y,w,h,label\na.jpg,0.1,0.1,0.5,0.5,cat\nb.jpg,2,2,9,9,cat\n")
    with pytest.raises(UserError, match="1 with no value above 1"):
        open_boxes(BoxesOptions(data=f"csv:{tmp_path / 'boxes'}"))
    (tmp_path / "boxes").write_text("path,x,y,w,h,label\na.jpg,0,0,1,1,cat\nb.jpg,0,0,1,1,cat\n")
    with pytest.raises(UserError, match="2 with no value above 1"):  # whole images
        open_boxes(BoxesOptions(data=f"csv:{tmp_path / 'boxes'}"))
    (tmp_path / "boxes").write_text("path,x,y,w,h,label\na.jpg,0,0,1,1,cat\nb.jpg,2,2,9,9,cat\n")
    data = open_boxes(BoxesOptions(data=f"csv:{tmp_path / 'boxes'}"))
    assert sum(len(image.boxes) for image in data.all) == 2  # one of them is one pixel


def test_one_image_and_one_class_in_all_spellings(tmp_path, capsys):
    """Letters with accents are one character or two; rows that are there twice count once."""
    save_images(tmp_path)
    (tmp_path / "a.jpg").rename(tmp_path / "Z\u00fcrich.jpg")
    rows = ["Z\u00fcrich.jpg,1,1,5,5,caf\u00e9", "./Zu\u0308rich.jpg,1,1,5,5,cafe\u0301", "x/../b.jpg,2,2,5,5,on"]
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "boxes.csv").write_text("\n".join(["path,x,y,w,h,label", *rows]))
    options = BoxesOptions(data=f"csv:{tmp_path / 'list' / 'boxes.csv'}", images=str(tmp_path))
    data = open_boxes(options)
    assert data.labels == ("caf\u00e9", "on")
    (tmp_path / "list" / "labels.txt").write_text("on\ncafe\u0301\n")
    assert open_boxes(options).labels == ("on", "caf\u00e9")
    assert [len(photo.boxes) for photo in sorted(data.all, key=lambda photo: photo.file.name)] == [1, 1]
    assert "Repeated rows count once: 1" in capsys.readouterr().out


def test_names_of_yaml_stay_words_and_the_labels_of_voc_match_in_any_form(tmp_path):
    data = write_yolo(tmp_path / "yolo")
    (tmp_path / "yolo" / "data.yaml").write_text("path: .\ntrain: images\nval: null\ntest:\nnames: [on, 01]\n")
    assert open_boxes(BoxesOptions(data=data)).labels == ("on", "01")
    write_voc(tmp_path / "voc")
    (tmp_path / "voc" / "Annotations" / "a.xml").rename(tmp_path / "voc" / "Annotations" / "e\u0301.xml")
    (tmp_path / "voc" / "JPEGImages" / "a.jpg").rename(tmp_path / "voc" / "JPEGImages" / "\u00e9.jpg")
    assert len(open_boxes(BoxesOptions(data=f"voc:{tmp_path / 'voc'}")).all) == 3


@pytest.mark.parametrize("kind", WRITERS)
def test_links_out_of_the_folder_are_named_unless_they_are_allowed(kind, tmp_path):
    data = WRITERS[kind](tmp_path / "data")
    (image,) = (tmp_path / "data").rglob("a.jpg")
    image.rename(tmp_path / "secret.jpg")
    image.symlink_to(tmp_path / "secret.jpg")
    with pytest.raises(UserError, match=r"a\.jpg \(a link to .*\), outside of .*--allow-outside"):
        open_boxes(BoxesOptions(data=data))
    assert len(open_boxes(BoxesOptions(data=data, allow_outside=True)).all) == 3


TURNED = {"id": 1, "file_name": "a.jpg", "height": "30", "width": 20}
ROW = {"image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 5]}


def _coco(**fields) -> str:
    images = [{"id": number, "file_name": f"{name}.jpg"} for number, name in enumerate("ab", 1)]
    return json.dumps({"images": images, "annotations": [ROW], "categories": [{"id": 1, "name": "cat"}]} | fields)


BOMB = '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]><annotation><filename>&b;</filename></annotation>'
OUTSIDE = (
    '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><annotation><object><name>&a;</name></object></annotation>'
)
ONE = "<annotation><object><name>cat</name><bndbox>{}</bndbox></object></annotation>"
EDGES = "<xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax>"
BROKEN = {
    "yolo": [
        ("data.yaml", "names: [cat\n", "cannot be read as YAML"),
        ("data.yaml", "- 1\n", "should have an object, but has ['1']"),
        ("data.yaml", "names: [cat]\n", "should have a text as train[0], but has nothing"),
        ("data.yaml", "names: {1: cat, 2: dog}\ntrain: images\n", "a text as names[0], but has nothing"),
        ("data.yaml", "names: 3\ntrain: images\n", "a list as names"),
        ("data.yaml", "names: [cat, cat]\ntrain: images\n", "'cat' twice"),
        ("data.yaml", "names: [cat, dog]\ntrain: gone\n", "gone cannot be read as text"),
        ("data.yaml", "names: [cat, dog]\ntrain: labels\n", "has no box"),
        ("data.yaml", "names: [cat, dog]\ntrain: {a: 1}\n", "should have a text as train[0], but has {'a': '1'}"),
        ("data.yaml", "!!python/object/apply:os.system ['touch x']\n", "cannot be read as YAML"),
        ("data.yaml", b"names: [\xff\xfe]\n", "as text in UTF-8"),
        ("labels/a.txt", "0 0.5 0.5 0.2\n", "but is '0 0.5 0.5 0.2'"),
        ("labels/a.txt", "0 0.1 0.1 0.2 0.1 0.2 0.2\n", "polygons as boxes"),
        ("labels/a.txt", "cat 0.5 0.5 0.2 0.2\n", "should be a class number"),
        ("labels/a.txt", "0 0.5 nan 0.2 0.2\n", "should be a class number"),
        ("labels/a.txt", "0.5 0.5 0.5 0.2 0.2\n", "should be a class number"),
        ("labels/a.txt", "7 0.5 0.5 0.2 0.2\n", "1 of an unknown class"),
        ("labels/a.txt", "-1 0.5 0.5 0.2 0.2\n", "1 of an unknown class"),
        ("labels/a.txt", "0 1.2 0.5 0.4 0.2\n", "1 outside of the image"),
        ("labels/a.txt", "0 5 5 10 10\n", "1 with a value above 1.5, as if they were pixels"),
        ("data.yaml", "names: [cat, dog]\ntrain: ../../\n", "outside of"),
        ("data.yaml", "names: [cat, dog]\npath: /\ntrain: images\n", "outside of"),
        ("images/a.jpg", b"GIF", "cannot be read"),
    ],
    "voc": [
        ("Annotations/a.xml", "<annotation><object>", "cannot be read as plain XML"),
        ("Annotations/a.xml", BOMB, "cannot be read as plain XML"),
        ("Annotations/a.xml", OUTSIDE, "cannot be read as plain XML"),
        ("Annotations/a.xml", "", "cannot be read as plain XML"),
        ("Annotations/a.xml", "<html/>", "a name, a bndbox"),
        ("Annotations/a.xml", "<annotation><size><width>20</width><height>30</height></size></annotation>", "upright"),
        ("Annotations/a.xml", "<annotation><object><name>cat</name></object></annotation>", "a name, a bndbox"),
        ("Annotations/a.xml", ONE.format("<xmin>1</xmin><ymin>1</ymin><xmax>9</xmax>"), "a bndbox of four finite"),
        (
            "Annotations/a.xml",
            ONE.format("<xmin>x</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax>"),
            "four finite numbers",
        ),
        ("Annotations/a.xml", ONE.format("<xmin>9</xmin><ymin>1</ymin><xmax>1</xmax><ymax>9</ymax>"), "swapped"),
        ("Annotations/gone.xml", "<annotation/>", "lacks 1 of the files"),
        ("Annotations/a.xml", ONE.replace("<bnd", "<difficult>2</difficult><bnd").format(EDGES), "0 or 1 as difficult"),
    ],
    "csv": [
        ("boxes.csv", "", "begin with the columns"),
        ("boxes.csv", "path,x,y,label\na.jpg,1,2,cat\n", "begins with 'path,x,y,label'"),
        ("boxes.csv", "path,x,y,w,h,label,label\n", "begins with"),
        ("boxes.csv", "path,x,y,w,h,label\na.jpg,1,2\n", "Line 2 of"),
        ("boxes.csv", "path,x,y,w,h,label\na.jpg,1,2,3,inf,cat\n", "finite numbers"),
        ("boxes.csv", "path,x,y,w,h,label\na.jpg,1,2,3,4,\n", "and a class"),
        ("boxes.csv", "path,x,y,w,h,label\n,1,2,3,4,cat\n", "the path of an image"),
        ("boxes.csv", "path,x,y,w,h,label\ngone.jpg,1,2,3,4,cat\n", "are not there"),
        ("boxes.csv", "path,x,y,w,h,label\n", "has no box"),
        ("boxes.csv", "path,x,y,w,h,label\na.jpg,,,,,\n", "has no box"),
        ("boxes.csv", "path,x,y,w,h,label\na.jpg,1,2,3,4,cat\n", "holds 1 images, and needs"),
        ("boxes.csv", "path,x,y,w,h,label\n../a.jpg,1,2,3,4,cat\n", "outside of"),
        ("boxes.csv", "path,x,y,w,h,label\n/etc/hosts,1,2,3,4,cat\n", "names /etc/hosts, outside of"),
        ("boxes.csv", "path,x,y,w,h,label\na\0.jpg,1,2,3,4,cat\n", "are not there"),
        ("boxes.csv", f"path,x,y,w,h,label\n{'a' * 5000}.jpg,1,2,3,4,cat\n", "are not there"),
        ("boxes.csv", b"path\xff", "as text in UTF-8"),
    ],
    "coco": [
        ("boxes.json", "{", "cannot be read as JSON"),
        ("boxes.json", "[" * 100_000, "cannot be read as JSON"),
        ("boxes.json", "[]", "should have an object, but has []"),
        ("boxes.json", _coco(images=[1]), "an object as images[0], but has 1"),
        ("boxes.json", _coco(images=[{"id": "a"}]), "a whole number as images[0].id"),
        ("boxes.json", _coco(annotations=[]), "has no box"),
        ("boxes.json", _coco(categories=[]), "has no categories"),
        ("boxes.json", _coco(images=[{"id": 1, "file_name": "../a.jpg"}]), "outside of"),
        ("boxes.json", _coco(images=[{"id": 1, "file_name": "\ud800.jpg"}]), "are not there"),
        ("boxes.json", _coco(annotations=[ROW | {"iscrowd": "0"}]), "0 or 1 as annotations[0].iscrowd, but has '0'"),
        ("boxes.json", _coco(annotations=[ROW | {"iscrowd": 1}]), "has no box"),
        ("boxes.json", _coco(annotations=[ROW | {"area": float("nan")}]), "a finite number as annotations[0].area"),
        ("boxes.json", _coco(annotations=[ROW | {"bbox": [[[1]] * 9] * 999}]), "a list of 4 as annotations[0].bbox"),
        (
            "boxes.json",
            _coco(images=[{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "a.jpg"}]),
            "has two images with",
        ),
        ("boxes.json", _coco(images=[TURNED, {"id": 2, "file_name": "b.jpg"}]), "annotated as one 20 wide and 30 high"),
        ("boxes.json", _coco(images=[]), "which is not listed"),
    ],
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_one_sentence(kind, tmp_path):
    for number, (name, content, words) in enumerate(BROKEN[kind]):
        root = tmp_path / str(number)
        root.mkdir()
        data = WRITERS[kind](root)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UserError) as refused:
            open_boxes(BoxesOptions(data=data))
        assert words in str(refused.value), (name, content, str(refused.value))
        assert "\n" not in str(refused.value)


def test_an_image_that_is_cut_off_is_named_before_the_training_and_a_name_that_is_no_utf_8_is_shown(tmp_path):
    data = write_yolo(tmp_path)
    for folder, suffix in (("images", ".jpg"), ("labels", ".txt")):
        file = tmp_path / folder / f"a{suffix}"
        os.rename(file, os.fsencode(file.parent) + b"/\xff" + suffix.encode())
    data = open_boxes(BoxesOptions(data=data))
    assert any(box_data_set(data).train.name(row).endswith("\\xff.jpg") for row in range(2))
    file = tmp_path / "images" / "b.jpg"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"^1 of 3 images cannot be read: .*b\.jpg"):
        box_data_set(data)


def test_roboflow_and_val_folders_are_found(tmp_path, capsys):
    write_yolo(tmp_path / "train")
    (tmp_path / "data.yaml").write_text("train: ../train/images\nval: [train/images]\nnc: 2\nnames: ['cat', 'dog']\n")
    data = open_boxes(BoxesOptions(data=f"yolo:{tmp_path / 'data.yaml'}"))
    assert data.has_split
    assert len(data.train) == len(data.evaluation) == 3
    assert "training also uses 3 of the evaluation images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("boxes.csv", "accepts coco:FILE.json"),
        ("csv:", "accepts coco:"),
        ("csv:gone", "no file"),
        ("voc:gone", "no folder"),
    ],
)
def test_data_that_are_not_there_are_one_sentence(data, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        BoxesOptions(data=data)
