"""Attentive probe: a learned query that attends to the frozen tokens of the patches, and a linear head.

Paper: "Scalable Pre-training of Large Autoregressive Image Models" (AIM, arXiv 2401.08541), section 4.2. Features of
training without labels are spread over the patches; their mean says less of them. Tokens are standardized by the
training images, for which AIM has a batch normalization without scale and offset.
"""

import math

import keras
import numpy as np
from keras import ops

import keras_vit
from keras_vit import UserError, ViTConfig
from training.data.dataset import DataSet, Split
from training.evaluation.predictors import outputs
from training.features.extraction import feature_model
from training.features.probe import splits_of
from training.options.features import LinearProbeOptions

_MOST = 2**32  # bytes of tokens that are kept in memory
_BATCH, _LEARNING_RATE, _WEIGHT_DECAY = 128, 1e-2, 1e-4


class AttentivePooling(keras.layers.Layer):
    """Cross-attention of a learned query: tokens (B, N, D) -> what it gathers (B, D)."""

    def __init__(self, num_heads: int, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads

    def build(self, input_shape):
        width = input_shape[-1]
        initializer = keras.initializers.RandomNormal(stddev=0.02)
        self.query = self.add_weight((width,), initializer=initializer, name="query")
        self.key, self.value = (self.add_weight((width, width), name=name) for name in ("key", "value"))

    def call(self, tokens):
        batch, count, width = ops.shape(tokens)[0], tokens.shape[1], tokens.shape[2]
        size = width // self.num_heads
        query = ops.reshape(self.query, (self.num_heads, size))
        keys, values = (
            ops.reshape(ops.matmul(tokens, kernel), (batch, count, self.num_heads, size))  # (B, N, H, D / H)
            for kernel in (self.key, self.value)
        )
        logits = ops.einsum("hd,bnhd->bhn", query, keys) * size**-0.5
        return ops.reshape(ops.einsum("bhn,bnhd->bhd", ops.softmax(logits), values), (batch, width))


def fit_attentive(tokens: np.ndarray, labels: np.ndarray, num_classes: int, num_heads: int, epochs: int) -> keras.Model:
    """Return the probe, tokens (n, N, D) -> logits (n, K), trained by AdamW with a cosine schedule from seed 0."""
    keras.utils.set_random_seed(0)
    mean, deviation = tokens.mean(axis=(0, 1)), tokens.std(axis=(0, 1))
    scaling = keras.layers.Normalization(mean=mean, variance=np.maximum(deviation**2, 1e-10))
    inputs = keras.Input(tokens.shape[1:])
    pooled = AttentivePooling(num_heads, name="pooling")(scaling(inputs))
    model = keras.Model(inputs, keras.layers.Dense(num_classes, kernel_initializer="zeros", name="head")(pooled))
    batch_size = min(_BATCH, len(tokens))
    steps = epochs * -(-len(tokens) // batch_size)
    schedule = keras.optimizers.schedules.CosineDecay(_LEARNING_RATE, steps)
    model.compile(
        keras.optimizers.AdamW(schedule, weight_decay=_WEIGHT_DECAY),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(tokens, labels, batch_size=batch_size, epochs=epochs, verbose=0)
    return model


def attentive_accuracy(model: keras.Model, source: DataSet, options: LinearProbeOptions) -> float:
    """Return the accuracy of the attentive probe of a backbone on the evaluation images.

    Raises UserError for a model without tokens of patches, and for more images than memory holds.
    """
    assert options.attentive is not None
    backbone, config = feature_model(model, "patches"), keras_vit.config_of(model)
    assert isinstance(config, ViTConfig)  # else it has no patches
    splits = splits_of(source).values()
    count = sum(split.num_examples for split in splits)
    if (size := 4 * count * math.prod(backbone.output_shape[1:])) > _MOST:
        raise UserError(
            f"--attentive keeps all tokens in memory, {size / 2**30:.1f} GiB for {count:,} images; give at "
            f"most {_MOST // 2**30} GiB of them, by --train-split and --eval-split."
        )
    preprocessing, num_classes = options.preprocessing(keras_vit.preprocessing_of(model)), len(source.labels)

    def computed(split: Split) -> tuple[np.ndarray, np.ndarray]:
        compute = backbone.predict_on_batch
        return outputs(compute, split, options.batch_size, preprocessing=preprocessing, num_classes=num_classes)

    (train, labels), (evaluation, expected) = (computed(split) for split in splits)
    probe = fit_attentive(train, labels, num_classes, config.num_heads, options.attentive)
    logits = probe.predict(evaluation, batch_size=options.batch_size, verbose=0)
    return float(np.mean(np.argmax(logits, axis=-1) == expected))
