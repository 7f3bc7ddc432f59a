"""The repository layout: which modules may import which, and that imports are silent."""

import ast
import graphlib
import importlib
import json
import os
import pathlib
import subprocess
import sys

import keras
import pytest

import keras_vit.inspection

ROOT = pathlib.Path(__file__).parent.parent
MODULES = sorted(path for package in ("keras_vit", "training", "export") for path in (ROOT / package).rglob("*.py"))
FORBIDDEN = {
    "keras_vit": {"tensorflow", "training", "export", "jax", "torch"},
    "training": {"export"},
    "export": {"training"},
}
# The one module that may import both.
EXCEPTIONS = {"training.demo"}
# From bottom to top: a module imports its own folder and those above it in this list. The longest prefix counts.
FLOORS = (
    "keras_vit.errors",
    "keras_vit.cli",
    "keras_vit.files",
    "keras_vit.models.config",
    "keras_vit.images",
    "keras_vit.models",
    "keras_vit.checkpoints",
    "keras_vit.text",
    "keras_vit.promise",
    "keras_vit.scores",
    "keras_vit.run",
    "keras_vit.inspection",
    "keras_vit.published",
    "keras_vit.cli.commands",
    "keras_vit",  # keras_vit.convert
    "training.recipes",
    "training.options",
    "training.loop.devices.backend",  # imports no TensorFlow
    "training.data",
    "training.checks",
    "training.prediction.arguments",  # imports no TensorFlow
    "training.loop.devices",
    "training.objectives",
    "training.loop",
    "training.evaluation",
    "training.features",
    "training.prediction",
    "training.segmentation",
    "training.detection",
    "training.outliers",
    "training.experiments",
    "training.beam",
    "export.options",
    "export",  # parity, report, source, inference_model, fingerprint
    "export.serving",
    "export.tflite",
    "export.saved_model",
    "export.onnx",
    "export.fastest",
    "export.from_keras",
    "export.demo",
    "export.__init__",
    "training",  # the commands
)
# Modules of keras_vit that import backends, inside their functions.
BACKENDS = {
    "keras_vit.inspection.compute": {"tensorflow", "jax"},  # gradients, which keras.ops has not
    "keras_vit.models.gpu": {"jax"},  # where Keras runs on JAX
    "keras_vit.models.build": {"tensorflow", "jax"},  # the precision of products, which Keras does not set
    "keras_vit.files.remote": {"tensorflow"},  # reads buckets
    "keras_vit.images.graph": {"tensorflow"},  # decodes JPEGs as training does, where Keras runs on TensorFlow
}


def dotted(path: pathlib.Path) -> str:
    """The name by which a module is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(tree: ast.AST) -> set[str]:
    """Modules, and names imported from them, including lazy imports and those for type checkers."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def floor(module: str) -> int:
    """The index of a module in FLOORS."""
    prefixes = [prefix for prefix in FLOORS if f"{module}.".startswith(f"{prefix}.")]
    return FLOORS.index(max(prefixes, key=len))


@pytest.fixture(name="trees", scope="module")
def _trees() -> dict[str, ast.Module]:
    return {dotted(path): ast.parse(path.read_text()) for path in MODULES}


@pytest.fixture(name="imports", scope="module")
def _imports(trees) -> dict[str, set[str]]:
    return {name: imported(tree) for name, tree in trees.items()}


@pytest.fixture(name="graph", scope="module")
def _graph(imports) -> dict[str, set[str]]:
    """Module -> the modules that it imports; names imported from a package itself are not followed."""
    modules = {name for name in imports if not name.endswith("__init__")}
    return {name: imports[name] & modules - {name} for name in modules}


def test_packages_import_only_what_they_may(imports):
    for name in imports.keys() - EXCEPTIONS:
        packages = {other.split(".")[0] for other in imports[name]}
        assert not packages & FORBIDDEN[name.split(".")[0]] - BACKENDS.get(name, set()), name


def test_no_module_reads_the_graph_of_a_keras_model(trees):
    """`keras.models.clone_model` connects the layers of another form of a model."""
    private = {"_inbound_nodes", "_outbound_nodes", "_keras_history", "_nodes", "_operations"}
    for name, tree in trees.items():
        assert not private & {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}, name


def test_modules_do_not_import_each_other_in_a_circle(graph):
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_imports_go_down_only(graph):
    upwards = [(name, other) for name, others in graph.items() for other in others if floor(other) > floor(name)]
    assert not upwards


def test_every_module_has_a_docstring(trees):
    assert not [name for name, tree in trees.items() if not ast.get_docstring(tree)]


@pytest.mark.parametrize("package", [keras_vit, keras_vit.inspection], ids=lambda package: package.__name__)
def test_a_package_has_all_its_names(package):
    name, names = package.__name__, {}
    assert set(package.__all__) <= set(dir(package))
    exec(f"from {name} import *", names)
    assert {*package.__all__, "__builtins__"} == names.keys()
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        package.nothing  # noqa: B018


@pytest.mark.parametrize("first", ["import keras", "keras_vit.build"])  # whose module imports Keras, but has no layers
def test_packages_import_keras_only_for_their_names_and_keras_knows_all_their_layers(first):
    code = "import sys, json, keras_vit, keras_vit.inspection\ndir(keras_vit.inspection)\n"
    code += f"before = 'keras' in sys.modules\n{first}\nimport keras\n"
    code += "print(json.dumps([before, list(keras.saving.get_custom_objects())]))"
    env = os.environ | {"KERAS_BACKEND": "jax"}  # the fastest to import
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=env)
    before, known = json.loads(done.stdout)
    assert not before
    for path in MODULES:
        if path.is_relative_to(ROOT / "keras_vit") and "@keras.saving.register" in path.read_text():
            importlib.import_module(dotted(path))
    registered = keras.saving.get_custom_objects().items()
    assert {*known} == {name for name, kind in registered if kind.__module__.startswith("keras_vit.")} != set()


@pytest.mark.slow
def test_importing_everything_prints_nothing():
    # Apache Beam has an environment of its own.
    modules = [dotted(path) for path in MODULES if path.stem != "__init__" and path.parent.name != "beam"]
    code = "import importlib, sys\nfrom keras_vit.cli.start import native_stderr_silenced\n"
    code += "with native_stderr_silenced(): import keras\n"  # whose backend prints warnings
    code += "for name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
