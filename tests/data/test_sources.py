"""Where images come from: digits, TensorFlow Datasets, class folders, and what is wrong with them."""

import itertools
import json
import os
import pathlib
import re
import shutil
import socket
import types
import urllib.error

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from keras_vit import UserError
from keras_vit.files.labels import check_classes
from keras_vit.files.transfer import TransferError
from keras_vit.images.formats import format_list, format_problem
from keras_vit.run import Run
from tests.support import TFDS, encoded, needs_mnist
from training.data import dataset as examples
from training.data import sources
from training.data import tfds as tfds_data
from training.data.checks import check_data
from training.data.known_images import check_held_out, check_split, warn_of_known_images, warn_of_training_images
from training.data.listed_files import listed_files
from training.data.sources import DataOptions, DataSet, Split, bad_examples_reported, open_source
from training.data.write import shard


def collect(split: Split) -> tuple[list[np.ndarray], list[int]]:
    examples = [split.example(tf.constant(index, tf.int64)) for index in range(split.num_examples)]
    return [image.numpy() for image, _ in examples], [int(label) for _, label in examples]


def test_digits_are_all_there_once():
    source = open_source(DataOptions("digits"))
    assert source.labels == tuple("0123456789")
    assert (source.train.num_examples, source.evaluation.num_examples) == (1437, 360)
    train, images = (
        next(iter(tf.data.Dataset.range(split.num_examples).map(split.read).batch(2000)))[0].numpy()
        for split in (source.train, source.evaluation)
    )
    assert (images.shape[1:], images.dtype, images.max()) == ((8, 8, 1), np.uint8, 255)
    assert np.bincount(source.evaluation.labels).min() >= 34  # stratified
    assert len({image.tobytes() for image in images} & {image.tobytes() for image in train}) == 0


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        *((name, {}, r"digits, tfds:NAME") for name in ("digit", "digits:x", "tfds:", "folder:", "imagenet")),
        ("digits", {"data_dir": "x"}, "--data-dir applies only to --data tfds"),
        ("digits", {"on_bad_image": "skip"}, "--on-bad-image applies only to --data folder"),
        ("folder:x", {"train_split": "train[:9]"}, "--train-split applies only to --data tfds"),
        ("folder:x", {"eval_split": "test"}, "--eval-split applies only to --data tfds"),
        ("tfds:mnist", {"on_bad_image": "skip"}, "--on-bad-image applies only to --data folder"),
        ("tfrecord:train-*", {"group": "folder"}, "--group applies only to .* and to keras-vit shard of these"),
        *((f"tfds:{name}", {}, "no data set of TensorFlow Datasets named") for name in ("../x", "a:b:c", "a b")),
        ("tfds:mnist:x", {"data_dir": "."}, "no configuration of mnist named 'x'"),
        ("tfds:cifar10_corrupted:fog_9", {"data_dir": "."}, "named 'fog_9'; the nearest names are fog_"),
        ("tfds:mnst", {}, "named 'mnst'; the nearest names are mnist"),
        ("folder:nowhere", {}, "There is no folder"),
        ("folder:.", {}, "No class folders are in"),
        ("csv:gone.csv", {}, "There is no file .*gone.csv"),
    ],
)
def test_what_is_no_data_set_is_refused(data, options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        open_source(DataOptions(data, **options))


UNREACHABLE = urllib.error.URLError(socket.gaierror("no such host"))


@pytest.mark.parametrize(
    ("error", "has_files", "words"),
    [
        (UNREACHABLE, False, r"since \S+ cannot be reached"),  # TFDS would try each file for minutes
        (UNREACHABLE, True, "could not be fetched .no route"),  # the files may be there
        (urllib.error.HTTPError("", 403, "Forbidden", None, None), False, "could not be fetched"),  # TFDS may know how
    ],
)
def test_a_data_set_that_cannot_be_fetched_says_where_it_was_looked_for(error, has_files, words, tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    fetched = []

    def opened(address: str):
        raise TransferError("it failed", retry=True) from error

    def fetch(builder):
        fetched.append(builder.name)
        raise ConnectionError("no route")

    monkeypatch.setattr(tfds_data, "opened", opened)
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", fetch)
    if has_files:
        (tmp_path / "downloads" / "manual").mkdir(parents=True)
    with pytest.raises(UserError, match=rf"'mnist' is not prepared in .*{words}"):
        open_source(DataOptions("tfds:mnist", str(tmp_path)))
    assert fetched == ([] if "reached" in words else ["mnist"])


@needs_mnist
def test_mnist_is_opened_with_its_splits():
    source = open_source(DataOptions("tfds:mnist", str(TFDS), "train[:50]", "test[10:30]"))
    assert source.labels == tuple("0123456789")
    assert (source.train.num_examples, source.evaluation.num_examples) == (50, 20)


@needs_mnist
def test_records_read_by_position_are_those_of_tfds(monkeypatch):
    arguments = DataOptions("tfds:mnist", str(TFDS), "train[100:140]", "test[:7]")
    held = open_source(arguments)
    monkeypatch.setattr(tfds_data, "_IN_MEMORY_BYTES", 0)
    read = open_source(arguments)
    for split in ("train", "evaluation"):
        (images, labels), (expected, numbers) = collect(getattr(read, split)), collect(getattr(held, split))
        assert labels == numbers
        np.testing.assert_array_equal(images, expected)
    others = tfds_data._tfds_split(tfds_data.tfds_builder("mnist", str(TFDS)), "train[:50]", ("zero", "one"))
    with pytest.raises(UserError, match="the images read has the label"), bad_examples_reported():
        list(tf.data.Dataset.range(50).map(others.read))


@needs_mnist
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eval_split": "dev"}, "no split 'dev', but train, test, and"),
        ({"train_split": "train[5:3]"}, "'train.*' of mnist is empty"),
        ({"train_split": "train[:0]"}, "'train.*' of mnist is empty"),
    ],
)
def test_a_split_that_is_not_there_or_empty_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        open_source(DataOptions("tfds:mnist", str(TFDS), **options))


