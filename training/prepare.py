"""Make a clean folder of images: upright, in formats that all commands read, without broken files and exact copies.

    keras-vit prepare photographs images
    keras-vit pretrain auto --data folder:pictures --workdir runs/pictures

The first folder is not changed. The second is written, with the same folders inside, and with a table of what was done
to each image, prepared.csv. JPEG and PNG files that need no change are copied byte for byte; TIFF, HEIC, AVIF, BMP,
GIF, WebP and others are converted.
"""

import os
from collections.abc import Sequence

from keras_vit import UserError, cli
from keras_vit.cli import parser
from keras_vit.files.remote import existing_folder
from training.options.common import PrepareOptions


def main(arguments: Sequence[str]) -> None:
    """`IN OUT`"""
    options = parser.parse(PrepareOptions, arguments, prog="keras-vit prepare", about=__doc__)
    existing_folder(options.folder, "give a folder of images")
    if os.path.lexists(options.output) or options.folder.resolve() in options.output.resolve().parents:
        raise UserError(f"OUT should be a new folder outside of {options.folder}, but is {options.output}.")
    cli.require_tensorflow()

    from training.preparation import prepare

    prepare(**vars(options))
    cli.print_next([("auto", "--data", f"folder:{options.output}", "--workdir", f"runs/{options.output.name}")])


if __name__ == "__main__":
    cli.run(main)
