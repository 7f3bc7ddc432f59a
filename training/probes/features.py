"""Frozen features of both splits of a data set: from an index, from the cache, or computed and put there.

The cache has the files of `training/features/store.py` under a key made of the model's numbers and of the images
themselves, so that a file of another model, or of changed data, is never taken.
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
from keras_vit import Preprocessing, UserError, preprocessing_of
from keras_vit.checkpoints.find import CACHE_VARIABLE
from keras_vit.files.atomic import staged
from keras_vit.files.remote import output_folder
from keras_vit.files.tables import markdown_table, short_name
from keras_vit.run import Run
from training.checks import report_directory
from training.data.dataset import DataSet, Split
from training.data.known_images import check_evaluation_images
from training.features.embed import Extractor, Listing, check_finite, contents_of, write_features
from training.features.extractors import (
    feature_extractor,
    fingerprint_of,
    preprocessing_for,
    token_extractor,
)
from training.features.store import NO_SPLIT, FeatureDescription, FeatureIndex, check_same_model, open_index
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


@dataclasses.dataclass(frozen=True)
class FeatureSet:
    """The features of a data set, for a probe."""

    names: tuple[str, ...]
    """Of the classes."""
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
    model = _with_fresh_weights(run.model) if options.random_weights else run.model
    preprocessing = preprocessing_for(run.preprocessing, options)
    if options.index is not None:
        index = open_index(options.index)
        check_same_model(index, fingerprint_of(model, preprocessing, options.features), options.features, run.name)
        return FeatureSet(source.labels, *_of_index(index, source), output)
    train, evaluation = features_of(
        model,
        source,
        preprocessing=preprocessing,
        batch_size=options.batch_size,
        cache=_cache(options.cache),
        kind=options.features,
    )
    return FeatureSet(source.labels, train, evaluation, output)


def write_report(
    name: str,
    title: str,
    options: FeatureOptions,
    features: FeatureSet,
    rows: Sequence[dict[str, str]],
    numbers: dict,
) -> None:
    """Write NAME.json and NAME.md and print the table.

    Args:
        name: of the files.
        title: of the page.
        options: of the command.
        features: which were measured.
        rows: of the table, texts by the name of their column; the first column is on the left, numbers on the right.
        numbers: for the JSON, beside what was measured on what.
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
        page = f"# {title}: {where}\n\n{sentence}.\n\n{table}\n"
        (stage / f"{name}.md").write_text(page, encoding="utf-8")
    print(f"{table}\n{sentence}; report in {features.output / f'{name}.md'}.")


def check_several_classes(source: DataSet) -> None:
    """Raise UserError for data that leave nothing to tell apart."""
    if len(source.labels) < 2:
        raise UserError(f"The data have one class, {source.labels[0]!r}; at least two are needed to tell apart.")


def _of_index(index: FeatureIndex, source: DataSet) -> tuple[Features, Features]:
    """Return the features of both splits. Raises UserError if the index is of other images."""
    begin, features = 0, []
    for name, split in (("train", source.train), ("test", source.evaluation)):
        digests, labels = contents_of(split)
        rows = slice(begin, begin + index.description.splits.get(name, 0))
        begin = rows.stop
        same_images = [f"{digest:016x}" for digest in digests.tolist()] == index.pictures.digests[rows]
        if not same_images or [source.labels[label] for label in labels] != index.pictures.labels[rows]:
            raise UserError(
                f"{index.folder} has the features of other pictures, labels or splits than --data; run keras-vit embed "
                "with this --data, or leave --index out."
            )
        features.append(Features(index.embeddings([name]), labels))
    return features[0], features[1]


def features_of(
    model: keras.Model,
    source: DataSet,
    *,
    preprocessing: Preprocessing,
    batch_size: int,
    cache: pathlib.Path,
    kind: FeatureKind = "pre_logits",
) -> tuple[Features, Features]:
    """Features of the training and of the evaluation split, from the cache or computed and put there."""
    extractor = feature_extractor(model) if kind == "pre_logits" else token_extractor(model, kind)
    fingerprint = fingerprint_of(model, preprocessing, kind)
    train, evaluation = (
        _features_of_split(
            split, Extractor(extractor, preprocessing, min(batch_size, split.num_examples)), fingerprint, kind, cache
        )
        for split in (source.train, source.evaluation)
    )
    return train, evaluation


def features_of_split(run: Run, split: Split, preprocessing: Preprocessing, batch_size: int) -> Features:
    """Return the features that the head of a run reads for the images of a split, from the cache or computed."""
    fingerprint = fingerprint_of(run.model, preprocessing, "pre_logits")
    extractor = Extractor(feature_extractor(run.model), preprocessing, min(batch_size, split.num_examples))
    return _features_of_split(split, extractor, fingerprint, "pre_logits", _cache(None))


def _features_of_split(
    split: Split, extractor: Extractor, fingerprint: str, kind: FeatureKind, cache: pathlib.Path
) -> Features:
    key, labels = _data_key(split)
    description = FeatureDescription(
        model=extractor.model.name,
        fingerprint=fingerprint,
        features=kind,
        width=int(extractor.model.output_shape[-1]),
        dtype="float32",
        labels=(),
        splits={NO_SPLIT: split.num_examples},
        checksum=int(key, 16),
        data=None,
        settings={},
    )
    listing = Listing((), {NO_SPLIT: split}, description.checksum)
    folder = cache / f"{fingerprint}-{key}"
    try:
        values = write_features(folder, description, listing, extractor).embeddings()
    except UserError as problem:
        if not folder.exists() or problem.__cause__ is None:
            raise
        shutil.rmtree(folder)  # cut short by a full disk, or not ours: computed again
        values = write_features(folder, description, listing, extractor).embeddings()
    return Features(values, labels)


def _with_fresh_weights(model: keras.Model) -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras_vit.build(keras_vit.config_of(model), preprocessing=preprocessing_of(model), num_classes=None)


def _cache(folder: str | None) -> pathlib.Path:
    if folder is None:
        return pathlib.Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/keras_vit").expanduser() / "features"
    return output_folder(folder)


def _data_key(split: Split) -> tuple[str, np.ndarray]:
    """(a hash of every image, as it is stored, and its label, the labels (n,) int64)."""
    digests, labels = contents_of(split)
    digest = hashlib.sha256(digests.tobytes())
    digest.update(np.asarray(labels, np.int64).tobytes())
    return digest.hexdigest()[:20], labels
