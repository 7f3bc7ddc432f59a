"""The index of TFRecord files: written once, used afterwards, and found out when it does not fit the files."""

import dataclasses
import os
import pathlib
import re
import resource
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from keras_vit import UserError
from training.data.dataset import DataSet, bad_examples_reported
from training.data.pipeline import training_batches
from training.data.sources import DataOptions, open_source
from training.data.tfrecord import TFRecords
from training.data.write import shard
from training.options.common import RECORD_INDEX
from training.recipes.pretrain import find_recipe


def write(path, records: list[bytes]) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


@pytest.fixture(name="files")
def _files(tmp_path) -> list[str]:
    """Short and long records in three files, one of them empty."""
    rng = np.random.default_rng(0)
    for name, lengths in {"a": [3, 0, 70_000, 5] * 5, "b": [], "c": [20_000, 1]}.items():
        write(tmp_path / name, [rng.bytes(length) for length in lengths])
    return [str(tmp_path / name) for name in "abc"]


def contents(files: list[str]) -> list[bytes]:
    records = TFRecords([(file, 0, 100) for file in files])
    return list(tf.data.Dataset.range(len(records)).map(records.read).as_numpy_iterator())


def test_records_are_those_of_the_sequential_reader_and_are_looked_for_once(files):
    expected = list(tf.data.TFRecordDataset(files).as_numpy_iterator())
    assert contents(files) == expected
    index = pathlib.Path(files[0]).with_name(RECORD_INDEX)
    written = index.stat().st_mtime_ns
    assert contents(files) == expected
    assert contents(files[2:]) == expected[-2:]
    assert index.stat().st_mtime_ns == written


def _truncate(index: pathlib.Path) -> None:
    index.write_bytes(index.read_bytes()[: index.stat().st_size // 2])


def _put_a_folder_there(index: pathlib.Path) -> None:
    index.unlink()
    index.mkdir()
    (index / "mine").touch()


def _claim(*more: int) -> Callable[[pathlib.Path], None]:
    """Add to the lengths of the first records of an index."""

    def claim(index: pathlib.Path) -> None:
        with np.load(index) as archive:
            arrays = dict(archive)
        arrays["lengths"][: len(more)] += more
        np.savez(index, **arrays)

    return claim


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_claim(10**12, -(10**12)), "records.npz is damaged; the records are indexed again"),
        (_claim(*[2**62] * 4), "records.npz does not fit .*a, which has changed; its"),  # 0, as int64 adds them
        (lambda index: write(index.with_name("c"), [b"another", b"and"]), "does not fit .*c, which has changed; its"),
        (_truncate, "records.npz is damaged; the records are indexed again"),
        (_put_a_folder_there, r"records.npz cannot be written \(Is a directory\), so each run indexes"),
    ],
    ids=["negative", "overflowing", "stale", "damaged", "not to be written"],
)
def test_an_index_that_cannot_be_used_is_named_and_made_anew(damage, words, files, capsys):
    contents(files)
    damage(pathlib.Path(files[0]).with_name(RECORD_INDEX))
    assert contents(files) == list(tf.data.TFRecordDataset(files).as_numpy_iterator())
    assert re.search(words, capsys.readouterr().out)
    contents(files)
    assert ("cannot be written" in words) == bool(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("indexed", "then", "words"),
    [
        (False, [], "c was changed while it was read"),
        (True, [b"1", b"2" * 20_000], "records.npz does not fit .*c; remove it"),  # of the same size
    ],
)
def test_a_file_that_changes_is_named(indexed, then, words, files):
    contents(files)
    if indexed:
        write(files[2], then)
    records = TFRecords([(file, 0, 100) for file in files])
    if not indexed:
        write(files[2], then)
    split = records.split(lambda index: (records.read(index), tf.constant(0)))
    with pytest.raises(UserError, match=words), bad_examples_reported(split):
        split.read(tf.constant(21, tf.int64))


@pytest.fixture(name="digits", scope="module")
def _digits(tmp_path_factory) -> DataSet:
    folder = tmp_path_factory.mktemp("digits") / "shards"
    shard(DataOptions("digits"), str(folder), shards=3)
    return open_source(DataOptions(f"tfrecord:{folder}/*.tfrecord"))


def operations(data: tf.data.Dataset) -> set[str]:
    """The types of all operations of a pipeline, functions included."""
    graph = tf.compat.v1.GraphDef()
    graph.ParseFromString(data._as_serialized_graph().numpy())
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return {node.op for node in nodes}


