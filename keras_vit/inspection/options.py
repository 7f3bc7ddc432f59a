"""What the command takes; without Keras, which `--help` need not wait for."""

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class InspectionOptions:
    """Draw the paper's figures for a model, and a page that shows them all."""

    output: pathlib.Path
    """Directory to write into."""
    run: str | None = None
    """Run directory of a training command, or a .keras file; or else:"""
    checkpoint: str | None = None
    """Checkpoint file or folder, address, or official name such as augreg:B_16."""
    images: str | None = None
    """Image file, folder of images, samples.npz, digits, tfds:NAME, folder:PATH or tfrecord:GLOB; default the run's
    samples.npz."""
    count: int = 128
    """Images at most that the attention distance is averaged over."""
    show: int = 8
    """Images whose maps are shown, the first of them."""
    figures: tuple[str, ...] | None = None
    """filters, positions, distance, rollout, attention, norms, relevance; default all that exist for the model."""
    layers: tuple[int, ...] | None = None
    """Blocks whose heads are shown, from 0; default all."""
    heads: tuple[int, ...] | None = None
    """Heads that are shown, from 0; default all."""
    labels: pathlib.Path | None = None
    """Text file with the name of a class in each line; default the run's labels.txt."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to resize position embeddings to; default: as stored."""
    num_heads: int | None = None
    """Attention heads, where the checkpoint does not tell them."""
    num_groups: int | None = None
    """Groups of GroupNorm, where the checkpoint does not tell them."""
    data_dir: str | None = None
    """Directory of prepared TFDS data sets; default TFDS' own."""