def test_images_of_tfds_that_are_no_bytes_are_refused(monkeypatch):
    import tensorflow_datasets as tfds

    features = {
        "image": tfds.features.Tensor(shape=(8, 8, 3), dtype=np.float32),
        "label": tfds.features.ClassLabel(num_classes=2),
    }
    info = types.SimpleNamespace(supervised_keys=("image", "label"), features=tfds.features.FeaturesDict(features))
    builder = types.SimpleNamespace(name="floats", info=info)
    monkeypatch.setattr(tfds_data, "tfds_builder", lambda name, data_dir: builder)
    with pytest.raises(UserError, match="'floats' should be uint8, 0 to 255, but 'image' is float32; convert"):
        open_source(DataOptions("tfds:floats"))


def test_labels_outside_the_classes_are_refused():
    images = np.zeros((3, 2, 2, 1), np.uint8)
    with pytest.raises(UserError, match="Labels must be 0 to 1, .* but 2 of 3 are outside, 5 first"):
        sources.array_split(images, np.array([0, 5, -1]), ("a", "b"))


def test_a_class_folder_with_a_line_break_in_its_name_is_refused(folder):
    (folder / "two\nlines").mkdir()
    with pytest.raises(UserError, match="unprintable characters in its name; rename it"):
        open_source(DataOptions(f"folder:{folder}"))