def test_no_python_runs_on_the_way_of_an_image(digits, tmp_path):
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        for number in range(4):
            tf.io.write_file(str(tmp_path / name / f"{number}.png"), tf.io.encode_png(np.full((5, 6, 3), 9, np.uint8)))
    recipe = dataclasses.replace(find_recipe("photos-small-strong"), batch_size=2)
    files = open_source(DataOptions(f"folder:{tmp_path}")).train
    batches = training_batches(digits.train, recipe, recipe.preprocessing(3), num_classes=10, seed=0, first_step=0)
    read_files = tf.data.Dataset.range(files.num_examples).map(files.read)
    for data, read in ((batches, "DatasetToSingleElement"), (read_files, "ReadFile")):
        found = operations(data)
        assert read in found
        assert not [operation for operation in found if "PyFunc" in operation]


@pytest.mark.slow
def test_records_of_a_bucket_are_read_many_at_once_and_give_the_same_batches(digits, tmp_path):
    recipe = dataclasses.replace(find_recipe("digits"), batch_size=96)

    def batches(source: DataSet) -> list:
        make = {"num_classes": 10, "seed": 3, "first_step": 13, "num_steps": 3}
        data = training_batches(source.train, recipe, recipe.preprocessing(1), **make)
        return list(data.as_numpy_iterator())

    shard(DataOptions("digits"), "ram://records/digits", shards=3)
    remote = open_source(DataOptions("tfrecord:ram://records/digits/*.tfrecord"))
    assert digits.train.parallel_reads is None
    assert remote.train.parallel_reads == remote.train.take(np.arange(3)).parallel_reads == 256
    assert remote.fingerprint == digits.fingerprint
    for (images, labels), (expected, expected_labels) in zip(batches(remote), batches(digits), strict=True):
        np.testing.assert_array_equal(images, expected)
        np.testing.assert_array_equal(labels, expected_labels)


def test_workers_with_another_index_have_another_fingerprint(files, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    copies = [str(tmp_path / "elsewhere" / os.path.basename(file)) for file in files]
    for file, copy in zip(files, copies, strict=True):
        tf.io.gfile.copy(file, copy)

    def fingerprint(paths: list[str]) -> int:
        return TFRecords([(path, 0, 100) for path in paths]).fingerprint

    assert fingerprint(copies) == fingerprint(files)
    assert fingerprint(files[:2]) != fingerprint(files)
    write(copies[2], [b"1", b"2" * 20_001])
    assert fingerprint(copies) != fingerprint(files)


def test_the_split_of_a_source_has_the_images_and_the_fingerprint_of_its_records(digits):
    expected = open_source(DataOptions("digits"))
    assert (digits.labels, digits.train.num_examples) == (expected.labels, expected.train.num_examples)
    first = tf.constant(0, tf.int64)
    for found, same in zip(digits.train.example(first), expected.train.example(first), strict=True):
        np.testing.assert_array_equal(found, same)
    assert digits.train.fingerprint != digits.evaluation.fingerprint != 0
    assert digits.train.take(np.array([0, 1])).fingerprint != digits.train.take(np.array([1, 0])).fingerprint


def test_many_files_are_read_with_few_of_them_open(tmp_path):
    """Of training on ten thousand files under the usual limits of a system, in small."""
    write(tmp_path / "first", [b"a", b"bc"])
    content = (tmp_path / "first").read_bytes()
    files = [str(tmp_path / f"{number:04}") for number in range(500)]
    for file in files:
        pathlib.Path(file).write_bytes(content)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        records = TFRecords([(file, 0, 100) for file in files])
        data = tf.data.Dataset.range(0, len(records), 7).map(records.read, num_parallel_calls=64)
        assert list(data.as_numpy_iterator()) == ([b"a", b"bc"] * 72)[:-1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_parts_of_files_are_read_by_number_and_have_a_fingerprint_of_their_own(files):
    spans = [(files[0], 18, 2), (files[1], 0, 9), (files[2], 1, 9), (files[0], 0, 2)]
    records = TFRecords(spans)
    [all_of_a, _, all_of_c] = [list(tf.data.TFRecordDataset(file).as_numpy_iterator()) for file in files]
    found = list(tf.data.Dataset.range(len(records)).map(records.read).as_numpy_iterator())
    assert found == [*all_of_a[18:], all_of_c[1], *all_of_a[:2]]
    assert [records.name(index) for index in (0, 2, 3)] == ["record 18 of a", "record 1 of c", "record 0 of a"]
    assert records.fingerprint == 333391862  # as the runs of all versions have it
