"""`keras-vit detect predict`, `fit` and `evaluate`. Imports TensorFlow when the options and paths are checked."""

import pathlib
from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.dense import DetectEvaluateOptions, DetectFitOptions, DetectPredictOptions
from training.options.train import USUAL
from training.prediction.arguments import check_images, check_output, find_images, parse_with_run


def predict(arguments: Sequence[str], prog: str, about: str) -> None:
    """Find objects on images, or serve a page that does."""
    options = parse_with_run(DetectPredictOptions, arguments, prog=prog, about=about)

    from keras_vit.run import Run
    from keras_vit.text.classes import classes_of_options

    check_images(options.run, options.images, options.serve, options.classes)
    check_output(options.output)
    texts = None if options.classes is None else classes_of_options(options.classes, options.templates)
    run = Run.open(options.run, image_size=options.image_size)
    files = find_images(options.images)
    cli.require_tensorflow()

    from training.detection.detector import detector_like, open_detector, save_detector
    from training.detection.predict import DetectionPage, detect
    from training.prediction.server import open_server, serve

    example = None if options.like is None else pathlib.Path(options.like)
    detector = open_detector(run, texts) if example is None else detector_like(run, example, options.box)
    if options.serve:
        page = DetectionPage(detector, options.top, options.threshold)
        serve(open_server(page, options.port, "Find objects"))
        return
    detect(detector, files, options)
    if options.save is not None:
        save_detector(detector, pathlib.Path(options.save))
    output, rest = parser.named(arguments, "--output", "")
    _, rest = parser.named(rest, "--save", "")
    other = "objects.csv" if output.endswith(".html") else "objects.html"
    exports = [("saved-model", "--run", options.save, "--output", "served")] if options.save else []
    cli.print_next([("detect", "predict", *rest, "--output", other), *exports])


def fit(arguments: Sequence[str], prog: str, about: str) -> None:
    """Train a detector, and measure it."""
    options = parser.parse(DetectFitOptions, arguments, prog=prog, about=about, usual=USUAL)

    from keras_vit.run import Run
    from training.checks import check_workdir
    from training.data.annotations.open_boxes import open_boxes

    Run.open(options.checkpoint)
    check_workdir(options, "detect", "detect", is_final=True)
    data = open_boxes(options.source)
    cli.require_tensorflow()

    from training.detection import fit
    from training.loop.callbacks import report_interruption
    from training.loop.plan import open_setup

    with report_interruption():
        fit.fit(options, data, open_setup(options, lambda: fit.box_data_set(data)))
    if not options.dry_run:
        served = ("detect", "predict", "--run", options.workdir, "--serve")
        cli.print_next([served, ("saved-model", "--run", options.workdir, "--output", "served")])


def evaluate(arguments: Sequence[str], prog: str, about: str) -> None:
    """Measure a detector on images with boxes."""
    options = parser.parse(DetectEvaluateOptions, arguments, prog=prog, about=about)

    from keras_vit.files.remote import output_folder
    from keras_vit.run import Run
    from training.data.annotations.open_boxes import open_boxes
    from training.data.known_images import check_group

    run = Run.open(options.run, image_size=options.image_size)
    output = output_folder(options.output)
    data = open_boxes(options.source, run)
    cli.require_tensorflow()

    from training.detection import evaluation
    from training.detection.detector import open_detector_of

    detector = open_detector_of(run, data.labels, options.templates)
    check_group(run, options.source, not data.has_split)
    evaluation.evaluate(detector, data.evaluation, data.kind, output)
    cli.print_next([("detect", "predict", "--run", options.run, "--serve")])
