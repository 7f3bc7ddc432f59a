"""Model soups: the mean of the weights of several fine-tuned models, as an ordinary run.

"Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing inference time"
(arXiv 2203.05482). Its Table 3, CLIP ViT-B/32 on ImageNet: 80.4 % for the best run, 80.0 % for the uniform soup of all,
81.0 % for the greedy soup. Here: `docs/results.md`.
"""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence

import keras
import numpy as np

import keras_vit
from keras_vit import UserError, cli, preprocessing_of, run_directory
from keras_vit.checkpoints.load import weights_by_key
from keras_vit.files.remote import to_path
from training.evaluation.classifiers import outputs
from training.input.sources import Source, open_source
from training.lock import locked
from training.loop.run import Run
from training.options.common import DataOptions
from training.options.workdir import check_images, trained_on
from training.workdir import differences

_BATCH = 500
_COPIED = (run_directory.SAMPLES, run_directory.CALIBRATION)


@dataclasses.dataclass(frozen=True)
class Ingredient:
    """A finished run."""

    run: Run
    settings: dict
    """Of its config.json."""
    fingerprint: int | None
    """`Source.fingerprint` of its images; None where its config.json does not say."""
    accuracy: float | None
    """On its evaluation images, at its end; None if its metrics do not say."""


def cook(runs: Sequence[str], output: str, *, greedy: bool = False) -> Run:
    """Average runs and return the run directory of the average. See `SoupOptions` for the arguments.

    Raises UserError if the runs differ in architecture, preprocessing or classes; with `greedy`, also in their data.
    """
    ingredients = [_read(path) for path in runs]
    labels = {run_directory.load_labels(ingredient.run.path) for ingredient in ingredients}
    if len(labels) > 1:
        raise UserError(f"The runs {', '.join(runs)} have different classes; average runs on the same data.")
    kinds = {run_directory.is_multi_label(ingredient.run.path) for ingredient in ingredients}
    if len(kinds) > 1:
        raise UserError(f"Of the runs {', '.join(runs)} some are for images of several classes; average one kind.")
    if greedy:
        _check_data(ingredients)
    model = run_directory.load_model(runs[0])
    for ingredient in ingredients[1:]:
        _check_model(ingredient, model)
    target = Run(to_path(output))
    source = _source_of(ingredients) if greedy and not target.model_file.is_file() else None
    fingerprints = {ingredient.fingerprint for ingredient in ingredients}
    settings = {"command": "soup", "runs": list(runs), "greedy": greedy, **_common_data(ingredients)}
    if kinds == {True}:
        settings["recipe"] = {"loss": "multi-label"}  # as `run_directory.is_multi_label` reads it
    with locked(target.path):
        target.start(settings, labels.pop(), images=fingerprints.pop() if len(fingerprints) == 1 else None)
        known = [run_directory.load_training_images(ingredient.run.path) for ingredient in ingredients]
        if digests := [one for one in known if one is not None]:
            run_directory.save_training_images(target.path, np.concatenate(digests))
        if target.model_file.is_file():
            print(f"{target.path} is finished: nothing to do.")
            return target
        records = _uniform(model, ingredients) if source is None else _greedy(model, ingredients, source)
        for name in _COPIED:
            if (ingredients[0].run.path / name).is_file():
                (target.path / name).write_bytes((ingredients[0].run.path / name).read_bytes())
        target.write_metrics(records)
        target.save_model(model)
    measure = cli.as_typed(f"python -m training.evaluate --run {shlex.quote(output)}")
    print(f"See {target.path}; measure it with {measure}.")
    return target


def _read(path: str) -> Ingredient:
    run_directory.find(path, run_directory.MODEL)
    run = Run(to_path(path))
    try:
        config = json.loads(run_directory.find(path, run_directory.CONFIG).read_text(encoding="utf-8"))
        settings, fingerprint = config["settings"], config.get(run_directory.IMAGES)
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{run.config_file} is damaged; average other runs, or train this one again.") from None
    records = run.metrics()
    return Ingredient(run, settings, fingerprint, records[-1].get("val_accuracy") if records else None)


