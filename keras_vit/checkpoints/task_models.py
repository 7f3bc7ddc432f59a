"""Put a further task on a Vision Transformer, with its weights."""

import keras

from keras_vit.checkpoints.from_checkpoint import adapt
from keras_vit.checkpoints.load import check_unchanged, fill_from
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.build import config_of, preprocessing_of
from keras_vit.models.config import DetectionConfig, LinearSegmentationConfig, SegmentationConfig, TaskConfig, ViTConfig
from keras_vit.models.named_models import model_config


def segmentation_model(
    backbone: str | ViTConfig | keras.Model,
    task: SegmentationConfig | LinearSegmentationConfig,
    *,
    image_size: int | tuple[int, int] | None = None,
    dtype: str | None = None,
    name: str | None = None,
) -> keras.Model:
    """Build an encoder-only mask transformer (EoMT, arXiv 2503.19108) on a Vision Transformer.

    Args:
        backbone: a name from `keras_vit.MODELS` or a configuration, for random weights; or a model of
            `keras_vit.build` or `keras_vit.from_checkpoint`, whose weights and preprocessing are taken.
        task: classes, queries and blocks; or a linear classifier of the patches.
        image_size: pixels, or (height, width). Default: that of the model, else 224.
        dtype: a Keras dtype policy. Default: Keras' global policy.
        name: of the keras.Model.

    Returns:
        A functional keras.Model: images (B, height, width, channels) -> {"class_logits": (B, Q, K + 1), "mask_logits":
        (B, h, w, Q)}; of a LinearSegmentationConfig -> {"pixel_logits": (B, h, w, K)}.

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
        patches: "boxes" (B, N, 4), center x and y, width and height as shares of the image; "class_embeddings"
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
    if isinstance(backbone, keras.Model):
        check_unchanged(backbone, "take one that was not changed")
        preprocessing = preprocessing_of(backbone)
        if image_size is not None and preprocessing != preprocessing.for_image_size(image_size):
            backbone = adapt(backbone, image_size=image_size)
        config, preprocessing = config_of(backbone), preprocessing_of(backbone)
    else:
        config = model_config(backbone)
        preprocessing = Preprocessing(224 if image_size is None else image_size)  # type: ignore[arg-type]
    model = Blueprint(config, preprocessing, task=task, dtype=dtype, name=name).build()
    if isinstance(backbone, keras.Model):
        # An unchanged backbone has all weights of its encoder; those of another task may be of other sizes.
        fill_from(model, backbone)
    return model
