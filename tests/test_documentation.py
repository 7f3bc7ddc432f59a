"""The documentation: its commands and scripts run, its links lead somewhere, its paths and names exist.

Commands and scripts run as a new user runs them: in the order of the site, in one folder. The scripts of a page go on
where the one before it ended.
"""

import ast
import collections
import functools
import os
import pathlib
import re
import runpy
import shlex
import shutil
import sys
import textwrap
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit.inspection
from keras_vit.cli.commands import COMMANDS
from training.data.sources import digits

ROOT = pathlib.Path(__file__).parent.parent
# As the site's navigation orders them.
IN_ORDER = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
PAGES = [ROOT / "README.md", *(ROOT / "docs" / page for page in IN_ORDER)]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
# Blocks in tabs are indented.
BLOCKS = [
    (page.relative_to(ROOT).as_posix(), language, textwrap.dedent(block))
    for page in PAGES
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", page.read_text(), re.DOTALL)
]
LOGS = sorted((ROOT / "benchmarks").rglob("*.md"))
# Commands with tests of their own, or with data that are not on every machine.
SKIPPED = ("tfds:", "make demo", "keras-vit launch")
FIXTURES = ROOT / "tests" / "fixtures"
# Tiny files stand for those of the hub, and shorter runs show as well that training works.
SHORTER = {
    "hf:facebook/dinov2-small": str(FIXTURES / "modern" / "hf_dinov2"),
    "augreg:S_16": str(FIXTURES / "hf_vit"),
    "keras-vit auto --data": f"keras-vit auto --checkpoint {FIXTURES / 'modern' / 'hf_dinov2'} --data",
    "finetune --checkpoint": "finetune --steps 4 --warmup-steps 1 --batch-size 16 --checkpoint",
    "photos-small --data": "photos-small --model.num-layers 2 --epochs 6 --warmup-steps 20 --batch-size 16 --data",
    "pretrain auto --data": "pretrain auto --epochs 2 --warmup-steps 2 --data",
    '"ViT-Ti_16"': '"testing"',
    # int8 has tests of its own: this demo is trained for a tenth of its epochs.
    "float32 float16 int8-dynamic int8-weights int4-weights int8": "float16 int8-dynamic",
    "--output phone --formats float32 int8-dynamic": "--output phone --formats float32",
    "attention_3": "attention_1",  # of two blocks
    "block_2": "block_1",
}


@pytest.fixture(name="directory", scope="module")
def _directory(demo_place) -> pathlib.Path:
    """The directory of the demo, with the images of a reader: two classes, new ones, and photographs."""
    images = digits().train
    for number in range(160):
        image, label = images.example(tf.constant(number, tf.int64))
        file = demo_place / "pictures" / ("even" if label % 2 == 0 else "odd") / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tf.io.encode_png(tf.repeat(image, 3, -1)).numpy())
    for folder in ("new", "photographs"):
        shutil.copytree(FIXTURES / "pixels" / "pictures", demo_place / folder)
    shutil.copy(demo_place / "new" / "square.jpg", demo_place / "new" / "1.jpg")
    return demo_place


def run_command(line: str, patch: pytest.MonkeyPatch) -> None:
    """Run a command in this process, because importing TensorFlow takes longer than most commands."""
    script, name, *arguments = shlex.split(line)
    assert script == "keras-vit", line
    module = COMMANDS[name].removesuffix(".__main__")
    patch.setattr(sys, "argv", [module, *arguments])
    keras.utils.clear_session(free_memory=False)
    for name in (module, f"{module}.__main__"):
        patch.delitem(sys.modules, name, raising=False)  # it may have been imported by another one
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if stop.code:
            pytest.fail(f"{line} ended with {stop.code}")


class Tracker(types.ModuleType):
    """Stands for the package mlflow, which is not required."""

    def __init__(self):
        super().__init__("mlflow")
        self.calls: list[tuple] = []
        self.start_run = lambda: self.calls.append(("start_run",))
        self.log_params = lambda values: self.calls.append(("log_params", values))
        self.log_metrics = lambda values, step: self.calls.append(("log_metrics", values, step))
        self.end_run = lambda: self.calls.append(("end_run",))


