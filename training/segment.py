"""Train a linear segmentation head on the frozen features of a model, evaluate it by mIoU, and export a SavedModel.

    keras-vit segment --checkpoint runs/pictures --data scenes --workdir runs/scenes

The folder holds images/ and masks/, or train/ and test/ with these two. A mask has the name and the size of its image
(scenes/masks/a.png for scenes/images/a.jpg), and its pixels are class numbers from 0; 255 is not counted. The file
labels.txt in the folder may name the classes. --data tfds:oxford_iiit_pet takes images and masks from TensorFlow
Datasets. The same command evaluates a finished run again.
"""

from collections.abc import Sequence

from keras_vit import cli, parser
from keras_vit.files.remote import is_remote, to_path
from training.options.segment import SegmentOptions
from training.workdir import check_outside, check_workdir


def main(arguments: Sequence[str]) -> None:
    """`--checkpoint FILE --data FOLDER --workdir DIR`"""
    options = parser.parse(SegmentOptions, arguments, prog="keras-vit segment")
    run = options.open_run()
    if not is_remote(options.workdir):
        check_workdir(to_path(options.workdir))
        check_outside(options.workdir, f"folder:{options.data}")
    options.check()
    cli.require_tensorflow()

    from training.segmentation.segment import open_data, segment

    segment(run, open_data(options), options)


if __name__ == "__main__":
    cli.run(main)
