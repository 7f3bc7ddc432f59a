"""Write the features of pictures into a folder, which similar, search, review and the probes read.

    keras-vit embed --checkpoint hf:facebook/dinov2-small --data folder:pictures --output features
    keras-vit embed --checkpoint hf:openai/clip-vit-base-patch32 photographs/ --output features

One pass over the pictures; a command that was killed continues where it was. The folder has Parquet files with the
path, digest, label, split and embedding of each picture, and the fingerprint of the model.
"""

from collections.abc import Sequence

from keras_vit import cli, parser, run_directory
from training.options.checks import check_data
from training.options.features import EmbedOptions
from training.options.predict import with_run

_PROG = "keras-vit embed"


def main(arguments: Sequence[str]) -> None:
    """`--run DIR | --checkpoint NAME, --data … | PICTURES…, --output DIR`"""
    given = with_run(parser.read(EmbedOptions, arguments, prog=_PROG))
    options = parser.build(EmbedOptions, given, prog=_PROG)
    run_directory.check_output(options.output)
    source = options.source
    if source is not None:
        check_data(source)
    run = options.open_run()

    from training.prediction.pictures import find_pictures

    files = [str(file) for file in find_pictures(options.pictures)]
    cli.require_tensorflow()

    from training.features.embed import embed, listing_of_data, listing_of_files
    from training.input.sources import open_source

    listing = listing_of_files(files) if source is None else listing_of_data(open_source(source))
    index = embed(run, listing, options)
    [first] = index.some([0]).paths
    following: list[tuple[str, ...]] = [("review", "--index", options.output)]
    if source is None or source.kind in ("folder", "csv"):
        following.insert(0, ("similar", "--index", options.output, first))
    if index.description.features == "joint":
        following.append(("search", "red bicycle in snow", "--index", options.output))
    cli.print_next(following)


if __name__ == "__main__":
    cli.run(main)