def write_image(path: pathlib.Path, value: int, size: tuple[int, int] = (9, 7), channels: int = 3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.full((*size, channels), value, np.uint8)
    PIL.Image.fromarray(image[..., 0] if channels == 1 else image).save(path)


def write_images(folder: pathlib.Path, **counts: int) -> None:
    """Write so many images of each class."""
    for name, count in counts.items():
        for number in range(count):
            write_image(folder / name / f"{number}.png", number)


@pytest.fixture(name="folder")
def _folder(tmp_path) -> pathlib.Path:
    """Two classes in mixed formats, sizes and channels, one of them with a folder inside."""
    root = tmp_path / "pictures"
    for number, suffix in enumerate((".png", ".jpg", ".JPEG", ".bmp", ".jpe")):
        write_image(root / "zebra" / f"{number}{suffix}", 10 * number, (9 + number, 7))
        write_image(root / "ant" / "more" / f"{number}{suffix}", 100 + 10 * number)
    write_image(root / "ant" / "gray.png", 50, channels=1)
    write_image(root / "ant" / "alpha.png", 60, channels=4)
    (root / "ant" / ".DS_Store").write_bytes(b"hidden files are nobody's images")
    return root


def test_a_folder_gives_its_classes_by_name_and_every_tenth_image_for_evaluation(folder):
    source = open_source(DataOptions(f"folder:{folder}"))
    assert source.labels == ("ant", "zebra")
    assert (source.train.num_examples, source.evaluation.num_examples) == (10, 2)
    images, labels = collect(source.train)
    assert sorted(labels) == [0] * 6 + [1] * 4
    assert {image.shape[-1] for image in images} == {1, 3}
    evaluated, _ = collect(source.evaluation)
    assert evaluated[0].shape[-1] == 4  # alpha.png is the first of ant
    assert len(images) + len(evaluated) == 12


def odd_images() -> dict[str, bytes]:
    """A nearly black image of 16 bits, ones of one color on white, and ones with nothing to warn of."""
    rng = np.random.default_rng(2)
    colors, clear = rng.integers(0, 256, (9, 7, 4), dtype=np.uint8), rng.integers(0, 256, (9, 7, 4), dtype=np.uint8)
    clear[..., 3] = 0
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    files = {}
    for name, image, form, options in (
        ("turned.jpg", colors[..., :3], "JPEG", {"exif": exif}),
        ("dark.png", rng.integers(0, 256, (9, 7)).astype(np.uint16), "PNG", {}),
        ("clear.png", clear, "PNG", {}),
        ("one color.png", np.full((9, 7), 40, np.uint8), "PNG", {}),
        ("seen.png", colors, "PNG", {}),
        ("upright.jpg", colors[..., :3], "JPEG", {}),
    ):
        files[name] = encoded(image, form, **options)
    return files


@pytest.fixture(name="odd_folder")
def _odd_folder(tmp_path) -> pathlib.Path:
    for kind in ("train", "test"):
        for name in ("ant", "bee"):
            (tmp_path / "odd" / kind / name).mkdir(parents=True)
            for file, content in odd_images().items():
                (tmp_path / "odd" / kind / name / file).write_bytes(content)
    return tmp_path / "odd"


@pytest.mark.parametrize("form", ["folder", "records"])
def test_dark_images_and_images_of_one_color_are_counted_and_named(form, odd_folder, tmp_path, capsys):
    data = DataOptions(f"folder:{odd_folder}")
    if form == "records":
        shard(data, str(tmp_path / "records"))
        capsys.readouterr()
        data = DataOptions(f"tfrecord:{tmp_path}/records/*.tfrecord")
    open_source(data)
    printed = capsys.readouterr().out
    dark = [line for line in printed.splitlines() if "of 16 bits and nearly black" in line]
    uniform = [line for line in printed.splitlines() if "of a single color" in line]
    assert (len(dark), len(uniform)) == (2, 2)  # of training and evaluation images, each split by itself
    assert all(line.startswith("Warning: 2 of 12 images") for line in dark)
    assert all(line.startswith("Warning: 4 of 12 images") for line in uniform)
    assert not any(re.search("seen|upright|turned", line) for line in (*dark, *uniform))
    if form == "folder":
        for file in ("dark.png (2", "clear.png", "one color.png"):
            assert all(str(odd_folder / split / "ant" / file) in printed for split in ("train", "test"))


@pytest.mark.parametrize("splits", ["train test", "train valid", "TRAIN Val", "training testing"])
def test_a_folder_with_splits_uses_them(tmp_path, splits):
    for split, count in zip(splits.split(), (3, 2), strict=True):
        write_images(tmp_path / split, a=count, b=count)
    source = open_source(DataOptions(f"folder:{tmp_path}"))
    assert source.labels == ("a", "b")
    assert (source.train.num_examples, source.evaluation.num_examples) == (6, 4)


@pytest.mark.parametrize("splits", ["train dev", "training"])
def test_a_split_without_its_other_is_no_class(tmp_path, splits):
    for split in splits.split():
        write_images(tmp_path / split, a=1, b=1)
    with pytest.raises(UserError, match="name them train and one of test, testing, val,"):
        open_source(DataOptions(f"folder:{tmp_path}"))


@pytest.mark.parametrize("alike", [("images", "labels"), ("first", "second")])
def test_class_folders_with_the_same_folders_and_no_images_are_refused(tmp_path, alike):
    for folder in alike:
        write_images(tmp_path / folder, a=2, b=2)
    write_images(tmp_path, other=2)
    one, other = (tmp_path / folder for folder in alike)
    with pytest.raises(UserError, match=f"^{one} and {other} should be class .* hold only"):
        check_data(DataOptions(f"folder:{tmp_path}"))
    write_image(one / "0.png", 1)
    check_data(DataOptions(f"folder:{tmp_path}"))


@pytest.mark.parametrize(
    ("folders", "labels"),
    [("ant/red ant/black bee/2021 bee/2022 cat/images dog/images", "ant bee cat dog"), ("bus train", "bus train")],
)
def test_classes_may_have_folders_inside_and_be_called_train(folders, labels, tmp_path):
    for number, path in enumerate(folders.split()):
        for file in range(2):
            write_image(tmp_path / path / f"{file}.png", 2 * number + file)
    assert open_source(DataOptions(f"folder:{tmp_path}")).labels == tuple(labels.split())


def test_splits_with_other_classes_are_refused(tmp_path):
    write_images(tmp_path / "train", a=1, b=1)
    write_images(tmp_path / "test", a=1, c=1)
    with pytest.raises(UserError, match="same classes, but b, c are only in"):
        open_source(DataOptions(f"folder:{tmp_path}"))


def csv_file(folder: pathlib.Path, *lines: str) -> DataOptions:
    (folder / "list.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return DataOptions(f"csv:{folder / 'list.csv'}")


def test_a_csv_file_gives_what_the_folder_does(folder):
    expected = open_source(DataOptions(f"folder:{folder}"))
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.name[0] != "."]
    lines = [f"{path},{path.parts[0]},x" for path in files]
    found = open_source(csv_file(folder, "path,label,note", *lines))
    assert found.labels == expected.labels
    for split in ("train", "evaluation"):
        (images, labels), (others, same) = (collect(getattr(source, split)) for source in (found, expected))
        assert labels == same
        assert all(np.array_equal(image, other) for image, other in zip(images, others, strict=True))


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("path;label\n{0};{1}\n{2};{3}\n", "utf-8"),
        ("path;label;;\r\n{0};{1};;\r\n;;;\r\n{2};{3};;\r\n", "utf-8-sig"),  # of a spreadsheet
        ("path\tlabel\n{0}\t{1}\n{2}\t{3}\n", "utf-8"),
        ('"Image_Path"|"Species"\n"{0}"|"{1}"\n"{2}"|"{3}"\n', "utf-8"),
        ("id, FILENAME, category\n1, {0}, {1}\n2, {2}, {3}\n", "utf-8"),
        ("label,path,class\n{1},{0},1\n{3},{2},2\n", "utf-8"),
        ("Class;Image\n{1};{0}\n{3};{2}\n", "utf-8"),
        (",path,label,\n0,{0},{1},\n1,{2},{3},\n", "utf-8"),  # of pandas
        ("path,label\n.\\{0},{1}\n.\\{2},{3}\n", "utf-8"),
        ("path,label\nBa\u0308r 1.png,{1}\n{2},{3}\n", "utf-8"),  # of macOS
    ],
)
def test_csv_files_of_other_programs_are_understood(text, encoding, tmp_path):
    names = ("Bär 1.png", "Bär", "b.png", "Löwe")
    for file in names[::2]:
        write_image(tmp_path / file, 3)
    (tmp_path / "list.csv").write_bytes(text.format(*names).encode(encoding))
    found = listed_files(tmp_path / "list.csv")
    assert found.value_of == {"": {str(tmp_path / names[0]): "Bär", str(tmp_path / names[2]): "Löwe"}}
    check_data(DataOptions(f"csv:{tmp_path / 'list.csv'}"))


