"""The model: frozen features of some blocks, a normalization and a 1x1 convolution, resized to the image."""

import dataclasses
from collections.abc import Sequence

import keras

import keras_vit
from keras_vit import UserError, ViTConfig, preprocessing_of
from training.loop.build import model_with_config

_DATA_FORMAT = "channels_last"


def segmenter(model: keras.Model, blocks: Sequence[int], num_classes: int) -> keras.Model:
    """Return a model of the same weights with a linear head: images (B, h, w, C) -> logits (B, h, w, K).

    As the linear evaluation of DINOv2 (arXiv 2304.07193, section 7.4; ViT-S/14 on ADE20k: 44.3 % mIoU from the last
    block): batch normalization of the patch tokens, then one linear layer; the logits are resized bilinearly. Only
    these two layers are trained. Images are stretched to the model's size, so that the mask is that of the whole image.

    Raises UserError for a model without tokens, or without these blocks.
    """
    config, preprocessing = keras_vit.config_of(model), preprocessing_of(model)
    if not isinstance(config, ViTConfig):
        raise UserError(
            "A segmentation head needs the patch tokens of a Vision Transformer; give another --checkpoint."
        )
    config = dataclasses.replace(config, dropout_rate=0.0, attention_dropout_rate=0.0, stochastic_depth_rate=0.0)
    stretched = preprocessing.with_resize("stretch", None)
    backbone = model_with_config(model, config, stretched)
    maps = keras_vit.feature_maps(backbone, blocks, norm=not config.norm_after_pooling).output
    for layer in backbone.layers:
        layer.trainable = False
    features = list(maps.values())
    x = features[0] if len(features) == 1 else keras.layers.Concatenate(name="features")(features)  # (B, h, w, D)
    x = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name="segmentation_norm")(x)
    x = keras.layers.Conv2D(num_classes, 1, data_format=_DATA_FORMAT, dtype="float32", name="segmentation_head")(x)
    height, width = stretched.image_size
    x = keras.layers.Resizing(height, width, data_format=_DATA_FORMAT, dtype="float32", name="segmentation")(x)
    return keras.Model(backbone.input, x, name="segmenter")
