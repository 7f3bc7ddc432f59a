"""Segment images with a Vision Transformer: the class of each pixel, objects, or both.

    keras-vit segment fit --checkpoint augreg:B_16 --data folder:scenes --workdir runs/scenes
    keras-vit segment evaluate --run runs/scenes --data folder:scenes --output runs/scenes
    keras-vit segment predict --run runs/scenes --output found new/

`fit`, `evaluate` and `predict` with --help list their options; `fit --head linear` trains a linear head on frozen
features. The same fit command continues an interrupted run.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.dense import SegmentEvaluateOptions, SegmentFitOptions, SegmentPredictOptions
from training.options.train import USUAL
from training.recipes.dense import SEGMENT_RECIPES

_PROG = "keras-vit segment"


def main(arguments: Sequence[str]) -> None:
    """`fit | evaluate | predict`, with the options of each"""
    cli.run_job(_PROG, __doc__ or "", {"fit": _fit, "evaluate": _evaluate, "predict": _predict}, arguments)


def _fit(arguments: Sequence[str]) -> None:
    head, _ = parser.named(arguments, "--head", "eomt")
    recipe = SEGMENT_RECIPES.get(head, SEGMENT_RECIPES["eomt"])  # another head is refused with the other options
    prog = f"{_PROG} fit"
    options = parser.parse(SegmentFitOptions, arguments, prog=prog, about=__doc__, usual=USUAL, recipe=recipe)

    from keras_vit.run import Run
    from training.checks import check_workdir
    from training.loop.devices.backend import prepare_backend
    from training.recipes.overrides import overridden

    options = dataclasses.replace(options, recipe=overridden(options.recipe, recipe))
    Run.open(options.checkpoint)
    check_workdir(options, "segment", options.recipe.head, is_final=True)
    prepare_backend(options)

    from training.data.annotations.open_scenes import open_scenes
    from training.loop.callbacks import report_interruption
    from training.loop.plan import open_setup
    from training.segmentation.fit import fit

    with report_interruption():
        setup = open_setup(options, lambda: open_scenes(options.source, options.task))
        fit(options, setup)
    if not options.dry_run:
        _print_next(options.workdir, setup.source.evaluation.name(0))


def _print_next(run: str, picture: str) -> None:
    """Print what to do with a run or checkpoint; `picture` is a file, or the name of a record."""
    predict = [("segment", "predict", "--run", run, "--output", "found", picture)]
    export = ("saved-model", "--run", run, "--output", "served")
    cli.print_next([*(predict if pathlib.Path(picture).is_file() else []), export])


def _evaluate(arguments: Sequence[str]) -> None:
    options = parser.parse(SegmentEvaluateOptions, arguments, prog=f"{_PROG} evaluate", about=__doc__)

    from keras_vit.files.labels import check_classes
    from keras_vit.files.remote import output_folder
    from keras_vit.run import Run

    run = Run.open(options.run)
    output = output_folder(options.output)
    cli.require_tensorflow()

    from training.data.annotations.open_scenes import open_scenes
    from training.segmentation.evaluation import evaluate, write_report
    from training.segmentation.segmenter import open_segmenter

    segmenter = open_segmenter(run, options.task)
    data = open_scenes(options.source, segmenter.kind)
    check_classes(segmenter.labels, data.labels)
    write_report(evaluate(segmenter, data.evaluation), output)
    _print_next(options.run, data.evaluation.name(0))


def _predict(arguments: Sequence[str]) -> None:
    prog = f"{_PROG} predict"
    given = parser.read(SegmentPredictOptions, arguments, prog=prog, about=__doc__)

    from keras_vit.files.remote import output_folder
    from keras_vit.run import Run
    from training.prediction.arguments import check_pictures, find_pictures, with_run

    options = parser.options_from(SegmentPredictOptions, with_run(given), prog=prog)
    check_pictures(options.run, options.pictures, serve=False, classes=None)
    run = Run.open(options.run)
    files = find_pictures(options.pictures)
    output = output_folder(options.output)
    cli.require_tensorflow()

    from training.segmentation.predict import predict
    from training.segmentation.segmenter import open_segmenter

    predict(open_segmenter(run, options.task), files, output, options.threshold)
    _print_next(options.run, "")


if __name__ == "__main__":
    cli.run(main)
