"""Write a data set as TFRecord files, which are read faster than many small ones, from a disk or a bucket.

    python -m training.shard --data folder:pictures --output shards --shards 16
    python -m training.pretrain photos-small --data 'tfrecord:shards/*.tfrecord' --workdir runs/pictures

Files of images are kept byte by byte. Example i of a split goes to file i mod N, so that every file holds all classes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from keras_vit import cli
from training.arguments import DataArguments


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Write a data set as TFRecord files."""

    source: Annotated[DataArguments, tyro.conf.arg(name="")]
    output: str
    """Directory of the files; must not hold TFRecord files yet."""
    shards: int = 1
    """Files of each split."""


def main(arguments: Sequence[str]) -> None:
    """`--data … --output DIR --shards N`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m training.shard")
    cli.require_tensorflow()

    from training.sharding import shard

    shard(parsed)


if __name__ == "__main__":
    cli.run(main)
