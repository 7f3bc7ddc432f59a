"""Checkpoints in and out of models: read the architecture and build it, load, adapt.

What a file holds is settled from its headers (`recognition.py`), and that it fits the model (`merging.py`); only then
are numbers read.
"""

import dataclasses
import functools
import io
import os
import warnings
from collections.abc import Iterable

import keras
import numpy as np

from keras_vit.checkpoints.adapt import Changes, build_and_fill, stored_channels
from keras_vit.checkpoints.assign import LoadReport, assign, plan_merge, values_by_key
from keras_vit.checkpoints.formats import POSITIONS, Layout
from keras_vit.checkpoints.hf_config import INTERPOLATION
from keras_vit.checkpoints.infer_config import (
    Checkpoint,
    file_config_grid,
    infer_config,
    known_image_size,
    no_square,
    open_checkpoint,
    refuse_unexpected_keys,
    refuse_untold,
    value_range,
)
from keras_vit.checkpoints.key_mapping import Weight
from keras_vit.errors import UserError, check_integers
from keras_vit.files.lazy_array import LazyArray, check_all
from keras_vit.models.build import config_of, preprocessing_of
from keras_vit.models.config import (
    Classifier,
    ConvStem,
    Gelu,
    ModelConfig,
    PositionEmbeddingKind,
    ResNetConfig,
    ViTConfig,
)
from keras_vit.models.kernel_resizing import ChannelRule
from keras_vit.models.position_resizing import Resampler, check_resampler
from keras_vit.preprocessing import Preprocessing

_DEFAULT_SIZE = 224  # pixels, of models without position embeddings


def from_checkpoint(
    path: str | os.PathLike,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    channel_rule: ChannelRule = "mean",
    resampler: Resampler | None = None,
    stored_grid: tuple[int, int] | None = None,
    classifier: Classifier | None = None,
    position_embedding: PositionEmbeddingKind | None = None,
    num_heads: int | None = None,
    num_groups: int | None = None,
    conv_stem_strides: tuple[int, ...] | None = None,
    gelu: Gelu | None = None,
    layer_norm_epsilon: float | None = None,
    dropout_rate: float = 0.0,
    attention_dropout_rate: float = 0.0,
    stochastic_depth_rate: float = 0.0,
    keep_pre_logits: bool = False,
) -> keras.Model:
    """Read the architecture out of a checkpoint, build it, and load it.

    Read are .npz files of vit_jax, big_vision and big_transfer, folders and .safetensors files of transformers, timm
    and torchvision. Numerics are those of the code that wrote the file.

    Args:
        path: of the file or folder; or an address or official name, which `find_checkpoint` downloads once.
        image_size: pixels, or (height, width); None takes the size that config.json or the position embeddings tell,
            else 224. Another size resamples position embeddings.
        num_classes: None keeps the head as stored. A number drops head and pre_logits and gives a head of zeros;
            0 gives the features.
        patch_size: another patch size, by FlexiViT's pseudo-inverse resize; None keeps the stored one.
        channels: another number of image channels; None keeps the stored one.
        channel_rule: "mean" spreads the sum over the old channels, "repeat" cycles through them.
        resampler: of position embeddings; None takes the origin's own.
        stored_grid: rows and columns of the stored position embeddings, where they are not square.
        classifier: "gap" (the default where the file has no class token) or "unpooled"; "token" and "map" are seen.
        position_embedding: of files without a table: "sincos-2d" (the default for big_vision) or "none" (for others).
        num_heads: where neither arrays nor config.json tell it; default: that of the official model of these sizes. A
            timm file without config.json and class token, whose norm precedes pooling, needs it and `gelu`.
        num_groups: of GroupNorm, likewise; the default is 32.
        conv_stem_strides: of early convolutions; default: 2, or, of more than four, 1 for those that do not widen.
        gelu, layer_norm_epsilon: other numerics than the origin's ("tanh" and 1e-6 for JAX files; config.json's, else
            "erf" and 1e-12, for transformers; "erf" and 1e-6 for timm and torchvision).
        dropout_rate, attention_dropout_rate, stochastic_depth_rate: for training on.
        keep_pre_logits: keep the tanh layer though num_classes is given (vit_jax: an equal representation_size).
    """
    changes = Changes(num_classes, patch_size, channels, channel_rule, resampler, keep_pre_logits)
    check_integers("stored_grid", stored_grid, length=2)
    check_integers("conv_stem_strides", conv_stem_strides, length=0)
    check_integers("num_heads", num_heads)
    check_integers("num_groups", num_groups)
    checkpoint = open_checkpoint(path)
    refuse_unexpected_keys(checkpoint)
    given = {"num_heads": num_heads, "num_groups": num_groups, "gelu": gelu, "layer_norm_epsilon": layer_norm_epsilon}
    file_config = dataclasses.replace(checkpoint.file_config, **{k: v for k, v in given.items() if v is not None})
    config = infer_config(checkpoint, file_config, classifier, position_embedding, conv_stem_strides)
    refuse_untold(checkpoint, config, given)
    rates = {"dropout_rate": dropout_rate, "attention_dropout_rate": attention_dropout_rate}
    rates |= {"stochastic_depth_rate": stochastic_depth_rate}
    of_vit = {"num_heads": num_heads, "gelu": gelu, "layer_norm_epsilon": layer_norm_epsilon, "classifier": classifier}
    of_vit |= {name: rate or None for name, rate in rates.items()}
    told = {"position_embedding": position_embedding, "stored_grid": stored_grid}
    told |= {"num_groups": num_groups, "conv_stem_strides": conv_stem_strides}
    _refuse_inapplicable(checkpoint, config, of_vit, told)
    if isinstance(config, ViTConfig):
        config = dataclasses.replace(config, **rates)
    grid = stored_grid or file_config_grid(checkpoint, config)
    if image_size is None:
        image_size = known_image_size(checkpoint, config, grid) or _default_image_size(checkpoint, config)
    channels_now = stored_channels(checkpoint)
    if checkpoint.file_config.other_resize:
        warnings.warn(
            f"The original of {os.fspath(path)} resizes images with {checkpoint.file_config.other_resize}; the "
            f"preprocessing here is {checkpoint.file_config.resize!r} with "
            f"{INTERPOLATION[checkpoint.file_config.resize]} interpolation, so that predictions for the same image may "
            "differ. Weights, mean and deviation are the original's.",
            stacklevel=2,
        )
    preprocessing = Preprocessing(
        image_size,
        channels_now,
        resize=checkpoint.file_config.resize,
        value_range=value_range(checkpoint, channels_now),
        crop_from=checkpoint.file_config.crop_from,
    )
    return build_and_fill(checkpoint, config, preprocessing, grid, changes)


