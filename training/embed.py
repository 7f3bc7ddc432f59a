"""Write the features of images into a folder, which similar, search, review and the probes read.

    keras-vit embed --checkpoint hf:facebook/dinov2-small --data folder:pictures --output features
    keras-vit embed --checkpoint hf:openai/clip-vit-base-patch32 photographs/ --output features
    keras-vit embed --run gs://bucket/run gs://bucket/new --output gs://bucket/features --runner DataflowRunner -- …

One pass over the images; a command that was killed continues where it was. The folder has Parquet files with the
path, digest, label, split and embedding of each image, and the fingerprint of the model.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.data import split_arguments
from training.options.features import EmbedOptions

_PROG = "keras-vit embed"


def main(arguments: Sequence[str]) -> None:
    """`--run DIR | --checkpoint NAME, --data … | PICTURES…, --output DIR`"""
    own, behind = split_arguments(arguments)
    given = parser.read(EmbedOptions, own, prog=_PROG, about=__doc__)

    from keras_vit.files.remote import output_folder
    from keras_vit.run import Run
    from training.checks import pipeline_options, table_path
    from training.data.checks import check_data
    from training.prediction.arguments import find_pictures, with_run

    options = parser.options_from(EmbedOptions, with_run(given), prog=_PROG)
    output_folder(options.output)
    source = options.source if options.source.data else None
    table = table_path(source.data) if options.runner and source else None
    pipeline = pipeline_options(options.runner, behind, options.run, (*options.pictures, table, options.output))
    if source is not None and pipeline is None:
        check_data(source)
    run = Run.open(options.run, image_size=options.image_size, num_heads=options.num_heads)
    if pipeline is not None:
        cli.require_tensorflow()

        from training.beam.inference import embed as embed_by_pipeline
        from training.beam.picture_list import PictureList

        _print_next(options, embed_by_pipeline(run, PictureList(options.pictures, table), options, pipeline))
        return

    files = [str(file) for file in find_pictures(options.pictures)]
    cli.require_tensorflow()

    from training.data.sources import open_source
    from training.features.extraction import embed, listing_of_data, listing_of_files

    listing = listing_of_files(files) if source is None else listing_of_data(open_source(source))
    [first] = embed(run, listing, options).some([0]).paths
    _print_next(options, first)


def _print_next(options: EmbedOptions, first: str) -> None:
    from training.features.store import read_description

    following: list[tuple[str, ...]] = [("review", "--index", options.output)]
    if options.pictures or options.source.kind in ("folder", "csv"):
        following.insert(0, ("similar", "--index", options.output, first))
    if read_description(options.folder).features == "joint":
        following.append(("search", "red bicycle in snow", "--index", options.output))
    cli.print_next(following)


if __name__ == "__main__":
    cli.run(main)
