"""Measure a published checkpoint on ImageNet and compare its top-1 accuracy with the published one.

    keras-vit verify-official imagenet21k+imagenet2012/ViT-B_16-224 --data folder:imagenet/val
    keras-vit verify-official big_vision:vit_s16_i1k_90ep --data tfds:imagenet2012

The checkpoint is downloaded, the images are preprocessed as for the published figure, and the result is a row of a
Markdown table. A folder contains the 1000 class folders, of which every image counts, or train and val. The names are
those of keras_vit/published.py.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.evaluate import VerifyOfficialOptions


def main(arguments: Sequence[str]) -> None:
    """`NAME --data …`"""
    options = parser.parse(VerifyOfficialOptions, arguments, prog="keras-vit verify-official", about=__doc__)

    from keras_vit.errors import check_known
    from keras_vit.published import ACCURACY
    from training.data.checks import check_data
    from training.loop.devices.backend import prepare_tpu

    check_known("published accuracy", options.name, ACCURACY)
    check_data(options.source)
    prepare_tpu(options.devices)
    cli.require_tensorflow()

    from training.evaluation.evaluate import verify_official

    verify_official(options)
    images = ("--images", options.source.data, "--output", "inspection")
    cli.print_next([("inspect", "--checkpoint", options.name, *images)])


if __name__ == "__main__":
    cli.run(main)