def test_of_a_csv_file_with_test_and_validation_images_those_of_test_are_used_as_in_a_folder(tmp_path, capsys):
    splits = ("train", "Training", "val", "val", "test", "test")
    for number in range(6):
        write_image(tmp_path / "all" / f"{number}.png", 10 * number)
    lines = [f"all/{n}.png,{'ant' if n % 2 else chr(34) + 'bee, wild' + chr(34)},{splits[n]}" for n in range(6)]
    found = open_source(csv_file(tmp_path, "\ufeffpath,label,split", *lines))
    assert found.labels == ("ant", "bee, wild")
    assert [collect(split)[1] for split in (found.train, found.evaluation)] == [[0, 1], [0, 1]]
    assert [pathlib.Path(found.evaluation.name(index)).name for index in range(2)] == ["5.png", "4.png"]
    used = f"Not used: 2 images of {tmp_path / 'list.csv'} with the split val."
    assert used in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("name,kind a.png,ant", "must name the columns path and one of label"),
        ("a.png,ant b.png,bee", "must name the columns path"),
        ("file,image,label a.png,b.png,ant", "path .* each once"),
        ("path,category,species a.png,x,ant", "label.* each once"),
        ("path,label a.png,ant b.png,", "Line 3 of .* the column label"),
        ("path,label,split a.png,ant,train b.png,bee,test a.png,ant,test", "Line 2 of .* and Line 4 of .* 'a.png'"),
        ("path,label,split a.png,ant,train b.png,bee,train", "split of .* says only train"),
        ("path,label a.png,ant", "at least two classes"),
        ("path,label,split a.png,ant,train b.png,bee,later", "Line 3 of .* as a split .*'later'"),
        ("path,label,split a.png,ant,train b.png,bee,test", "but ant, bee are only"),
        ("path,label a.png,ant gone.png,bee", "1 of 2 files that .* are not there, such as .*gone.png"),
        ("path,label a.png,ant b.png,bee", "The class 'ant' has one image, and needs two"),
    ],
)
def test_a_wrong_line_of_a_csv_file_is_named(tmp_path, lines, words):
    for name in ("a.png", "b.png", "c.png"):
        write_image(tmp_path / name, 3)
    with pytest.raises(UserError, match=words):
        open_source(csv_file(tmp_path, *lines.split()))


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_a_list_in_another_encoding_is_one_sentence(encoding, tmp_path):
    (tmp_path / "list.csv").write_text("path,label\nä.png,ant\nb.png,bee\n", encoding=encoding)
    with pytest.raises(UserError, match="UTF-8"):
        listed_files(tmp_path / "list.csv")


