"""`keras-vit segment fit`, `evaluate` and `predict`. Imports TensorFlow when the options and paths are checked."""

import dataclasses
import pathlib
from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.files.remote import output_folder
from training.options.dense import SegmentEvaluateOptions, SegmentFitOptions, SegmentPredictOptions
from training.options.train import USUAL
from training.prediction.arguments import check_images, find_images, parse_with_run
from training.recipes.dense import SEGMENT_RECIPES
from training.recipes.overrides import overridden


def fit(arguments: Sequence[str], prog: str, about: str) -> None:
    """Train a model that segments, and measure it."""
    head, _ = parser.named(arguments, "--head", "eomt")
    recipe = SEGMENT_RECIPES.get(head, SEGMENT_RECIPES["eomt"])  # another head is refused with the other options
    options = parser.parse(SegmentFitOptions, arguments, prog=prog, about=about, usual=USUAL, recipe=recipe)

    from keras_vit.run import Run
    from training.checks import check_workdir
    from training.loop.devices.backend import prepare_backend

    options = dataclasses.replace(options, recipe=overridden(options.recipe, recipe))
    Run.open(options.checkpoint)
    check_workdir(options, "segment", options.recipe.head, is_final=True)
    prepare_backend(options)

    from training.data.annotations.open_scenes import open_scenes
    from training.loop.callbacks import report_interruption
    from training.loop.plan import open_setup
    from training.segmentation import fit

    with report_interruption():
        setup = open_setup(options, lambda: open_scenes(options.source, options.task))
        fit.fit(options, setup)
    if not options.dry_run:
        _print_next(options.workdir, setup.source.evaluation.name(0))


def evaluate(arguments: Sequence[str], prog: str, about: str) -> None:
    """Measure a model that segments on images with masks."""
    options = parser.parse(SegmentEvaluateOptions, arguments, prog=prog, about=about)

    from keras_vit.files.labels import check_classes
    from keras_vit.run import Run

    run = Run.open(options.run)
    output = output_folder(options.output)
    cli.require_tensorflow()

    from training.data.annotations.open_scenes import open_scenes
    from training.data.known_images import check_group
    from training.segmentation import evaluation
    from training.segmentation.segmenter import open_segmenter

    segmenter = open_segmenter(run, options.task)
    data = open_scenes(options.source, segmenter.kind, run)
    check_group(run, options.source, data.held_out)
    check_classes(segmenter.labels, data.labels)
    evaluation.write_report(evaluation.evaluate(segmenter, data.evaluation), output)
    _print_next(options.run, data.evaluation.name(0))


def predict(arguments: Sequence[str], prog: str, about: str) -> None:
    """Write the masks of images."""
    options = parse_with_run(SegmentPredictOptions, arguments, prog=prog, about=about)

    from keras_vit.run import Run

    check_images(options.run, options.images, serve=False, classes=None)
    run = Run.open(options.run)
    files = find_images(options.images)
    output = output_folder(options.output)
    cli.require_tensorflow()

    from training.segmentation import predict
    from training.segmentation.segmenter import open_segmenter

    predict.predict(open_segmenter(run, options.task), files, output, options.threshold)
    _print_next(options.run, "")


def _print_next(run: str, image: str) -> None:
    """Print what to do with a run or checkpoint; `image` is a file, or the name of a record."""
    following = [("segment", "predict", "--run", run, "--output", "found", image)]
    export = ("saved-model", "--run", run, "--output", "served")
    cli.print_next([*(following if pathlib.Path(image).is_file() else []), export])
