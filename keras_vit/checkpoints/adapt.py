"""A model of weights whose architecture is known, as it is or changed: other images, classes, patches, channels.

As the official code changes them (vit_jax `checkpoint.load_pretrained`); patches as FlexiViT.
"""

import dataclasses
import numbers
from collections.abc import Mapping

import keras
import numpy as np

from keras_vit.checkpoints.assign import assign, plan_merge
from keras_vit.checkpoints.formats import HEADS, num_classes_of
from keras_vit.checkpoints.infer_config import Checkpoint
from keras_vit.checkpoints.key_mapping import Weight
from keras_vit.errors import UserError, check_integers
from keras_vit.models.build import build
from keras_vit.models.config import ModelConfig, ViTConfig, make_plain
from keras_vit.models.kernel_resizing import ChannelRule, adapt_channels, resize_patch_kernel
from keras_vit.models.layers import no_init_weights
from keras_vit.models.position_resizing import Resampler, check_resampler
from keras_vit.preprocessing import Preprocessing

# The kernels that see the image's channels.
_FIRST_KERNELS = (
    "conv_stem/0/conv/kernel",
    "conv_root/kernel",
    "resnet/root_block/standardized_conv2d/kernel",
    "embedding/kernel",
)


@dataclasses.dataclass(frozen=True)
class Changes:
    """In what a model is to differ from the weights that it is filled with; None: not at all."""

    num_classes: int | None
    patch_size: int | tuple[int, int] | None
    channels: int | None
    channel_rule: ChannelRule
    resampler: Resampler | None
    keep_pre_logits: bool

    def __post_init__(self) -> None:
        make_plain(self)
        check_integers("num_classes", self.num_classes, least=0)
        check_integers("channels", self.channels)
        if self.patch_size is not None and not isinstance(self.patch_size, numbers.Integral):
            check_integers("patch_size", self.patch_size, length=2)
        if self.channel_rule not in ChannelRule.__args__:
            raise UserError(
                f"channel_rule must be one of {', '.join(ChannelRule.__args__)}, but is {self.channel_rule!r}."
            )
        if self.resampler is not None:
            check_resampler(self.resampler)
        if self.keep_pre_logits and self.num_classes is None:
            raise UserError("keep_pre_logits is for a new head; give num_classes with it, or leave it out.")


def build_and_fill(
    checkpoint: Checkpoint,
    config: ModelConfig,
    preprocessing: Preprocessing,
    stored_grid: tuple[int, int] | None,
    changes: Changes,
) -> keras.Model:
    """The model of a checkpoint whose architecture is known.

    Args:
        preprocessing: of the model, but for the number of its channels, which is that of the checkpoint.
        stored_grid: rows and columns of the stored position embeddings, as far as they are known.
    """
    weights, num_classes = checkpoint.weights, changes.num_classes
    new_head = num_classes is not None
    if not new_head:
        num_classes = num_classes_of(weights)
    drops_pre_logits = new_head and not changes.keep_pre_logits
    if isinstance(config, ViTConfig) and drops_pre_logits:
        config = dataclasses.replace(config, representation_size=None)
    if changes.patch_size is not None:
        if not isinstance(config, ViTConfig):
            raise UserError("patch_size does not apply to a ResNet, which has no patches; leave it out.")
        config = dataclasses.replace(config, patch_size=changes.patch_size)
        weights = _with_patch(weights, config.patch)
    if changes.channels is not None:
        weights = _with_channels(weights, changes.channels, changes.channel_rule)
        preprocessing = _for_channels(preprocessing, changes.channels)
    with no_init_weights():
        model = build(config, preprocessing=preprocessing, num_classes=num_classes)
    keep = HEADS if new_head else ()
    drop = (*keep, "pre_logits/") if drops_pre_logits else keep
    checkpoint = dataclasses.replace(checkpoint, weights=weights)
    assign(model, plan_merge(model, checkpoint, changes.resampler, stored_grid, drop=drop, keep=keep).weights)
    return model


def stored_channels(checkpoint: Checkpoint) -> int:
    """Channels of the images that the weights are for."""
    return _first_kernel(checkpoint.weights)[1].shape[2]


def _first_kernel(weights: Mapping[str, Weight]) -> tuple[str, Weight]:
    key = next(key for key in _FIRST_KERNELS if key in weights)
    return key, weights[key]


def _with_patch(weights: Mapping[str, Weight], patch: tuple[int, int]) -> dict[str, Weight]:
    kernel = weights["embedding/kernel"]
    shape = (*patch, *kernel.shape[2:])
    resized = Weight(kernel.source, shape, lambda array: resize_patch_kernel(kernel.convert(array), patch))
    return {**weights, "embedding/kernel": resized}


def _with_channels(weights: Mapping[str, Weight], channels: int, rule: ChannelRule) -> dict[str, Weight]:
    key, kernel = _first_kernel(weights)
    shape = (*kernel.shape[:2], channels, kernel.shape[3])
    adapted = Weight(kernel.source, shape, lambda array: adapt_channels(kernel.convert(array), channels, rule))
    return {**weights, key: adapted}


def _for_channels(preprocessing: Preprocessing, channels: int) -> Preprocessing:
    """The same preprocessing for another number of channels; a range for each becomes their mean for all."""
    value_range = preprocessing.value_range
    if channels != preprocessing.channels:
        value_range = tuple(float(np.mean(end)) for end in value_range)
    return dataclasses.replace(preprocessing, channels=channels, value_range=value_range)
