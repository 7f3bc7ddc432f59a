"""Probe the frozen features of a data set: from an index, from the cache, or computed; report; make a run of a probe.

The cache has the files of `training/features/store.py` under a key made of the model's numbers and of the images
themselves, so that a file of another model, or of changed data, is never taken. A run has the backbone with the probe's
linear head, so whatever works on a run works on it.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Sequence

import keras
import numpy as np

import keras_vit
from keras_vit import Preprocessing, UserError, ViTConfig, preprocessing_of
from keras_vit.checkpoints.describe import license_of
from keras_vit.checkpoints.find import cache_folder
from keras_vit.checkpoints.layouts import HEADS
from keras_vit.checkpoints.load import check_unchanged, values_by_key, weights_by_key
from keras_vit.files.atomic import locked, staged
from keras_vit.files.remote import output_folder
from keras_vit.files.tables import markdown_table, short_name
from keras_vit.run import Run
from training.checks import report_directory
from training.data.dataset import DataSet, Split, check_several_classes
from training.data.known_images import check_evaluation_images
from training.evaluation.predictors import outputs
from training.features.extraction import (
    POOLING,
    Extractor,
    Listing,
    check_finite,
    contents_of,
    feature_model,
    open_extractor,
    write_features,
)
from training.features.store import NO_SPLIT, FeatureIndex, check_same_model, open_index
from training.loop.callbacks import save_images
from training.options.features import FeatureKind, FeatureOptions, ProbeOptions


@dataclasses.dataclass(frozen=True)
class Features:
    """The features of every image of a split, in its order."""

    values: np.ndarray
    """(n, D) float32."""
    labels: np.ndarray
    """(n,) int64."""

    def __post_init__(self) -> None:
        check_finite(self.values)

    @classmethod
    def of_all(cls, parts: Sequence["Features"]) -> "Features":
        """Return the features of several splits in a row."""
        return cls(np.concatenate([part.values for part in parts]), np.concatenate([part.labels for part in parts]))

    def take(self, rows: np.ndarray) -> "Features":
        return Features(self.values[rows], self.labels[rows])


@dataclasses.dataclass(frozen=True)
class FeatureSet:
    """The features of a data set, for a probe."""

    names: tuple[str, ...]
    """The names of the classes."""
    train: Features
    evaluation: Features
    output: pathlib.Path
    """Directory for the report."""


def open_features(run: Run, source: DataSet, options: FeatureOptions) -> FeatureSet:
    """Return the features of a model for the images of a data set, from the index or the cache, or computed."""
    new_run = options.directory if isinstance(options, ProbeOptions) and options.output is None else None
    output = new_run or report_directory(run, options.output)
    check_several_classes(source)
    check_evaluation_images(run, options.source, source)
    preprocessing = options.preprocessing(run.preprocessing)
    extractor = open_extractor(measured_model(run, options), preprocessing, options.features, options.batch_size)
    if options.index is None:
        train, evaluation = (cached_features(extractor, each, options.cache) for each in splits_of(source).values())
    else:
        index = open_index(options.index)
        check_same_model(index, extractor.fingerprint, options.features, run.name)
        train, evaluation = _of_index(index, source)
    return FeatureSet(source.labels, train, evaluation, output)


def measured_model(run: Run, options: FeatureOptions) -> keras.Model:
    """Return the model of a run, or one like it with random weights."""
    if not options.random_weights:
        return run.model
    keras.utils.set_random_seed(0)
    return keras_vit.build(keras_vit.config_of(run.model), preprocessing=run.preprocessing, num_classes=None)


def _of_index(index: FeatureIndex, source: DataSet) -> list[Features]:
    """Return the features of both splits. Raises UserError if the index is of other images."""
    begin, features = 0, []
    for name, split in splits_of(source).items():
        digests, labels = contents_of(split)
        rows = slice(begin, begin + index.description.splits.get(name, 0))
        begin = rows.stop
        same_images = [f"{digest:016x}" for digest in digests.tolist()] == index.images.digests[rows]
        if not same_images or [source.labels[label] for label in labels] != index.images.labels[rows]:
            raise UserError(
                f"{index.folder} has the features of other images, labels or splits than --data; run keras-vit embed "
                "with this --data, or leave --index out."
            )
        features.append(Features(index.embeddings([name]), labels))
    return features


def splits_of(source: DataSet) -> dict[str, Split]:
    """Return both splits by the names that they have in an index."""
    return {"train": source.train, "test": source.evaluation}


def cached_features(extractor: Extractor, split: Split, cache: str | os.PathLike | None = None) -> Features:
    """Return the features of a split from the cache, by default that of the user, or compute and put them there."""
    digests, labels = contents_of(split)
    digest = hashlib.sha256(digests.tobytes())
    digest.update(np.asarray(labels, np.int64).tobytes())
    key = digest.hexdigest()[:20]
    description = extractor.describe(extractor.model.name, (), {NO_SPLIT: split.num_examples}, int(key, 16))
    listing = Listing((), {NO_SPLIT: split}, description.checksum)
    extractor = dataclasses.replace(extractor, batch_size=min(extractor.batch_size, split.num_examples))
    parent = cache_folder() / "features" if cache is None else output_folder(cache)
    folder = parent / f"{extractor.fingerprint}-{key}"
    try:
        values = write_features(folder, description, listing, extractor).embeddings()
    except UserError as problem:
        if not folder.exists() or problem.__cause__ is None:
            raise
        shutil.rmtree(folder)  # cut short by a full disk, or not ours: computed again
        values = write_features(folder, description, listing, extractor).embeddings()
    return Features(values, labels)


def computed_features(model: keras.Model, split: Split, num_classes: int, batch_size: int) -> Features:
    """Return what the head of a model in training reads for the images of a split; nothing is kept."""
    compute, preprocessing = feature_model(model).predict_on_batch, preprocessing_of(model)
    return Features(*outputs(compute, split, batch_size, preprocessing=preprocessing, num_classes=num_classes))


def write_report(
    name: str,
    title: str,
    options: FeatureOptions,
    features: FeatureSet,
    rows: Sequence[dict[str, str]],
    numbers: dict,
    sentences: Sequence[str] = (),
) -> None:
    """Write NAME.json, with these numbers and what was measured on what, and NAME.md, and print the table.

    rows: of the table, texts by the name of their column. sentences: after it.
    """
    random = " with random weights" if options.random_weights else ""
    train, evaluation = features.train, features.evaluation
    document = {
        "model": f"{options.run}{random}",
        "data": options.source.data,
        "classes": len(features.names),
        "features": train.values.shape[1],
        "kind": options.features,
        "training_images": len(train.labels),
        "evaluation_images": len(evaluation.labels),
        "crop_from": options.crop_from,
        "resize": options.resize,
        **numbers,
    }
    sentence = (
        f"{train.values.shape[1]} features of {len(train.labels):,} training and {len(evaluation.labels):,} evaluation "
        f"images of {len(features.names)} classes"
    )
    table = markdown_table([*rows[0]], [[*row.values()] for row in rows])
    where = f"{short_name(options.run)}{random} on {short_name(options.source.data)}"
    with staged(features.output) as stage:
        (stage / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        page = "\n\n".join([f"# {title}: {where}", f"{sentence}.", table, *sentences]) + "\n"
        (stage / f"{name}.md").write_text(page, encoding="utf-8")
    print("\n".join([table, f"{sentence}; report in {features.output / f'{name}.md'}.", *sentences]))


# A probe as a run


def with_linear_head(
    model: keras.Model, features: FeatureKind, preprocessing: Preprocessing, kernel: np.ndarray, bias: np.ndarray
) -> keras.Model:
    """Return a new model with the weights of `model` and a head, kernel (D, K) and bias (K,), that reads features.

    Raises UserError for a model whose graph was changed.
    """
    check_unchanged(model, "leave --workdir out, which saves such a model")
    config = keras_vit.config_of(model)
    if isinstance(config, ViTConfig):
        changes: dict = {"head_bias": True}
        if features != "pre_logits":
            changes |= {"classifier": POOLING[features], "representation_size": None}
            changes["with_class_token"] = features == "mean" and config.has_class_token
            if config.distillation == "head":  # its token stays, its head does not
                changes["distillation"] = "token"
        config = dataclasses.replace(config, **changes)
    new = keras_vit.build(config, preprocessing=preprocessing, num_classes=len(bias), name=model.name)
    values = values_by_key(model)
    for key, variable in weights_by_key(new).items():
        if key.startswith(HEADS):
            part = kernel if key.endswith("/kernel") else bias
            variable.assign(part.reshape(variable.shape))
        else:
            variable.assign(values[key])
    return new


def save_linear_model(
    run: Run, source: DataSet, options: ProbeOptions, head: tuple[np.ndarray, np.ndarray], accuracy: float
) -> None:
    """Write the run directory of a probe with this kernel and bias; for the other arguments see `save_probe`."""
    model = with_linear_head(run.model, options.features, options.preprocessing(run.preprocessing), *head)
    save_probe(run, model, source, options, accuracy)


def save_probe(run: Run, model: keras.Model, source: DataSet, options: ProbeOptions, accuracy: float) -> None:
    """Write the run directory of a probe: a model with its head, and its accuracy on the evaluation images.

    run: the backbone. source: the data that the head was fitted to.
    """
    assert options.directory is not None
    directory = Run.at(options.directory)
    images = {"train": source.train.num_examples, "evaluation": source.evaluation.num_examples}
    settings = {**options.settings(), "checkpoint": run.name, "images": images}
    with locked(directory.path):
        weights = {"checkpoint": run.name, "license": license_of(run.name)}
        directory.start(settings, source.labels, weights, images=source.fingerprint)
        save_images(directory, source, preprocessing_of(model))
        directory.write_metrics([{"epoch": 1, "val_accuracy": accuracy}])
        directory.save_model(model)