def _refuse_inapplicable(checkpoint: Checkpoint, config: ModelConfig, of_vit: dict, told: dict) -> None:
    """Raise UserError for what was given (None: was not) and cannot mean anything for this file.

    of_vit: arguments of every Vision Transformer. told: arguments of some models.
    """
    is_vit, has_table = isinstance(config, ViTConfig), POSITIONS in checkpoint.weights
    stem = config.stem if is_vit else config
    applies = dict.fromkeys((*of_vit, "position_embedding"), (is_vit, "the file is of a ResNet"))
    if has_table:
        applies["position_embedding"] = False, "the file has a table of them"
    applies["stored_grid"] = has_table, "the file has no table of position embeddings"
    applies["num_groups"] = isinstance(stem, ResNetConfig), "the file has no GroupNorm"
    applies["conv_stem_strides"] = isinstance(stem, ConvStem), "the file has no early convolutions"
    for name, value in (of_vit | told).items():
        does, why_not = applies[name]
        if value is not None and not does:
            raise UserError(f"{name}={value!r:.80} does not apply, for {why_not}; leave it out.")


def _default_image_size(checkpoint: Checkpoint, config: ModelConfig) -> tuple[int, int]:
    if POSITIONS in checkpoint.weights:
        raise no_square(checkpoint.weights[POSITIONS].shape[1] - config.num_prefix_tokens)
    return _DEFAULT_SIZE, _DEFAULT_SIZE


def adapt(
    model: keras.Model,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    patch_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    channel_rule: ChannelRule = "mean",
    resampler: Resampler = "bilinear-aligned",
    keep_pre_logits: bool = False,
) -> keras.Model:
    """A new model with the weights of another one, for other images or classes; as `from_checkpoint` does with a file.

    Args:
        model: built by `keras_vit.build`; it stays as it is.
        image_size, num_classes, patch_size, channels: None keeps the model's own.
        channel_rule, resampler, keep_pre_logits: as `from_checkpoint`.
    """
    changes = Changes(num_classes, patch_size, channels, channel_rule, resampler, keep_pre_logits)
    config, preprocessing = config_of(model), preprocessing_of(model)
    weights = {}
    for key, value in values_by_key(model).items():
        content = functools.partial(_numbers_of, value)
        stored = LazyArray(key, tuple(value.shape), np.dtype(np.float32), content)
        weights[key] = Weight(stored, stored.shape, np.asarray)
    grid = config.grid(preprocessing.image_size) if POSITIONS in weights else None
    if image_size is not None:
        preprocessing = dataclasses.replace(preprocessing, image_size=image_size)
    return build_and_fill(Checkpoint("keras", Layout(()), weights), config, preprocessing, grid, changes)


def _numbers_of(value) -> io.BytesIO:
    return io.BytesIO(np.array(value, np.float32).tobytes())


def load_checkpoint(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    resampler: Resampler | None = None,
    stored_grid: tuple[int, int] | None = None,
    drop: str | Iterable[str] = (),
    keep: str | Iterable[str] = (),
) -> LoadReport:
    """Load a checkpoint of any layout into a model, strictly: nothing is left over on either side unless declared.

    The model is untouched when this raises UserError, whose text names the keys that are missing, left over or of
    another shape. Its numerics (GELU, epsilons) stay the model's own; `from_checkpoint` takes the file's.

    Args:
        model: built by `keras_vit.build`.
        path: of the file or folder; or an address or official name, see `find_checkpoint`.
        resampler: of position embeddings; None takes that of the file's origin.
        stored_grid: rows and columns of the stored position embeddings, where they are not square.
        drop: beginnings of keys that may stay in the file, such as "head/"; by our names, or by the file's own.
        keep: beginnings of weight names that may stay as they are.
    """
    if resampler is not None:
        check_resampler(resampler)
    check_integers("stored_grid", stored_grid, length=2)
    drop, keep = _beginnings("drop", drop), _beginnings("keep", keep)
    plan = plan_merge(model, open_checkpoint(path), resampler, stored_grid, drop=drop, keep=keep)
    check_all({weight.source.key: weight.source for weight in plan.weights.values()}.values())
    assign(model, plan.weights)
    return plan.report


def _beginnings(name: str, given) -> tuple[str, ...]:
    beginnings = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(beginning, str) for beginning in beginnings):
        raise UserError(f"{name} must be beginnings of keys, such as 'head/', but is {given!r:.80}.")
    return beginnings