def _common_data(ingredients: Sequence[Ingredient]) -> dict:
    """The source and the numbers of images of the runs, as far as they agree; `training.options.checks` reads them."""
    first, found = ingredients[0].settings, [trained_on(str(ingredient.run.path)) for ingredient in ingredients]
    one_place = len({known and known.place for known in found}) == 1
    common = {"source": first["source"]} if one_place and "source" in first else {}
    if common and len({known and known.counts for known in found}) == 1 and "images" in first:
        common["images"] = first["images"]
    return common


def _check_data(ingredients: Sequence[Ingredient]) -> None:
    for ingredient in ingredients:
        if ingredient.accuracy is None:
            raise UserError(f"{ingredient.run.path} has no accuracy in its metrics.jsonl; leave it or --greedy out.")
        if different := differences(ingredients[0].settings["source"], ingredient.settings["source"]):
            raise UserError(
                f"A greedy soup compares its runs on the same images, but {ingredients[0].run.path} and "
                f"{ingredient.run.path} differ in {different}; leave one of them or --greedy out."
            )


def _check_model(ingredient: Ingredient, first: keras.Model) -> None:
    """Raise UserError unless the model of a run is built like the first one."""
    model = run_directory.load_model(ingredient.run.path)
    described = [
        {"config": dataclasses.asdict(keras_vit.config_of(each)), "image": dataclasses.asdict(preprocessing_of(each))}
        for each in (first, model)
    ]
    if different := differences(*described):
        raise UserError(
            f"Only equal models can be averaged, but {ingredient.run.path} differs from the first run in {different}."
        )


def _uniform(model: keras.Model, ingredients: Sequence[Ingredient]) -> list[dict]:
    """Leave the average of all runs in the model."""
    total = _weights(ingredients[0])
    for ingredient in ingredients[1:]:
        total = _added(total, _weights(ingredient))
    _assign(model, total, len(ingredients))
    print(f"The average of {len(ingredients)} runs.")
    return []


def _source_of(ingredients: Sequence[Ingredient]) -> Source:
    """The data of the runs. Raises UserError if a rule now keeps other images for evaluation than when they trained."""
    options = DataOptions(**ingredients[0].settings["source"])
    source = open_source(options)
    for ingredient in ingredients if source.held_out else ():
        counts = source.train.num_examples, source.evaluation.num_examples
        check_images(str(ingredient.run.path), options, *counts, source.fingerprint)
    return source


def _greedy(model: keras.Model, ingredients: Sequence[Ingredient], source: Source) -> list[dict]:
    """Leave the greedy average in the model, and return one record for each run that was tried."""
    preprocessing = preprocessing_of(model)

    def accuracy() -> float:
        logits, labels = outputs(
            model.predict_on_batch,
            source.evaluation,
            preprocessing,
            num_classes=len(source.labels),
            batch_size=_BATCH,
        )
        return float(np.mean(logits.argmax(-1) == labels))

    total: Mapping[str, np.ndarray] = {}
    count, best, records = 0, -1.0, []
    for ingredient in sorted(ingredients, key=lambda each: each.accuracy or 0.0, reverse=True):
        tried = _added(total, _weights(ingredient))
        _assign(model, tried, count + 1)
        found = accuracy()
        records.append({"run": str(ingredient.run.path), "val_accuracy": found, "kept": found >= best})
        print(f"{'Kept' if found >= best else 'Left out'} {ingredient.run.path}: accuracy {found:.4f} with it.")
        if found >= best:
            total, count, best = tried, count + 1, found
    _assign(model, total, count)
    return records


def _weights(ingredient: Ingredient) -> dict[str, np.ndarray]:
    """Return the weights of a run by key, in float64."""
    model = run_directory.load_model(ingredient.run.path)
    return {key: np.array(value, np.float64) for key, value in weights_by_key(model).items()}


def _added(total: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the sum of two sets of weights; an empty total counts as zeros."""
    return {key: total[key] + value if total else value for key, value in weights.items()}


def _assign(model: keras.Model, total: Mapping[str, np.ndarray], count: int) -> None:
    for key, variable in weights_by_key(model).items():
        variable.assign(total[key] / count)