def test_every_bad_image_is_named_and_stops(folder, capfd):
    (folder / "zebra" / "broken.jpg").write_bytes((folder / "zebra" / "1.jpg").read_bytes()[:300])
    (folder / "zebra" / "words.png").write_text("no image")
    (folder / "ant" / "photo").write_bytes(b"\0\0\0\x18ftypheic\0\0")
    (folder / "ant" / "raw.nef").write_bytes(b"II*\0" + bytes(8))  # of a format that no image of ours has
    (folder / "ant" / "empty.png").write_bytes(b"")
    (folder / "ant" / "begun.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    write_image(folder / "ant" / "moving.gif", 9)
    with pytest.raises(UserError, match="^6 of 18 files in .* --on-bad-image skip") as caught:
        open_source(DataOptions(f"folder:{folder}"))
    for words in (
        f"words.png (not {format_list()})",
        f"begun.png (not a whole {format_list()}, or too large)",
        "photo (not JPEG",
        "but a HEIC file; convert the folder by keras-vit prepare",
        "moving.gif (not JPEG, PNG, BMP or WebP, but a GIF file; convert",
        "broken.jpg",
        "empty.png",
    ):
        assert words in str(caught.value)
    assert "{{" not in str(caught.value)
    assert capfd.readouterr().err == ""
    source = open_source(DataOptions(f"folder:{folder}", on_bad_image="skip"))
    assert (source.train.num_examples, source.evaluation.num_examples) == (10, 2)
    assert "Skipped: 6 of 18 files" in capfd.readouterr().out


def test_files_that_are_no_images_are_counted_in_a_line_and_ignored(folder, capsys):
    for name in ("ant/notes.txt", "ant/call.ogg", "zebra/CALL.OGG", "zebra/labels.csv", "zebra/README", "zebra/x.json"):
        (folder / name).write_text("BM and GIF8 are no images, and neither is this")
    (folder / "zebra" / "no_ending").write_bytes((folder / "zebra" / "1.jpg").read_bytes())
    (folder / "zebra" / "lost.txt").symlink_to(folder / "nowhere")
    source = open_source(DataOptions(f"folder:{folder}"))
    assert source.train.num_examples + source.evaluation.num_examples == 13
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not images" in line]
    assert line.startswith(f"Ignored: 7 files in {folder} that are not images (2 .")
    assert all(kind in line for kind in ("2 .txt", "2 .ogg", "1 .csv", "1 .json", "1 without an ending"))


def _bmp(mode: str, palette: list[int] | None = None) -> bytes:
    image = PIL.Image.fromarray(np.arange(63, dtype=np.uint8).reshape(9, 7)).convert(mode)
    if palette:
        image.putpalette(palette)
    return encoded(image, "BMP")


RAMP = np.repeat(np.arange(256), 3).tolist()
COLORS = np.random.default_rng(0).permutation(RAMP).tolist()


@pytest.mark.parametrize(
    "content",
    [_bmp("P", COLORS), _bmp("P", RAMP[::-1]), _bmp("1"), _bmp("L")[:30] + bytes([1]) + _bmp("L")[31:]],
    ids=["colors", "inverted", "black and white", "run lengths"],
)
def test_a_bmp_of_which_the_indices_would_be_read_is_no_readable_image(content):
    assert format_problem(content).startswith("a BMP with a palette or compression,")


@pytest.mark.parametrize("content", [_bmp("L"), _bmp("P", RAMP), _bmp("RGB")], ids=["gray", "ramp", "color"])
def test_a_bmp_of_grey_values_or_colors_is_read(content):
    assert format_problem(content) is None
    image = examples.decoded(tf.constant(content)).numpy()
    np.testing.assert_array_equal(image[:, :, 0], np.arange(63).reshape(9, 7))


def test_file_names_need_not_be_utf_8(folder):
    name = os.fsdecode(b"\xff.png")
    write_image(folder / "ant" / name, 77)
    (folder / "ant" / os.fsdecode(b"\xfe.png")).write_text("no image")
    source = open_source(DataOptions(f"folder:{folder}", on_bad_image="skip"))
    assert any((image == 77).all() for image in collect(source.train)[0])
    with pytest.raises(UserError, match=r"ant/\\xfe.png \("):
        open_source(DataOptions(f"folder:{folder}"))


def test_hidden_folders_and_files_of_the_system_are_skipped(folder):
    write_image(folder / "ant" / ".thumbnails" / "0.png", 0)
    write_image(folder / "__MACOSX" / "0.png", 0)
    for file in ("ant/Thumbs.db", "ant/desktop.ini"):
        (folder / file).write_text("of the system")
    source = open_source(DataOptions(f"folder:{folder}"))
    assert source.train.num_examples + source.evaluation.num_examples == 12


def test_links_to_folders_and_to_nothing_are_named(folder, tmp_path):
    write_image(tmp_path / "elsewhere" / "0.png", 0)
    (folder / "ant" / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "ant" / "lost.png").symlink_to(tmp_path / "nowhere")
    (folder / "ant" / "image.png").symlink_to(tmp_path / "elsewhere" / "0.png")
    with pytest.raises(UserError, match="^2 of 15 files") as caught:
        open_source(DataOptions(f"folder:{folder}"))
    assert "ant/linked (a link to a folder, which is not followed)" in str(caught.value)
    assert "ant/lost.png (no file, or a link to none)" in str(caught.value)


def test_an_empty_class_is_refused_and_one_of_a_single_image_before_all_are_decoded(folder):
    (folder / "bee").mkdir()
    with pytest.raises(UserError, match="class .bee. of .* has no image"):
        open_source(DataOptions(f"folder:{folder}"))
    for name in ("ant", "bee"):
        (folder / name / "0.png").write_bytes(b"broken")
    with pytest.raises(UserError, match="class 'bee' has one image, and needs two"):
        open_source(DataOptions(f"folder:{folder}"))


def test_of_many_unreadable_files_ten_are_named_and_a_file_lists_all(tmp_path):
    make_many = {
        f"class {number % 2}/{number:04d}.png": b"words" if number % 3 else b"\x89PNG\r\n\x1a\n" for number in range(60)
    }
    for name, data in make_many.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match="^60 of 60 files in .* cannot be read as images: ") as caught:
        open_source(DataOptions(f"folder:{tmp_path}"))
    message = str(caught.value)
    assert (message.count(".png"), message.count(".png (")) == (10, 2)  # a reason stands once
    assert f"; and 50 more (in all 40 times not {format_list()}, 20 times " in message
    listed = pathlib.Path(re.search(r"which are listed in (\S+\.txt);", message)[1])
    lines = listed.read_text().splitlines()
    listed.unlink()
    assert sorted(line.split("\t")[0] for line in lines) == sorted(str(tmp_path / name) for name in make_many)


