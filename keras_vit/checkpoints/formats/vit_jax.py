"""vit_jax's files as released, with the keys of flax before Linen: ViT and hybrids. The weights of all models here have
these keys.
"""

from collections.abc import Mapping

from keras_vit.checkpoints.formats import flax
from keras_vit.checkpoints.formats.layout import Layout, WrittenModel, no_files, no_settings
from keras_vit.checkpoints.key_mapping import POSITIONS
from keras_vit.files.lazy_array import LazyArray

LAYOUT = "npz"
SUFFIXES: tuple[str, ...] = (".npz",)
CONFIG_FILES: tuple[str, ...] = ()
_LAYOUT = flax.layout(*flax.unchanged(POSITIONS), *flax.RELEASED_BLOCK, *flax.RESNET)


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format."""
    is_released = any("/MultiHeadDotProductAttention_1/" in key for key in arrays)
    return _LAYOUT if is_released and "embedding/kernel" in arrays else None


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    return _LAYOUT


expressible, read_config, write_config = flax.expressible, no_settings, no_files
