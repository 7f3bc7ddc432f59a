"""Build models from checkpoints and from other models, for other images, classes, patches or channels on request.

Changes follow the official code (vit_jax `checkpoint.load_pretrained`); patches are resized as in FlexiViT.
"""

import dataclasses
import functools
import io
import numbers
import os
import typing
import warnings
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_vit.checkpoints.checkpoint import Checkpoint, not_square_error, open_checkpoint, refuse_unexpected_keys
from keras_vit.checkpoints.download import find_checkpoint
from keras_vit.checkpoints.infer_config import (
    file_config_grid,
    infer_config,
    known_image_size,
    original_preprocessing,
    refuse_ambiguous_settings,
)
from keras_vit.checkpoints.key_mapping import POSITIONS, Layout, Weight
from keras_vit.checkpoints.layouts import HEADS, num_classes_of
from keras_vit.checkpoints.load import assign, changed_layer, check_unchanged, match_weights, values_by_key
from keras_vit.errors import UserError, check_integers
from keras_vit.files.lazy_array import LazyArray
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.build import build, classifier_activation_of, config_of, preprocessing_of
from keras_vit.models.config import (
    Classifier,
    ConvStem,
    Gelu,
    ModelConfig,
    PositionEmbeddingKind,
    ResNetConfig,
    ShiftedPatches,
    ViTConfig,
    convert_fields,
    python_numbers,
)
from keras_vit.models.layers import no_init_weights
from keras_vit.models.resizing import ChannelRule, Resampler, adapt_channels, check_resampler, resize_patch_kernel
from keras_vit.run_directory import is_keras_model, load_model

