"""Write a data set as TFRecord files, which are read faster than many small ones, from a disk or a bucket.

    python -m training.shard --data folder:pictures --output shards --shards 16
    python -m training.pretrain photos-small --data 'tfrecord:shards/*.tfrecord' --workdir runs/pictures

Files of images are kept byte by byte. Example i of a split goes to file i mod N, so that every file holds all classes.
"""

from collections.abc import Sequence

from keras_vit import cli
from training.options.data import ShardOptions


def main(arguments: Sequence[str]) -> None:
    """`--data … --output DIR --shards N`"""
    parsed = cli.parse(ShardOptions, arguments, prog="python -m training.shard")
    cli.require_tensorflow()

    from training.input.write_tfrecord import shard

    shard(parsed)


if __name__ == "__main__":
    cli.run(main)
