"""Look inside a model: what it learned, and where it looks.

    python -m keras_vit.inspection --run runs/mnist-small --output inside
    python -m keras_vit.inspection --checkpoint augreg:B_16 --images photographs --output inside

writes the paper's figures as PNG, arrays.npz, measures.json and index.html, which shows everything.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import keras

from keras_vit import cli, run_directory
from keras_vit.checkpoint import adapt, from_checkpoint
from keras_vit.errors import UserError
from keras_vit.finding import find_checkpoint
from keras_vit.inspection.images import read_pictures
from keras_vit.inspection.observe import FIGURES, inspect
from keras_vit.inspection.page import sentences
from keras_vit.inspection.report import write


@dataclasses.dataclass(frozen=True)
class Arguments:
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


def main(arguments: Sequence[str]) -> None:
    """`--run DIR | --checkpoint FILE --output DIR`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m keras_vit.inspection")
    _check(parsed)
    output = run_directory.check_output(parsed.output)
    labels = _labels(parsed)
    samples = None if parsed.run is None else pathlib.Path(parsed.run) / run_directory.SAMPLES
    source = parsed.images or samples
    model = _model(parsed)
    pictures = read_pictures(source, parsed.count, labels, parsed.data_dir)
    findings = inspect(
        model,
        pictures,
        checkpoint=parsed.run or parsed.checkpoint,
        labels=labels,
        figures=parsed.figures,
        shown=parsed.show,
        layers=parsed.layers,
        heads=parsed.heads,
    )
    names = write(findings, output)
    for sentence in sentences(findings):
        print(sentence)
    print(f"{len(names)} files in {output}; open {output / 'index.html'}.")


def _check(arguments: Arguments) -> None:
    if (arguments.run is None) == (arguments.checkpoint is None):
        raise UserError("Give either --run DIR or --checkpoint FILE, whose model is looked into.")
    for option in ("count", "show"):
        if getattr(arguments, option) < 1:
            raise UserError(f"--{option} must be at least 1 image, but is {getattr(arguments, option)}.")
    unknown = [figure for figure in arguments.figures or () if figure not in FIGURES]
    if unknown:
        raise UserError(f"There is no figure {unknown[0]!r}; --figures takes {', '.join(FIGURES)}.")
    if arguments.images is None:
        if arguments.run is None or arguments.run.endswith(".keras"):
            raise UserError("--images is needed with a checkpoint: give an image, a folder of images, or a data set.")
        run_directory.find(arguments.run, run_directory.SAMPLES)


def _model(arguments: Arguments) -> keras.Model:
    """The model; the options that only a checkpoint has must not be given with a run."""
    given = {name: getattr(arguments, name) for name in ("num_heads", "num_groups")}
    if arguments.run is not None:
        meaningless = [name for name, value in given.items() if value is not None]
        if meaningless:
            raise UserError(
                f"--{meaningless[0].replace('_', '-')} means nothing to a run, which knows it; leave it out."
            )
        model = run_directory.load_model(arguments.run)
        return model if arguments.image_size is None else adapt(model, image_size=arguments.image_size)
    path = find_checkpoint(arguments.checkpoint)
    return from_checkpoint(path, image_size=arguments.image_size, **given)


def _labels(arguments: Arguments) -> tuple[str, ...]:
    if arguments.labels is not None:
        try:
            return tuple(arguments.labels.read_text(encoding="utf-8").splitlines())
        except UnicodeDecodeError as error:
            raise UserError(f"{arguments.labels} should name a class in each line, but is no UTF-8 text.") from error
    if arguments.run is not None and pathlib.Path(arguments.run).is_dir():
        return run_directory.load_labels(arguments.run)
    return ()


if __name__ == "__main__":
    cli.run(main, any_backend=True)
