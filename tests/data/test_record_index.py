"""The index of TFRecord files: written once, used afterwards, and found out when it does not fit the files."""

import dataclasses
import os
import pathlib
import resource

import numpy as np
import pytest
import tensorflow as tf

from keras_vit import UserError
from training.data.dataset import DataSet, Split, bad_examples_reported
from training.data.pipeline import evaluation_batches, training_batches
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


def test_a_stale_index_is_named_and_made_anew(files, capsys):
    contents(files)
    write(files[2], [b"another", b"and", b"more"])
    assert contents(files)[-3:] == [b"another", b"and", b"more"]
    assert f"records.npz does not fit {files[2]}, which has changed; its records are" in capsys.readouterr().out
    contents(files)
    assert not capsys.readouterr().out


def test_a_damaged_index_is_named_and_made_anew(files, capsys):
    expected = contents(files)
    index = os.path.join(os.path.dirname(files[0]), RECORD_INDEX)
    with open(index, "r+b") as stream:
        stream.truncate(os.path.getsize(index) // 2)
    assert contents(files) == expected
    assert "records.npz is damaged; the records are indexed again" in capsys.readouterr().out


def test_an_index_that_cannot_be_written_is_named_and_not_needed(files, capsys):
    index = pathlib.Path(files[0]).with_name(RECORD_INDEX)
    index.mkdir()  # in its place
    (index / "mine").touch()
    assert contents(files) == list(tf.data.TFRecordDataset(files).as_numpy_iterator())
    assert "records.npz cannot be written (Is a directory), so each run indexes" in capsys.readouterr().out


def test_a_file_that_shrinks_while_it_is_read_is_named(files):
    records = TFRecords([(file, 0, 100) for file in files])
    split = Split(
        len(records), lambda index: (records.read(index), tf.constant(0)), explain_damage=records.explain_damage
    )
    write(files[2], [])
    with pytest.raises(UserError, match="c was changed while it was read"), bad_examples_reported(split):
        split.read(tf.constant(21, tf.int64))


def test_an_index_of_other_records_of_the_same_size_is_named(files):
    contents(files)
    write(files[2], [b"1", b"2" * 20_000])
    records = TFRecords([(file, 0, 100) for file in files])
    split = Split(
        len(records), lambda index: (records.read(index), tf.constant(0)), explain_damage=records.explain_damage
    )
    with pytest.raises(UserError, match="records.npz does not fit .*c; remove it"), bad_examples_reported(split):
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
    files, preprocessing = open_source(DataOptions(f"folder:{tmp_path}")), recipe.preprocessing(3)
    training = training_batches(digits.train, recipe, preprocessing, num_classes=10, seed=0, first_step=0)
    evaluation = evaluation_batches(files.evaluation, preprocessing, num_classes=2, batch_size=2)
    for data, read in ((training, "DatasetToSingleElement"), (evaluation, "ReadFile")):
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


def test_the_split_of_a_source_has_the_fingerprint_of_its_records(digits):
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
