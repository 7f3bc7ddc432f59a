"""big_vision's files: Linen's keys, and position embeddings without a row for the class token.

It prepends the class token after they are added.
"""

from collections.abc import Mapping

from keras_vit.checkpoints.formats import flax
from keras_vit.checkpoints.formats.layout import Layout, WrittenModel, no_files, no_settings
from keras_vit.checkpoints.key_mapping import POSITIONS, Rule
from keras_vit.files.lazy_array import LazyArray

LAYOUT = "big_vision"
SUFFIXES: tuple[str, ...] = (".npz",)
CONFIG_FILES: tuple[str, ...] = ()
_LAYOUT = flax.layout(
    Rule((POSITIONS,), "pos_embedding"), *flax.LINEN_BLOCK, prefix_positions=False, default_positions="sincos-2d"
)


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format."""
    is_vit_jax = POSITIONS in arrays or any("/MultiHeadDotProductAttention_1/" in key for key in arrays)
    return _LAYOUT if not is_vit_jax and "embedding/kernel" in arrays else None


def expressible(model: WrittenModel) -> dict[str, tuple | None] | None:
    """The fields that it has; None for a ResNet."""
    fields = flax.expressible(model, stems=(None,))
    return fields and fields | {"position_embedding": ("learned", "sincos-2d")}


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    return _LAYOUT


read_config, write_config = no_settings, no_files
