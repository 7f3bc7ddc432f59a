"""The pipelines of Apache Beam: the same files as on one machine, whatever happens to the workers; `make test-beam`."""

import csv
import importlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import tracemalloc

import keras
import numpy as np
import PIL.Image
import pytest

import keras_vit
from tests.support import TINY, TINY_IMAGE

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("apache_beam") is None, reason="Apache Beam is not installed"),
    pytest.mark.filterwarnings("default"),  # Beam's own
]
PIPELINE = ("--runner", "DirectRunner")
PROCESSES = (*PIPELINE, "--", "--direct_running_mode=multi_processing", "--direct_num_workers=2")
MANY = 20_000
BROKEN = "00007.png"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.fixture(name="run")
def _run(place, monkeypatch, capsys):
    """Runs a command as a pipeline, or on one machine, and returns what it prints."""
    monkeypatch.chdir(place)

    def run(command: str, *options: str, pipeline: bool = True) -> str:
        importlib.import_module(f"training.{command}").main([*options, *(PIPELINE if pipeline else ())])
        return capsys.readouterr().out

    return run


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    """The files of a folder that both ways write."""
    files = (file for file in folder.iterdir() if file.is_file() and file.name not in (".lock", "pipeline.json"))
    return {file.name: file.read_bytes() for file in files}


