"""Every command and script of the documentation, as a stranger runs them: in the order of the pages, in one folder."""

import os
import pathlib
import re
import runpy
import shlex
import sys

import keras
import pytest
import tensorflow as tf

from training.input.sources import digits

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    (page.name, *block)
    for page in PAGES
    for block in re.findall(r"```(sh|python)\n(.*?)```", page.read_text(), re.DOTALL)
]
# What has tests of its own, or data that are not everywhere.
ELSEWHERE = ("tfds:", "make demo", "make test", "training.launch")
# As much as it takes to see that training runs.
LESS = {
    "--epochs 20": "--epochs 6",
    "photos-small --data": "photos-small --model.num-layers 2 --data",
    '"ViT-Ti_16"': '"testing"',
    "float32 float16 int8-dynamic int8-weights int8 int16x8": "float16 int8",  # the README has two others
}


@pytest.fixture(name="place", scope="module")
def _place(demo_place) -> pathlib.Path:
    """The folder of the demo, with a folder of pictures in two classes."""
    images = digits().train
    for number in range(160):
        image, label = images.example(tf.constant(number, tf.int64))
        file = demo_place / "pictures" / ("even" if label % 2 == 0 else "odd") / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tf.io.encode_png(tf.repeat(image, 3, -1)).numpy())
    return demo_place


def command(line: str, patch: pytest.MonkeyPatch) -> None:
    """What follows "python", in this process: TensorFlow takes longer to import than most of them to run."""
    flag, module, *arguments = shlex.split(line)
    assert flag == "-m", line
    patch.setattr(sys, "argv", [module, *arguments])
    keras.utils.clear_session(free_memory=False)
    patch.delitem(sys.modules, module, raising=False)  # it may have been imported by another one
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if stop.code:
            pytest.fail(f"{line} ended with {stop.code}")


# What is read first; each command of the others has tests of its own, too.
FIRST = ("README.md", "checkpoint.md")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # scripts leave files to be closed
@pytest.mark.parametrize("pages", ["first", pytest.param("others", marks=pytest.mark.slow)])
def test_every_documented_command_and_script_runs_as_written(pages, place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # and as where .venv/bin/activate was sourced
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    done = set()
    for page, language, block in BLOCKS:
        if (page in FIRST) != (pages == "first"):
            continue
        for much, less in LESS.items():
            block = block.replace(much, less)
        if language == "python":
            exec(compile(block, page, "exec"), {"__name__": "__main__"})
            continue
        for line in filter(None, block.splitlines()):
            if not any(part in line for part in ELSEWHERE) and line not in done:  # some are on two pages
                done.add(line)
                print(page, line)
                command(line.removeprefix("python "), monkeypatch)


def test_every_link_of_the_documentation_leads_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)\)", prose):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
