"""Vision Transformers for Keras 3: models, checkpoints, and what can be seen in them.

Runs on the TensorFlow and JAX backends of Keras and imports neither itself; models are not built on its torch backend,
which has no names with dots. Keras comes with the first name that needs it.
"""

from typing import TYPE_CHECKING

from keras_vit.config import MODELS, ConvStem, ResNetConfig, ViTConfig, hybrid_resnet
from keras_vit.deferred import public_names, register_layers_with_keras
from keras_vit.errors import UserError

if TYPE_CHECKING:
    from keras_vit.attention import chunk_attention
    from keras_vit.checkpoint import LoadReport, adapt, from_checkpoint, load_checkpoint
    from keras_vit.description import Description, describe
    from keras_vit.finding import find_checkpoint
    from keras_vit.models import build, config_of, feature_map, intermediates, preprocessing_of
    from keras_vit.posemb import resize_position_embedding
    from keras_vit.preprocess import Preprocessing
    from keras_vit.saving import save_checkpoint
else:
    __getattr__ = public_names(
        globals(),
        {
            "attention": ["chunk_attention"],
            "checkpoint": ["LoadReport", "adapt", "from_checkpoint", "load_checkpoint"],
            "description": ["Description", "describe"],
            "finding": ["find_checkpoint"],
            "models": ["build", "config_of", "feature_map", "intermediates", "preprocessing_of"],
            "posemb": ["resize_position_embedding"],
            "preprocess": ["Preprocessing"],
            "saving": ["save_checkpoint"],
        },
    )

__all__ = [
    "MODELS",
    "ConvStem",
    "Description",
    "LoadReport",
    "Preprocessing",
    "ResNetConfig",
    "UserError",
    "ViTConfig",
    "adapt",
    "build",
    "chunk_attention",
    "config_of",
    "describe",
    "feature_map",
    "find_checkpoint",
    "from_checkpoint",
    "hybrid_resnet",
    "intermediates",
    "load_checkpoint",
    "preprocessing_of",
    "resize_position_embedding",
    "save_checkpoint",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_layers_with_keras()
