"""`python -m keras_vit.convert IN OUT --layout LAYOUT`: convert a checkpoint to another layout."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated

import tyro

from keras_vit import cli
from keras_vit.checkpoints.download import check_name
from keras_vit.checkpoints.layouts import LAYOUTS, SUFFIXES
from keras_vit.errors import UserError, nearest
from keras_vit.models.config import Gelu
from keras_vit.run_directory import check_model_file


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Convert a checkpoint to the layout of another library and print the mapping of its keys."""

    source: Annotated[str, tyro.conf.Positional]
    """Checkpoint file or folder, address, official name such as augreg:B_16, .keras file, or run directory."""
    target: Annotated[pathlib.Path, tyro.conf.Positional]
    """File to write (.npz, .safetensors), or new folder (huggingface, timm)."""
    layout: str
    """npz, npz-linen, big_vision, huggingface, timm or torchvision."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to resize position embeddings to; default: their size in the file."""
    num_classes: int | None = None
    """Width of a new head of zeros, 0 for none; default: the head of the file."""
    num_heads: int | None = None
    """Attention heads, if they are not in the file."""
    gelu: Gelu | None = None
    """GELU of the model, tanh or erf, if it is not in the file."""
    num_groups: int | None = None
    """Groups of GroupNorm, if they are not in the file."""

    def __post_init__(self) -> None:
        """Raise UserError for what `keras_vit.checkpoints.convert` would refuse, once Keras is imported."""
        if self.layout not in LAYOUTS:
            raise UserError(
                f"The layout must be one of {', '.join(LAYOUTS)}, but is {self.layout!r}; the nearest is "
                f"{nearest(self.layout, LAYOUTS).split(', ')[0]}."
            )
        if self.target.exists():
            raise UserError(f"{self.target} already exists; give the name of a new file.")
        suffix = SUFFIXES.get(self.layout, "")
        is_folder = self.layout == "huggingface" or (self.layout == "timm" and not self.target.suffix)
        if not is_folder and self.target.suffix != suffix:
            raise UserError(
                f"A file of the layout {self.layout} should end in {suffix}, but is {self.target.name!r}; name it so."
            )


def main(arguments: Sequence[str]) -> None:
    """`IN OUT --layout LAYOUT`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m keras_vit.convert")
    check_name(parsed.source)
    check_model_file(parsed.source)
    cli.import_keras()

    from keras_vit.checkpoints.convert import convert

    convert(
        parsed.source,
        parsed.target,
        parsed.layout,
        image_size=parsed.image_size,
        num_classes=parsed.num_classes,
        num_heads=parsed.num_heads,
        gelu=parsed.gelu,
        num_groups=parsed.num_groups,
    )


if __name__ == "__main__":
    cli.run(main)
