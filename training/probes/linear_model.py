"""A probe as a model: the backbone with the probe's linear head, in a run directory like that of a training.

So whatever works on a run works on a probe: predict, evaluate, inspect, export, serve, fine-tune further.
"""

import dataclasses

import keras
import numpy as np
import sklearn.pipeline

import keras_vit
from keras_vit import Preprocessing, ViTConfig
from keras_vit.checkpoints.describe import license_of
from keras_vit.checkpoints.layouts import HEADS
from keras_vit.checkpoints.load import check_unchanged, values_by_key, weights_by_key
from keras_vit.files.lock import locked
from keras_vit.models.config import ModelConfig
from keras_vit.run import Run
from training.data.sources import DataSet
from training.features.extractors import preprocessing_for
from training.loop.summary import save_images
from training.options.features import FeatureKind, ProbeOptions

_POOLING = {"token": "token", "mean": "gap", "both": "token+gap"}


def linear_head(probe: sklearn.pipeline.Pipeline) -> tuple[np.ndarray, np.ndarray]:
    """The kernel (D, K) and bias (K,), float32, that compute the logits of a fitted probe from the features.

    The probe computes ((x - mean) / scale) coef.T + intercept. Of two classes, scikit-learn has the logit of the second
    one alone; that of the first is 0.
    """
    scaler, regression = probe
    kernel = (regression.coef_ / scaler.scale_).T
    bias = regression.intercept_ - scaler.mean_ @ kernel
    if kernel.shape[1] == 1:
        kernel, bias = (np.concatenate([np.zeros_like(part), part], axis=-1) for part in (kernel, bias))
    return kernel.astype(np.float32), bias.astype(np.float32)


def with_linear_head(
    model: keras.Model, kind: FeatureKind, preprocessing: Preprocessing, kernel: np.ndarray, bias: np.ndarray
) -> keras.Model:
    """A new model with the weights of `model` and a head that reads the features of this kind.

    Args:
        model: built by `keras_vit.build`.
        kind: see `FeatureOptions.features`.
        preprocessing: of the images that the features were computed of.
        kernel: (D, K), of the head.
        bias: (K,).

    Raises UserError for a model whose graph was changed.
    """
    check_unchanged(model, "leave --workdir out, which saves such a model")
    config = _with_head_for(keras_vit.config_of(model), kind)
    new = keras_vit.build(config, preprocessing=preprocessing, num_classes=len(bias), name=model.name)
    values = values_by_key(model)
    for key, variable in weights_by_key(new).items():
        if key.startswith(HEADS):
            part = kernel if key.endswith("/kernel") else bias
            variable.assign(part.reshape(variable.shape))
        else:
            variable.assign(values[key])
    return new


def _with_head_for(config: ModelConfig, kind: FeatureKind) -> ModelConfig:
    if not isinstance(config, ViTConfig):
        return config
    changes: dict = {"head_bias": True}
    if kind != "pre_logits":
        changes |= {"classifier": _POOLING[kind], "representation_size": None}
        changes["with_class_token"] = kind == "mean" and config.has_class_token
        if config.distillation == "head":  # its token stays, its head does not
            changes["distillation"] = "token"
    return dataclasses.replace(config, **changes)


def save_linear_model(
    run: Run, source: DataSet, options: ProbeOptions, head: tuple[np.ndarray, np.ndarray], accuracy: float
) -> None:
    """Write the run directory of a probe with this kernel and bias; for the other arguments see `save_probe`."""
    model = with_linear_head(run.model, options.features, preprocessing_for(run.preprocessing, options), *head)
    save_probe(run, model, source, options, accuracy)


def save_probe(run: Run, model: keras.Model, source: DataSet, options: ProbeOptions, accuracy: float) -> None:
    """Write the run directory of a probe.

    Args:
        run: the backbone.
        model: with the head of the probe.
        source: the data that it was fitted to.
        options: of the command, with a workdir.
        accuracy: on the evaluation images.
    """
    assert options.directory is not None
    directory = Run.at(options.directory)
    images = {"train": source.train.num_examples, "evaluation": source.evaluation.num_examples}
    settings = {**options.settings(), "checkpoint": run.name, "images": images}
    with locked(directory.path):
        weights = {"checkpoint": run.name, "license": license_of(run.name)}
        directory.start(settings, source.labels, weights, images=source.fingerprint)
        save_images(directory, source, keras_vit.preprocessing_of(model))
        directory.write_metrics([{"epoch": 1, "val_accuracy": accuracy}])
        directory.save_model(model)
