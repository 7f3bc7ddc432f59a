"""`python -m keras_vit.convert IN OUT --layout LAYOUT`: a checkpoint in another code's layout, key by key."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated

import tyro

from keras_vit import cli


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


def main(arguments: Sequence[str]) -> None:
    """`IN OUT --layout LAYOUT`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m keras_vit.convert")
    cli.import_keras()

    from keras_vit.checkpoints.convert import convert

    convert(
        parsed.source,
        parsed.target,
        parsed.layout,
        image_size=parsed.image_size,
        num_classes=parsed.num_classes,
        num_heads=parsed.num_heads,
        num_groups=parsed.num_groups,
    )


if __name__ == "__main__":
    cli.run(main)
