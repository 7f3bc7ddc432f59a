"""Vision Transformers for Keras 3: models, checkpoints, and what can be seen in them.

Runs on the TensorFlow and JAX backends of Keras and imports neither itself; models are not built on its torch backend,
which has no names with dots. Keras comes with the first name that needs it.
"""

from typing import TYPE_CHECKING

from keras_vit.errors import UserError
from keras_vit.lazy_imports import public_names, register_layers_with_keras
from keras_vit.models.config import MODELS, ConvStem, ResNetConfig, ViTConfig, hybrid_resnet

if TYPE_CHECKING:
    from keras_vit.checkpoints.describe import Description, describe
    from keras_vit.checkpoints.download import find_checkpoint
    from keras_vit.checkpoints.from_checkpoint import adapt, from_checkpoint
    from keras_vit.checkpoints.load import LoadReport, load_checkpoint
    from keras_vit.checkpoints.save import save_checkpoint
    from keras_vit.models.attention import chunk_attention
    from keras_vit.models.build import build, config_of, feature_map, intermediates, preprocessing_of
    from keras_vit.models.position_resizing import resize_position_embedding
    from keras_vit.preprocessing import Preprocessing
else:
    __getattr__ = public_names(
        globals(),
        {
            "models.attention": ["chunk_attention"],
            "checkpoints.from_checkpoint": ["adapt", "from_checkpoint"],
            "checkpoints.load": ["LoadReport", "load_checkpoint"],
            "checkpoints.describe": ["Description", "describe"],
            "checkpoints.download": ["find_checkpoint"],
            "models.build": ["build", "config_of", "feature_map", "intermediates", "preprocessing_of"],
            "models.position_resizing": ["resize_position_embedding"],
            "preprocessing": ["Preprocessing"],
            "checkpoints.save": ["save_checkpoint"],
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
