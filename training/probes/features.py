"""Frozen features: what a model says of every image of a data set before its head, computed once and kept on disk.

The features are `pre_logits`, what the head reads, or pooled tokens. They are kept under a key made of the model's
numbers and of the images themselves, so that a file of another model, or of changed data, is never taken.
"""

import dataclasses
import hashlib
import json
import os
import pathlib

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit import Preprocessing, UserError, ViTConfig, preprocessing_of, run_directory
from keras_vit.checkpoints.fetch.find import CACHE_VARIABLE
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.models.layers import PoolTokens
from keras_vit.runs import Run
from training.evaluation.predictors import outputs
from training.input.known_images import check_evaluation_images
from training.input.sources import DataSet, Split, bad_examples_reported
from training.options.checks import report_directory
from training.options.common import FeatureKind, FeatureOptions

# What is computed once per example for its fingerprint, in one go.
_FINGERPRINT_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class Features:
    """Of every image of a split, in its order."""

    values: np.ndarray
    """(n, D) float32."""
    labels: np.ndarray
    """(n,) int64."""

    def __post_init__(self) -> None:
        bad = int(np.sum(~np.all(np.isfinite(self.values), axis=-1)))
        if bad:
            raise UserError(
                f"The features of {bad:,} of {len(self.values):,} images are not finite numbers; the model's weights "
                "are broken, or its numbers overflow: inspect it with keras-vit inspect."
            )


@dataclasses.dataclass(frozen=True)
class FeatureSet:
    """What a probe of frozen features works on."""

    names: tuple[str, ...]
    """Of the classes."""
    train: Features
    evaluation: Features
    output: pathlib.Path
    """Directory for the report."""


def open_features(run: Run, source: DataSet, options: FeatureOptions, output: pathlib.Path | None = None) -> FeatureSet:
    """The features of a model for the images of a data set, from the cache or computed.

    output: directory of the report. Default: that of the options, else the run directory.
    """
    output = output or report_directory(run, options.output)
    check_several_classes(source)
    check_evaluation_images(run, options.source, source)
    model = _with_fresh_weights(run.model) if options.random_weights else run.model
    train, evaluation = features_of(
        model,
        source,
        preprocessing=preprocessing_for(run.preprocessing, options),
        batch_size=options.batch_size,
        cache=_cache(options.cache),
        kind=options.features,
    )
    return FeatureSet(source.labels, train, evaluation, output)


def check_several_classes(source: DataSet) -> None:
    """Raise UserError for data that leave nothing to tell apart."""
    if len(source.labels) < 2:
        raise UserError(f"The data have one class, {source.labels[0]!r}; at least two are needed to tell apart.")


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
    model_key = _model_key(model, preprocessing, kind)
    found = []
    for name, split in (("training", source.train), ("evaluation", source.evaluation)):
        with bad_examples_reported(split):
            path = cache / f"{model_key}-{_data_key(split)}.npz"
            features = _cached(path, split)
            if features is None:
                print(f"Features of the {split.num_examples:,} {name} images:")
                values, labels = outputs(
                    extractor.predict_on_batch,
                    split,
                    preprocessing,
                    num_classes=len(source.labels),
                    batch_size=batch_size,
                )
                features = Features(values.astype(np.float32), labels)
                cache.mkdir(parents=True, exist_ok=True)
                write_npz(path, {"values": features.values, "labels": features.labels})
        found.append(features)
    return found[0], found[1]


def feature_extractor(model: keras.Model) -> keras.Model:
    """The model up to its head: images -> (B, D)."""
    inside = keras_vit.intermediates(model, ["pre_logits"])
    features = inside.output["pre_logits"]
    if len(features.shape) != 2:
        raise UserError(
            f"The model gives features of shape {features.shape}, one for each token; one vector per image is needed: "
            "take a model with a classifier."
        )
    return keras.Model(inside.input, features)


def token_extractor(model: keras.Model, kind: FeatureKind) -> keras.Model:
    """The class token of a Vision Transformer, the mean of its patch tokens, or both: images -> (B, D) or (B, 2 D)."""
    config = keras_vit.config_of(model)
    if not isinstance(config, ViTConfig) or config.norm_after_pooling:
        raise UserError(f"This model has no normalized tokens for --features {kind}; leave --features out.")
    if kind != "mean" and not config.has_class_token:
        raise UserError(f"This model has no class token for --features {kind}; give --features mean.")
    pooling = {"token": "token", "mean": "gap", "both": "token+gap"}[kind]
    inside = keras_vit.intermediates(model, ["encoded"])
    features = PoolTokens(pooling, config.num_prefix_tokens)(inside.output["encoded"])
    return keras.Model(inside.input, features)


def _with_fresh_weights(model: keras.Model) -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras_vit.build(keras_vit.config_of(model), preprocessing=preprocessing_of(model), num_classes=None)


def preprocessing_for(own: Preprocessing, options: FeatureOptions) -> Preprocessing:
    """The model's own, with another resize, or the papers' for few-shot evaluation: a stretch and a center crop."""
    if options.resize is not None:
        return own.with_resize(options.resize, None)
    if options.crop_from is None:
        return own
    return own.with_resize("stretch", (options.crop_from, options.crop_from))


# The cache


def _cache(folder: str | None) -> pathlib.Path:
    if folder is None:
        return pathlib.Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/keras_vit").expanduser() / "features"
    return run_directory.check_output(folder)


def _model_key(model: keras.Model, preprocessing: Preprocessing, kind: FeatureKind) -> str:
    """A hash of the weights, the architecture, the precision, the features, and what is done to the images."""
    described = [
        dataclasses.asdict(keras_vit.config_of(model)),
        type(preprocessing).__name__,
        dataclasses.asdict(preprocessing),
        sorted({layer.dtype_policy.name for layer in model.layers}),
        *([] if kind == "pre_logits" else [kind]),  # the keys of pre_logits are those of earlier versions
    ]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for weight in model.weights:
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(weight)).tobytes())
    return digest.hexdigest()[:20]


def _data_key(split: Split) -> str:
    """A hash of every image, as it is stored, and its label."""

    def fingerprint(index: tf.Tensor) -> tf.Tensor:
        image, label = split.read(index)
        content = tf.cast(tf.fingerprint(tf.reshape(image, (1, -1)))[0], tf.int64)
        numbers = tf.concat([content, tf.shape(image, tf.int64), tf.cast(label, tf.int64)[None]], axis=0)
        return tf.strings.reduce_join(tf.strings.as_string(numbers), separator=" ")

    digest = hashlib.sha256()
    data = tf.data.Dataset.range(split.num_examples).map(fingerprint, num_parallel_calls=tf.data.AUTOTUNE)
    for batch in data.batch(_FINGERPRINT_BATCH):
        digest.update(b"\n".join([*batch.numpy(), b""]))
    return digest.hexdigest()[:20]


def _cached(path: pathlib.Path, split: Split) -> Features | None:
    """The features of a file of the cache, or None where there is none that can be read."""
    if not path.is_file():
        return None
    try:
        arrays = read_npz(path)
    except UserError:  # cut short by a full disk, or not ours: computed again
        return None
    if arrays.keys() != {"values", "labels"} or {len(array) for array in arrays.values()} != {split.num_examples}:
        return None
    return Features(arrays["values"], arrays["labels"])
