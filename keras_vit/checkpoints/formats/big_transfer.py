"""big_transfer's files: BiT, with TensorFlow's names. The weights of all BiT models here have these keys."""

from collections.abc import Mapping

from keras_vit.checkpoints.formats.flax import unchanged
from keras_vit.checkpoints.formats.layout import Layout, WrittenModel, no_files, no_settings
from keras_vit.checkpoints.key_mapping import BIT_UNIT, POINTWISE
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.config import ResNetConfig

LAYOUT = "npz"
SUFFIXES: tuple[str, ...] = (".npz",)
CONFIG_FILES: tuple[str, ...] = ()
_ROOT = "resnet/root_block/standardized_conv2d/kernel"
_LAYOUT = Layout(
    (
        *unchanged(_ROOT, f"{BIT_UNIT}a/proj/standardized_conv2d/kernel"),
        *unchanged(*(f"{BIT_UNIT}{letter}/standardized_conv2d/kernel" for letter in "abc")),
        *unchanged(*(f"{BIT_UNIT}{letter}/group_norm/{leaf}" for letter in "abc" for leaf in ("gamma", "beta"))),
        *unchanged("resnet/group_norm/gamma", "resnet/group_norm/beta"),
        *unchanged("resnet/head/conv2d/kernel", transform=POINTWISE),
        *unchanged("resnet/head/conv2d/bias"),
    ),
    variance_epsilon=1e-10,
)


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format."""
    return _LAYOUT if _ROOT in arrays else None


def expressible(model: WrittenModel) -> dict[str, tuple | None] | None:
    """None for all but BiT, of which any is expressible."""
    return {} if isinstance(model.config, ResNetConfig) and model.config.preactivation else None


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    return _LAYOUT


read_config, write_config = no_settings, no_files
