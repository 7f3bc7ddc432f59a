"""What importing this package puts off: Keras, which takes seconds with its backend, and all that is written on it.

A command is to print its help, and to refuse a wrong option, before that. So what a command line is declared in imports
neither; a package gives its public names when they are first used; and our layers are registered with Keras when
somebody imports that.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

# The modules whose layers a saved model is made of; the second one imports the first.
_LAYERS, _ALL_LAYERS = "keras_vit.layers", "keras_vit.attention"


def public_names(module: dict, homes: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """The `__getattr__` of a module (PEP 562): imports a public name, or a module of a package, when it is first used.

    Args:
        module: its `globals()`.
        homes: module of the same package -> the public names in it.
    """
    package = module["__package__"]
    home = {name: neighbour for neighbour, names in homes.items() for name in names}
    parts = {part.name for part in pkgutil.iter_modules(module.get("__path__", ()))}

    def first_use(name: str):
        if name in home:
            module[name] = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        elif name in parts:
            module[name] = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        return module[name]

    return first_use


def register_layers_with_keras() -> None:
    """Let Keras know our layers from the moment it is there, for `keras.models.load_model` finds no others.

    It may be there already; else whoever imports it, by whatever way, imports our layers behind it.
    """
    if "keras" in sys.modules:
        importlib.import_module(_ALL_LAYERS)
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds Keras as the other finders do, but for what comes with its import; stands before them until then.

    Our layers are watched because they may be what imports Keras: they cannot be imported behind it then, but those
    built on them can, behind them.
    """

    def find_spec(self, name: str, path=None, target=None):
        if name not in ("keras", _LAYERS):
            return None
        others = (finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for find in others if (spec := find(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def loaded(self, name: str) -> None:
        """Import our layers, unless they are what just imported Keras."""
        if name == _LAYERS or (name == "keras" and _LAYERS not in sys.modules):
            sys.meta_path.remove(self)
            importlib.import_module(_ALL_LAYERS)


class _Loader:
    """Loads a module as its own loader does, which it then leaves in its place."""

    def __init__(self, loader, finder: _Finder):
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str):
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.loaded(module.__name__)
