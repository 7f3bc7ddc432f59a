"""Build models from checkpoints and from other models, for other images, classes, patches or channels on request.

Changes follow the official code (vit_jax `checkpoint.load_pretrained`); patches are resized as in FlexiViT.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.checkpoints.checkpoint import Checkpoint, LoadOptions, open_checkpoint
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.checkpoints.formats.layout import Layout
from keras_vit.checkpoints.infer_config import first_kernel, infer_blueprint
from keras_vit.checkpoints.key_mapping import POSITIONS, Weight
from keras_vit.checkpoints.layouts import HEADS, num_classes_of
from keras_vit.checkpoints.load import assign, changed_layer, check_unchanged, match_weights, values_by_key
from keras_vit.checkpoints.stored_positions import stored_grid_of
from keras_vit.files.keras_model import MODEL, is_keras_model, load_model
from keras_vit.files.labels import LABELS, read_labels
from keras_vit.files.lazy_array import in_memory
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.build import numbers_of_classes, saved_classes, set_classes
from keras_vit.models.config import (
    Classes,
    Classifier,
    DetectionConfig,
    Gelu,
    PositionEmbeddingKind,
    SegmentationConfig,
    ShiftedPatches,
    ViTConfig,
    with_rates,
)
from keras_vit.models.layers import ModelSpec, no_init_weights
from keras_vit.models.weight_resizing import ChannelRule, Resampler, adapt_channels, resize_patch_kernel

# What to do where a model with a changed graph should be rebuilt.
_CHANGE_FIRST = "adapt the model first, and change its layers then"
_HEAD_LAYERS = tuple(head.replace("/", ".") for head in HEADS)


def from_checkpoint(
    path: str | os.PathLike,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
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
        classes: instead of num_classes: the names of the new model's classes. The head keeps those of the checkpoint's
            classes that are among them, in the new order; rows of other classes are zeros.
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
        dropout_rate, attention_dropout_rate, stochastic_depth_rate: for further training; see `keras_vit.build`.
        keep_pre_logits: keep the tanh layer with a new head (vit_jax: an equal representation_size).
        classifier_activation, dtype, name: see `keras_vit.build`.
    """
    options = LoadOptions(**{option: value for option, value in locals().items() if option != "path"})
    file = find_checkpoint(path)
    if is_keras_model(file):
        return from_keras_model(load_named_model(file), options)
    return build_checkpoint(open_checkpoint(file, options.stored_grid), os.fsdecode(path), options)


def build_checkpoint(checkpoint: Checkpoint, name: str, options: LoadOptions) -> keras.Model:
    """Build the model of an opened checkpoint; for the arguments see `infer_blueprint`."""
    return Original(infer_blueprint(checkpoint, name, options), checkpoint).build(options)


def load_named_model(path: pathlib.Path) -> keras.Model:
    """Load the model of a run or .keras file; the labels.txt of a run, which may be edited, names its classes."""
    model, file = load_model(path), (path if path.is_dir() else path.parent) / LABELS
    is_of_run = path.is_dir() or path.name == MODEL
    if is_of_run and file.is_file() and any(isinstance(layer, ModelSpec) for layer in model.layers):
        labels, classes = read_labels(file), saved_classes(model)
        if (classes is None or classes.labels != labels) and len(labels) in numbers_of_classes(model):
            set_classes(model, dataclasses.replace(classes, labels=labels) if classes else Classes(labels))
    return model


_IN_KERAS_MODEL = (
    *("num_heads", "gelu", "layer_norm_epsilon", "classifier", "position_embedding"),
    *("stored_grid", "num_groups", "conv_stem_strides"),
)


def from_keras_model(model: keras.Model, options: LoadOptions) -> keras.Model:
    """The model of a .keras file with the changes of the options; itself, where none is asked for."""
    options.refuse(dict.fromkeys(_IN_KERAS_MODEL, "a .keras file contains it"))
    blueprint = Blueprint.of(model)
    config = with_rates(blueprint.config, options.rates)
    if options == LoadOptions():
        is_as_asked = config == blueprint.config and blueprint.dtype == keras.config.dtype_policy().name
        if is_as_asked or changed_layer(model):
            return model
    else:
        check_unchanged(model, _CHANGE_FIRST)
    blueprint = dataclasses.replace(
        blueprint,
        config=config,
        classifier_activation=options.classifier_activation or blueprint.classifier_activation,
        dtype=options.dtype,
        name=options.name,
    )
    return Original.of(model, blueprint).build(options)


