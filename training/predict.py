"""Classify image files with a run or a checkpoint.

    keras-vit predict --run runs/pictures new/ cat.jpg
    keras-vit predict --checkpoint hf:google/vit-base-patch16-224 new/ --output new.html --explain rollout
    keras-vit predict --run runs/pictures --serve
    keras-vit predict --run gs://bucket/run gs://bucket/new --output gs://bucket/found --runner DataflowRunner -- …
    keras-vit predict --checkpoint hf:openai/clip-vit-base-patch32 --classes cat dog "a rabbit" new/

It prints the five most likely classes of each image. `--run` may be left out: `runs/pictures new/`. A file that cannot
be read is named, and the others are classified; if none can be read, the exit code is 2.
"""

from collections.abc import Sequence

from keras_vit import cli
from training.beam import commands


def main(arguments: Sequence[str]) -> None:
    """`--run DIR | --checkpoint NAME IMAGES…`"""
    commands.predict(arguments, __doc__ or "")


if __name__ == "__main__":
    cli.run(main)