def test_the_documented_callback_sends_every_epoch_to_its_tracker(handed_over, monkeypatch):
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, "mlflow", tracker)
    ((page, _, script),) = [block for block in BLOCKS if "import mlflow" in block[2]]
    exec(compile(script, page, "exec"), {"__name__": "__main__"})
    events = keras.callbacks.CallbackList(handed_over[0].callbacks)
    events.on_train_begin()
    for epoch in range(2):
        events.on_epoch_end(epoch, {"loss": np.float32(0.5), "val_accuracy": 0.25})
    events.on_train_end()
    names = [call[0] for call in tracker.calls]
    assert names == ["start_run", "log_params", "log_metrics", "log_metrics", "end_run"]
    assert tracker.calls[2:4] == [("log_metrics", {"loss": 0.5, "val_accuracy": 0.25}, step) for step in (1, 2)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # scripts leave files open
@pytest.mark.parametrize("pages", ["api", pytest.param("others", marks=pytest.mark.slow)])
def test_every_documented_command_and_script_runs_as_written(pages, directory, monkeypatch):
    monkeypatch.chdir(directory)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # as after `source .venv/bin/activate`
    monkeypatch.setenv("PATH", f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "mlflow", Tracker())
    done, variables = set(), collections.defaultdict(lambda: {"__name__": "__main__"})
    for page, language, block in BLOCKS:
        if page.startswith("docs/api/") != (pages == "api"):
            continue
        for long, short in SHORTER.items():
            block = block.replace(long, short)
        if language == "python":
            exec(compile(block, page, "exec"), variables[page])
            continue
        for line in filter(None, block.splitlines()):
            if not any(part in line for part in SKIPPED) and line not in done:  # some are on two pages
                done.add(line)
                print(page, line)
                run_command(line, monkeypatch)


def test_every_link_of_the_documentation_leads_somewhere():
    for page in [*PAGES, *LOGS, CONTRIBUTING]:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)\)", prose):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    words = [
        re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    ]
    return {re.sub(r"[-\s]+", "-", heading) for heading in words}


def test_every_anchor_of_a_link_is_a_heading():
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([\w-]+)\)", prose):
            if not target.startswith("https://"):
                assert anchor in anchors(page.parent / target if target else page), f"{page.name}: {target}#{anchor}"


@functools.cache
def names_of(path: pathlib.Path) -> set[str]:
    """The functions, classes and variables at the top of a module, and "Class.name" of what is in its classes."""

    def names(body: list[ast.stmt], prefix: str = "") -> set[str]:
        found = set()
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                found |= names(node.body, f"{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
        return found

    return names(ast.parse(path.read_text()).body)


def code_spans(page: pathlib.Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


def missing(span: str) -> bool:
    """Whether a code span is a path of this repository, a name in one, or a module to run, that does not exist."""
    if module := re.match(r"python -m ((?:keras_vit|training|export|benchmarks)[\w.]*)", span):
        path = ROOT / module[1].replace(".", "/")
        return not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file())
    path, _, name = span.partition(":")
    if path.endswith(".py") or re.match(r"(keras_vit|training|export|tests|benchmarks|docs)/[\w./-]*$", path):
        return not (ROOT / path).exists() or (bool(name) and name not in names_of(ROOT / path))
    return False


@pytest.mark.parametrize("page", [CONTRIBUTING, *PAGES, *LOGS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_and_name_of_the_documentation_exists(page):
    assert not [span for span in code_spans(page) if missing(span)]


def test_the_site_has_every_page():
    assert sorted(IN_ORDER) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def test_every_documented_command_exists():
    for page in PAGES:
        for name in re.findall(r"(?<![\w/.-])keras-vit ([a-z][\w-]*)", page.read_text()):
            assert name in {*COMMANDS, "models", "recipes"}, f"{page.name}: keras-vit {name}"


def test_everything_that_the_reference_quotes_exists():
    """Mkdocstrings stops at a name that moved, but `make docs` is not a part of the tests."""
    quoted = re.findall(r"^::: ([\w.]+)$", "".join(page.read_text() for page in PAGES), re.MULTILINE)
    for name in quoted:
        parent, _, last = name.rpartition(".")
        place = parent.replace(".", "/")
        assert not missing(f"{place}.py:{last}") or not missing(f"{place}/{last}.py"), name


@pytest.mark.parametrize(
    ("package", "page"),
    [(keras_vit, "keras_vit.md"), (keras_vit.inspection, "inspection.md")],
    ids=["models", "figures"],
)
def test_the_reference_has_every_public_name(package, page):
    text = (ROOT / "docs" / "api" / page).read_text()
    assert not [name for name in package.__all__ if not re.search(rf"\b{name}$|`\w+\.{name}`", text, re.MULTILINE)]