# What to do where a model with a changed graph should be rebuilt.
_CHANGE_FIRST = "adapt the model first, and change its layers then"
_HEAD_LAYERS = tuple(head.replace("/", ".") for head in HEADS)
_DEFAULT_SIZE = 224  # pixels, for models without position embeddings
# Kernels whose input is the image.
_FIRST_KERNELS = (
    "conv_stem/0/conv/kernel",
    "conv_root/kernel",
    "resnet/root_block/standardized_conv2d/kernel",
    "embedding/kernel",
)


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
    classifier_activation: str | None = None,
    dtype: str | None = None,
    name: str | None = None,
) -> keras.Model:
    """Infer the architecture of a checkpoint, build the model and load the weights.

    Reads .npz files of vit_jax, big_vision and big_transfer, folders and .safetensors files of transformers, timm and
    torchvision, and .keras files and run directories of this package, without running code from them. GELU and epsilons
    are those of the code that wrote the file.

    Args:
        path: file, folder, address or official name; `find_checkpoint` downloads the latter two once.
        image_size: pixels, or (height, width). Default: the size in config.json or of the position embeddings, else
            224. Another size resamples the position embeddings.
        num_classes: None keeps the head. A number drops head and pre_logits and adds a head of zeros; 0 returns the
            features.
        patch_size: another patch size, by FlexiViT's pseudo-inverse resize. Default: that of the checkpoint.
        channels: another number of image channels. Default: that of the checkpoint.
        channel_rule: "mean" distributes the sum over the old channels, "repeat" cycles through them.
        resampler: of position embeddings. Default: that of the code that wrote the file.
        stored_grid: (rows, columns) of the stored position embeddings, if they are not square.
        classifier: "gap" (default without a class token) or "unpooled"; "token" and "map" are inferred.
        position_embedding: without a table in the file, "sincos-2d" (default for big_vision) or "none" (otherwise);
            with one, "learned", which timm's CLIP without config.json requires.
        num_heads: if it is neither in the arrays nor in config.json. Default: that of the official model of these
            sizes. Required, with `gelu`, for timm files without config.json and class token that have the norm before
            pooling.
        num_groups: of GroupNorm, likewise. Default: 32.
        conv_stem_strides: of early convolutions. Default: 2; with more than four, 1 for those that do not widen.
        gelu: instead of that of the checkpoint: "tanh" for JAX files; config.json's, else "erf", for transformers;
            "erf" for timm and torchvision. Arrays do not contain the activation: a file without config.json from a
            model with another one loads and gives other outputs.
        layer_norm_epsilon: instead of that of the checkpoint: 1e-6 for JAX files, timm and torchvision; config.json's,
            else 1e-12, for transformers.
        dropout_rate: for further training; see `keras_vit.build`.
        attention_dropout_rate: likewise.
        stochastic_depth_rate: likewise.
        keep_pre_logits: keep the tanh layer with a new head (vit_jax: an equal representation_size).
        classifier_activation: see `keras_vit.build`.
        dtype: see `keras_vit.build`.
        name: see `keras_vit.build`.
    """
    changes = Changes(num_classes, patch_size, channels, channel_rule, resampler, keep_pre_logits)
    build_options = BuildOptions(classifier_activation, dtype, name)
    check_integers("stored_grid", stored_grid, length=2)
    check_integers("conv_stem_strides", conv_stem_strides, length=0)
    check_integers("num_heads", num_heads)
    check_integers("num_groups", num_groups)
    overrides: dict[str, Any] = {"num_heads": num_heads, "num_groups": num_groups}
    overrides |= {"gelu": gelu, "layer_norm_epsilon": layer_norm_epsilon}
    rates: dict[str, Any] = {"dropout_rate": dropout_rate, "attention_dropout_rate": attention_dropout_rate}
    rates |= {"stochastic_depth_rate": stochastic_depth_rate}
    vit_settings = {
        "num_heads": num_heads,
        "gelu": gelu,
        "layer_norm_epsilon": layer_norm_epsilon,
        "classifier": classifier,
        **{name: rate or None for name, rate in rates.items()},
    }
    other_settings: dict[str, object] = {
        "position_embedding": position_embedding,
        "stored_grid": stored_grid,
        "num_groups": num_groups,
        "conv_stem_strides": conv_stem_strides,
    }
    file = find_checkpoint(path)
    if is_keras_model(file):
        _refuse_settings_of_keras_model({**vit_settings, **other_settings}, rates)
        model = load_model(file)
        config = config_of(model)
        if changed_layer(model):
            if (changes, build_options, image_size) == (Changes(), BuildOptions(), None) and not any(rates.values()):
                return model
            check_unchanged(model, _CHANGE_FIRST)
        if isinstance(config, ViTConfig):
            config = dataclasses.replace(config, **rates)
        elif any(rates.values()):
            raise UserError("The file is of a ResNet, which has no dropout; leave the rates out.")
        activation = classifier_activation or classifier_activation_of(model)
        build_options = dataclasses.replace(build_options, classifier_activation=activation)
        return _adapted(model, config, image_size, changes, build_options)
    checkpoint = open_checkpoint(file)
    refuse_unexpected_keys(checkpoint)
    known = {name: value for name, value in overrides.items() if value is not None}
    file_config = dataclasses.replace(checkpoint.file_config, **known)
    image_size = python_numbers(image_size)
    wanted = (image_size, image_size) if isinstance(image_size, int) else image_size
    config = infer_config(
        checkpoint, file_config, classifier, position_embedding, conv_stem_strides, stored_grid, wanted
    )
    refuse_ambiguous_settings(checkpoint, config, {**overrides, "position_embedding": position_embedding})
    _refuse_inapplicable(checkpoint, config, vit_settings, other_settings)
    if isinstance(config, ViTConfig):
        config = dataclasses.replace(config, **rates)
        if wanted is not None and wanted != file_config.image_size:
            changes.with_patch(config).check_image_size(wanted)
    grid = stored_grid or file_config_grid(checkpoint, config)
    if image_size is None:
        image_size = known_image_size(checkpoint, config, grid) or _default_image_size(checkpoint, config)
    channels_now = stored_channels(checkpoint)
    for sentence in checkpoint.file_config.differences(None if wanted else typing.cast(tuple[int, int], image_size)):
        warnings.warn(f"The original of {os.fspath(path)} {sentence}", stacklevel=2)
    if isinstance(means := (file_config.value_range or (0.0,))[0], tuple) and len(means) != channels_now:
        warnings.warn(
            f"{os.fspath(path)} says how {len(means)} channels are normalized, but its images have {channels_now}; "
            "here they are scaled to [-1, 1].",
            stacklevel=2,
        )
    preprocessing = original_preprocessing(checkpoint, typing.cast(tuple[int, int], image_size), channels_now)
    return build_and_fill(checkpoint, config, preprocessing, grid, changes, build_options)


