"""Models of further tasks on a Vision Transformer: build them, and ask a model which task it has."""

import dataclasses

import keras

from keras_vit.errors import UserError
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.build import config_of, dtype_policy, model_spec, preprocessing_of
from keras_vit.models.config import (
    DetectionConfig,
    ResNetConfig,
    SegmentationConfig,
    TaskConfig,
    ViTConfig,
    config_from_dict,
)
from keras_vit.models.detection import detection_network
from keras_vit.models.named_models import model_config
from keras_vit.models.segmentation import segmentation_network


def task_of(model: keras.Model) -> TaskConfig | None:
    """The configuration of the further task of a model; None for a classifier, or features."""
    task = model_spec(model).task
    return None if task is None else config_from_dict(task)


def build_task(
    config: ViTConfig,
    task: TaskConfig,
    preprocessing: Preprocessing,
    *,
    dtype: str | None = None,
    name: str | None = None,
) -> keras.Model:
    """A new model of a further task; the arguments are those of `segmentation_model`, config that of its backbone."""
    with dtype_policy(dtype):
        if isinstance(task, SegmentationConfig):
            return segmentation_network(backbone_config(config), task, preprocessing, name or "segmentation")
        return detection_network(backbone_config(config), task, preprocessing, name or "detection")


def backbone_config(config: ViTConfig) -> ViTConfig:
    """The configuration without what reads the tokens. Raises UserError for one that is no plain encoder."""
    if config.axial or config.distillation != "none" or config.position_injection != "input":
        raise UserError(
            "Segmentation and detection need a plain encoder, without axial attention, distillation token and "
            "positions in every layer; take another model."
        )
    if config.locality_attention or config.position_embedding == "relative":
        raise UserError(
            "Segmentation and detection need attention without relative positions and locality; take another model."
        )
    return dataclasses.replace(
        config,
        classifier="none",
        with_class_token=config.has_class_token,
        norm_after_pooling=False,
        representation_size=None,
        representation="tanh",
        normalized=False,
        head_bias=True,
    )


def segmentation_model(
    backbone: str | ViTConfig | keras.Model,
    task: SegmentationConfig,
    *,
    image_size: int | tuple[int, int] | None = None,
    dtype: str | None = None,
    name: str | None = None,
) -> keras.Model:
    """Build an encoder-only mask transformer (EoMT, arXiv 2503.19108) on a Vision Transformer.

    Args:
        backbone: a name from `keras_vit.MODELS` or a configuration, for random weights; or a model of
            `keras_vit.build` or `keras_vit.from_checkpoint`, whose weights and preprocessing are taken.
        task: classes, queries and blocks.
        image_size: pixels, or (height, width). Default: that of the model, else 224. Adapt a model with `adapt` first.
        dtype: a Keras dtype policy. Default: Keras' global policy.
        name: of the keras.Model.

    Returns:
        A functional keras.Model: images (B, height, width, channels) -> {"class_logits": (B, Q, K + 1), "mask_logits":
        (B, h, w, Q)}.

    Raises:
        UserError: for a ResNet, or an encoder with axial attention, a distillation token or relative positions.
    """
    return _on_backbone(backbone, task, image_size, dtype, name)


def detection_model(
    backbone: str | ViTConfig | keras.Model,
    task: DetectionConfig,
    *,
    image_size: int | tuple[int, int] | None = None,
    dtype: str | None = None,
    name: str | None = None,
) -> keras.Model:
    """Build an open-vocabulary detector (OWL-ViT, arXiv 2205.06230; OWLv2, 2306.09683) on a Vision Transformer.

    The arguments are those of `segmentation_model`.

    Returns:
        A functional keras.Model: images (B, height, width, channels) -> a dict of one prediction for each of the N
        patches: "boxes" (B, N, 4), centre x and y, width and height as shares of the image; "class_embeddings"
        (B, N, E) of unit length, see `with_classes`; with task.objectness also "objectness" (B, N), logits.
    """
    return _on_backbone(backbone, task, image_size, dtype, name)


def _on_backbone(
    backbone: str | ViTConfig | keras.Model,
    task: TaskConfig,
    image_size: int | tuple[int, int] | None,
    dtype: str | None,
    name: str | None,
) -> keras.Model:
    weights: dict[str, list] = {}
    if isinstance(backbone, keras.Model):
        config, preprocessing = config_of(backbone), preprocessing_of(backbone)
        weights = {layer.name: layer.weights for layer in backbone.layers}
        if image_size is not None and preprocessing != preprocessing.for_image_size(image_size):
            raise UserError(
                f"The backbone is for images of {preprocessing.image_size} pixels, not {image_size}; adapt it with "
                "keras_vit.adapt first."
            )
    else:
        config = model_config(backbone)
        preprocessing = Preprocessing(224 if image_size is None else image_size)  # type: ignore[arg-type]
    if isinstance(config, ResNetConfig):
        raise UserError("Segmentation and detection need the tokens of a Vision Transformer, not a ResNet.")
    model = build_task(config, task, preprocessing, dtype=dtype, name=name)
    for layer in model.layers:
        for variable, value in zip(layer.weights, weights.get(layer.name, []), strict=False):
            variable.assign(value)
    return model
