"""vit_jax's files with the keys of flax's Linen: ViT and hybrids."""

from collections.abc import Mapping

from keras_vit.checkpoints.formats import flax
from keras_vit.checkpoints.formats.layout import Layout, WrittenModel, no_files, no_settings
from keras_vit.checkpoints.key_mapping import POSITIONS
from keras_vit.files.lazy_array import LazyArray

LAYOUT = "npz-linen"
SUFFIXES: tuple[str, ...] = (".npz",)
CONFIG_FILES: tuple[str, ...] = ()
_LAYOUT = flax.layout(*flax.unchanged(POSITIONS), *flax.LINEN_BLOCK, *flax.RESNET)


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format."""
    is_released = any("/MultiHeadDotProductAttention_1/" in key for key in arrays)
    return _LAYOUT if not is_released and "embedding/kernel" in arrays and POSITIONS in arrays else None


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    return _LAYOUT


expressible, read_config, write_config = flax.expressible, no_settings, no_files
