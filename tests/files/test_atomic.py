"""Atomic writes: what killed processes leave is removed by the next write, and two processes stay apart."""

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from keras_vit import UserError
from keras_vit.files import atomic

WRITERS = {"atomic_write": atomic.atomic_write, "atomic_folder": atomic.atomic_folder, "staged": atomic.staged}
# Begins to write, says so and waits.
HALF = """
import pathlib, sys
from keras_vit.files import atomic
with getattr(atomic, sys.argv[1])(pathlib.Path(sys.argv[2])) as place:
    (place / "x" if place.is_dir() else place).write_text("half")
    print("begun", flush=True)
    sys.stdin.read()
"""


def written(name: str, path: pathlib.Path) -> None:
    with WRITERS[name](path) as place:
        (place / "x" if place.is_dir() else place).write_text("whole")


@contextlib.contextmanager
def beginning(name: str, path: pathlib.Path) -> Iterator[subprocess.Popen]:
    """A process that has begun to write."""
    command = [sys.executable, "-c", HALF, name, str(path)]
    root = pathlib.Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root) as process:
        try:
            assert process.stdout.readline() == b"begun\n"
            yield process
        finally:
            process.kill()


def names(folder: pathlib.Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_killed_process_left_is_removed_by_the_next_write(name, tmp_path):
    with beginning(name, tmp_path / "out"):
        assert any(".building" in each for each in names(tmp_path))
    written(name, tmp_path / "out")
    assert names(tmp_path) == ({"out"} if name == "atomic_write" else {"out", "out/x"})


def test_what_another_process_writes_is_left_alone(tmp_path):
    with beginning("staged", tmp_path / "out"):
        before = names(tmp_path)
        written("staged", tmp_path / "out")
        atomic.remove_temporary(tmp_path / "out")
        assert names(tmp_path) == {*before, "out/x"}


def test_one_process_writes_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_WAIT", 0.1)
    with beginning("atomic_folder", tmp_path / "out"), pytest.raises(UserError, match="Another process writes .*out"):
        written("atomic_folder", tmp_path / "out")
    written("atomic_folder", tmp_path / "out")
    with pytest.raises(UserError, match="out exists by now"):
        written("atomic_folder", tmp_path / "out")
    with pytest.raises(UserError, match="new exists by now"), atomic.atomic_folder(tmp_path / "new"):
        (tmp_path / "new" / "of another").mkdir(parents=True)
    assert names(tmp_path) == {"out", "out/x", "new", "new/of another"}
