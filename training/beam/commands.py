"""`keras-vit predict`, `embed` and `shard`, which also run as pipelines: what they open, check and call.

Imports TensorFlow when the options and paths are checked, and Beam for a pipeline alone.
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.files.remote import is_remote
from training.options.common import ShardOptions, split_arguments
from training.options.features import EmbedOptions
from training.options.predict import PredictOptions
from training.prediction.arguments import check_images, check_output, find_images, parse_with_run


def predict(arguments: Sequence[str], about: str) -> None:
    """Classify image files, or serve a page that does."""
    own, behind = split_arguments(arguments)
    options = parse_with_run(PredictOptions, own, prog="keras-vit predict", about=about)

    from keras_vit.run import CONFIG, Run
    from keras_vit.text.classes import classes_of_options
    from training.checks import pipeline_options

    check_images(options.run, options.images, options.serve, options.classes)
    paths = (*options.images, options.labels, options.output)
    pipeline = pipeline_options(options.runner, behind, options.run, paths)
    texts = None if options.classes is None else classes_of_options(options.classes, options.templates)
    run = Run.open(options.run, image_size=options.image_size, num_heads=options.num_heads, texts=texts)
    if options.labels is not None:
        run.check_label_file(options.labels)
    if pipeline is not None:
        cli.require_tensorflow()

        from training.beam import inference

        inference.predict(run, options, pipeline)
        return
    files = find_images(options.images)
    check_output(options.output)
    cli.require_tensorflow()

    from training.prediction import results
    from training.prediction.classifier import open_classifier

    classifier = open_classifier(run, options.labels, threshold=options.threshold, explain=options.explain)
    if options.serve:
        from training.prediction.server import open_server, serve

        serve(open_server(dataclasses.replace(classifier, traced_batch=1), options.port))
        return
    results.predict(classifier, files, options)
    if run.file(CONFIG) and options.classes is None:
        cli.print_next(run.next_commands("predict"))
        return
    again = ("predict", *parser.arguments_of(options, "images", "output", "explain", "serve", "port"))
    page = ("--output", "predictions.html", *options.images)
    cli.print_next([(*again, "--serve") if (options.output or "").endswith(".html") else (*again, *page)])


def embed(arguments: Sequence[str], about: str) -> None:
    """Write the features of images into a folder."""
    own, behind = split_arguments(arguments)
    options = parse_with_run(EmbedOptions, own, prog="keras-vit embed", about=about)

    from keras_vit.files.remote import output_folder
    from keras_vit.run import Run
    from training.checks import pipeline_options
    from training.data.checks import check_data

    output_folder(options.output)
    paths, data = (*options.images, options.output), options.source.data
    pipeline = pipeline_options(options.runner, behind, options.run, paths, data)
    if data and pipeline is None:
        check_data(options.source)
    run = Run.open(options.run, image_size=options.image_size, num_heads=options.num_heads)
    files = [str(file) for file in find_images(options.images)] if pipeline is None else []
    cli.require_tensorflow()

    from training.data.sources import open_source
    from training.features import extraction
    from training.features.store import read_description

    if pipeline is not None:
        from training.beam import inference

        first = inference.embed(run, options, pipeline)
    else:
        listing = extraction.listing_of_files(files)
        if data:
            listing = extraction.listing_of_data(open_source(options.source))
        [first] = extraction.embed(run, listing, options).some([0]).paths
    following: list[tuple[str, ...]] = [("review", "--index", options.output)]
    if options.images or options.source.kind in ("folder", "csv"):
        following.insert(0, ("similar", "--index", options.output, first))
    if read_description(options.folder).features == "joint":
        following.append(("search", "red bicycle in snow", "--index", options.output))
    cli.print_next(following)


def shard(arguments: Sequence[str], about: str) -> None:
    """Write a data set as TFRecord files."""
    own, behind = split_arguments(arguments)
    options = parser.parse(ShardOptions, own, prog="keras-vit shard", about=about)

    from training.checks import pipeline_options
    from training.data.checks import check_data, check_shard_folder

    pipeline = pipeline_options(options.runner, behind, None, (options.output,), options.source.data)
    if pipeline is None:
        check_data(options.source)
    if not is_remote(options.output):  # else it is checked where TensorFlow reads it
        check_shard_folder(options.output, is_pipeline=pipeline is not None)
    cli.require_tensorflow()

    if pipeline is not None:
        from training.beam import shard

        shard.shard(options, pipeline)
    else:
        from training.data import write

        write.shard(options.source, options.output, shards=options.shards)
    cli.print_next([("auto", "--data", f"tfrecord:{options.output}/*.tfrecord", "--workdir", "runs/auto")])
