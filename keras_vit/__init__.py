"""Vision Transformers, BiT ResNets and hybrids for Keras 3, with the published checkpoints.

    model = keras_vit.build("ViT-B_16", image_size=224, num_classes=10)
    model = keras_vit.from_checkpoint("ViT-B_16.npz", num_classes=10)

Models are functional `keras.Model`s: `compile`, `fit`, `save` and `keras.models.load_model` work without
`custom_objects`. Start with these six names:

    MODELS              configurations by official name, such as "ViT-B_16", "R50+ViT-B_16" and "BiT-R50x1"
    build               create a model from a name or a configuration, with random weights
    from_checkpoint     read the architecture of a checkpoint file, build the model and load its weights
    load_checkpoint     load a checkpoint into an existing model; `save_checkpoint` is the inverse
    intermediates       a model that returns activations by name, such as attention probabilities
    preprocessing_of    the function that turns an image into the input of a model

`keras-vit inspect` plots what a model learned. The packages `training` and `export` train and deploy models.

The models run on the TensorFlow and JAX backends. The torch backend is not supported: its layers cannot have names with
dots. `import keras_vit` does not import Keras; the first function that requires it does.
"""

from typing import TYPE_CHECKING

from keras_vit.errors import UserError
from keras_vit.lazy_imports import public_names, register_layers_with_keras
from keras_vit.models.config import (
    ConvStem,
    DetectionConfig,
    ResNetConfig,
    SegmentationConfig,
    ShiftedPatches,
    ViTConfig,
    hybrid_resnet,
)
from keras_vit.models.named_models import MODELS

if TYPE_CHECKING:
    from keras_vit.checkpoints.describe import Description, describe
    from keras_vit.checkpoints.find import find_checkpoint
    from keras_vit.checkpoints.from_checkpoint import adapt, from_checkpoint
    from keras_vit.checkpoints.load import LoadReport, load_checkpoint
    from keras_vit.checkpoints.save import save_checkpoint
    from keras_vit.checkpoints.task_models import detection_model, segmentation_model
    from keras_vit.images.preprocessing import Preprocessing
    from keras_vit.models.attention import chunk_attention
    from keras_vit.models.build import (
        build,
        classes_of,
        config_of,
        feature_map,
        feature_maps,
        get_layer,
        intermediates,
        preprocessing_of,
        set_classes,
        task_of,
    )
    from keras_vit.models.complexity import summary
    from keras_vit.models.detection import query_embeddings, with_classes, with_queries
    from keras_vit.models.weight_resizing import resize_position_embedding
    from keras_vit.published import list_models
    from keras_vit.run import load
    from keras_vit.scores import predict
    from keras_vit.text.checkpoint import text_tower
    from keras_vit.text.save import save_two_towers
    from keras_vit.text.tokenizer import tokenizer
    from keras_vit.text.zero_shot import zero_shot
else:
    __getattr__, __dir__ = public_names(globals())

__version__ = "0.1.0"

__all__ = [
    "MODELS", "ConvStem", "Description", "DetectionConfig", "LoadReport", "Preprocessing", "ResNetConfig",
    "SegmentationConfig", "ShiftedPatches", "UserError", "ViTConfig", "adapt", "build", "chunk_attention", "classes_of",
    "config_of", "describe", "detection_model", "feature_map", "feature_maps", "find_checkpoint", "from_checkpoint",
    "get_layer", "hybrid_resnet", "intermediates", "list_models", "load", "load_checkpoint", "predict",
    "preprocessing_of", "query_embeddings", "resize_position_embedding", "save_checkpoint", "save_two_towers",
    "segmentation_model", "set_classes", "summary", "task_of", "text_tower", "tokenizer", "with_classes",
    "with_queries", "zero_shot",
]  # fmt: skip


register_layers_with_keras()
