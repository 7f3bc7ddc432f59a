"""Frozen features: what a model says of an image before its head, and a fingerprint of the numbers that make them."""

import dataclasses
import hashlib
import json

import keras
import numpy as np

import keras_vit
from keras_vit import Preprocessing, UserError, ViTConfig
from keras_vit.models.layers import PoolTokens
from keras_vit.models.tasks import task_of
from keras_vit.run import Run
from training.options.features import FeatureKind, FeatureOptions, IndexKind


def extractor_of(run: Run, kind: IndexKind) -> keras.Model:
    """The model up to the features of a kind: images (B, h, w, C) -> (B, D)."""
    if kind == "joint":
        return _joint_extractor(run)
    return feature_extractor(run.model) if kind == "pre_logits" else token_extractor(run.model, kind)


def _joint_extractor(run: Run) -> keras.Model:
    """The image tower of two towers, whose output the embeddings of texts are compared with."""
    if task_of(run.model) is not None or len(run.model.output_shape) != 2:
        raise UserError(
            f"{run.name} gives no single vector for an image to compare with texts; give a checkpoint of CLIP or "
            "SigLIP, or --features pre_logits."
        )
    return run.model


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


def preprocessing_for(own: Preprocessing, options: FeatureOptions) -> Preprocessing:
    """The model's own, with another resize, or the papers' for few-shot evaluation: a stretch and a center crop."""
    if options.resize is not None:
        return own.with_resize(options.resize, None)
    if options.crop_from is None:
        return own
    return own.with_resize("stretch", (options.crop_from, options.crop_from))


def fingerprint_of(model: keras.Model, preprocessing: Preprocessing, kind: IndexKind) -> str:
    """A hash of the weights, the architecture, the precision, the features, and what is done to the images."""
    described = [
        dataclasses.asdict(keras_vit.config_of(model)),
        type(preprocessing).__name__,
        dataclasses.asdict(preprocessing),
        sorted({layer.dtype_policy.name for layer in model.layers}),
        kind,
    ]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for weight in model.weights:
        digest.update(np.ascontiguousarray(keras.ops.convert_to_numpy(weight)).tobytes())
    return digest.hexdigest()[:20]
