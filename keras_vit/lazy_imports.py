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
_LAYERS, _ALL_LAYERS = "keras_vit.models.layers", "keras_vit.models.attention"


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
        sys.meta_path.insert(0, _ImportsLayersBehindKeras())


class _ImportsLayersBehindKeras:
    """A finder that stands before the others until Keras, or what imports it of ours first, is executed.

    It gives what they find; with the execution of that come our layers, and nothing else.
    """

    def find_spec(self, name: str, path=None, target=None):
        if name not in ("keras", _LAYERS):
            return None
        others = (finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for find in others if (spec := find(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def with_layers(module: ModuleType) -> None:
                # No longer needed, nor in the way where our layers import Keras: those come first.
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                execute(module)
                importlib.import_module(_ALL_LAYERS)

            setattr(spec.loader, "exec_module", with_layers)  # noqa: B010 - mypy refuses to assign to a method
        return spec
