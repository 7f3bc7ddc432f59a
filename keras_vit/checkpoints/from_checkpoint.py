"""Build models from checkpoints and from other models, for other images, classes, patches or channels on request.

Changes follow the official code (vit_jax `checkpoint.load_pretrained`); patches are resized as in FlexiViT.
"""

import dataclasses
import io
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.checkpoints.checkpoint import (
    RATES,
    Checkpoint,
    LoadOptions,
    not_square_error,
    open_checkpoint,
    refuse_unexpected_keys,
)
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.checkpoints.formats.layout import Layout
from keras_vit.checkpoints.infer_config import (
    FIRST_CONVOLUTIONS,
    infer_config,
    infer_task,
    known_image_size,
    known_num_heads,
    original_preprocessing,
    refuse_ambiguous_settings,
    stored_grid_of,
)
from keras_vit.checkpoints.key_mapping import POSITIONS, Weight
from keras_vit.checkpoints.layouts import HEADS, num_classes_of
from keras_vit.checkpoints.load import assign, changed_layer, check_unchanged, match_weights, values_by_key
from keras_vit.files.keras_model import MODEL, is_keras_model, load_model
from keras_vit.files.labels import LABELS, read_labels
from keras_vit.files.lazy_array import LazyArray
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.build import (
    numbers_of_classes,
    saved_classes,
    set_classes,
)
from keras_vit.models.config import (
    Classes,
    Classifier,
    ConvStem,
    DetectionConfig,
    Gelu,
    ModelConfig,
    PositionEmbeddingKind,
    ResNetConfig,
    SegmentationConfig,
    ShiftedPatches,
    ViTConfig,
)
from keras_vit.models.layers import ModelSpec, no_init_weights
from keras_vit.models.weight_resizing import ChannelRule, Resampler, adapt_channels, resize_patch_kernel

# What to do where a model with a changed graph should be rebuilt.
_CHANGE_FIRST = "adapt the model first, and change its layers then"
_HEAD_LAYERS = tuple(head.replace("/", ".") for head in HEADS)
_DEFAULT_SIZE = 224, 224  # pixels, for models without position embeddings


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
    options = LoadOptions(
        image_size=image_size,
        num_classes=num_classes,
        classes=None if classes is None else tuple(classes),
        patch_size=patch_size,
        channels=channels,
        channel_rule=channel_rule,
        resampler=resampler,
        stored_grid=stored_grid,
        classifier=classifier,
        position_embedding=position_embedding,
        num_heads=num_heads,
        num_groups=num_groups,
        conv_stem_strides=conv_stem_strides,
        gelu=gelu,
        layer_norm_epsilon=layer_norm_epsilon,
        dropout_rate=dropout_rate,
        attention_dropout_rate=attention_dropout_rate,
        stochastic_depth_rate=stochastic_depth_rate,
        keep_pre_logits=keep_pre_logits,
        classifier_activation=classifier_activation,
        dtype=dtype,
        name=name,
    )
    return build_source(path, options)


# Changes the config and the weights of a classifier before it is built.
Edit = Callable[[ModelConfig, Mapping[str, Weight]], tuple[ModelConfig, Mapping[str, Weight]]]


def build_source(path: str | os.PathLike, options: LoadOptions, edit: Edit | None = None) -> keras.Model:
    """`from_checkpoint` with its options in one object; for `edit` see `build_checkpoint`."""
    file = find_checkpoint(path)
    if is_keras_model(file):
        return _from_keras_model(load_named_model(file), options)
    return build_checkpoint(open_checkpoint(file, options.stored_grid), os.fsdecode(path), options, edit)


def build_checkpoint(checkpoint: Checkpoint, name: str, options: LoadOptions, edit: Edit | None = None) -> keras.Model:
    """Build the model of an opened checkpoint.

    Args:
        checkpoint: of a published layout.
        name: by which it was opened, for messages and the name of the model.
        options: what the files do not say, and what is changed.
        edit: changes the config and the weights of a classifier first, such as to give it another head; not called for
            another task.
    """
    refuse_unexpected_keys(checkpoint)
    refuse_ambiguous_settings(checkpoint, options)
    config = infer_config(checkpoint, options)
    options.refuse(_inapplicable(checkpoint, config, options))
    if isinstance(config, ViTConfig):
        config = dataclasses.replace(config, **options.rates)
        if options.size is not None and options.size != checkpoint.file_config.image_size:
            options.with_patch(config).check_image_size(options.size)
    task = infer_task(checkpoint)
    preprocessing = _preprocessing(checkpoint, config, name, options)
    checkpoint = dataclasses.replace(checkpoint, stored_grid=stored_grid_of(checkpoint, config))
    if edit is not None and task is None:
        config, weights = edit(config, checkpoint.weights)
        checkpoint = dataclasses.replace(checkpoint, weights=weights)
    activation = None if options.num_classes is not None else checkpoint.file_config.classifier_activation
    # The name of the folder or file, in letters that layers may have.
    last = re.sub(r"\.(npz|safetensors|h5)$", "", name.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1])
    own_name = re.sub(r"[^A-Za-z0-9_.-]", "_", last).strip("._-") or None
    blueprint = Blueprint(
        config,
        preprocessing,
        task=task,
        classes=checkpoint.classes,
        classifier_activation=options.classifier_activation or activation,
        dtype=options.dtype,
        name=options.name or own_name,
    )
    return _build_and_fill(blueprint, checkpoint, options)


