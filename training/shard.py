"""Write a data set as TFRecord files, which are faster to read than many small files, from a disk or a bucket.

    keras-vit shard --data folder:pictures --output shards --shards 16
    keras-vit pretrain photos-small --data 'tfrecord:shards/*.tfrecord' --workdir runs/pictures
    keras-vit shard --data csv:gs://bucket/list.csv --output gs://bucket/new --shards 1000 --runner DataflowRunner -- …

Image files are stored unchanged. Example i of a split goes to file i mod N, so every file contains all classes.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.data import ShardOptions, split_arguments


def main(arguments: Sequence[str]) -> None:
    """`--data … --output DIR --shards N`"""
    own, behind = split_arguments(arguments)
    options = parser.parse(ShardOptions, own, prog="keras-vit shard", about=__doc__)

    from training.checks import check_shards, pipeline_options, table_path
    from training.data.checks import check_data

    table = table_path(options.source.data) if options.runner else None
    pipeline = pipeline_options(options.runner, behind, None, (table, options.output))
    if pipeline is None:
        check_data(options.source)
    check_shards(options.output)
    cli.require_tensorflow()

    if pipeline is not None:
        from training.beam.picture_list import PictureList
        from training.beam.shard import shard as shard_by_pipeline

        shard_by_pipeline(PictureList(table=table, evaluation="eval"), options, pipeline)
    else:
        from training.data.write import shard

        shard(options.source, options.output, shards=options.shards)
    cli.print_next([("auto", "--data", f"tfrecord:{options.output}/*.tfrecord", "--workdir", "runs/auto")])


if __name__ == "__main__":
    cli.run(main)
