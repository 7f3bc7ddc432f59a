"""Choose the images that are most worth a label.

    keras-vit label-next --checkpoint hf:facebook/dinov2-small --data folder:labeled --unlabelled new/ --count 50

It writes label_next.html and label_next.csv, with the class that each image probably has, and says what more labels are
worth. With few labels, it chooses typical images; with more, those about which a linear head is least sure. Near copies
are left out.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.features import LabelNextOptions


def main(arguments: Sequence[str]) -> None:
    """`--checkpoint NAME --data … --unlabelled DIR`"""
    options = parser.parse(LabelNextOptions, arguments, prog="keras-vit label-next", about=__doc__)

    from keras_vit.files.remote import output_folder
    from keras_vit.run import Run
    from training.data.checks import check_data
    from training.prediction.arguments import find_images

    check_data(options.source)
    output_folder(options.output)
    files = [str(file) for file in find_images((options.unlabelled,))]
    run = Run.open(options.run, image_size=options.image_size, num_heads=options.num_heads)
    cli.require_tensorflow()

    from training.data.sources import open_source
    from training.features.active_learning import label_next

    label_next(run, open_source(options.source), files, options)
    probe = ("linear-probe", "--checkpoint", options.run, *options.source.arguments(), "--workdir", "runs/probe")
    cli.print_next([probe])


if __name__ == "__main__":
    cli.run(main)
