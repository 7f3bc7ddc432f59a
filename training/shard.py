"""Write a data set as TFRecord files, which are faster to read than many small files, from a disk or a bucket.

    keras-vit shard --data folder:pictures --output shards --shards 16
    keras-vit pretrain photos-small --data 'tfrecord:shards/*.tfrecord' --workdir runs/pictures

Image files are stored unchanged. Example i of a split goes to file i mod N, so every file contains all classes.
"""

from collections.abc import Sequence

from keras_vit import cli, parser
from training.options.checks import check_data
from training.options.data import ShardOptions
from training.workdir import check_no_run


def main(arguments: Sequence[str]) -> None:
    """`--data … --output DIR --shards N`"""
    options = parser.parse(ShardOptions, arguments, prog="keras-vit shard")
    check_data(options.source)
    check_no_run(options.output)
    options.check_output()
    cli.require_tensorflow()

    from training.input.write_tfrecord import shard

    shard(**vars(options))
    cli.print_next([("auto", "--data", f"tfrecord:{options.output}/*.tfrecord", "--workdir", "runs/auto")])


if __name__ == "__main__":
    cli.run(main)
