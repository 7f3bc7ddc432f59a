"""The house: who may import whom, and what no module does."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
MODULES = sorted(path for room in ("keras_vit", "training", "export") for path in (ROOT / room).rglob("*.py"))
FORBIDDEN = {
    "keras_vit": {"tensorflow", "training", "export", "jax", "torch"},
    "training": {"export"},
    "export": {"training"},
}
# The one place that may see both sides.
EXCEPTION = ROOT / "training" / "demo.py"


def dotted(path: pathlib.Path) -> str:
    """The name of a module, as it is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_rooms_import_only_what_they_may_know(path):
    if path != EXCEPTION:
        assert not imported(path) & FORBIDDEN[path.relative_to(ROOT).parts[0]]


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_importing_everything_prints_nothing():
    modules = [dotted(path) for path in MODULES if path.stem != "__init__"]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