def _refuse_settings_of_keras_model(settings: Mapping[str, object], rates: Mapping[str, float]) -> None:
    for name, value in settings.items():
        if value is not None and name not in rates:
            raise UserError(f"{name}={value!r:.80} does not apply, because a .keras file contains it; leave it out.")


def _refuse_inapplicable(
    checkpoint: Checkpoint,
    config: ModelConfig,
    vit_settings: Mapping[str, object],
    other_settings: Mapping[str, object],
) -> None:
    """Raise UserError for an argument that does not apply to this checkpoint; None means that it was not passed.

    vit_settings: arguments of every Vision Transformer. other_settings: arguments of some models.
    """
    is_vit, has_table = isinstance(config, ViTConfig), POSITIONS in checkpoint.weights
    stem = config.stem if isinstance(config, ViTConfig) else config
    applies = dict.fromkeys((*vit_settings, "position_embedding"), (is_vit, "the file is of a ResNet"))
    if has_table and other_settings["position_embedding"] != "learned":
        applies["position_embedding"] = False, "the file has a table of them"
    applies["stored_grid"] = has_table, "the file has no table of position embeddings"
    applies["num_groups"] = isinstance(stem, ResNetConfig), "the file has no GroupNorm"
    applies["conv_stem_strides"] = isinstance(stem, ConvStem), "the file has no early convolutions"
    for name, value in {**vit_settings, **other_settings}.items():
        does, why_not = applies[name]
        if value is not None and not does:
            raise UserError(f"{name}={value!r:.80} does not apply, because {why_not}; leave it out.")


def _default_image_size(checkpoint: Checkpoint, config: ModelConfig) -> tuple[int, int]:
    if POSITIONS in checkpoint.weights and isinstance(config, ViTConfig):
        raise not_square_error(checkpoint.weights[POSITIONS].shape[1] - config.num_prefix_positions)
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
    """A new model with the weights of another one, for other images or classes; like `from_checkpoint` for files.

    Args:
        model: built by `keras_vit.build`; it stays unchanged. Its name and its frozen layers are kept.
        image_size: pixels, or (height, width). None keeps that of the model.
        num_classes: None keeps the head. A number adds a head of zeros; 0 returns the features.
        patch_size: None keeps that of the model.
        channels: of the images. None keeps those of the model.
        channel_rule: see `from_checkpoint`.
        resampler: see `from_checkpoint`.
        keep_pre_logits: see `from_checkpoint`.

    Raises UserError for a model with other layers than its config says, which no new model would have.
    """
    changes = Changes(num_classes, patch_size, channels, channel_rule, resampler, keep_pre_logits)
    check_unchanged(model, _CHANGE_FIRST)
    dtype = model.get_layer("spec").dtype_policy.name
    build_options = BuildOptions(classifier_activation_of(model), None if dtype == "float32" else dtype, model.name)
    adapted = _adapted(model, config_of(model), image_size, changes, build_options)
    frozen = {layer.name for layer in model.layers if not layer.trainable}
    for layer in adapted.layers:
        if layer.name in frozen and not (num_classes is not None and f"{layer.name}.".startswith(_HEAD_LAYERS)):
            layer.trainable = False
    return adapted


def _adapted(
    model: keras.Model,
    config: ModelConfig,
    image_size: int | tuple[int, int] | None,
    changes: "Changes",
    build_options: "BuildOptions",
) -> keras.Model:
    """Build a model with the changes and copy the weights; `config` may differ from the model's in its drop rates."""
    preprocessing, weights = preprocessing_of(model), {}
    for key, value in values_by_key(model).items():
        content = functools.partial(_value_stream, value)
        array = LazyArray(key, tuple(value.shape), np.dtype(np.float32), content)
        weights[key] = Weight(array, array.shape, np.asarray)
    grid = config.grid(preprocessing.image_size) if isinstance(config, ViTConfig) and POSITIONS in weights else None
    if image_size is not None:
        size, preprocessing = preprocessing.image_size, preprocessing.for_image_size(image_size)
        if isinstance(config, ViTConfig) and preprocessing.image_size != size:
            changes.with_patch(config).check_image_size(preprocessing.image_size)
    return build_and_fill(Checkpoint("keras", Layout(()), weights), config, preprocessing, grid, changes, build_options)


