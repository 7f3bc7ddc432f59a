"""Paths with a scheme: they keep it, fail in one sentence, and hold whole files only."""

import os
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

from keras_vit import UserError
from keras_vit.files import remote
from keras_vit.files.atomic import atomic_folder, atomic_write, staged
from keras_vit.files.documents import read_text
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.files.remote import first_bytes, is_remote, local_copy, local_path, to_path
from tests.support import without_pauses


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    without_pauses(monkeypatch)


@pytest.fixture(name="folder")
def _folder(request) -> remote.RemotePath:
    folder = to_path(f"ram://files/{request.node.name}")
    folder.mkdir()
    return folder


def test_a_scheme_is_kept():
    path = to_path("gs://bucket/run")
    assert [str(path / "x.npz"), os.fspath(path.parent), f"{path.with_name('y')}"] == [
        "gs://bucket/run/x.npz", "gs://bucket", "gs://bucket/y",
    ]  # fmt: skip
    assert to_path(pathlib.Path("gs://bucket/run")) == path
    assert (path / "a" / "b").relative_to(path) == type(path)("a/b")


@pytest.mark.parametrize("name", ["runs/mine", "/runs", "a:b/c", "folder:gs://bucket", "digits", pathlib.Path("a:b")])
def test_other_paths_are_local(name):
    assert not is_remote(name)
    assert type(to_path(name)) is type(pathlib.Path())


def test_where_only_local_paths_are_taken_others_are_refused():
    assert local_path("runs/mine", "workdir") == pathlib.Path("runs/mine")
    with pytest.raises(UserError, match="--workdir accepts .* this machine, but is gs://b/r"):
        local_path("gs://b/r", "workdir")


def test_a_bucket_needs_tensorflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(UserError, match="gs://b/r needs TensorFlow"):
        to_path("gs://b/r").exists()


def test_files_are_written_listed_read_and_removed(folder):
    (folder / "inside").mkdir()
    (folder / "inside" / "a.txt").write_text("é")
    (folder / "b.txt").write_text("b")
    (folder / "b.txt").write_text("again")
    assert sorted(path.name for path in folder.iterdir()) == ["b.txt", "inside"]
    assert [path.name for path in folder.glob("*.txt")] == ["b.txt"]
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == ["b.txt", "inside/a.txt"]
    assert (folder / "inside").is_dir()
    assert not (folder / "inside").is_file()
    assert (folder / "b.txt").is_file()
    assert (folder / "b.txt").stat().st_size == 5
    assert read_text(folder / "b.txt") == "again"
    with pytest.raises(UserError, match="is not a regular file"):
        read_text(folder / "inside")
    assert (folder / "inside" / "a.txt").read_text() == "é"
    assert (first_bytes(folder / "b.txt", 2), first_bytes(folder / "b.txt", 9)) == (b"ag", b"again")
    assert sorted(path.name for path in local_copy(folder).iterdir()) == ["b.txt"]
    (folder / "b.txt").unlink()
    (folder / "b.txt").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (folder / "b.txt").unlink()
    assert not list((folder / "nothing").glob("*"))


def test_arrays_and_folders_are_written(folder):
    write_npz(folder / "x.npz", {"x": np.arange(4.0)})
    np.testing.assert_array_equal(read_npz(folder / "x.npz")["x"], np.arange(4.0))
    with staged(folder / "staged") as stage:
        (stage / "1").mkdir()
        (stage / "1" / "saved_model.pb").write_text("graph")
        (stage / "1" / "variables").write_text("weights")
    assert (folder / "staged" / "1" / "variables").read_text() == "weights"
    with atomic_folder(folder / "model") as stage:
        (stage / "config.json").write_text("{}")
    assert (folder / "model" / "config.json").read_text() == "{}"
    with pytest.raises(ZeroDivisionError), atomic_write(folder / "never") as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert not (folder / "never").exists()


def test_what_fails_for_a_moment_is_tried_again_and_what_lasts_is_not(folder, monkeypatch):
    (folder / "a").write_text("content")
    stat, failures = tf.io.gfile.stat, []

    def fails(path):
        if failures:
            raise failures.pop()
        return stat(path)

    monkeypatch.setattr(tf.io.gfile, "stat", fails)
    failures += [tf.errors.UnavailableError(None, None, "503"), OSError("connection reset")] * 2
    assert (folder / "a").stat().st_size == 7
    failures += [tf.errors.UnavailableError(None, None, "503")] * 5
    with pytest.raises(UserError, match=r"/a cannot be read or written \(503\)"):
        (folder / "a").is_file()
    failures += [tf.errors.PermissionDeniedError(None, None, "403")] * 2
    with pytest.raises(UserError, match=r"\(403\)"):
        (folder / "a").is_dir()
    assert len(failures) == 1


def test_a_file_that_is_cut_on_its_way_is_not_believed(folder, monkeypatch):
    (folder / "a").write_text("before")

    def cut(source, target, overwrite=False):
        with tf.io.gfile.GFile(target, "wb") as stream:
            stream.write(b"ha")

    monkeypatch.setattr(tf.io.gfile, "copy", cut)
    with pytest.raises(UserError, match="2 bytes arrived of 4"), atomic_write(folder / "a") as temporary:
        temporary.write_text("half")
    assert (folder / "a").read_text() == "before"
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_an_address_is_nothing_that_tensorflow_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    path = to_path("https://host/x.npz")
    assert (path.is_file(), path.is_dir()) == (False, False)
    with pytest.raises(UserError, match="TensorFlow has no file system of this scheme"):
        path.write_text("x")


def test_a_folder_that_is_there_gets_the_new_files_and_keeps_its_others(tmp_path):
    for name, text in (("old", "1"), ("both", "1")):
        (tmp_path / "masks").mkdir(exist_ok=True)
        (tmp_path / "masks" / name).write_text(text)
    with staged(tmp_path) as stage:
        (stage / "masks" / "deep").mkdir(parents=True)
        for name in ("both", "deep/new"):
            (stage / "masks" / name).write_text("2")
    found = {str(file.relative_to(tmp_path)): file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    assert found == {"masks/old": "1", "masks/both": "2", "masks/deep/new": "2"}