def adapt(
    model: keras.Model,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
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
        classes: instead of num_classes, see `from_checkpoint`.
        patch_size: None keeps that of the model.
        channels: of the images. None keeps those of the model.
        channel_rule, resampler, keep_pre_logits: see `from_checkpoint`.

    Raises UserError for a model with other layers than its config says, which no new model would have.
    """
    check_unchanged(model, _CHANGE_FIRST)
    options = LoadOptions(**{option: value for option, value in locals().items() if option != "model"})
    blueprint = Blueprint.of(model)
    if blueprint.dtype == "float32":  # then the global policy decides
        blueprint = dataclasses.replace(blueprint, dtype=None)
    adapted = Original.of(model, blueprint).build(options)
    frozen = {layer.name for layer in model.layers if not layer.trainable}
    for layer in adapted.layers:
        if layer.name in frozen and not (num_classes is not None and f"{layer.name}.".startswith(_HEAD_LAYERS)):
            layer.trainable = False
    return adapted


def weight_of(key: str, value: Any) -> Weight:
    """A weight in memory, float32."""
    array = in_memory(key, value)
    return Weight(array, array.shape, np.asarray)


@dataclasses.dataclass(frozen=True)
class Original:
    """The start of a new model: the blueprint of a file, or of another model, and its weights."""

    blueprint: Blueprint
    checkpoint: Checkpoint

    @classmethod
    def of(cls, model: keras.Model, blueprint: Blueprint) -> "Original":
        """Return that of a model in memory; the blueprint may differ from it in what no weight depends on."""
        weights = {key: weight_of(key, value) for key, value in values_by_key(model).items()}
        grid, config = None, blueprint.config
        if isinstance(config, ViTConfig) and POSITIONS in weights:
            grid = config.grid(blueprint.preprocessing.image_size)
        return cls(blueprint, Checkpoint(None, Layout(()), weights, stored_grid=grid))

    def build(self, options: LoadOptions) -> keras.Model:
        """Build a model with the changes of the options, and load the weights."""
        options.refuse(_without_effect(self.blueprint, options))
        options, classes, rows = options.for_classes(self.blueprint.classes)
        weights = _with_rows(self.checkpoint.weights, rows)
        blueprint = dataclasses.replace(self.blueprint, classes=classes, num_classes=num_classes_of(weights))
        drop: tuple[str, ...] = ()
        keep: tuple[str, ...] = ()
        if options.num_classes is not None:
            blueprint, keep = _with_new_head(blueprint, options), HEADS if blueprint.task is None else ("class_head/",)
            drop = keep if options.keep_pre_logits else (*keep, "pre_logits/")
        blueprint, weights = _with_images(blueprint, weights, options)
        grid = stored_grid_of(self.checkpoint, self.blueprint.config)
        checkpoint = dataclasses.replace(self.checkpoint, weights=weights, stored_grid=grid)
        with no_init_weights():
            model = blueprint.build()
        matched, _ = match_weights(model, blueprint.config, checkpoint, options.resampler, drop=drop, keep=keep)
        assign(model, matched)
        return model


def _with_new_head(blueprint: Blueprint, options: LoadOptions) -> Blueprint:
    config, task, number = blueprint.config, blueprint.task, options.num_classes or 0
    if isinstance(task, SegmentationConfig):
        task = dataclasses.replace(task, num_classes=number)
    elif task is None and isinstance(config, ViTConfig):  # a new head is no projection
        config = dataclasses.replace(config, head_bias=True)
        if not options.keep_pre_logits:
            config = dataclasses.replace(config, representation_size=None, representation="tanh", normalized=False)
    return dataclasses.replace(blueprint, config=config, task=task, num_classes=number)


def _with_images(
    blueprint: Blueprint, weights: Mapping[str, Weight], options: LoadOptions
) -> tuple[Blueprint, Mapping[str, Weight]]:
    """Return both for images of the size, patches and channels that the options name."""
    config, preprocessing = blueprint.config, blueprint.preprocessing
    if options.size not in (None, preprocessing.image_size):
        preprocessing = preprocessing.for_image_size(options.size)
    if isinstance(config, ViTConfig):
        config = options.with_patch(config)
        if config != blueprint.config or preprocessing != blueprint.preprocessing:
            config.check_image_size(preprocessing.image_size)
    if options.patch_size is not None and isinstance(config, ViTConfig):
        kernel, patch = weights["embedding/kernel"], config.patch
        resized = kernel.mapped((*patch, *kernel.shape[2:]), lambda array: resize_patch_kernel(array, patch))
        weights = {**weights, "embedding/kernel": resized}
    if (channels := options.channels) is not None:
        key = first_kernel(weights)
        kernel = weights[key]
        shape = (*kernel.shape[:2], channels, kernel.shape[3])
        adapted = kernel.mapped(shape, lambda array: adapt_channels(array, channels, options.channel_rule))
        weights, preprocessing = {**weights, key: adapted}, preprocessing.for_channels(channels)
    return dataclasses.replace(blueprint, config=config, preprocessing=preprocessing), weights


def _without_effect(blueprint: Blueprint, options: LoadOptions) -> dict[str, str]:
    """Options that do not apply to any model of this config and task, and why."""
    reasons, config, task = {}, blueprint.config, blueprint.task
    if task is not None:
        names = ["classifier", "classifier_activation", "classes", "keep_pre_logits"]
        names += ["num_classes"] if isinstance(task, DetectionConfig) or options.num_classes == 0 else []
        reasons = dict.fromkeys(names, f"the model is of a {type(task).__name__}, not of a classifier")
    if not isinstance(config, ViTConfig):
        return reasons | {"patch_size": "the file is of a ResNet"}
    if isinstance(config.stem, ShiftedPatches):
        reasons["channels"] = "shifted patches are normalized over all of them"
    return reasons


def _with_rows(weights: Mapping[str, Weight], rows: Sequence[int | None]) -> Mapping[str, Weight]:
    """The weights with a head of these rows of it, that is columns of the kernel; None is a row of zeros."""
    if not rows:
        return weights
    known, taken = np.array([row is not None for row in rows], np.float32), [row or 0 for row in rows]
    heads = {
        key: weight.mapped((*weight.shape[:-1], len(rows)), lambda array: array[..., taken] * known)
        for key, weight in weights.items()
        if key.startswith(HEADS)
    }
    return {**weights, **heads}
