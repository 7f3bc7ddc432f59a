"""A run: what a path is opened as, the lock of the writing process, atomic writes."""

import concurrent.futures
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile

import pytest

from keras_vit import UserError
from keras_vit.files.atomic import check_unlocked, locked, write_text
from keras_vit.run import Run
from tests.support import FIXTURES

# Takes the lock as `locked` does, says so, and holds it until its input ends; without TensorFlow, which takes seconds.
HOLDER = """
import fcntl, os, socket, sys
stream = open(sys.argv[1], "w")
fcntl.flock(stream, fcntl.LOCK_EX)
print(os.getpid(), "on", socket.gethostname(), file=stream, flush=True)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture(name="held")
def _held(tmp_path):
    """A run directory, and a process that writes into it."""
    Run.at(tmp_path / "run").start({}, ("ant",))
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run" / ".lock")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    yield tmp_path / "run", process
    process.kill()
    process.communicate()


def test_a_published_checkpoint_is_no_run_and_an_export_beside_a_model_changes_nothing(tmp_path):
    published = shutil.copytree(FIXTURES / "hf_vit", tmp_path / "hf_vit")
    (published / "labels.txt").write_text("ant\nbee\n")
    opened = Run.open(published)
    assert (opened.directory, opened.is_ours, opened.labels, opened.config) == (None, False, ("ant", "bee"), {})
    Run.at(tmp_path / "run").start({"command": "finetune"}, ("ant",))
    with pytest.raises(UserError, match="not a finished run: it has no model.keras; wait for its training"):
        Run.open(tmp_path / "run")
    with zipfile.ZipFile(tmp_path / "run" / "model.keras", "w"):
        (tmp_path / "run" / "model.safetensors").touch()
    for name in ("run", "run/model.keras"):
        opened = Run.open(tmp_path / name)
        assert (opened.directory, opened.is_ours, opened.labels) == (tmp_path / "run", True, ("ant",))
        assert opened.settings == {"command": "finetune"}


def test_a_run_continues_with_the_images_of_its_beginning_alone(tmp_path):
    run = Run.at(tmp_path / "run")
    for _ in range(2):
        run.start({"seed": 1}, ("ant",), images=5)
    for settings, images, words in (({"seed": 1}, 6, "with other images"), ({"seed": 2}, 5, "differs in seed")):
        with pytest.raises(UserError, match=words):
            run.start(settings, ("ant",), images=images)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("labels.txt", lambda run: run.labels),
        ("config.json", lambda run: run.config),
        ("metrics.jsonl", Run.metrics),
        ("temperature.json", lambda run: run.temperature),
        ("promise.json", lambda run: run.promise),
    ],
)
def test_a_file_of_a_run_is_not_read_if_it_is_larger_than_any_of_its_kind(name, read, tmp_path):
    (tmp_path / "model.keras").touch()
    with open(tmp_path / name, "wb") as stream:
        stream.truncate(2**36)
    with pytest.raises(UserError, match=f"{name} cannot be read as .* more than 16,777,216 bytes"):
        read(Run.at(tmp_path))


def test_a_second_process_is_refused_with_the_name_of_the_first(held, short_lock_wait):
    run, process = held
    words = f"Another process, {process.pid} on {socket.gethostname()}, writes into {run}; wait until it ends, or give"
    with pytest.raises(UserError, match=words), locked(run):
        pass
    with pytest.raises(UserError, match=words):
        check_unlocked(run)
    assert (run / ".lock").exists()


def test_the_lock_of_a_killed_process_is_released(held):
    run, process = held
    process.send_signal(signal.SIGKILL)
    check_unlocked(run)
    with locked(run):
        assert (run / ".lock").read_text() == f"{os.getpid()} on {socket.gethostname()}"
        Run.at(run).start({}, ("ant",))
    assert {path.name for path in run.iterdir()} == {"config.json", "labels.txt", "checkpoints"}


def test_a_process_of_another_machine_is_named(tmp_path, capsys):
    (tmp_path / ".lock").write_text("7 on elsewhere")
    with locked(tmp_path):
        pass
    assert f"Process 7 on elsewhere did not remove its lock of {tmp_path}. If it still runs," in capsys.readouterr().out


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch, capsys):
    def flock(stream, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with locked(tmp_path):
        pass
    assert f"{tmp_path} has no locks; make sure that no other process trains there." in capsys.readouterr().out


def test_a_lock_leaves_no_directory_in_which_nothing_was_written(tmp_path):
    with locked(tmp_path / "some" / "run"):
        assert (tmp_path / "some" / "run").is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_part_of_a_model(tmp_path):
    class Model:
        def save(self, path):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="model could not be written to .* .No space left on device"):
        Run.at(tmp_path).save_model(Model())
    assert list(tmp_path.iterdir()) == []


def test_concurrent_writes_of_a_file_leave_one_complete_text(tmp_path):
    texts = [str(number) * 1000 for number in range(10)] * 5
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_text(tmp_path / "config.json", text), texts))
    assert (tmp_path / "config.json").read_text() in texts
    assert list(tmp_path.iterdir()) == [tmp_path / "config.json"]
