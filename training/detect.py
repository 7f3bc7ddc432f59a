"""Find objects on images with a Vision Transformer: from words, from an example, or of your own classes.

    keras-vit detect predict --checkpoint hf:google/owlv2-base-patch16-ensemble --classes "a red stamp" new/
    keras-vit detect predict --checkpoint hf:google/owlvit-base-patch32 --like a.jpg --box 10 20 80 60 new/
    keras-vit detect fit --checkpoint augreg:B_16 --data yolo:stamps/data.yaml --workdir runs/stamps
    keras-vit detect evaluate --run runs/stamps --data yolo:stamps/data.yaml --output runs/stamps

`predict`, `fit` and `evaluate` with --help list their options.
"""

import pathlib
from collections.abc import Sequence

from keras_vit import UserError, cli
from keras_vit.cli import parser
from training.options.dense import DetectEvaluateOptions, DetectFitOptions, DetectPredictOptions
from training.options.train import USUAL

_PROG = "keras-vit detect"


def main(arguments: Sequence[str]) -> None:
    """`predict | fit | evaluate`, with the options of each"""
    cli.run_job(_PROG, __doc__ or "", {"predict": _predict, "fit": _fit, "evaluate": _evaluate}, arguments)


def _predict(arguments: Sequence[str]) -> None:
    prog = f"{_PROG} predict"
    given = parser.read(DetectPredictOptions, arguments, prog=prog, about=__doc__)

    from keras_vit.files.remote import existing_file
    from keras_vit.run import Run
    from keras_vit.text.classes import classes_of_options
    from training.prediction.arguments import check_output, check_pictures, find_pictures, with_pictures, with_run

    options = parser.options_from(DetectPredictOptions, with_run(with_pictures(given)), prog=prog)
    check_pictures(options.run, options.pictures, options.serve, options.classes)
    check_output(options.output)
    if options.like is not None:
        existing_file(options.like, "--like takes a picture of the example")
    if options.save is not None and pathlib.Path(options.save).exists():
        raise UserError(f"{options.save} exists, but --save takes a new directory; choose another.")
    texts = None if options.classes is None else classes_of_options(options.classes, options.templates)
    run = Run.open(options.run, image_size=options.image_size)
    files = find_pictures(options.pictures)
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


def _fit(arguments: Sequence[str]) -> None:
    options = parser.parse(DetectFitOptions, arguments, prog=f"{_PROG} fit", about=__doc__, usual=USUAL)

    from keras_vit.run import Run
    from training.checks import check_workdir
    from training.data.annotations.open_boxes import open_boxes

    Run.open(options.checkpoint)
    check_workdir(options, "detect", "detect", is_final=True)
    data = open_boxes(options.source)
    cli.require_tensorflow()

    from training.detection.fit import box_data_set, fit
    from training.loop.callbacks import report_interruption
    from training.loop.plan import open_setup

    with report_interruption():
        fit(options, data, open_setup(options, lambda: box_data_set(data)))
    if not options.dry_run:
        run, folder = options.workdir, str(data.evaluation[0].file.parent)
        predict = ("detect", "predict", "--run", run, "--output", "objects.html", folder)
        cli.print_next([predict, ("saved-model", "--run", run, "--output", "served")])


def _evaluate(arguments: Sequence[str]) -> None:
    options = parser.parse(DetectEvaluateOptions, arguments, prog=f"{_PROG} evaluate", about=__doc__)

    from keras_vit.files.remote import output_folder
    from keras_vit.run import Run
    from training.data.annotations.open_boxes import open_boxes

    run = Run.open(options.run, image_size=options.image_size)
    output = output_folder(options.output)
    data = open_boxes(options.source)
    cli.require_tensorflow()

    from training.detection.detector import open_detector_of
    from training.detection.evaluation import evaluate

    detector = open_detector_of(run, data.labels, options.templates)
    is_trained = run.settings.get("command") == "detect"
    pictures = data.evaluation if data.has_split or is_trained else data.all
    if is_trained and not data.has_split:
        print("Every tenth picture is measured; the others may have trained the detector.")
    evaluate(detector, pictures, data.kind, output)
    folder = str(pictures[0].file.parent)
    cli.print_next([("detect", "predict", "--run", options.run, "--output", "objects.html", folder)])


if __name__ == "__main__":
    cli.run(main)
