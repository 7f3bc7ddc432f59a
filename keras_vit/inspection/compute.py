"""Run a model on images and compute the arrays behind every figure."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit.checkpoints.describe import official_name
from keras_vit.errors import check_choice, refuse_first
from keras_vit.images.files import Image
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.inspection import FIGURES, analysis
from keras_vit.inspection.attention import ATTENTION_FIGURES, Attention, as_float32
from keras_vit.models.build import check_classifies, classifies, config_of, logits_model, preprocessing_of, task_of
from keras_vit.models.config import ConvStem, ResNetConfig, SegmentationConfig, ShiftedPatches, ViTConfig
from keras_vit.models.positions import PositionEmbedding, PositionEmbedding2D, SinCosPositions
from keras_vit.scores import RankedClasses, Scoring

_BATCH = 32  # images of one forward pass that ranks classes
_QUERIES = 4  # queries of an image that are shown, those that are surest of a class
_SMALL = 20_000_000  # parameters below which a model without a name is called small


@dataclasses.dataclass(frozen=True)
class InspectionResult:
    """The arrays and measurements that `inspect` computes for a model."""

    model: str
    """Official name of the model, or what it is and how large."""
    architecture: str
    """Its sizes in words."""
    checkpoint: str
    """Source of the weights, for titles."""
    images: tuple[Image, ...]
    """The images with maps, before preprocessing."""
    predictions: tuple[RankedClasses, ...]
    """The classes of each image; empty for a model without a head."""
    image_size: tuple[int, int]
    """Height and width of the input in pixels."""
    grid: tuple[int, int] | None
    """Rows and columns of patches; None for a ResNet."""
    filters_are_components: bool
    """Whether "filters" are principal components of the patch embedding. If not, they are filters of a convolution."""
    num_averaged: int
    """Number of images in the average of the attention distance."""
    layers: tuple[str, ...]
    """Names of the layers in "attention", such as "3"; an axial model has "3 row" and "3 column"."""
    layer_numbers: tuple[int, ...]
    """Indices of these layers in "rollout" and "attention_distance"."""
    heads: tuple[int, ...]
    """Indices of the heads in "attention"."""
    arrays: dict[str, np.ndarray]
    """Arrays of the requested figures by name. docs/reference/inspection.md lists their shapes and units."""
    queries: tuple[tuple[str, ...], ...]
    """Class and probability of each query in "queries", of each image."""
    measures: dict[str, Any]
    """The numbers of `neighbourhood` and `weight_per_pixel`, and the range of the attention distance in each layer."""
    scoring: Scoring = dataclasses.field(default_factory=Scoring)
    """How the classes follow from the logits."""

    def __post_init__(self) -> None:
        _check_finite(self.arrays)


def available_figures(model: keras.Model) -> tuple[str, ...]:
    """Return the figures that exist for a model, in the order of FIGURES."""
    config = config_of(model)
    exist, segments = {"filters"}, isinstance(task_of(model), SegmentationConfig)
    if isinstance(config, ViTConfig):
        exist |= {"positions"} if _position_layer(model) else set()
        # Where queries join, there are more tokens than those of the patches.
        exist |= {"queries"} if segments else {*ATTENTION_FIGURES}
    if classifies(model):
        exist.add("relevance")
    return tuple(figure for figure in FIGURES if figure in exist)


def inspect(
    model: keras.Model,
    images: Sequence[Image],
    *,
    checkpoint: str,
    labels: Sequence[str] = (),
    figures: Sequence[str] | None = None,
    shown: int = 8,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    scoring: Scoring | None = None,
) -> InspectionResult:
    """Compute the arrays behind the figures of a model. Raises UserError for what it does not have, and for NaN.

    Args:
        model: a model built by `keras_vit.build`, with any weights.
        images: of any size, preprocessed as in evaluation. The attention distance is averaged over all of them.
        checkpoint: source of the weights, for titles.
        labels: class names. Default to the class numbers.
        figures: names from FIGURES. Default to all figures that exist for the model.
        shown: number of images with maps; the first ones are taken.
        layers, heads: their indices in the attention maps. Default to all.
        scoring: how the classes follow from the logits. Default: by the softmax, without a threshold.
    """
    model, figures, scoring = logits_model(model), _chosen_figures(model, figures), scoring or Scoring()
    attention = Attention.select(model, figures, shown, layers, heads)
    arrays, measures = _of_weights(model, figures)
    config, size = config_of(model), preprocessing_of(model).image_size
    resized, inputs = model_inputs(images, preprocessing_of(model))
    of_attention = attention.compute(inputs, resized)
    of_outputs, queries = _of_outputs(model, figures, inputs[:shown], labels)
    arrays |= {"images": np.clip(np.round(resized[:shown]), 0, 255).astype(np.uint8), **of_attention[0], **of_outputs}
    return InspectionResult(
        model=model_name(model),
        architecture=_architecture(config),
        image_size=size,
        grid=config.grid(size) if isinstance(config, ViTConfig) else None,
        filters_are_components=_root_layer(config) is None,
        checkpoint=checkpoint,
        images=tuple(images[:shown]),
        predictions=scoring.rank(arrays["logits"], labels) if "logits" in arrays else (),
        num_averaged=len(inputs),
        layers=attention.names,
        layer_numbers=attention.layers,
        heads=attention.heads,
        arrays=arrays,
        queries=queries,
        measures=measures | of_attention[1],
        scoring=scoring,
    )


def _of_outputs(
    model: keras.Model, figures: Sequence[str], inputs: np.ndarray, labels: Sequence[str]
) -> tuple[dict[str, np.ndarray], tuple[tuple[str, ...], ...]]:
    """Return what the model says of the images as arrays, and the titles of its queries."""
    arrays, titles = dict[str, np.ndarray](), tuple[tuple[str, ...], ...]()
    if "queries" in figures:
        arrays["queries"], titles = _queries(model, inputs, labels)
    if "relevance" in figures:
        features, gradients, logits = features_and_gradients(model, inputs)
        config = config_of(model)
        if isinstance(config, ViTConfig):
            where = config.grid(preprocessing_of(model).image_size), config.num_prefix_tokens
            features, gradients = (analysis.patch_tokens(tokens, *where) for tokens in (features, gradients))
        arrays["relevance"] = analysis.class_relevance(features, gradients)
        arrays["logits"] = checked_logits(logits)
    elif classifies(model):
        arrays["logits"] = checked_logits(model(inputs, training=False))
    return arrays, titles


def is_mistake(label: str | None, ranked: RankedClasses | None) -> bool:
    """Return whether the most likely class of an image is not its label, where both are known."""
    return label is not None and ranked is not None and ranked.likeliest[0][0] != label


def mistakes_first(
    model: keras.Model, images: Sequence[Image], labels: Sequence[str], scoring: Scoring, count: int
) -> list[Image]:
    """The images, with up to `count` that the model takes for another class at the start, the surest mistakes first."""
    model = logits_model(model)
    if not classifies(model) or all(image.label is None for image in images):
        return list(images)
    inputs = model_inputs(images, preprocessing_of(model))[1]
    batches = (inputs[n : n + _BATCH] for n in range(0, len(images), _BATCH))
    logits = np.concatenate([checked_logits(model(batch, training=False)) for batch in batches])
    ranked = scoring.rank(logits, labels)
    wrong = [n for n, image in enumerate(images) if is_mistake(image.label, ranked[n])]
    wrong = sorted(wrong, key=lambda n: -ranked[n].likeliest[0][1])[:count]
    return [images[n] for n in wrong] + [image for n, image in enumerate(images) if n not in wrong]


def _queries(
    model: keras.Model, inputs: np.ndarray, labels: Sequence[str]
) -> tuple[np.ndarray, tuple[tuple[str, ...], ...]]:
    """Return the masks (B, n, h, w) of the queries of a model that segments, as probabilities, and what each found."""
    outputs = model(inputs, training=False)
    classes = as_float32(keras.ops.softmax(outputs["class_logits"], axis=-1))[..., :-1]  # (B, Q, K)
    surest = np.argsort(-classes.max(axis=-1), axis=-1, kind="stable")[:, :_QUERIES]  # (B, n)
    masks = np.moveaxis(as_float32(keras.ops.sigmoid(outputs["mask_logits"])), -1, 1)  # (B, Q, h, w)
    names = labels or [str(number) for number in range(classes.shape[-1])]
    shown = np.take_along_axis(classes, surest[:, :, None], axis=1)  # (B, n, K)
    titles = tuple(tuple(f"{names[each.argmax()]}, {each.max():.0%}" for each in image) for image in shown)
    return np.take_along_axis(masks, surest[:, :, None, None], axis=1), titles


def model_inputs(images: Sequence[Image], preprocessing: Preprocessing) -> tuple[np.ndarray, np.ndarray]:
    """Return images of any size as the model sees them: (B, h, w, C) float32 in 0..255, and normalized."""
    resized = np.stack([keras.ops.convert_to_numpy(preprocessing.resized(image.pixels)) for image in images])
    return resized, keras.ops.convert_to_numpy(preprocessing.normalize(resized))


def checked_logits(logits) -> np.ndarray:
    """Return a tensor (B, K) as float32. Raises UserError if it is not finite."""
    values = as_float32(logits)
    _check_finite({"logits": values})
    return values


def _check_finite(arrays: dict[str, np.ndarray]) -> None:
    """Raise UserError if any array is not finite. Plots would show these values as blank."""
    why = "of the model is not finite; its weights are broken, or its activations overflow"
    refuse_first((not np.all(np.isfinite(values)), f"{name!r} {why}.") for name, values in arrays.items())


def _chosen_figures(model: keras.Model, figures: Sequence[str] | None) -> tuple[str, ...]:
    exist = available_figures(model)
    for figure in figures or ():
        check_choice("A figure of this model", figure, exist)
    return exist if figures is None else tuple(figure for figure in exist if figure in figures)


def _of_weights(model: keras.Model, figures: Sequence[str]) -> tuple[dict, dict]:
    config, arrays, measures = config_of(model), dict[str, np.ndarray](), dict[str, Any]()
    if "filters" in figures:
        root = _root_layer(config)
        kernel = keras.ops.convert_to_numpy(model.get_layer(root or "embedding").kernel)
        if isinstance(config, ViTConfig) and isinstance(config.stem, ShiftedPatches):
            size = config.stem.patch_size
            kernel = kernel.reshape(size, size, 5, -1, kernel.shape[-1])[:, :, 0]  # of the image itself
        _check_finite({"filters": kernel})  # an SVD fails on values that are not finite
        arrays["filters"] = analysis.root_filters(kernel) if root else analysis.principal_filters(kernel)
    if "positions" in figures:
        assert isinstance(config, ViTConfig)
        table = _position_table(_position_layer(model), config)
        arrays["position_similarity"] = analysis.position_similarity(table, config.num_prefix_positions)
        grid = config.grid(preprocessing_of(model).image_size)
        if grid != (1, 1):
            measures["position_similarity"] = analysis.neighbourhood(arrays["position_similarity"], grid)
    return arrays, measures


def _root_layer(config: ViTConfig | ResNetConfig) -> str | None:
    """Name of the first convolution, or None if it is the patch embedding."""
    if isinstance(config, ViTConfig):
        if config.stem is None or isinstance(config.stem, ShiftedPatches):
            return None
        return "conv_stem.0.conv" if isinstance(config.stem, ConvStem) else "conv_root"
    return "resnet.root_block.standardized_conv2d" if config.preactivation else "conv_root"


def _position_layer(model: keras.Model) -> keras.layers.Layer | None:
    """Return the first layer that adds position embeddings. A model with one in every block has more."""
    classes = (PositionEmbedding, PositionEmbedding2D, SinCosPositions)
    return next((layer for layer in model.layers if isinstance(layer, classes)), None)


def _position_table(layer: keras.layers.Layer, config: ViTConfig) -> np.ndarray:
    if isinstance(layer, PositionEmbedding):
        return keras.ops.convert_to_numpy(layer.pos_embedding)
    num_tokens = config.num_prefix_positions + layer.grid[0] * layer.grid[1]
    return keras.ops.convert_to_numpy(layer(np.zeros((1, num_tokens, config.hidden_size), np.float32)))


def model_name(model: keras.Model) -> str:
    """Describe a model by its official name, or its kind, and its size: "Small ResNet, 131,816 parameters"."""
    config, count = config_of(model), model.count_params()
    name = official_name(config)
    if name is None and isinstance(config, ViTConfig) and config.stem is not None:
        name = "Hybrid of convolutions and Transformer"
    elif name is None:
        family = "ResNet" if isinstance(config, ResNetConfig) else "Vision Transformer"
        name = f"Small {family}" if count < _SMALL else family
    return f"{name}, {count:,} parameters"


def _architecture(config: ViTConfig | ResNetConfig) -> str:
    if isinstance(config, ResNetConfig):
        return f"{len(config.block_units)} stages with {', '.join(map(str, config.block_units))} units"
    patch = " x ".join(map(str, config.patch))
    blocks = f"{config.num_layers} blocks of width {config.hidden_size} with {config.num_heads} heads"
    return f"{blocks}, patches of {patch} pixels"


def features_and_gradients(
    model: keras.Model, images: np.ndarray, classes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the last feature map, its gradients for one class per image, and the logits.

    For a ResNet, the feature map is the input of the global pooling, so relevance is the class activation map. For a
    ViT, it is the input of the last attention: after that layer, only the class token has a gradient.

    The model runs in inference mode.

    Args:
        model: a model built by `keras_vit.build` that classifies images.
        images: (B, height, width, channels), preprocessed.
        classes: (B,), class indices. Defaults to the most likely class of each image.

    Returns:
        A tuple `(features, gradients, logits)`, all float32. Features and gradients have shape (B, T, D) for a ViT,
        with the class token, or (B, h, w, C) for a ResNet. Logits have shape (B, K).

    Raises UserError if the model has no head.
    """
    check_classifies(model, f"The model {model.name!r}")
    model = logits_model(model)
    inputs = _last_feature_map(model)  # tensors that bypass the feature map, and the feature map
    outputs = keras.Model(model.input, [*inputs, model.output])(images, training=False)
    *bypassing, features, logits = outputs
    features, logits = (ops.convert_to_numpy(ops.cast(output, "float32")) for output in (features, logits))
    classes = logits.argmax(axis=-1) if classes is None else classes
    chosen = np.eye(logits.shape[-1], dtype=np.float32)[classes]  # (B, K)
    tail = keras.Model(inputs, model.output)

    def sum_of_chosen_logits(features):
        # Images are independent at inference, so one gradient of the sum gives the gradient of each.
        logits = tail([*bypassing, features], training=False)
        return ops.sum(chosen * ops.cast(logits, "float32"))

    return features, gradient(sum_of_chosen_logits, features), logits


def _last_feature_map(model: keras.Model) -> list:
    """Tensors from which the model computes its logits; the last one is the feature map."""
    config = config_of(model)
    if isinstance(config, ResNetConfig):
        return [model.get_layer("pool").input]
    assert isinstance(config, ViTConfig)
    block = f"Transformer.encoderblock_{config.num_layers - 1}{'.row' if config.axial else ''}"
    norm = model.get_layer(f"{block}.LayerNorm_0")
    return [norm.input, norm.output]


def gradient(function: Callable, point: np.ndarray) -> np.ndarray:
    """Return the gradient of a scalar function at a point, an array of the shape of `point`.

    By the automatic differentiation of the backend, since `keras.ops` has none.

    Args:
        function: maps one tensor to a scalar tensor, with `keras.ops` and layers.
        point: floating point array of any shape.
    """
    tensor = ops.convert_to_tensor(point)
    if keras.backend.backend() == "jax":
        import jax

        return ops.convert_to_numpy(jax.grad(function)(tensor))
    import tensorflow as tf

    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(tensor)
        number = function(tensor)
    return ops.convert_to_numpy(tape.gradient(number, tensor))
