"""Classify image files with a run or a checkpoint.

    keras-vit predict --run runs/pictures new/ cat.jpg
    keras-vit predict --checkpoint hf:google/vit-base-patch16-224 new/ --output new.html --explain rollout
    keras-vit predict --run runs/pictures --serve
    keras-vit predict --run gs://bucket/run gs://bucket/new --output gs://bucket/found --runner DataflowRunner -- …
    keras-vit predict --checkpoint hf:openai/clip-vit-base-patch32 --classes cat dog "a rabbit" new/

prints the five most likely classes of each image. `runs/pictures new/`, without an option, is the same. A file that
cannot be read is named, and the others are classified; if none can be read, the exit code is 2.
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.data import split_arguments
from training.options.predict import PredictOptions

_PROG = "keras-vit predict"


def main(arguments: Sequence[str]) -> None:
    """`--run DIR | --checkpoint NAME PICTURES…`"""
    own, behind = split_arguments(arguments)
    given = parser.read(PredictOptions, own, prog=_PROG, about=__doc__)

    from keras_vit.run import Run
    from keras_vit.text.classes import classes_of_options
    from training.checks import pipeline_options
    from training.prediction.arguments import (
        check_output,
        check_pictures,
        find_pictures,
        next_commands,
        with_pictures,
        with_run,
    )

    options = parser.options_from(PredictOptions, with_run(with_pictures(given)), prog=_PROG)
    check_pictures(options.run, options.pictures, options.serve, options.classes)
    paths = (*options.pictures, options.labels, options.output)
    pipeline = pipeline_options(options.runner, behind, options.run, paths)
    texts = None if options.classes is None else classes_of_options(options.classes, options.templates)
    run = Run.open(options.run, image_size=options.image_size, num_heads=options.num_heads, texts=texts)
    if options.labels is not None:
        run.check_label_file(options.labels)
    if pipeline is not None:
        cli.require_tensorflow()

        from training.beam.inference import predict as predict_by_pipeline
        from training.beam.picture_list import PictureList

        predict_by_pipeline(run, PictureList(options.pictures), options, pipeline)
        return
    files = find_pictures(options.pictures)
    check_output(options.output)
    cli.require_tensorflow()

    from training.prediction.classifier import open_classifier
    from training.prediction.results import predict

    classifier = open_classifier(run, options.labels, threshold=options.threshold, explain=options.explain)
    if options.serve:
        from training.prediction.server import open_server, serve

        serve(open_server(dataclasses.replace(classifier, traced_batch=1), options.port))
        return
    predict(classifier, files, options)
    cli.print_next(next_commands(options, run))


if __name__ == "__main__":
    cli.run(main)