def _preprocessing(checkpoint: Checkpoint, config: ModelConfig, name: str, options: LoadOptions) -> Preprocessing:
    """Return that of the model; say what is assumed, and warn where the original makes other images."""
    size = options.size or known_image_size(checkpoint, config)
    if size is None:
        if POSITIONS in checkpoint.weights and isinstance(config, ViTConfig):
            raise not_square_error(checkpoint.weights[POSITIONS].shape[1] - config.num_prefix_positions)
        size = _DEFAULT_SIZE
    num_channels = _first_kernel(checkpoint.weights)[1].shape[2]
    _warn_of_images(checkpoint, name, None if options.size else size, num_channels)
    preprocessing = original_preprocessing(checkpoint, size, num_channels)
    if assumed := _assumed(checkpoint, config, options, preprocessing):
        print(f"Not in the files of {checkpoint.path}, and assumed: {'; '.join(assumed)}.")
    return preprocessing


def load_named_model(path: pathlib.Path) -> keras.Model:
    """Load the model of a run or .keras file; the labels.txt of a run, which may be edited, names its classes."""
    model, file = load_model(path), (path if path.is_dir() else path.parent) / LABELS
    is_of_run = path.is_dir() or path.name == MODEL
    if is_of_run and file.is_file() and any(isinstance(layer, ModelSpec) for layer in model.layers):
        labels, classes = read_labels(file), saved_classes(model)
        if (classes is None or classes.labels != labels) and len(labels) in numbers_of_classes(model):
            set_classes(model, dataclasses.replace(classes, labels=labels) if classes else Classes(labels))
    return model


def _warn_of_images(checkpoint: Checkpoint, path: str, size: tuple[int, int] | None, num_channels: int) -> None:
    """Warn where the original makes other images. size: that of the file, unless the caller gave one."""
    images = checkpoint.file_config.images
    if images is None:
        return
    if None not in (images.size, size) and images.size != size:
        made, taken = ("x".join(map(str, each or ())) for each in (images.size, size))
        warnings.warn(
            f"The original of {path} gives its model images of {made} pixels, although the position embeddings are for "
            f"{taken} pixels, which the model here takes; pass image_size={max(images.size or ())} for its "
            "predictions.",
            stacklevel=5,
        )
    if images.num_channels not in (None, num_channels):
        warnings.warn(
            f"{path} says how {images.num_channels} channels are normalized, but its images have {num_channels}; here "
            "they are scaled to [-1, 1].",
            stacklevel=5,
        )


def _assumed(
    checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions, preprocessing: Preprocessing
) -> list[str]:
    """Return the settings that the files do not contain, although models of this format differ in them."""
    if checkpoint.format is None or not checkpoint.format.config_files:
        return []
    file_config, assumed = checkpoint.file_config, list[str]()
    if not checkpoint.is_preprocessing_known:
        assumed.append(preprocessing.summary())
    if file_config.gelu is None and isinstance(config, ViTConfig):
        assumed += [f"{config.num_heads} heads"] if known_num_heads(checkpoint, options) is None else []
        assumed += [f"GELU {config.gelu}"] if options.gelu is None else []
    return assumed


_IN_KERAS_MODEL = (
    *("num_heads", "gelu", "layer_norm_epsilon", "classifier", "position_embedding"),
    *("stored_grid", "num_groups", "conv_stem_strides"),
)


def _from_keras_model(model: keras.Model, options: LoadOptions) -> keras.Model:
    options.refuse(dict.fromkeys(_IN_KERAS_MODEL, "a .keras file contains it"))
    blueprint = Blueprint.of(model)
    config = blueprint.config
    if options == LoadOptions():
        is_as_asked = not any(getattr(config, rate, 0.0) for rate in options.rates)
        if (is_as_asked and blueprint.dtype == keras.config.dtype_policy().name) or changed_layer(model):
            return model
    else:
        check_unchanged(model, _CHANGE_FIRST)
    if isinstance(config, ViTConfig):
        config = dataclasses.replace(config, **options.rates)
    blueprint = dataclasses.replace(
        blueprint,
        config=config,
        classifier_activation=options.classifier_activation or blueprint.classifier_activation,
        dtype=options.dtype,
        name=options.name,
    )
    return _adapted(model, blueprint, options)


