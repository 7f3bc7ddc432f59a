"""`keras-vit convert IN OUT --layout LAYOUT`: convert a checkpoint to another layout."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated

from keras_vit import cli
from keras_vit.checkpoints.find import check_name
from keras_vit.checkpoints.layouts import check_target
from keras_vit.cli import parser
from keras_vit.cli.options import Positional
from keras_vit.errors import refuse_without_effect
from keras_vit.models.config import Gelu
from keras_vit.run import check_model_file


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Convert a checkpoint to the layout of another library and print the mapping of its keys."""

    source: Annotated[str, Positional("IN")]
    """Checkpoint file or folder, address, official name such as augreg:B_16, .keras file, or run directory."""
    target: Annotated[pathlib.Path, Positional("OUT")]
    """File to write (.npz, .safetensors, .h5), or new folder (huggingface, timm, keras_hub, kmodels)."""
    layout: str
    """npz, npz-linen, big_vision, huggingface, timm, torchvision, keras_hub, vit_keras or kmodels."""
    two_towers: bool = False
    """Whether the text tower and its tokenizer are written, too: CLIP and SigLIP, for keras_hub."""
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
        check_target(self.target, self.layout, is_new=True)
        refuse_without_effect(self, [(("two_towers",), self.layout == "keras_hub", "--layout keras_hub")])


def main(arguments: Sequence[str]) -> None:
    """`IN OUT --layout LAYOUT`"""
    parsed = parser.parse(Arguments, arguments, prog="keras-vit convert", about=__doc__)
    check_name(parsed.source)
    check_model_file(parsed.source)
    cli.import_keras()

    from keras_vit.checkpoints.checkpoint import LoadOptions
    from keras_vit.checkpoints.save import convert

    names = ("image_size", "num_classes", "num_heads", "gelu", "num_groups")
    options = LoadOptions(**{name: getattr(parsed, name) for name in names})
    if parsed.two_towers:
        from keras_vit.text.save import convert_two_towers

        convert_two_towers(parsed.source, parsed.target, options)
        return
    convert(parsed.source, parsed.target, parsed.layout, options)
    features = ("--embeddings", "features", "--output", "features")
    cli.print_next([("saved-model", "--checkpoint", str(parsed.target), *features)])


if __name__ == "__main__":
    cli.run(main)
