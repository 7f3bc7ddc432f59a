"""Write the features of images into a folder, which similar, search, review and the probes read.

    keras-vit embed --checkpoint hf:facebook/dinov2-small --data folder:pictures --output features
    keras-vit embed --checkpoint hf:openai/clip-vit-base-patch32 photographs/ --output features
    keras-vit embed --run gs://bucket/run gs://bucket/new --output gs://bucket/features --runner DataflowRunner -- …

It reads every image once; a command that was killed continues where it was. The folder has Parquet files with the
path, digest, label, split and embedding of each image, and the fingerprint of the model.
"""

from collections.abc import Sequence

from keras_vit import cli
from training.beam import commands


def main(arguments: Sequence[str]) -> None:
    """`--run DIR | --checkpoint NAME, --data … | IMAGES…, --output DIR`"""
    commands.embed(arguments, __doc__ or "")


if __name__ == "__main__":
    cli.run(main)
