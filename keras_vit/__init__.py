"""Vision Transformers for Keras 3: models, checkpoints, and what can be seen in them.

Runs on the TensorFlow, JAX and torch backends of Keras and imports none of them itself.
"""

from keras_vit.quiet import native_stderr_silenced

with native_stderr_silenced():
    import keras as _keras  # noqa: F401  (first import of the backend)

from keras_vit.attention import chunk_attention
from keras_vit.checkpoint import LoadReport, adapt, from_checkpoint, load_checkpoint
from keras_vit.config import MODELS, ConvStem, ResNetConfig, ViTConfig, hybrid_resnet
from keras_vit.describe import Description, describe
from keras_vit.errors import UserError
from keras_vit.finding import find_checkpoint
from keras_vit.models import build, config_of, feature_map, intermediates, preprocessing_of
from keras_vit.posemb import resize_position_embedding
from keras_vit.preprocess import Preprocessing
from keras_vit.saving import save_checkpoint

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
