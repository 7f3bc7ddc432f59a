"""Find defects when only good parts are known: a heat map, a score and a verdict for each image.

    keras-vit anomaly fit --checkpoint hf:facebook/dinov2-small --data good/ --workdir runs/parts
    keras-vit anomaly predict --run runs/parts new/ --output defects.html

`fit` keeps patch features of good parts (PatchCore, arXiv 2106.08265), sets a threshold on parts that it held out, and
writes a SavedModel. `fit` and `predict` with --help list their options.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.predict import AnomalyFitOptions, AnomalyPredictOptions

_PROG = "keras-vit anomaly"


def main(arguments: Sequence[str]) -> None:
    """`fit | predict`, with the options of each"""
    cli.run_job(_PROG, __doc__ or "", {"fit": _fit, "predict": _predict}, arguments)


def _fit(arguments: Sequence[str]) -> None:
    options = parser.parse(AnomalyFitOptions, arguments, prog=f"{_PROG} fit", about=__doc__)

    from keras_vit.files.remote import existing_folder
    from keras_vit.run import Run
    from training.checks import check_new_workdir
    from training.prediction.arguments import find_pictures

    existing_folder(options.folder, "--data takes a folder of pictures of good parts")
    check_new_workdir(options.workdir)
    run = Run.open(options.checkpoint, image_size=options.image_size)
    files = find_pictures([options.folder])
    cli.require_tensorflow()

    from training.outliers.anomaly import fit_anomaly

    fit_anomaly(run, files, options)
    cli.print_next([("anomaly", "predict", "--run", options.workdir, options.folder, "--output", "defects.html")])


def _predict(arguments: Sequence[str]) -> None:
    given = parser.read(AnomalyPredictOptions, arguments, prog=f"{_PROG} predict", about=__doc__)

    from keras_vit.files.keras_model import find
    from training.prediction.arguments import check_output, find_pictures, with_run

    options = parser.options_from(AnomalyPredictOptions, with_run(given), prog=f"{_PROG} predict")
    find(options.run, "anomaly.json")
    check_output(options.output)
    files = find_pictures(options.pictures)
    cli.require_tensorflow()

    from training.outliers.anomaly import open_anomaly_detector, predict_anomaly

    predict_anomaly(open_anomaly_detector(options.run), files, options)


if __name__ == "__main__":
    cli.run(main)
