"""Inspect a model: plot what it learned and which parts of an image it attends to.

    keras-vit inspect --run runs/mnist-small --output inside
    keras-vit inspect --checkpoint augreg:B_16 --images photographs --output inside

Writes the paper's figures as PNG, arrays.npz, measures.json, and index.html with everything in one report.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.inspection.options import InspectionOptions


def main(arguments: Sequence[str]) -> None:
    """`--run DIR | --checkpoint FILE --output DIR`"""
    options = parser.parse(InspectionOptions, arguments, prog="keras-vit inspect", about=__doc__)

    from keras_vit import run_directory
    from keras_vit.inspection.source import image_source, open_run

    run = open_run(options)
    if options.labels is not None:
        run.check_label_file(options.labels)
    image_source(options, run)
    run_directory.output_folder(options.output)
    cli.import_keras()

    from keras_vit.inspection.run import run_inspection

    run_inspection(run, options)
    if run.file(run_directory.CONFIG):
        cli.print_next(run.next_commands("inspect"))
        return
    heads = () if options.num_heads is None else ("--num-heads", str(options.num_heads))
    model, features = ("--run", run.name, *heads), ("--embeddings", "features", "--output", "features")
    if run.class_names:
        cli.print_next([("predict", *model, "--serve"), ("saved-model", *model, "--output", "served")])
    else:
        cli.print_next([("saved-model", *model, *features)])


if __name__ == "__main__":
    cli.run(main)