def test_an_image_that_vanishes_is_named(tmp_path):
    write_images(tmp_path, ant=2, bee=2)
    train = open_source(DataOptions(f"folder:{tmp_path}")).train
    (tmp_path / "bee" / "1.png").unlink()
    words = r"bee/1.png can no longer be read \(No such file or directory\)"
    with pytest.raises(UserError, match=words), bad_examples_reported(train):
        tf.function(lambda: next(iter(tf.data.Dataset.range(2).map(train.read).batch(2))))()
    with pytest.raises(UserError, match=words), bad_examples_reported(train):
        train.read(tf.constant(1, tf.int64))


def names_of(split: Split) -> set[str]:
    return {os.path.join(*pathlib.Path(split.name(index)).parts[-2:]) for index in range(split.num_examples)}


def uneven_folder(root: pathlib.Path) -> pathlib.Path:
    for name, count in {"ant": 23, "bee": 2, "cat": 10}.items():
        for number in range(count):
            write_image(root / name / f"{number:02}.png", number)
    return root


def test_a_seed_draws_a_tenth_of_each_class_and_another_seed_draws_others(tmp_path, capsys):
    folder = uneven_folder(tmp_path / "pictures")
    splits = [open_source(DataOptions(f"folder:{folder}", split_seed=seed)) for seed in (1, 1, 2, None)]
    first, again, other, by_name = (names_of(source.evaluation) for source in splits)
    assert first == again != other
    assert by_name == {"ant/00.png", "ant/10.png", "ant/20.png", "bee/00.png", "cat/00.png"}
    for source in splits:
        assert np.bincount(source.evaluation.labels).tolist() == [3, 1, 1]
        assert np.bincount(source.train.labels).tolist() == [20, 1, 9]
        assert not names_of(source.train) & names_of(source.evaluation)
    printed = [line for line in capsys.readouterr().out.splitlines() if "of each class" in line]
    assert len(printed) == 4
    assert printed[0].startswith("A tenth of each class, drawn with the seed 1, is")
    assert printed[-1].startswith("Every tenth image of each class is")
    assert all(line.endswith("kept for evaluation: 5 of 35 images, 1 to 3 of each class.") for line in printed)


def test_a_drawn_split_is_the_same_forever_wherever_the_folder_is_and_in_a_csv_file(tmp_path):
    drawn = {"ant/01.png", "ant/06.png", "ant/22.png", "bee/01.png", "cat/09.png"}
    here, there = (uneven_folder(tmp_path / place) for place in ("here", "there"))
    lines = [f"{path.relative_to(there)},{path.parent.name}" for path in there.rglob("*.png")]
    for data in (f"folder:{here}", f"folder:{there}", csv_file(there, "path,label", *lines).data):
        assert names_of(open_source(DataOptions(data, split_seed=1)).evaluation) == drawn
    assert "split_seed" not in DataOptions("digits").settings()  # as of earlier runs


