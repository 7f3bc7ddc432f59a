"""Inspect a model: plot what it learned and which parts of an image it attends to.

    keras-vit inspect --run runs/mnist-small --output inside
    keras-vit inspect --checkpoint augreg:B_16 --images photographs --output inside

Writes the paper's figures as PNG, arrays.npz, measures.json, and index.html with everything in one report.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.cli.options import Aliases, Count, MayLead
from keras_vit.errors import UserError
from keras_vit.inspection import Figure

if TYPE_CHECKING:
    from keras_vit.run import Run


@dataclasses.dataclass(frozen=True)
class InspectionOptions:
    """Plot the paper's figures for a model and write an HTML report."""

    output: pathlib.Path
    """Output directory."""
    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory, .keras file, checkpoint file or folder, address, or official name such as augreg:B_16."""
    images: str | None = None
    """Image file, folder of images, samples.npz, or a data set as --data of training takes it; default the run's
    samples.npz."""
    count: Count = 128
    """Maximum number of images in the average of the attention distance."""
    show: Count = 8
    """Number of images with maps; the first ones are taken."""
    figures: tuple[Figure, ...] | None = None
    """Which of them; default all figures of the model."""
    layers: tuple[int, ...] | None = None
    """Blocks in the attention maps, from 0, or from -1 backward; default all."""
    heads: tuple[int, ...] | None = None
    """Heads in the attention maps, from 0; default all."""
    labels: pathlib.Path | None = None
    """Text file with one class name per line; default the run's labels.txt."""
    image_size: tuple[int, int] | None = None
    """Height and width of the input in pixels; position embeddings are resized. Default as stored."""
    num_heads: int | None = None
    """Number of attention heads, if the checkpoint does not contain it."""
    num_groups: int | None = None
    """Number of groups of GroupNorm, if the checkpoint does not contain it."""
    data_dir: str | None = None
    """Directory of prepared TFDS data sets; default is the TFDS default."""


def main(arguments: Sequence[str]) -> None:
    """`--run DIR | --checkpoint FILE --output DIR`"""
    options = parser.parse(InspectionOptions, arguments, prog="keras-vit inspect", about=__doc__)

    from keras_vit.files.remote import output_folder
    from keras_vit.images.files import SAMPLES, check_source
    from keras_vit.run import CONFIG, Run

    size, heads, groups = options.image_size, options.num_heads, options.num_groups
    run = Run.open(options.run, image_size=size, num_heads=heads, num_groups=groups)
    if options.labels is not None:
        run.check_label_file(options.labels)
    source = options.images or str(run.file(SAMPLES) or "")
    if not source:
        raise UserError(
            f"{run.name} has no images of its own; give --images, an image, a folder of images, or a data set."
        )
    check_source(source)
    output_folder(options.output)
    cli.import_keras()
    _inspect(run, source, options)
    if run.file(CONFIG):
        cli.print_next(run.next_commands("inspect"))
        return
    model = "--run", run.name, *(() if heads is None else ("--num-heads", str(heads)))
    saved_model = "saved-model", *model
    if run.class_names:
        cli.print_next([("predict", *model, "--serve"), (*saved_model, "--output", "served")])
    else:
        cli.print_next([(*saved_model, "--embeddings", "features", "--output", "features")])


def _inspect(run: "Run", source: str, options: InspectionOptions) -> None:
    # lazy: importing Keras takes seconds
    from keras_vit.files.labels import read_labels
    from keras_vit.images.files import read_images
    from keras_vit.inspection.compute import inspect, mistakes_first
    from keras_vit.inspection.report import sentences, write
    from keras_vit.models.build import exact_products

    labels = read_labels(options.labels) if options.labels else run.class_names
    images = read_images(source, options.count, labels, options.data_dir, run.preprocessing)
    if not run.is_multi_label:
        images = mistakes_first(run.model, images, labels, run.scoring(), options.show // 2)
    with exact_products():
        result = inspect(
            run.model,
            images,
            checkpoint=run.name,
            labels=labels,
            figures=options.figures,
            shown=options.show,
            layers=options.layers,
            heads=options.heads,
            scoring=run.scoring(),
        )
    names = write(result, options.output)
    page = options.output / "index.html"
    print(*sentences(result), f"{len(names)} files in {options.output}; open {page}.", sep="\n")


if __name__ == "__main__":
    cli.run(main)
