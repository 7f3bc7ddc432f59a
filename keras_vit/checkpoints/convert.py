"""A checkpoint read, written in another code's layout, read again and compared, with a report key by key."""

import os
import pathlib

import keras
import numpy as np

from keras_vit.checkpoints.assign import weights_by_key
from keras_vit.checkpoints.download import find_checkpoint
from keras_vit.checkpoints.formats import HEADS, LAYOUTS, layout_of
from keras_vit.checkpoints.infer_config import Checkpoint, open_checkpoint
from keras_vit.checkpoints.load import adapt, from_checkpoint
from keras_vit.checkpoints.save import save_checkpoint
from keras_vit.errors import UserError
from keras_vit.models.build import config_of
from keras_vit.models.config import ResNetConfig, ViTConfig
from keras_vit.run_directory import load_model


def convert(
    source: str | os.PathLike,
    target: pathlib.Path,
    layout: str,
    *,
    image_size: tuple[int, int] | None = None,
    num_classes: int | None = None,
    num_heads: int | None = None,
    num_groups: int | None = None,
) -> None:
    """Read, write, read again, compare, and print the report.

    Args:
        source: checkpoint file or folder, address, official name, .keras file, or run directory.
        target: file to write, or new folder.
        layout: one of LAYOUTS.
        image_size: height and width in pixels to resize position embeddings to; None keeps what is stored.
        num_classes: width of a new head of zeros, 0 for none; None keeps the head as stored.
        num_heads, num_groups: where the file does not have them.

    Raises:
        UserError: for a layout that is none, a target that exists, and a source that cannot be read or written so.
    """
    if layout not in LAYOUTS:
        raise UserError(f"The layout must be one of {', '.join(LAYOUTS)}, but is {layout!r}.")
    if target.exists():
        raise UserError(f"{target} is there already; give the name of a new file.")
    if not target.parent.is_dir():
        raise UserError(f"There is no folder {str(target.parent)!r} to write {target.name} into.")
    model, origin = _read(source, image_size, num_classes, num_heads, num_groups)
    save_checkpoint(model, target, layout=layout)
    written = open_checkpoint(target)
    stored = {} if origin is None else origin.weights
    changed = []
    for key, weight in written.weights.items():
        variable = weights_by_key(model)[key]
        same = np.array_equal(weight.convert(weight.source.read()), keras.ops.convert_to_numpy(variable))
        changed += [] if same else [key]
        notes = [] if same else ["changed"]
        if key.startswith(HEADS) and num_classes is not None:
            notes.append("new, of zeros")
        elif key in stored and stored[key].shape != tuple(variable.shape):
            notes.append("resized")
        name = stored[key].source.key if key in stored else key
        print(f"{name}  ->  {weight.source.key}  {weight.source.shape}  {', '.join(notes)}".rstrip())
    for name in [] if origin is None else _left_out(origin, written):
        print(f"{name}  ->  left out")
    print(f"{len(written.weights)} weights, {model.count_params():,} numbers, in {target}", end="")
    print("; read again, all are equal bit for bit." if not changed else f"; changed: {', '.join(changed)}.")
    _report_numerics(model, layout)


def _read(
    source: str | os.PathLike,
    image_size: tuple[int, int] | None,
    num_classes: int | None,
    num_heads: int | None,
    num_groups: int | None,
) -> tuple[keras.Model, Checkpoint | None]:
    """The model, and the checkpoint that it is from; None for a saved model."""
    path = find_checkpoint(source)
    if path.suffix == ".keras" or (path / "model.keras").is_file():
        return adapt(load_model(path), image_size=image_size, num_classes=num_classes), None
    model = from_checkpoint(
        path, image_size=image_size, num_classes=num_classes, num_heads=num_heads, num_groups=num_groups
    )
    return model, open_checkpoint(path)


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


def _report_numerics(model: keras.Model, layout: str) -> None:
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
