"""Model soups: the mean of the weights of several fine-tuned models, as an ordinary run.

"Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing inference time"
(arXiv 2203.05482). Its Table 3, CLIP ViT-B/32 on ImageNet: 80.4% for the best run, 80.0% for the uniform soup of all,
81.0% for the greedy soup. Here: `benchmarks/logs/techniques.md`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import keras
import numpy as np

import keras_vit
from keras_vit import UserError, preprocessing_of
from keras_vit.checkpoints.load import weights_by_key
from keras_vit.files.atomic import locked
from keras_vit.files.keras_model import load_model
from keras_vit.files.remote import output_folder
from keras_vit.images.files import SAMPLES
from keras_vit.run import CALIBRATION, CONFIG, IMAGES, Run, differences
from training.data.known_images import TrainingData, check_held_out
from training.data.sources import DataSet, open_source
from training.evaluation.predictors import accuracy
from training.options.common import DataOptions
from training.options.evaluate import SoupOptions

_BATCH = 500
_COPIED = (SAMPLES, CALIBRATION)
Weights = dict[str, np.ndarray]


def cook(runs: Sequence[Run], options: SoupOptions) -> Run:
    """Average finished runs and return the run directory of the average.

    Raises UserError if the runs differ in architecture, preprocessing or classes; if greedy, also in their data.
    """
    model, target = _read(runs[0]), Run.at(output_folder(options.output))
    _check(runs, _described(model), greedy=options.greedy)
    source = _source_of(runs) if options.greedy and not target.is_finished else None
    fingerprints = {run.config.get(IMAGES) for run in runs}
    settings = {"command": "soup", "runs": list(options.runs), "greedy": options.greedy, **_common_data(runs)}
    if runs[0].is_multi_label:
        settings["recipe"] = {"loss": "multi-label"}  # by which a run is known as one
    with locked(target.path):
        target.start(settings, runs[0].labels, images=fingerprints.pop() if len(fingerprints) == 1 else None)
        if digests := [run.training_images for run in runs if run.training_images is not None]:
            target.save_training_images(np.concatenate(digests))
        if target.is_finished:
            print(f"{target.path} is finished: nothing to do.")
            return target
        if source is None:
            _assign(model, functools.reduce(_added, runs, {}), len(runs))
            print(f"Averaged {len(runs)} runs.")
        records = [] if source is None else _greedy(model, runs, source)
        for name in _COPIED:
            if file := runs[0].file(name):
                (target.path / name).write_bytes(file.read_bytes())
        target.write_metrics(records)
        target.save_model(model)
    print(f"See {target.path}.")
    return target


def _check(runs: Sequence[Run], described: dict, *, greedy: bool) -> None:
    """Raise UserError for runs that cannot be averaged; if greedy, also for those that cannot be compared.

    described: the model of the first run.
    """
    first, what = runs[0], None
    for run in runs:
        if "settings" not in run.config:
            what = f"the {CONFIG} of {run.name} is damaged"
        elif run.labels != first.labels:
            what = f"{first.name} and {run.name} have different classes"
        elif run.is_multi_label != first.is_multi_label:
            what = f"only one of {first.name} and {run.name} is for images of several classes"
        elif greedy and _accuracy_at_end(run) is None:
            what = f"{run.name} has no accuracy in its metrics.jsonl, as --greedy needs"
        elif greedy and (different := differences(first.settings["source"], run.settings["source"])):
            what = f"--greedy compares on the same images, and {first.name} and {run.name} differ in {different}"
        elif run is not first and (different := differences(described, _described(_read(run)))):
            what = f"the models of {first.name} and {run.name} differ in {different}"
        if what is not None:
            raise UserError(f"These runs cannot be averaged, because {what}; give others.")


def _read(run: Run) -> keras.Model:
    """Load the model of a run; `Run.model` would keep those of all runs in memory."""
    return load_model(run.checkpoint)


def _described(model: keras.Model) -> dict:
    image = dataclasses.asdict(preprocessing_of(model))
    return {"config": dataclasses.asdict(keras_vit.config_of(model)), "image": image}


def _common_data(runs: Sequence[Run]) -> dict:
    """Return the source and the numbers of images of the runs, as far as they agree; see `TrainingData`."""
    first, known = runs[0].settings, [TrainingData.of_run(run) for run in runs]
    one_place = len({each and each.place for each in known}) == 1
    common = {"source": first["source"]} if one_place and "source" in first else {}
    if common and len({each and each.counts for each in known}) == 1 and "images" in first:
        common["images"] = first["images"]
    return common


def _accuracy_at_end(run: Run) -> float | None:
    return run.metrics()[-1].get("val_accuracy") if run.metrics() else None


def _source_of(runs: Sequence[Run]) -> DataSet:
    """Open the data. Raises UserError if a rule now keeps other images for evaluation than when the runs trained."""
    options = DataOptions.of_settings(runs[0].settings["source"])
    source = open_source(options)
    for run in runs:
        check_held_out(run, options, source)
    return source


def _greedy(model: keras.Model, runs: Sequence[Run], source: DataSet) -> list[dict]:
    """Leave the greedy average in the model, and return one record for each run that was tried."""
    preprocessing, num_classes = preprocessing_of(model), len(source.labels)
    total: Weights = {}
    count, best, records = 0, -1.0, []
    for run in sorted(runs, key=lambda each: _accuracy_at_end(each) or 0.0, reverse=True):
        tried = _added(total, run)
        _assign(model, tried, count + 1)
        reached = accuracy(model, source.evaluation, preprocessing, num_classes=num_classes, batch_size=_BATCH)
        records.append({"run": run.name, "val_accuracy": reached, "kept": reached >= best})
        print(f"{'Kept' if reached >= best else 'Left out'} {run.name}: accuracy {reached:.1%} with it.")
        if reached >= best:
            total, count, best = tried, count + 1, reached
    _assign(model, total, count)
    return records


def _added(total: Weights, run: Run) -> Weights:
    """Return the sum of weights and those of a run, in float64; an empty total counts as zeros."""
    weights = {key: np.array(value, np.float64) for key, value in weights_by_key(_read(run)).items()}
    return {key: total[key] + value if total else value for key, value in weights.items()}


def _assign(model: keras.Model, total: Weights, count: int) -> None:
    for key, variable in weights_by_key(model).items():
        variable.assign(total[key] / count)
