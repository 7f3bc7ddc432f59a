"""TFRecord files of images: written from a folder, read by number, and what is wrong with them."""

import dataclasses
import pathlib
import re
import shutil

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from keras_vit import UserError
from training.data.dataset import bad_examples_reported
from training.data.pipeline import training_batches
from training.data.sources import DataOptions, DataSet, Split, open_source
from training.data.tfrecord import IMAGE, LABEL
from training.data.write import shard
from training.recipes.pretrain import find_recipe

MODES = ("RGB", "L", "P", "RGBA", "LA", "1", "I;16")


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory) -> pathlib.Path:
    """PNGs of mixed sizes, palettes, depths and alpha channels in nested class folders."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(42):
        path = root / f"class {number % 2}" / f"more{number % 6}" / "inside" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (9 + number, 50 - number, 3), dtype=np.uint8)
        mode = MODES[number % len(MODES)]
        if mode == "I;16":
            image = PIL.Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257)
        else:
            image = PIL.Image.fromarray(pixels).convert(mode)
        image.save(path, **({"transparency": 3} if mode == "P" else {}))
    return root


def sharded(folder: pathlib.Path, output: pathlib.Path, shards: int = 3, **arguments) -> DataSet:
    shard(DataOptions(f"folder:{folder}", **arguments), str(output), shards=shards)
    return open_source(DataOptions(f"tfrecord:{output}/*.tfrecord"))


@pytest.fixture(name="shards", scope="module")
def _shards(folder, tmp_path_factory) -> pathlib.Path:
    shard(DataOptions(f"folder:{folder}"), str(tmp_path_factory.getbasetemp() / "shards"), shards=3)
    return tmp_path_factory.getbasetemp() / "shards"


def contents(split) -> list[tuple[bytes, int]]:
    pairs = [split.read(tf.constant(index, tf.int64)) for index in range(split.num_examples)]
    return sorted((data.numpy(), int(label)) for data, label in pairs)


def test_the_files_of_a_folder_are_kept_byte_by_byte_and_their_index_fits(folder, shards, monkeypatch):
    monkeypatch.setattr("training.data.tfrecord.scan", lambda path: pytest.fail("indexed again"))
    data = f"tfrecord:{shards}/*.tfrecord", f"folder:{folder}"
    records, files = (open_source(DataOptions(each)) for each in data)
    assert records.labels == files.labels == ("class 0", "class 1")
    files_of_splits = {f"{split}-0000{n}-of-00003.tfrecord" for split in ("train", "eval") for n in range(3)}
    assert {path.name for path in shards.iterdir()} == {"labels.txt", "records.npz", *files_of_splits}
    for split in ("train", "evaluation"):
        assert contents(getattr(records, split)) == contents(getattr(files, split))


@pytest.mark.slow
def test_any_png_trains_from_a_folder_and_from_records(folder, shards, capfd):
    recipe = dataclasses.replace(find_recipe("photos-small-strong"), batch_size=36)
    for data in (f"folder:{folder}", f"tfrecord:{shards}/*.tfrecord"):
        train = open_source(DataOptions(data)).train
        batches = training_batches(train, recipe, recipe.preprocessing(3), num_classes=2, seed=0, first_step=0)
        images, _ = next(iter(batches))
        assert np.isfinite(images).all()
    printed, errors = capfd.readouterr()
    assert re.fullmatch(
        r"Every tenth image of each class is kept for evaluation: \d+ of \d+ images, .* of each class\.\n", printed
    )
    assert errors == ""


def corrupt(folder: pathlib.Path, count: int) -> list[str]:
    paths = sorted(folder.rglob("*.png"))[3 :: len(list(folder.rglob("*.png"))) // count][:count]
    for path in paths:
        path.write_bytes(path.read_bytes()[:70])
    return [path.name for path in paths]


def test_all_of_five_corrupt_files_are_named_or_skipped_on_request(tmp_path, folder, capfd):
    shutil.copytree(folder, tmp_path / "copy")
    names = corrupt(tmp_path / "copy", 5)
    with pytest.raises(UserError, match="^5 of 42 files in .* cannot be read as images: ") as caught:
        sharded(tmp_path / "copy", tmp_path / "out")
    assert all(f"/{name}" in str(caught.value) for name in names)
    assert not (tmp_path / "out").exists()
    source = sharded(tmp_path / "copy", tmp_path / "out", on_bad_image="skip")
    assert source.train.num_examples + source.evaluation.num_examples == 37
    out, err = capfd.readouterr()
    assert "Skipped: 5 of 42 files" in out
    assert err == ""


def write(path: pathlib.Path, examples: list[tuple[bytes, int]], image: str = IMAGE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for data, label in examples:
            features = {
                image: tf.train.Feature(bytes_list=tf.train.BytesList(value=[data])),
                LABEL: tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    (path.parent / "labels.txt").write_text("ant\nbee\n")


GOOD = tf.io.encode_png(np.full((5, 6, 3), 9, np.uint8)).numpy()


def refuse_examples(split: Split, words: str) -> None:
    """Read all examples, which raises a sentence with these words."""
    with pytest.raises(UserError, match=words), bad_examples_reported(split):
        list(tf.data.Dataset.range(split.num_examples).map(split.read))


def test_bad_records_are_named_when_they_are_met_and_skipped_on_request(tmp_path, capsys):
    write(tmp_path / "train.tfrecord", [(GOOD, 0), (GOOD[:40], 1), (GOOD, 1), (b"words", 0)])
    write(tmp_path / "test.tfrecord", [(GOOD, 0)])
    data = f"tfrecord:{tmp_path}/*.tfrecord"
    source = open_source(DataOptions(data))
    words = (
        "2 of 4 images cannot be decoded: record 1 of train.tfrecord.*record 3 of train.tfrecord .not JPEG, PNG, BMP"
    )
    with pytest.raises(UserError, match=words), bad_examples_reported(source.train):
        source.train.example(tf.constant(1, tf.int64))
    skipped = open_source(DataOptions(data, on_bad_image="skip"))
    assert skipped.train.num_examples == 2
    assert "Skipped: 2 of 4 images cannot be decoded" in capsys.readouterr().out
    labels = [int(label) for _, label in tf.data.Dataset.range(2).map(skipped.train.read)]
    assert labels == [0, 1]


@pytest.fixture(name="records")
def _records(tmp_path) -> str:
    """`--data` of two splits with an example of each of two classes."""
    for split in ("train", "test"):
        write(tmp_path / f"{split}.tfrecord", [(GOOD, 0), (GOOD, 1)])
    return f"tfrecord:{tmp_path}/*.tfrecord"


@pytest.mark.parametrize(
    ("names", "words"),
    [("ant\nbee\nant\n", "'ant' twice"), ("ant\nbee\n\n", "an empty line"), ("ant\n \nbee\n", "an empty line")],
)
def test_a_class_without_a_name_of_its_own_is_refused(names, words, records, tmp_path):
    (tmp_path / "labels.txt").write_text(names)
    with pytest.raises(UserError, match=f"labels.txt names .* {words}"):
        open_source(DataOptions(records))


def test_the_names_of_the_splits_are_those_of_folders(tmp_path):
    for name, count in (("training", 3), ("testing", 2)):
        write(tmp_path / f"{name}.tfrecord", [(GOOD, 0)] * count)
    source = open_source(DataOptions(f"tfrecord:{tmp_path}/*.tfrecord"))
    assert (source.train.num_examples, source.evaluation.num_examples) == (3, 2)


def test_a_label_that_is_no_line_of_labels_txt_is_named(tmp_path):
    write(tmp_path / "train.tfrecord", [(GOOD, 0), (GOOD, 2)])
    write(tmp_path / "val.tfrecord", [(GOOD, 0), (GOOD, 2**32)])  # 0 in 32 bits
    source = open_source(DataOptions(f"tfrecord:{tmp_path}/*.tfrecord"))
    refuse_examples(source.train, "has the label 2; correct")
    refuse_examples(source.evaluation, "has the label 4294967296; correct")


def test_what_are_no_records_of_images_is_refused(tmp_path):
    def opened(words: str, pattern: str = "*.tfrecord") -> None:
        with pytest.raises(UserError, match=words):
            open_source(DataOptions(f"tfrecord:{tmp_path}/{pattern}"))

    opened(r"nothing\*' matches none", "nothing*")
    write(tmp_path / "train.tfrecord", [(GOOD, 0)])
    opened("files with train and files with eval, test or val in their names, but gives train.tfrecord")
    write(tmp_path / "eval.tfrecord", [])
    opened("eval.tfrecord must be tf.train.Examples .*, at least one")
    write(tmp_path / "eval.tfrecord", [(GOOD, 0)], image="image/raw")
    opened(f"must be tf.train.Examples with {IMAGE} and {LABEL}")
    write(tmp_path / "eval.tfrecord", [(GOOD, 7)])
    opened("has the label 7; correct")
    write(tmp_path / "eval.tfrecord", [(GOOD, 1)])
    (tmp_path / "labels.txt").unlink()
    opened("There is no file .*labels.txt.; write one with a class in each line")
    write(tmp_path / "train-00001-of-00003.tfrecord", [(GOOD, 0)])
    opened("names of the TFRecord files speak of 3 shards, but 2 are there, train-00001-of-00003.tfrecord first")


def test_a_number_of_files_that_cannot_be_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="6 images of eval cannot fill 7 files; give --shards 6 or"):
        sharded(folder, tmp_path / "out", 7)
    assert not (tmp_path / "out").exists()


def test_records_that_are_there_are_not_overwritten(folder, shards):
    with pytest.raises(UserError, match=f"{shards} should be new or empty, but holds eval-00000"):
        sharded(folder, shards)


def flip(path: pathlib.Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def test_a_flipped_bit_is_found_by_the_checksum_of_its_record(tmp_path, capsys):
    for split in ("train", "test"):
        write(tmp_path / f"{split}.tfrecord", [(GOOD, 0), (GOOD, 1), (GOOD, 1)])
    path = tmp_path / "train.tfrecord"
    size = path.stat().st_size // 3
    flip(path, size + size // 2)
    data = f"tfrecord:{tmp_path}/*.tfrecord"
    train = open_source(DataOptions(data)).train
    refuse_examples(train, "The record 1 of train.tfrecord, in .*, is damaged")
    assert open_source(DataOptions(data, on_bad_image="skip")).train.num_examples == 2
    assert "1 of 3 images cannot be decoded: record 1 of train.tfrecord (The record" in capsys.readouterr().out


def test_a_flipped_bit_in_a_length_and_a_truncated_file_are_found_when_they_are_opened(records, tmp_path):
    path = tmp_path / "train.tfrecord"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"at byte \d+ a record is longer than the file"):
        open_source(DataOptions(records))
    flip(path, 0)
    with pytest.raises(UserError, match="at byte 0 the length of a record has another checksum"):
        open_source(DataOptions(records))


def test_a_file_that_vanishes_is_named(records, tmp_path):
    train = open_source(DataOptions(records)).train
    (tmp_path / "train.tfrecord").unlink()
    refuse_examples(train, "train.tfrecord can no longer be read .No such file or directory")
