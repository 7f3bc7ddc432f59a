"""`keras-vit anomaly fit` and `predict`. Imports TensorFlow when the options and paths are checked."""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.files.keras_model import find
from keras_vit.files.remote import existing_folder
from training.options.predict import AnomalyFitOptions, AnomalyPredictOptions
from training.prediction.arguments import check_output, find_images, parse_with_run


def fit(arguments: Sequence[str], prog: str, about: str) -> None:
    """Learn from images of good parts."""
    options = parser.parse(AnomalyFitOptions, arguments, prog=prog, about=about)

    from keras_vit.run import Run
    from training.checks import check_new_workdir

    existing_folder(options.folder, "--data accepts a folder of images of good parts")
    check_new_workdir(options.workdir)
    run = Run.open(options.checkpoint, image_size=options.image_size)
    files = find_images([options.folder])
    cli.require_tensorflow()

    from training.outliers.anomaly import fit_anomaly

    fit_anomaly(run, files, options)
    cli.print_next([("anomaly", "predict", "--run", options.workdir, options.folder, "--output", "defects.html")])


def predict(arguments: Sequence[str], prog: str, about: str) -> None:
    """Tell good parts from defective ones."""
    options = parse_with_run(AnomalyPredictOptions, arguments, prog=prog, about=about)
    find(options.run, "anomaly.json")
    check_output(options.output)
    files = find_images(options.images)
    cli.require_tensorflow()

    from training.outliers.anomaly import open_anomaly_detector, predict_anomaly

    predict_anomaly(open_anomaly_detector(options.run), files, options)
