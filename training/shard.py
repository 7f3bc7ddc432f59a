"""Write a data set as TFRecord files, which are faster to read than many small files, from a disk or a bucket.

    keras-vit shard --data folder:pictures --output shards --shards 16
    keras-vit pretrain photos-small --data 'tfrecord:shards/*.tfrecord' --workdir runs/pictures
    keras-vit shard --data csv:gs://bucket/list.csv --output gs://bucket/new --shards 1000 --runner DataflowRunner -- …

Image files are stored unchanged. Example i of a split goes to file i mod N, so every file contains all classes.
"""

from collections.abc import Sequence

from keras_vit import cli
from training.beam import commands


def main(arguments: Sequence[str]) -> None:
    """`--data … --output DIR --shards N`"""
    commands.shard(arguments, __doc__ or "")


if __name__ == "__main__":
    cli.run(main)
