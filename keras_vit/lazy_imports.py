"""Lazy imports: Keras and its backend take seconds to import, so this package imports them on first use.

Commands print their help and reject wrong options before that. Packages import public names on first access, and the
layers of this package are registered when Keras is imported.
"""

import ast
import importlib
import pathlib
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType

_PACKAGE = __name__.partition(".")[0]
# The modules with the layers of saved models.
_WITH_LAYERS = (
    "keras_vit.models.layers",
    "keras_vit.models.image_model",
    "keras_vit.models.positions",
    "keras_vit.models.attention",
    "keras_vit.models.vit",
    "keras_vit.models.detection",
    "keras_vit.models.segmentation",
    "keras_vit.models.patch_memory",
    "keras_vit.text.tower",
    "keras_vit.images.preprocessing",
)


def public_names(module: dict) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package (PEP 562), which import public names and modules on first access.

    The public names are those that the package imports in its block `if TYPE_CHECKING`, the only list of them, which
    type checkers and editors read, too.

    Args:
        module: the `globals()` of the package.
    """
    package = module["__package__"]
    tree = ast.parse(pathlib.Path(module["__file__"]).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    parts = {part.name for part in pkgutil.iter_modules(module.get("__path__", ()))}

    def first_use(name: str):
        if name in homes:
            module[name] = getattr(importlib.import_module(homes[name]), name)
        elif name in parts:
            module[name] = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        return module[name]

    return first_use, lambda: sorted({*module, *homes})


def register_layers_with_keras() -> None:
    """Register the layers, so that `keras.models.load_model` finds them: now, or right after Keras is imported."""
    if "keras" in sys.modules:
        _import_layers()
    else:
        sys.meta_path.insert(0, _ImportsLayersBehindKeras())


def _import_layers() -> None:
    for module in _WITH_LAYERS:
        importlib.import_module(module)


class _ImportsLayersBehindKeras:
    """A meta path finder that imports the layers of this package right after Keras.

    It delegates to the other finders, wraps the loaders of Keras and of this package, and removes itself when Keras is
    executed. A module of this package that imports Keras must be complete before the layers import it, so they wait for
    the outermost one.
    """

    def __init__(self):
        self._depth = 0  # modules that are being executed

    def find_spec(self, name: str, path=None, target=None):
        if name != "keras" and not name.startswith(f"{_PACKAGE}."):
            return None
        others = (finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for find in others if (spec := find(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def with_layers(module: ModuleType) -> None:
                self._depth += 1
                try:
                    execute(module)
                finally:
                    self._depth -= 1
                if not self._depth and "keras" in sys.modules and self in sys.meta_path:
                    sys.meta_path.remove(self)  # first, for the layers are modules of this package
                    _import_layers()

            setattr(spec.loader, "exec_module", with_layers)  # noqa: B010 - mypy refuses to assign to a method
        return spec