def test_a_seed_is_refused_where_the_splits_are_there(tmp_path):
    for split in ("train", "test"):
        write_images(tmp_path / split, ant=1, bee=1)
    csv = csv_file(tmp_path, "path,label,split", "train/ant/0.png,ant,train", "test/bee/0.png,bee,test")
    for data in (f"folder:{tmp_path}", csv.data):
        with pytest.raises(UserError, match="--split-seed draws a split, but .* has splits of"):
            open_source(DataOptions(data, split_seed=1))


def trained_on(folder: pathlib.Path, data: DataOptions, counts: tuple[int, int] | None = None, **config) -> Run:
    """A run directory that says what it was trained on, made anew."""
    folder.mkdir(exist_ok=True)
    images = {} if counts is None else {"images": dict(zip(("train", "evaluation"), counts, strict=True))}
    (folder / "config.json").write_text(json.dumps({"settings": {"source": data.settings(), **images}, **config}))
    return Run.at(folder)


def made_up(counts: tuple[int, int], number: int) -> DataSet:
    """A data set with a part that a rule kept, of so many training and evaluation images."""
    train = Split(counts[0], lambda index: None, fingerprint=number)
    return DataSet(("ant", "bee"), train, Split(counts[1], lambda index: None), held_out=True)


def test_images_that_a_rule_kept_are_no_longer_those_when_the_folder_has_others(folder, tmp_path):
    data = DataOptions(f"folder:{folder}")
    source = open_source(data)
    counts = source.train.num_examples, source.evaluation.num_examples
    assert source.held_out
    run = trained_on(tmp_path / "run", data, counts)
    check_held_out(run, data, source)
    check_held_out(run, DataOptions("folder:others"), made_up((1, 1), 0))
    with pytest.raises(UserError, match=f"had {sum(counts)} images, instead of {sum(counts) + 1}"):
        check_held_out(run, data, made_up((counts[0] + 1, counts[1]), 7))
    run = trained_on(tmp_path / "run", data, counts, images_fingerprint=source.fingerprint)
    check_held_out(run, data, source)
    for known in (run, Run(str(tmp_path / "run" / "model.keras"))):
        with pytest.raises(UserError, match="had other images, or the same under other names"):
            check_held_out(known, data, made_up(counts, 8))


def test_training_images_of_a_run_are_found_in_another_folder_where_a_rule_keeps_others(tmp_path, capsys):
    here, there = (tmp_path / name for name in ("here", "there"))
    for number in range(30):
        write_image(here / ("ant" if number < 21 else "bee") / f"{number:02}.png", number)
    shutil.copytree(here, there)
    source = open_source(DataOptions(f"folder:{here}"))
    run = trained_on(tmp_path / "run", DataOptions(f"folder:{here}"))
    assert not warn_of_training_images(run, source.evaluation.digests, source.evaluation.name)
    run.save_training_images(source.train.digests)
    same = open_source(DataOptions(f"folder:{there}"))
    (there / "ant" / "00.png").unlink()
    others = open_source(DataOptions(f"folder:{there}"))
    seen = names_of(others.evaluation) & names_of(source.train)
    capsys.readouterr()
    run = Run.at(tmp_path / "run")  # opened anew
    for known in (run, Run(str(tmp_path / "run" / "model.keras"))):
        assert warn_of_training_images(known, same.evaluation.digests, same.evaluation.name)
    assert capsys.readouterr().out == ""
    assert warn_of_training_images(run, others.evaluation.digests, others.evaluation.name)
    words = f"Warning: {len(seen)} of the {others.evaluation.num_examples} evaluation images are among the training"
    assert f"{words} images of {tmp_path / 'run'}," in capsys.readouterr().out
    picked = others.evaluation.take(np.array([1, 0]))
    np.testing.assert_array_equal(picked.digests, others.evaluation.digests[[1, 0]])


def test_equal_files_in_two_classes_and_in_both_splits_are_warned_of(tmp_path, capsys):
    for number, (split, name, index) in enumerate(itertools.product(("train", "test"), ("ant", "bee"), (0, 1))):
        write_image(tmp_path / split / name / f"{index}.png", number)
    data = f"folder:{tmp_path}"
    before = open_source(DataOptions(data)).fingerprint
    assert "remove the copies" not in capsys.readouterr().out
    shutil.copy(tmp_path / "train" / "ant" / "0.png", tmp_path / "train" / "bee" / "1.png")
    shutil.copy(tmp_path / "train" / "ant" / "1.png", tmp_path / "test" / "ant" / "0.png")
    assert open_source(DataOptions(data)).fingerprint != before
    printed = capsys.readouterr().out
    again = f"1 image also appears under another label, such as {tmp_path}/train/ant/0.png and"
    assert f"Warning: {again} {tmp_path}/train/bee/1.png; keep each under" in printed
    known = f"1 of the 4 evaluation images is also among the training images, such as {tmp_path}/test/ant/0.png and"
    assert f"Warning: {known} {tmp_path}/train/ant/1.png, so the accuracy" in printed