def _inapplicable(checkpoint: Checkpoint, config: ModelConfig, options: LoadOptions) -> dict[str, str]:
    is_vit, has_table = isinstance(config, ViTConfig), POSITIONS in checkpoint.weights
    stem = config.stem if isinstance(config, ViTConfig) else config
    of_vit = ("num_heads", "gelu", "layer_norm_epsilon", "classifier", "position_embedding")
    inapplicable: dict[str, str] = {} if is_vit else dict.fromkeys(of_vit, "the file is of a ResNet")
    if has_table and options.position_embedding != "learned":
        inapplicable["position_embedding"] = "the file has a table of them"
    if not has_table:
        inapplicable["stored_grid"] = "the file has no table of position embeddings"
    if not isinstance(stem, ResNetConfig):
        inapplicable["num_groups"] = "the file has no GroupNorm"
    if not isinstance(stem, ConvStem):
        inapplicable["conv_stem_strides"] = "the file has no early convolutions"
    return inapplicable


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
    options = LoadOptions(
        image_size=image_size,
        num_classes=num_classes,
        classes=None if classes is None else tuple(classes),
        patch_size=patch_size,
        channels=channels,
        channel_rule=channel_rule,
        resampler=resampler,
        keep_pre_logits=keep_pre_logits,
    )
    blueprint = Blueprint.of(model)
    if blueprint.dtype == "float32":  # then the global policy decides
        blueprint = dataclasses.replace(blueprint, dtype=None)
    adapted = _adapted(model, blueprint, options)
    frozen = {layer.name for layer in model.layers if not layer.trainable}
    for layer in adapted.layers:
        if layer.name in frozen and not (num_classes is not None and f"{layer.name}.".startswith(_HEAD_LAYERS)):
            layer.trainable = False
    return adapted


def _adapted(model: keras.Model, blueprint: Blueprint, options: LoadOptions) -> keras.Model:
    """Build a model with the changes and copy the weights; the blueprint may differ from the model in its rates."""
    weights = {key: weight_of(key, value) for key, value in values_by_key(model).items()}
    config, preprocessing, grid = blueprint.config, blueprint.preprocessing, None
    if isinstance(config, ViTConfig) and POSITIONS in weights:
        grid = config.grid(preprocessing.image_size)
    if options.image_size is not None:
        size, preprocessing = preprocessing.image_size, preprocessing.for_image_size(options.image_size)
        if isinstance(config, ViTConfig) and preprocessing.image_size != size:
            options.with_patch(config).check_image_size(preprocessing.image_size)
    checkpoint = Checkpoint(None, Layout(()), weights, stored_grid=grid)
    return _build_and_fill(dataclasses.replace(blueprint, preprocessing=preprocessing), checkpoint, options)


def weight_of(key: str, value: Any) -> Weight:
    """A weight in memory, float32."""
    array = LazyArray(
        key, tuple(value.shape), np.dtype(np.float32), lambda: io.BytesIO(np.array(value, np.float32).tobytes())
    )
    return Weight(array, array.shape, np.asarray)


def _build_and_fill(blueprint: Blueprint, checkpoint: Checkpoint, options: LoadOptions) -> keras.Model:
    """Build the model of a checkpoint, from a file or a model, with the changes, and load the weights."""
    options.refuse(_without_effect(blueprint, options))
    options, classes, rows = options.for_classes(blueprint.classes)
    weights = _with_rows(checkpoint.weights, rows)
    blueprint = dataclasses.replace(blueprint, classes=classes, num_classes=num_classes_of(weights))
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    if options.num_classes is not None:
        blueprint, keep = _with_new_head(blueprint, options), HEADS if blueprint.task is None else ("class_head/",)
        drop = keep if options.keep_pre_logits else (*keep, "pre_logits/")
    blueprint, weights = _with_input(blueprint, weights, options)
    with no_init_weights():
        model = blueprint.build()
    checkpoint = dataclasses.replace(checkpoint, weights=weights)
    matched, _ = match_weights(model, checkpoint, options.resampler, drop=drop, keep=keep)
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


def _with_input(
    blueprint: Blueprint, weights: Mapping[str, Weight], options: LoadOptions
) -> tuple[Blueprint, Mapping[str, Weight]]:
    """Return both for the patches and channels that the options name."""
    config, preprocessing = blueprint.config, blueprint.preprocessing
    if options.patch_size is not None and isinstance(config, ViTConfig):
        config = options.with_patch(config)
        config.check_image_size(preprocessing.image_size)
        kernel, patch = weights["embedding/kernel"], config.patch
        resized = kernel.mapped((*patch, *kernel.shape[2:]), lambda array: resize_patch_kernel(array, patch))
        weights = {**weights, "embedding/kernel": resized}
    if (channels := options.channels) is not None:
        key, kernel = _first_kernel(weights)
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
        return reasons | dict.fromkeys(("patch_size", *RATES), "the file is of a ResNet")
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


def _first_kernel(weights: Mapping[str, Weight]) -> tuple[str, Weight]:
    key = next(key for key in (*FIRST_CONVOLUTIONS, "embedding/kernel") if key in weights)
    return key, weights[key]
