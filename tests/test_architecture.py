"""The repository layout: who may import whom, and what no module does."""

import ast
import collections
import graphlib
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
# The one module that may see both sides.
EXCEPTION = ROOT / "training" / "demo.py"
# From bottom to top: a module imports its own room and those above it in this list. The longest prefix counts.
FLOORS = (
    "keras_vit.errors",
    "keras_vit.native_stderr",
    "keras_vit.cli",
    "keras_vit.files",
    "keras_vit.models.config",
    "keras_vit.preprocessing",
    "keras_vit.run_directory",
    "keras_vit.models",
    "keras_vit.checkpoints",
    "keras_vit.inspection",
    "keras_vit",  # the command that converts
    "training.recipes",
    "training.options",
    "training.input",
    "training.devices",
    "training.loop",
    "training.evaluation",
    "training.probes",
    "training.experiments",
    "export.options",
    "export",  # parity, report, source, inference_model, fingerprint
    "export.serving",
    "export.saved_model",
    "export.tflite",
    "export.onnx",
    "training",  # the doors
)
MOST_MODULES = 12
# The one module of keras_vit that names backends, whose gradients keras.ops does not have; inside functions alone.
GRADIENTS = ROOT / "keras_vit" / "inspection" / "gradients.py"


def dotted(path: pathlib.Path) -> str:
    """The name of a module, as it is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(path: pathlib.Path) -> set[str]:
    """Everything that a module imports, lazily and for type checkers too."""
    return imported_by(ast.parse(path.read_text()))


def imported_by(tree: ast.AST) -> set[str]:
    """Names of the modules, and of what is taken from them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def floor(module: str) -> int:
    """The place of a module's room in FLOORS."""
    rooms = [room for room in FLOORS if f"{module}.".startswith(f"{room}.")]
    return FLOORS.index(max(rooms, key=len))


@pytest.fixture(name="graph", scope="module")
def _graph() -> dict[str, set[str]]:
    """Each module and the modules that it imports; what a package gives by its own name is not followed."""
    modules = {dotted(path): path for path in MODULES if path.stem != "__init__"}
    return {name: imported(path) & modules.keys() - {name} for name, path in modules.items()}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_packages_import_only_what_they_may_know(path):
    if path != EXCEPTION:
        known = {name.split(".")[0] for name in imported(path)}
        backends = {"tensorflow", "jax"} if path == GRADIENTS else set()
        assert not known & FORBIDDEN[path.relative_to(ROOT).parts[0]] - backends


def test_no_backend_is_imported_with_the_module_of_gradients():
    at_the_top = ast.Module(
        [node for node in ast.parse(GRADIENTS.read_text()).body if not isinstance(node, ast.FunctionDef)], []
    )
    assert not {name.split(".")[0] for name in imported_by(at_the_top)} & {"tensorflow", "jax"}


def test_modules_do_not_import_each_other_in_a_circle(graph):
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_imports_go_down_only(graph):
    upwards = [(name, other) for name, others in graph.items() for other in others if floor(other) > floor(name)]
    assert not upwards


def test_a_folder_has_at_most_a_dozen_modules():
    doors = {ROOT / "training"}  # a module for each command
    sizes = collections.Counter(path.parent for path in MODULES if path.stem not in ("__init__", "__main__"))
    assert not {folder: size for folder, size in sizes.items() if size > MOST_MODULES and folder not in doors}


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
    code = "import importlib, sys\nfrom keras_vit.native_stderr import native_stderr_silenced\n"
    code += "with native_stderr_silenced(): import keras\n"  # whose backend makes remarks of its own
    code += "for name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
