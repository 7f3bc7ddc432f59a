"""Model soups: the mean of the weights of several fine-tuned models, as an ordinary run.

"Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing inference time"
(arXiv 2203.05482). Its Table 3, CLIP ViT-B/32 on ImageNet: 80.4 % for the best run, 80.0 % for the uniform soup of all,
81.0 % for the greedy soup. Here: `benchmarks/logs/techniques.md`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import numpy as np

import keras_vit
from keras_vit import UserError, preprocessing_of
from keras_vit.checkpoints.load import weights_by_key
from keras_vit.errors import refuse_first
from keras_vit.files.keras_model import load_model
from keras_vit.files.lock import locked
from keras_vit.files.remote import output_folder
from keras_vit.run import CALIBRATION, CONFIG, IMAGES, SAMPLES, Run, differences
from training.data.known_images import check_held_out
from training.data.sources import DataSet, open_source
from training.evaluation.predictors import accuracy
from training.options.common import DataOptions
from training.options.evaluate import SoupOptions

_BATCH = 500
_COPIED = (SAMPLES, CALIBRATION)


def cook(runs: Sequence[Run], options: SoupOptions) -> Run:
    """Average finished runs and return the run directory of the average.

    Raises UserError if the runs differ in architecture, preprocessing or classes; if greedy, also in their data.
    """
    names = ", ".join(run.name for run in runs)
    labels, kinds = {run.labels for run in runs}, {run.is_multi_label for run in runs}
    damaged = [run.name for run in runs if "settings" not in run.config]
    refuse_first(
        [
            (
                damaged,
                f"The {CONFIG} of {', '.join(damaged)} is damaged; average other runs, or train again.",
            ),
            (len(labels) > 1, f"The runs {names} have different classes; average runs on the same data."),
            (len(kinds) > 1, f"Of the runs {names} some are for images of several classes; average one kind."),
        ]
    )
    if options.greedy:
        _check_data(runs)
    model = _read(runs[0])
    for run in runs[1:]:
        _check_model(run, model)
    target = Run.at(output_folder(options.output))
    source = _source_of(runs) if options.greedy and not target.is_finished else None
    fingerprints = {run.config.get(IMAGES) for run in runs}
    settings = {"command": "soup", "runs": list(options.runs), "greedy": options.greedy, **_common_data(runs)}
    if kinds == {True}:
        settings["recipe"] = {"loss": "multi-label"}  # by which a run is known as one
    with locked(target.path):
        target.start(settings, labels.pop(), images=fingerprints.pop() if len(fingerprints) == 1 else None)
        digests = [run.training_images for run in runs if run.training_images is not None]
        if digests:
            target.save_training_images(np.concatenate(digests))
        if target.is_finished:
            print(f"{target.path} is finished: nothing to do.")
            return target
        records = _uniform(model, runs) if source is None else _greedy(model, runs, source)
        for name in _COPIED:
            if file := runs[0].file(name):
                (target.path / name).write_bytes(file.read_bytes())
        target.write_metrics(records)
        target.save_model(model)
    print(f"See {target.path}.")
    return target


def _read(run: Run) -> keras.Model:
    """The model of a run; `Run.model` would keep those of all runs in memory."""
    return load_model(run.checkpoint)


def _common_data(runs: Sequence[Run]) -> dict:
    """The source and the numbers of images of the runs, as far as they agree; `Run.data` reads them."""
    first, found = runs[0].settings, [run.data for run in runs]
    one_place = len({known and known.place for known in found}) == 1
    common = {"source": first["source"]} if one_place and "source" in first else {}
    if common and len({known and known.counts for known in found}) == 1 and "images" in first:
        common["images"] = first["images"]
    return common


def _accuracy_at_end(run: Run) -> float | None:
    """On its evaluation images; None if its metrics do not say."""
    return run.metrics()[-1].get("val_accuracy") if run.metrics() else None


def _check_data(runs: Sequence[Run]) -> None:
    for run in runs:
        if _accuracy_at_end(run) is None:
            raise UserError(f"{run.name} has no accuracy in its metrics.jsonl; leave it or --greedy out.")
        if different := differences(runs[0].settings["source"], run.settings["source"]):
            raise UserError(
                f"A greedy soup compares its runs on the same images, but {runs[0].name} and {run.name} differ in "
                f"{different}; leave one of them or --greedy out."
            )


def _check_model(run: Run, first: keras.Model) -> None:
    """Raise UserError unless the model of a run is built like the first one."""
    described = [
        {"config": dataclasses.asdict(keras_vit.config_of(each)), "image": dataclasses.asdict(preprocessing_of(each))}
        for each in (first, _read(run))
    ]
    if different := differences(*described):
        raise UserError(f"Only equal models can be averaged, but {run.name} differs from the first run in {different}.")


def _uniform(model: keras.Model, runs: Sequence[Run]) -> list[dict]:
    """Leave the average of all runs in the model."""
    total = _weights(runs[0])
    for run in runs[1:]:
        total = _added(total, _weights(run))
    _assign(model, total, len(runs))
    print(f"The average of {len(runs)} runs.")
    return []


def _source_of(runs: Sequence[Run]) -> DataSet:
    """The data of the runs. Raises UserError if a rule now keeps other images for evaluation than when they trained."""
    options = DataOptions(**runs[0].settings["source"])
    source = open_source(options)
    for run in runs:
        check_held_out(run, options, source)
    return source


def _greedy(model: keras.Model, runs: Sequence[Run], source: DataSet) -> list[dict]:
    """Leave the greedy average in the model, and return one record for each run that was tried."""
    preprocessing, num_classes = preprocessing_of(model), len(source.labels)
    total: Mapping[str, np.ndarray] = {}
    count, best, records = 0, -1.0, []
    for run in sorted(runs, key=lambda each: _accuracy_at_end(each) or 0.0, reverse=True):
        tried = _added(total, _weights(run))
        _assign(model, tried, count + 1)
        reached = accuracy(model, source.evaluation, preprocessing, num_classes=num_classes, batch_size=_BATCH)
        records.append({"run": run.name, "val_accuracy": reached, "kept": reached >= best})
        print(f"{'Kept' if reached >= best else 'Left out'} {run.name}: accuracy {reached:.4f} with it.")
        if reached >= best:
            total, count, best = tried, count + 1, reached
    _assign(model, total, count)
    return records


def _weights(run: Run) -> dict[str, np.ndarray]:
    """Return the weights of a run by key, in float64."""
    return {key: np.array(value, np.float64) for key, value in weights_by_key(_read(run)).items()}


def _added(total: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the sum of two sets of weights; an empty total counts as zeros."""
    return {key: total[key] + value if total else value for key, value in weights.items()}


def _assign(model: keras.Model, total: Mapping[str, np.ndarray], count: int) -> None:
    for key, variable in weights_by_key(model).items():
        variable.assign(total[key] / count)
