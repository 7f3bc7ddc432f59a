"""A checkpoint read, written in another code's layout, read again and compared, with a report key by key."""

import keras
import numpy as np

from keras_vit.checkpoint import adapt, from_checkpoint
from keras_vit.config import ResNetConfig, ViTConfig
from keras_vit.convert import Arguments
from keras_vit.errors import UserError
from keras_vit.finding import find_checkpoint
from keras_vit.layouts import HEADS, LAYOUTS, layout_of
from keras_vit.merging import weights_by_key
from keras_vit.models import config_of
from keras_vit.recognition import Checkpoint, open_checkpoint
from keras_vit.run_directory import load_model
from keras_vit.saving import save_checkpoint


def convert(arguments: Arguments) -> None:
    """Read, write, read again, compare, and print the report."""
    if arguments.layout not in LAYOUTS:
        raise UserError(f"The layout must be one of {', '.join(LAYOUTS)}, but is {arguments.layout!r}.")
    if arguments.target.exists():
        raise UserError(f"{arguments.target} is there already; give the name of a new file.")
    if not arguments.target.parent.is_dir():
        raise UserError(f"There is no folder {str(arguments.target.parent)!r} to write {arguments.target.name} into.")
    model, source = _read(arguments)
    save_checkpoint(model, arguments.target, layout=arguments.layout)
    written = open_checkpoint(arguments.target)
    stored = {} if source is None else source.weights
    changed = []
    for key, weight in written.weights.items():
        variable = weights_by_key(model)[key]
        same = np.array_equal(weight.convert(weight.source.read()), keras.ops.convert_to_numpy(variable))
        changed += [] if same else [key]
        notes = [] if same else ["changed"]
        if key.startswith(HEADS) and arguments.num_classes is not None:
            notes.append("new, of zeros")
        elif key in stored and stored[key].shape != tuple(variable.shape):
            notes.append("resized")
        name = stored[key].source.key if key in stored else key
        print(f"{name}  ->  {weight.source.key}  {weight.source.shape}  {', '.join(notes)}".rstrip())
    for name in [] if source is None else _left_out(source, written):
        print(f"{name}  ->  left out")
    print(f"{len(written.weights)} weights, {model.count_params():,} numbers, in {arguments.target}", end="")
    print("; read again, all are equal bit for bit." if not changed else f"; changed: {', '.join(changed)}.")
    _say_numerics(model, arguments.layout)


def _read(arguments: Arguments) -> tuple[keras.Model, Checkpoint | None]:
    """The model, and the checkpoint that it is from; None for a saved model."""
    path = find_checkpoint(arguments.source)
    options = {name: getattr(arguments, name) for name in ("image_size", "num_classes")}
    if path.suffix == ".keras" or (path / "model.keras").is_file():
        return adapt(load_model(path), **options), None
    told = {name: getattr(arguments, name) for name in ("num_heads", "num_groups")}
    return from_checkpoint(path, **options, **told), open_checkpoint(path)


def _left_out(source: Checkpoint, written: Checkpoint) -> list[str]:
    """Keys of the source whose arrays are in no weight that was written."""
    dropped = {weight.source.key for key, weight in source.weights.items() if key not in written.weights}
    kept = {weight.source.key for key, weight in source.weights.items() if key in written.weights}
    return sorted({*dropped - kept, *source.unused})


_NUMERICS = {"gelu": "GELU", "layer_norm_epsilon": "epsilon"}
_RESNET_NUMERICS = {
    "group_norm_epsilon": "GroupNorm epsilon",
    "variance_epsilon": "epsilon of the kernels' variance",
    "deviation_epsilon": "epsilon of the kernels' deviation",
}


def _say_numerics(model: keras.Model, layout: str) -> None:
    """A file of arrays does not carry GELU and epsilons; say where the other code would compute otherwise."""
    config, compared = config_of(model), []
    has_rep = isinstance(config, ViTConfig) and config.representation_size is not None
    origin = layout_of(config, layout, 0 if has_rep else 1)
    if isinstance(config, ViTConfig) and layout != "huggingface":  # whose config.json says it
        compared += [(config, field, name) for field, name in _NUMERICS.items()]
    resnet = config if isinstance(config, ResNetConfig) else config.stem
    if isinstance(resnet, ResNetConfig):
        compared += [(resnet, field, name) for field, name in _RESNET_NUMERICS.items()]
    for owner, field, name in compared:
        ours, theirs = getattr(owner, field), getattr(origin, field)
        if ours != theirs:
            print(f"{name}: {ours} in this model, {theirs} in the code of {layout} files; set it there.")
