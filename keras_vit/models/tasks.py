"""Models of further tasks on a Vision Transformer: build them, and ask a model which task it has."""

import dataclasses

import keras

from keras_vit.errors import UserError
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.build import dtype_policy, model_spec
from keras_vit.models.config import (
    LinearSegmentationConfig,
    ModelConfig,
    SegmentationConfig,
    TaskConfig,
    ViTConfig,
    config_from_dict,
)
from keras_vit.models.detection import detection_network
from keras_vit.models.segmentation import linear_segmentation_network, segmentation_network


def task_of(model: keras.Model) -> TaskConfig | None:
    """The configuration of the further task of a model; None for a classifier, or features."""
    task = model_spec(model).task
    return None if task is None else config_from_dict(task)


def build_task(
    config: ModelConfig,
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
        if isinstance(task, LinearSegmentationConfig):
            return linear_segmentation_network(backbone_config(config), task, preprocessing, name or "segmentation")
        return detection_network(backbone_config(config), task, preprocessing, name or "detection")


def backbone_config(config: ModelConfig) -> ViTConfig:
    """The configuration without what reads the tokens. Raises UserError for one that is no plain encoder."""
    if (
        not isinstance(config, ViTConfig)
        or config.axial
        or config.locality_attention
        or config.position_embedding == "relative"
        or config.distillation != "none"
        or config.position_injection != "input"
    ):
        raise UserError(
            "Segmentation and detection need a plain Vision Transformer, not a ResNet, and without axial attention, "
            "relative positions, locality, distillation token and positions in every layer; take another model."
        )
    return dataclasses.replace(
        config,
        classifier="none",
        with_class_token=config.has_class_token,
        norm_after_pooling=False,
        final_norm=True,  # of the task
        representation_size=None,
        representation="tanh",
        normalized=False,
        head_bias=True,
    )
