"""The house: who may import whom, and what no module does."""

import ast
import pathlib
import subprocess
import sys

import pytest

import keras_vit.inspection

ROOT = pathlib.Path(__file__).parent.parent
MODULES = sorted(path for room in ("keras_vit", "training", "export") for path in (ROOT / room).rglob("*.py"))
FORBIDDEN = {
    "keras_vit": {"tensorflow", "training", "export", "jax", "torch"},
    "training": {"export"},
    "export": {"training"},
}
# The one place that may see both sides.
EXCEPTION = ROOT / "training" / "demo.py"
# The one place of keras_vit that names backends, whose gradients keras.ops does not have; inside functions alone.
GRADIENTS = ROOT / "keras_vit" / "inspection" / "gradients.py"


def dotted(path: pathlib.Path) -> str:
    """The name of a module, as it is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(path: pathlib.Path) -> set[str]:
    return imported_by(ast.parse(path.read_text()))


def imported_by(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_rooms_import_only_what_they_may_know(path):
    if path != EXCEPTION:
        backends = {"tensorflow", "jax"} if path == GRADIENTS else set()
        assert not imported(path) & FORBIDDEN[path.relative_to(ROOT).parts[0]] - backends


def test_no_backend_is_imported_with_the_module_of_gradients():
    at_the_top = ast.Module(
        [node for node in ast.parse(GRADIENTS.read_text()).body if not isinstance(node, ast.FunctionDef)], []
    )
    assert not imported_by(at_the_top) & {"tensorflow", "jax"}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("package", [keras_vit, keras_vit.inspection], ids=lambda package: package.__name__)
def test_a_package_gives_all_its_names_and_only_then_imports_keras(package):
    code = f"import {package.__name__} as package, sys; before = 'keras' in sys.modules; listed = dir(package)\n"
    code += f"names = {{}}; exec('from {package.__name__} import *', names); print(before, *listed); print(*names)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    (before, *listed), names = (line.split() for line in done.stdout.splitlines())
    assert before == "False"
    assert set(package.__all__) <= set(listed)
    assert {*package.__all__, "__builtins__"} == set(names)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_importing_everything_prints_nothing():
    modules = [dotted(path) for path in MODULES if path.stem != "__init__"]
    code = "import importlib, sys\nfrom keras_vit.quiet import native_stderr_silenced\n"
    code += "with native_stderr_silenced(): import keras\n"  # whose backend makes remarks of its own
    code += "for name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
