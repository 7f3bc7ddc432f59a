"""`python -m keras_vit.convert IN OUT --layout LAYOUT`: a checkpoint in another code's layout, key by key."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated

import keras
import numpy as np
import tyro

from keras_vit import cli
from keras_vit.checkpoint import from_checkpoint, save_checkpoint, weights_by_key
from keras_vit.config import ViTConfig
from keras_vit.errors import UserError
from keras_vit.finding import find_checkpoint
from keras_vit.layouts import LAYOUTS, layout_of
from keras_vit.models import config_of
from keras_vit.recognition import open_checkpoint
from keras_vit.run_directory import load_model


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Write a checkpoint in the layout of another code, and print which key became which."""

    source: Annotated[str, tyro.conf.Positional]
    """Checkpoint file or folder, address, official name such as augreg:B_16, .keras file, or run directory."""
    target: Annotated[pathlib.Path, tyro.conf.Positional]
    """File to write (.npz, .safetensors), or new folder (huggingface)."""
    layout: str
    """npz, npz-linen, big_vision, huggingface, timm or torchvision."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to resize position embeddings to; default: as stored."""
    num_classes: int | None = None
    """Width of a new head of zeros, 0 for none; default: the head as stored."""
    num_heads: int | None = None
    """Attention heads, where the file does not tell them."""
    num_groups: int | None = None
    """Groups of GroupNorm, where the file does not tell them."""


def convert(arguments: Arguments) -> None:
    """Read, write, read again, compare, and print the report."""
    if arguments.target.exists():
        raise UserError(f"{arguments.target} is there already; give the name of a new file.")
    if not arguments.target.parent.is_dir():
        raise UserError(f"There is no folder {str(arguments.target.parent)!r} to write {arguments.target.name} into.")
    model, read = _read(arguments)
    save_checkpoint(model, arguments.target, layout=arguments.layout)
    written = open_checkpoint(arguments.target)
    changed = []
    weights = weights_by_key(model)
    for key, weight in written.weights.items():
        same = np.array_equal(weight.convert(weight.source.read()), keras.ops.convert_to_numpy(weights[key]))
        changed += [] if same else [key]
        print(f"{read.get(key, key)}  ->  {weight.source.key}  {weight.source.shape}{'' if same else '  changed'}")
    print(f"{len(written.weights)} weights, {model.count_params():,} numbers, in {arguments.target}", end="")
    print("; read again, all are equal bit for bit." if not changed else f"; changed: {', '.join(changed)}.")
    _say_numerics(model, arguments.layout)


def _read(arguments: Arguments) -> tuple[keras.Model, dict[str, str]]:
    """The model, and the key of the source for each of its weights."""
    path = find_checkpoint(arguments.source)
    if path.suffix == ".keras" or (path / "model.keras").is_file():
        return load_model(path), {}
    options = {name: getattr(arguments, name) for name in ("image_size", "num_classes", "num_heads", "num_groups")}
    model = from_checkpoint(path, **options)
    return model, {key: weight.source.key for key, weight in open_checkpoint(path).weights.items()}


def _say_numerics(model: keras.Model, layout: str) -> None:
    """A file of arrays does not carry GELU and epsilon; say where the other code would compute otherwise."""
    config = config_of(model)
    if layout == "huggingface" or not isinstance(config, ViTConfig):
        return
    origin = layout_of(config, layout, 0 if config.representation_size else 1)
    ours, theirs = (f"{c.gelu} GELU and epsilon {c.layer_norm_epsilon:g}" for c in (config, origin))
    if ours != theirs:
        print(f"This model computes with {ours}, the code of {layout} files with {theirs}: set them there.")


def main(arguments: Sequence[str]) -> None:
    """`IN OUT --layout LAYOUT`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m keras_vit.convert")
    if parsed.layout not in LAYOUTS:
        raise UserError(f"The layout must be one of {', '.join(LAYOUTS)}, but is {parsed.layout!r}.")
    convert(parsed)


if __name__ == "__main__":
    cli.run(main, any_backend=True)