def test_two_images_that_changed_places_are_other_images(tmp_path):
    for name, value in (("ant/0", 0), ("ant/1", 1), ("bee/0", 2), ("bee/1", 3)):
        write_image(tmp_path / f"{name}.png", value)
    before = open_source(DataOptions(f"folder:{tmp_path}")).fingerprint
    write_image(tmp_path / "ant" / "1.png", 3)
    write_image(tmp_path / "bee" / "1.png", 1)
    assert open_source(DataOptions(f"folder:{tmp_path}")).fingerprint != before


def test_images_and_folders_that_are_not_used_are_named(tmp_path, capsys):
    for name in ("train/a/1", "train/b/1", "test/a/1", "test/b/1", "val/a/1", "c/1"):
        write_image(tmp_path / f"{name}.png", 9)
    write_image(tmp_path / "train" / "beside.PNG", 9)
    open_source(DataOptions(f"folder:{tmp_path}"))
    printed = capsys.readouterr().out
    assert f"Not used, beside train and test of {tmp_path}: c, val." in printed
    assert f"outside the class folders of {tmp_path / 'train'}: 1 image, such as beside.PNG." in printed


@pytest.mark.parametrize(
    ("names", "words"),
    [("cat Cat dog", "Cat and cat are different .* case count"), ("cat cat_ dog", "'cat' and 'cat ' .* spaces count")],
)
def test_classes_that_differ_in_case_or_spaces_alone_are_named(names, words, tmp_path, capsys):
    for name in names.split():
        for number in range(2):
            write_image(tmp_path / name.replace("_", " ") / f"{number}.png", 9)
    open_source(DataOptions(f"folder:{tmp_path}"))
    assert re.search(f"Warning: {words}", capsys.readouterr().out)


def test_a_folder_whose_name_is_stored_decomposed_is_the_class_that_a_csv_file_names(tmp_path):
    decomposed, composed = "cafe\N{COMBINING ACUTE ACCENT}", "caf\N{LATIN SMALL LETTER E WITH ACUTE}"
    for name in (f"{decomposed}/1", f"{decomposed}/2", "cafz/1", "cafz/2"):
        write_image(tmp_path / f"{name}.png", 9)
    source = open_source(DataOptions(f"folder:{tmp_path}"))
    assert source.labels == ("cafz", composed)
    check_classes((decomposed, "cafz"), (composed, "cafz"))
    for name in ("3", "4"):
        write_image(tmp_path / composed / f"{name}.png", 9)
    joined = open_source(DataOptions(f"folder:{tmp_path}"))
    assert joined.labels == ("cafz", composed)
    assert joined.train.num_examples == 4


def test_another_split_of_the_folder_that_a_run_was_trained_on_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, another, words in ((3, None, "give --split-seed 3"), (None, 4, "leave --split-seed out")):
        same = DataOptions("folder:pictures", split_seed=seed)
        run = trained_on(tmp_path / "run", same)
        check_split(run, same)
        check_split(run, DataOptions("folder:others", split_seed=4))
        for known, folder in ((run, f"{tmp_path}/pictures"), (Run(str(tmp_path / "run" / "model.keras")), "pictures")):
            with pytest.raises(UserError, match=f"another split of folder:pictures, .*{words}"):
                check_split(known, DataOptions(f"folder:{folder}", split_seed=another))


@pytest.mark.parametrize(
    ("split_seed", "images", "fingerprint", "is_other"),
    [(3, (9, 1), 7, False), (4, (9, 1), 7, True), (3, (10, 2), 7, True), (3, (9, 1), 8, True)],
)
def test_a_checkpoint_of_another_split_of_the_folder_is_warned_of(
    split_seed, images, fingerprint, is_other, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    drawn = DataOptions("folder:pictures", split_seed=3)
    run = trained_on(tmp_path / "run", drawn, (9, 1), images_fingerprint=made_up((9, 1), 7).fingerprint)
    for folder, is_warned in (("pictures", is_other), ("others", False)):
        options = DataOptions(f"folder:{folder}", split_seed=split_seed)
        warn_of_known_images(run, options, made_up(images, fingerprint))
        printed = capsys.readouterr().out
        assert ("was trained on another split of folder:pictures" in printed) == bool(printed) == is_warned