def write_images(folder: pathlib.Path, count: int) -> None:
    """Images of 6 x 6 pixels, one of which is broken."""
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (count, 6, 6, 3), np.uint8)
    for number, image in enumerate(pixels):
        PIL.Image.fromarray(image).save(folder / f"{number:05d}.png", compress_level=0)
    (folder / BROKEN).write_bytes(b"\x89PNG\r\n\x1a\nbroken")


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory) -> pathlib.Path:
    """A model, 60 images, and a table of most of them, in the order in which one machine reads it."""
    place = tmp_path_factory.mktemp("beam")
    keras.utils.set_random_seed(0)
    keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7).save(place / "model.keras")
    write_images(place / "pictures", 60)
    with (place / "list.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["path", "label", "split"])
        for split in ("train", "test"):
            for label, numbers in (("ant", range(10, 30)), ("bee", range(30, 60))):
                chosen = [number for number in numbers if (number % 4 == 0) == (split == "test")]
                writer.writerows((f"pictures/{number:05d}.png", label, split) for number in chosen)
    return place


def test_the_features_are_those_of_one_machine_to_the_last_byte_and_a_broken_image_goes_aside(place, run):
    said = run("embed", "--run", "model.keras", "pictures", "--output", "features")
    run("embed", "--run", "model.keras", "pictures", "--output", "local", pipeline=False)
    assert "of 60 images, 0 of them from an earlier pipeline; 1 cannot be read, see features/problems." in said
    assert files_of(place / "features") == files_of(place / "local")
    [line] = (place / "features" / "problems" / "pictures-00000.jsonl").read_text().splitlines()
    problem = json.loads(line)
    assert problem["picture"] == f"pictures/{BROKEN}"
    assert problem["problem"]
    again = run("embed", "--run", "model.keras", "pictures", "--output", "features")
    assert "60 of them from an earlier pipeline" in again
    (place / "paths.csv").write_text("path\n" + "".join(f"pictures/{number:05d}.png\n" for number in range(60)))
    run("embed", "--run", "model.keras", "paths.csv", "--output", "of_table")
    assert files_of(place / "of_table") == files_of(place / "local")


def test_the_features_of_a_table_have_its_labels_and_splits(place, run):
    import pyarrow.parquet

    options = ("--run", "model.keras", "--data", "csv:list.csv")
    run("embed", *options, "--output", "labeled")
    run("embed", *options, "--output", "labeled_local", pipeline=False)
    for name in ("train-00000.parquet", "test-00000.parquet"):
        tables = [pyarrow.parquet.read_table(place / folder / name) for folder in ("labeled", "labeled_local")]
        assert tables[0].equals(tables[1], check_metadata=True)


def test_the_classes_are_those_of_one_machine_to_the_last_byte(place, run):
    said = run("predict", "--run", "model.keras", "pictures", "--output", "classes")
    run("predict", "--run", "model.keras", "pictures", "--output", "local.parquet", pipeline=False)
    assert "classes has the classes of 60 images" in said
    assert (place / "classes" / "pictures-00000.parquet").read_bytes() == (place / "local.parquet").read_bytes()
    assert BROKEN in (place / "classes" / "problems" / "pictures-00000.jsonl").read_text()


def test_the_records_are_those_of_one_machine_to_the_last_byte(place, run):
    options = ("--data", "csv:list.csv", "--shards", "3")
    run("shard", *options, "--output", "shards")
    run("shard", *options, "--output", "shards_local", pipeline=False)
    expected = files_of(place / "shards_local")
    assert files_of(place / "shards") == expected
    (place / "shards" / "train-00001-of-00003.tfrecord").unlink()
    (place / "shards" / "records.npz").unlink()
    run("shard", *options, "--output", "shards")
    assert files_of(place / "shards") == expected


def descendants(process: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    children = pathlib.Path(f"/proc/{process}/task/{process}/children")
    threads = pathlib.Path(f"/proc/{process}/task").glob("*/children") if children.exists() else ()
    found = [int(number) for file in threads for number in file.read_text().split()]
    return found + [further for number in found for further in descendants(number)]


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="processes are found in Linux' /proc")
def test_a_killed_worker_ends_the_command_which_continues_and_ends_in_the_bytes_of_one_machine(place, run):
    write_images(place / "many", MANY)
    options = ("--run", "model.keras", "many", "--output", "many_features")
    command = [sys.executable, "-m", "training.embed", *options, *PROCESSES]
    first = subprocess.Popen(command, cwd=place, env=environment(), stderr=subprocess.PIPE, text=True)
    while not any((place / "many_features").glob("*.parquet")):
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.05)
    workers = [
        number
        for number in descendants(first.pid)
        if pathlib.Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")[2:3]
        == [b"apache_beam.runners.worker.sdk_worker_main"]
    ]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 75
    assert "A worker process has ended (Worker subprocess exited with return code" in errors
    assert len([*(place / "many_features").glob("*.parquet")]) < -(-MANY // 2048)
    said = run("embed", *options)
    assert ", 0 of them from an earlier pipeline" not in said
    run("embed", "--run", "model.keras", "many", "--output", "many_local", pipeline=False)
    assert files_of(place / "many_features") == files_of(place / "many_local")


def test_a_folder_of_other_predictions_and_a_table_of_one_split_are_one_sentence(run, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pipeline.json").write_text("{}")
    with pytest.raises(keras_vit.UserError, match="other is of another pipeline, which differs in model"):
        run("predict", "--run", "model.keras", "pictures/00001.png", "--output", str(tmp_path / "other"))
    (tmp_path / "one.csv").write_text("path,label,split\na.png,ant,train\nb.png,bee,train\n")
    from training.beam.image_list import ImageList

    with pytest.raises(keras_vit.UserError, match="must say train and one of test"):
        ImageList(table=str(tmp_path / "one.csv")).summary()


def test_a_pattern_and_a_folder_are_listed_in_order_and_no_list_is_held(tmp_path):
    from training.beam.image_list import ImageList, _in_bucket

    for name in ("b/2.png", "b/1.png", "a.png", "b.txt", ".hidden.png", "c/d/3.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    of_folder = [pathlib.Path(row.path).name for row in ImageList((str(tmp_path),)).rows()]
    assert of_folder == ["a.png", "1.png", "2.png", "3.jpg"]
    of_pattern = [pathlib.Path(row.path).name for row in ImageList((f"{tmp_path}/**.png",)).rows()]
    assert of_pattern == ["a.png", "1.png", "2.png"]
    assert {pathlib.Path(path).name for path in _in_bucket(str(tmp_path))} == {*of_folder}
    assert {pathlib.Path(path).name for path in _in_bucket(f"{tmp_path}/b/*")} == {"1.png", "2.png"}
    count = 200_000
    table = tmp_path / "many.csv"
    table.write_text("path\n" + "".join(f"pictures/{number:08d}.png\n" for number in range(count)))
    summary = ImageList((str(table),)).summary()
    assert summary.counts == {"pictures": count}
    tracemalloc.start()
    for group in ImageList((str(table),)).groups(summary.splits, 100):
        if group.number == count // 100 - 1:
            # pathlib interns the parts of a path, and Python's table of all that is interned grows at times.
            held = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, pathlib.__file__)])
    tracemalloc.stop()
    assert group.number == count // 100 - 1
    assert sum(trace.size for trace in held.traces) < 2**20
