"""The whole way, as a stranger walks it: the demo, then every command and script of the documentation as written."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import throughput
from keras_vit import UserError
from training.sources import digits

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def run(arguments: list[str], cwd: pathlib.Path) -> str:
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"  # as where .venv/bin/activate was sourced
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory) -> pathlib.Path:
    """An empty folder in which the demo has run, with a folder of pictures in two classes."""
    place = tmp_path_factory.mktemp("place")
    run(["-m", "training.demo"], place)
    images = digits().train
    for number in range(160):
        image, label = images.example(tf.constant(number, tf.int64))
        file = place / "pictures" / ("even" if label % 2 == 0 else "odd") / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tf.io.encode_png(tf.repeat(image, 3, -1)).numpy())
    return place


def test_the_demo_reaches_its_numbers_and_says_where_everything_is(place):
    demo = place / "runs" / "demo"
    summary = json.loads((demo / "summary.json").read_text())
    assert summary.keys() == {"parameters", "test_accuracy", "train_seconds", "saved_model", "tflite"}
    assert summary["test_accuracy"] >= 0.98
    assert summary["saved_model"]["max_abs_diff"] <= 1e-4
    assert (demo / summary["saved_model"]["path"] / "saved_model.pb").is_file()
    assert summary["tflite"].keys() == {"float32", "int8-dynamic"}
    for name, part in summary["tflite"].items():
        assert (demo / part["path"]).stat().st_size == part["bytes"], name
        assert abs(part["accuracy"] - summary["test_accuracy"]) <= 0.01
    assert summary["tflite"]["float32"]["max_abs_diff"] <= 1e-4
    assert summary["tflite"]["int8-dynamic"]["bytes"] < 0.5 * summary["tflite"]["float32"]["bytes"]


def test_the_served_model_reads_the_digits_from_their_files(place):
    loaded = tf.saved_model.load(place / "runs" / "demo" / "saved_model" / "1")
    split = digits().evaluation
    examples = [split.example(tf.constant(index, tf.int64)) for index in range(split.num_examples)]
    files = tf.stack([tf.io.encode_png(image) for image, _ in examples])
    answer = loaded.signatures["serving_default"](image_bytes=files)
    right = answer["labels"].numpy()[:, 0].astype(int) == np.array([int(label) for _, label in examples])
    summary = json.loads((place / "runs" / "demo" / "summary.json").read_text())
    assert right.mean() == pytest.approx(summary["test_accuracy"])


# What has tests of its own: long training.
LONG = ("tfds:", "make demo", "make test")
BLOCKS = [
    (page.name, *block)
    for page in PAGES
    for block in re.findall(r"```(sh|python)\n(.*?)```", page.read_text(), re.DOTALL)
]


def test_every_documented_command_and_script_runs_as_written(place):
    """In the order of the pages, in one folder, as a reader would."""
    for page, language, block in BLOCKS:
        if language == "python":
            print(page, run(["-c", block], place))
            continue
        for line in filter(None, block.splitlines()):
            if not any(part in line for part in LONG):
                assert line.startswith("python -m "), line
                run(shlex.split(line)[1:], place)


def test_every_link_of_the_documentation_leads_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)\)", prose):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(
    ("model", "words"),
    [("ViT-B16", "There is no model named 'ViT-B16'; the nearest names are"), ("R50+ViT-B_32", "R50.ViT-B_32 is none")],
)
def test_the_benchmark_refuses_what_its_peers_have_not(model, words):
    with pytest.raises(UserError, match=words):
        throughput.main(["--model", model])
