"""The complete workflow on real images that need no download: train, evaluate, export, verify.

    keras-vit demo --workdir runs/demo

It trains a small ViT on scikit-learn's handwritten digits, evaluates it on the 360 test images, exports it as
SavedModel and TFLite, compares both with the Keras model on all test images, and writes summary.json. This takes a few
minutes on two cores.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.train import DemoOptions


def main(arguments: Sequence[str]) -> None:
    """`--workdir DIR`"""
    options = parser.parse(DemoOptions, arguments, prog="keras-vit demo", about=__doc__)
    cli.require_tensorflow()

    from export.demo import export_and_summarize
    from keras_vit.files.atomic import locked
    from keras_vit.files.remote import local_path
    from training.experiments.by_recipe import train_on_digits
    from training.loop.callbacks import report_interruption

    workdir, serving = options.workdir, f"{options.workdir}/serving"
    # A second lock besides that of the training, because the exports also need the directory for themselves.
    with report_interruption(), locked(local_path(workdir, "workdir"), ".demo.lock"):
        export_and_summarize(*train_on_digits(workdir, options.seed))
    inspect = ("inspect", "--run", workdir, "--output", f"{workdir}/inspection")
    served = ("serving", "--models", f"{workdir}/saved_model", "--name", "digits", "--output", serving)
    cli.print_next([("predict", "--run", workdir, "--serve"), inspect, served])


if __name__ == "__main__":
    cli.run(main)