def _value_stream(value: Any) -> io.BytesIO:
    return io.BytesIO(np.array(value, np.float32).tobytes())


@dataclasses.dataclass(frozen=True)
class Changes:
    """How a new model differs from the checkpoint it is filled with; None: not at all."""

    num_classes: int | None = None
    patch_size: int | tuple[int, int] | None = None
    channels: int | None = None
    channel_rule: ChannelRule = "mean"
    resampler: Resampler | None = None
    keep_pre_logits: bool = False

    def __post_init__(self) -> None:
        convert_fields(self)
        check_integers("num_classes", self.num_classes, least=0)
        check_integers("channels", self.channels)
        if self.patch_size is not None and not isinstance(self.patch_size, numbers.Integral):
            check_integers("patch_size", self.patch_size, length=2)
        rules = typing.get_args(ChannelRule)
        if self.channel_rule not in rules:
            raise UserError(f"channel_rule must be one of {', '.join(rules)}, but is {self.channel_rule!r}.")
        if self.resampler is not None:
            check_resampler(self.resampler)
        if self.keep_pre_logits and self.num_classes is None:
            raise UserError("keep_pre_logits is for a new head; give num_classes with it, or leave it out.")

    def with_patch(self, config: ViTConfig) -> ViTConfig:
        """The config with the new patch size."""
        return config if self.patch_size is None else dataclasses.replace(config, patch_size=self.patch_size)


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """Arguments of `keras_vit.build` that are not in a file."""

    classifier_activation: str | None = None
    dtype: str | None = None
    name: str | None = None


def build_and_fill(
    checkpoint: Checkpoint,
    config: ModelConfig,
    preprocessing: Preprocessing,
    stored_grid: tuple[int, int] | None,
    changes: Changes,
    build_options: BuildOptions,
) -> keras.Model:
    """Build the model of a checkpoint with the changes and load the weights.

    Args:
        checkpoint: from a file or a model.
        config: architecture of the checkpoint.
        preprocessing: of the new model, with the channels of the checkpoint.
        stored_grid: (rows, columns) of the stored position embeddings, if known.
        changes: to config and preprocessing.
        build_options: the arguments of `build` that no file tells.
    """
    weights, num_classes = checkpoint.weights, changes.num_classes
    new_head = num_classes is not None
    if not new_head:
        num_classes = num_classes_of(weights)
    drops_pre_logits = new_head and not changes.keep_pre_logits
    if isinstance(config, ViTConfig) and drops_pre_logits:
        config = dataclasses.replace(config, representation_size=None)
    if isinstance(config, ViTConfig) and new_head:
        config = dataclasses.replace(config, head_bias=True)  # a new head is no projection
    if changes.patch_size is not None:
        if not isinstance(config, ViTConfig):
            raise UserError("patch_size does not apply to a ResNet, which has no patches; leave it out.")
        config = changes.with_patch(config)
        config.check_image_size(preprocessing.image_size)
        weights = _with_patch(weights, config.patch)
    if changes.channels is not None:
        if isinstance(config, ViTConfig) and isinstance(config.stem, ShiftedPatches):
            raise UserError(
                "Shifted patches are normalized over all channels; keep their number, and leave channels out."
            )
        weights = _with_channels(weights, changes.channels, changes.channel_rule)
        preprocessing = preprocessing.for_channels(changes.channels)
    with no_init_weights():
        model = build(config, preprocessing=preprocessing, num_classes=num_classes, **dataclasses.asdict(build_options))
    keep = HEADS if new_head else ()
    drop = (*keep, "pre_logits/") if drops_pre_logits else keep
    checkpoint = dataclasses.replace(checkpoint, weights=weights)
    assign(model, match_weights(model, checkpoint, changes.resampler, stored_grid, drop=drop, keep=keep).weights)
    return model


def stored_channels(checkpoint: Checkpoint) -> int:
    """Number of image channels of the checkpoint."""
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
