"""Find defects when only good parts are known: a heat map, a score and a verdict for each picture.

    keras-vit anomaly fit --checkpoint hf:facebook/dinov2-small --data good/ --workdir runs/parts
    keras-vit anomaly predict --run runs/parts new/ --output defects.html

`fit` keeps patch features of good parts (PatchCore, arXiv 2106.08265), sets a threshold on parts that it held out, and
writes a SavedModel. `fit` and `predict` with --help list their options.
"""

import pathlib
from collections.abc import Sequence

from keras_vit import UserError, cli, parser, run_directory
from training.options.outliers import AnomalyFitOptions, AnomalyPredictOptions

_PROG = "keras-vit anomaly"


def main(arguments: Sequence[str]) -> None:
    """`fit | predict`, with the options of each"""
    jobs = {"fit": _fit, "predict": _predict}
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: {cli.as_typed(_PROG)} {'|'.join(jobs)} [OPTIONS]\n\n{cli.as_typed(__doc__ or '')}")
        return
    if name not in jobs:
        raise UserError(f"{_PROG} takes {' or '.join(jobs)} and its options, but was given {name!r} first.")
    jobs[name](rest)


def _fit(arguments: Sequence[str]) -> None:
    options = parser.parse(AnomalyFitOptions, arguments, prog=f"{_PROG} fit")
    options.check()
    run = options.open_run()

    from training.prediction.pictures import find_pictures

    files = find_pictures([options.folder])
    cli.require_tensorflow()

    from training.outliers.anomaly import fit_anomaly

    fit_anomaly(run, files, options)
    cli.print_next([("anomaly", "predict", "--run", options.workdir, options.folder, "--output", "defects.html")])


def _predict(arguments: Sequence[str]) -> None:
    options = parser.parse(AnomalyPredictOptions, arguments, prog=f"{_PROG} predict")
    run_directory.find(options.run, "anomaly.json")
    if options.output is not None:
        run_directory.check_output(pathlib.Path(options.output).parent)

    from training.prediction.pictures import find_pictures

    files = find_pictures(options.pictures)
    cli.require_tensorflow()

    from training.outliers.anomaly import open_detector, predict_anomaly

    predict_anomaly(open_detector(options.run), files, options.output)


if __name__ == "__main__":
    cli.run(main)
