"""What the exports take; without TensorFlow and Keras, which `--help` need not wait for."""

import dataclasses

# Share of images that an artifact with rounded weights may put in another class than the model does. One image always
# may be: among few, a single picture between two classes says nothing.
LARGEST_DISAGREEMENT = 0.02


@dataclasses.dataclass(frozen=True)
class SourceArguments:
    """The model to export: one of --run and --checkpoint."""

    run: str | None = None
    """Run directory."""
    checkpoint: str | None = None
    """Checkpoint file or folder, address, or official name such as augreg:B_16."""
    labels: str | None = None
    """Text file with a class in each line, in the order of a checkpoint's logits. A run has its own."""
    images: str | None = None
    """Folder of image files to check a checkpoint's export on; those in folders named as a class give accuracy, too.
    Default: 16 made-up pictures. A run has its own."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels of a checkpoint's model; default: as stored."""
    num_heads: int | None = None
    """Attention heads, where a checkpoint does not tell them."""
    num_groups: int | None = None
    """Groups of GroupNorm, where a checkpoint does not tell them."""
