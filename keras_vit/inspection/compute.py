"""Run a model on images and compute the arrays behind every figure."""

import concurrent.futures
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.checkpoints.describe import official_name
from keras_vit.errors import UserError
from keras_vit.images.files import Image
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.inspection import analysis, locality, relevance
from keras_vit.inspection.options import FIGURES
from keras_vit.models.build import config_of, intermediates, logits_model, preprocessing_of
from keras_vit.models.config import ConvStem, ResNetConfig, SegmentationConfig, ShiftedPatches, ViTConfig
from keras_vit.models.positions import PositionEmbedding, PositionEmbedding2D, SinCosPositions
from keras_vit.models.tasks import task_of
from keras_vit.scores import RankedClasses, Scoring

_OF_ATTENTION = ("distance", "rollout", "attention", "norms")

# The largest batch, and the largest number of attention probabilities in memory at once, which limits the batch.
_LARGEST_BATCH, _HELD = 64, 2**26
# Queries of a picture that are shown, those that are surest of a class.
_QUERIES = 4
# Parameters below which a model without a name is called small.
_SMALL = 20_000_000


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
    """The numbers of `locality.py`, and the range of the attention distance in each layer."""
    scoring: Scoring = dataclasses.field(default_factory=Scoring)
    """How the classes follow from the logits."""


def available_figures(model: keras.Model) -> tuple[str, ...]:
    """Return the figures that exist for a model, in the order of FIGURES."""
    config = config_of(model)
    exist, segments = {"filters"}, isinstance(task_of(model), SegmentationConfig)
    if isinstance(config, ViTConfig):
        exist |= {"positions"} if _position_layer(model) else set()
        # Where queries join, there are more tokens than those of the patches.
        exist |= {"queries"} if segments else {*_OF_ATTENTION}
    if relevance.classifies(model):
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
    """Compute the arrays behind the figures of a model.

    Args:
        model: a model built by `keras_vit.build`, with any weights.
        images: images of any size. They are preprocessed as in evaluation. The attention distance is averaged over
            all of them.
        checkpoint: source of the weights, for titles.
        labels: class names. Defaults to the class numbers.
        figures: names from FIGURES. Defaults to all figures that exist for the model.
        shown: number of images with maps; the first ones are taken.
        layers: indices of the layers in the attention maps. Defaults to all.
        heads: indices of the heads in the attention maps. Defaults to all.
        scoring: how the classes follow from the logits. Default: by the softmax, without a threshold.

    Returns:
        An `InspectionResult`.

    Raises:
        UserError: if an argument does not fit the model, or if the model's outputs are not finite.
    """
    scoring = scoring or Scoring()
    model, figures = logits_model(model), _chosen_figures(model, figures)
    config, preprocessing = config_of(model), preprocessing_of(model)
    if not images or shown < 1:
        raise UserError(f"At least one image is required, but there are {len(images)} images with {shown} to show.")
    found, measured = _of_weights(model, figures)
    resized, inputs = model_inputs(images, preprocessing)
    found["images"] = as_uint8(resized[:shown])
    names: tuple[str, ...] = ()
    places: list[int] = []
    chosen_heads: tuple[int, ...] = ()
    if {*figures} & {*_OF_ATTENTION}:
        assert isinstance(config, ViTConfig)
        names, places = _chosen_layers(config, layers)
        chosen_heads = _chosen(heads, config.num_heads, "heads")
        seen, also = _attend(model, inputs, resized, figures, shown, places, list(chosen_heads))
        found, measured = found | seen, measured | also
    elif layers is not None or heads is not None:
        raise UserError(
            "layers and heads select attention maps, but none of the requested figures has attention "
            f"({', '.join(figures)}); leave them out."
        )
    queries: tuple[tuple[str, ...], ...] = ()
    if "queries" in figures:
        found["queries"], queries = _queries(model, inputs[:shown], labels)
    predictions: tuple[RankedClasses, ...] = ()
    if relevance.classifies(model):
        if "relevance" in figures:
            features, gradients, logits = relevance.features_and_gradients(model, inputs[:shown])
            if isinstance(config, ViTConfig):
                where = config.grid(preprocessing.image_size), config.num_prefix_tokens
                features, gradients = (analysis.patch_tokens(tokens, *where) for tokens in (features, gradients))
            found["relevance"] = analysis.class_relevance(features, gradients)
            _check_finite({"logits": logits})
        else:
            logits = logits_of(model, inputs[:shown])
        found["logits"] = logits
        predictions = scoring.rank(logits, labels)
    _check_finite(found)
    return InspectionResult(
        model=model_name(model),
        architecture=_architecture(config),
        checkpoint=checkpoint,
        images=tuple(images[:shown]),
        predictions=predictions,
        image_size=preprocessing.image_size,
        grid=config.grid(preprocessing.image_size) if isinstance(config, ViTConfig) else None,
        filters_are_components=_root_layer(config) is None,
        num_averaged=len(inputs),
        layers=names,
        layer_numbers=tuple(places),
        heads=chosen_heads,
        arrays=found,
        queries=queries,
        measures=measured,
        scoring=scoring,
    )


def _queries(
    model: keras.Model, inputs: np.ndarray, labels: Sequence[str]
) -> tuple[np.ndarray, tuple[tuple[str, ...], ...]]:
    """The masks (B, n, h, w) of the queries of a model that segments, as probabilities, and what each found."""
    outputs = model(inputs, training=False)
    classes = _as_float32(keras.ops.softmax(outputs["class_logits"], axis=-1))[..., :-1]  # (B, Q, K)
    surest = np.argsort(-classes.max(axis=-1), axis=-1, kind="stable")[:, :_QUERIES]  # (B, n)
    masks = np.moveaxis(_as_float32(keras.ops.sigmoid(outputs["mask_logits"])), -1, 1)  # (B, Q, h, w)
    names = labels or [str(number) for number in range(classes.shape[-1])]
    titles = tuple(
        tuple(f"{names[classes[image, query].argmax()]}, {classes[image, query].max():.0%}" for query in chosen)
        for image, chosen in enumerate(surest)
    )
    return np.take_along_axis(masks, surest[:, :, None, None], axis=1), titles


def model_inputs(images: Sequence[Image], preprocessing: Preprocessing) -> tuple[np.ndarray, np.ndarray]:
    """Images of any size as the model sees them: (B, h, w, C) float32 in 0..255, and normalized."""
    resized = np.stack([keras.ops.convert_to_numpy(preprocessing.resized(image.pixels)) for image in images])
    return resized, keras.ops.convert_to_numpy(preprocessing.normalize(resized))


def as_uint8(resized: np.ndarray) -> np.ndarray:
    """Pixels to show."""
    return np.clip(np.round(resized), 0, 255).astype(np.uint8)


def logits_of(model: keras.Model, inputs: np.ndarray) -> np.ndarray:
    """(B, K) float32 of a model of logits. Raises UserError if they are not finite."""
    return checked_logits(model(inputs, training=False))


def checked_logits(logits) -> np.ndarray:
    """A tensor (B, K) as float32. Raises UserError if it is not finite."""
    found = _as_float32(logits)
    _check_finite({"logits": found})
    return found


def _as_float32(tensor) -> np.ndarray:
    """Cast to float32: NumPy cannot store every half precision dtype."""
    return keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32"))


def _check_finite(found: dict[str, np.ndarray]) -> None:
    """Raise UserError if any array is not finite. Plots would show these values as blank."""
    for name, values in found.items():
        if not np.all(np.isfinite(values)):
            raise UserError(
                f"{name!r} of the model is not finite; its weights are broken, or its activations overflow."
            )


def _chosen_figures(model: keras.Model, figures: Sequence[str] | None) -> tuple[str, ...]:
    exist = available_figures(model)
    missing = [figure for figure in figures or () if figure not in exist]
    if missing:
        without = "no attention" if {*missing} & {*_OF_ATTENTION} else "no layer for it"
        raise UserError(
            f"The model has no figure {missing[0]!r} because it has {without}; available figures: {', '.join(exist)}."
        )
    return exist if figures is None else tuple(figure for figure in exist if figure in figures)


def _chosen(numbers: Sequence[int] | None, count: int, what: str) -> tuple[int, ...]:
    if numbers is None:
        return tuple(range(count))
    outside = [number for number in numbers if not 0 <= number < count]
    if outside or not numbers:
        raise UserError(
            f"The model has {count} {what}, numbered 0 to {count - 1}, but --{what} asks for "
            f"{outside[0] if outside else 'none'}."
        )
    return tuple(numbers)


def _chosen_layers(config: ViTConfig, layers: Sequence[int] | None) -> tuple[tuple[str, ...], list[int]]:
    """Names of the selected attention layers and their indices among all; an axial block has two layers."""
    chosen = _chosen(layers, config.num_layers, "layers")
    axes = ("row", "column") if config.axial else ("",)
    names = tuple(f"{layer} {axis}".strip() for layer in chosen for axis in axes)
    return names, [layer * len(axes) + part for layer in chosen for part in range(len(axes))]


def _of_weights(model: keras.Model, figures: Sequence[str]) -> tuple[dict, dict]:
    """Arrays and measures of the figures that depend only on the weights."""
    config = config_of(model)
    found: dict[str, np.ndarray] = {}
    measured: dict[str, Any] = {}
    if "filters" in figures:
        root = _root_layer(config)
        kernel = keras.ops.convert_to_numpy(model.get_layer(root or "embedding").kernel)
        if isinstance(config, ViTConfig) and isinstance(config.stem, ShiftedPatches):
            size = config.stem.patch_size
            kernel = kernel.reshape(size, size, 5, -1, kernel.shape[-1])[:, :, 0]  # of the image itself
        _check_finite({"filters": kernel})  # an SVD fails on values that are not finite
        found["filters"] = analysis.root_filters(kernel) if root else analysis.principal_filters(kernel)
    if "positions" in figures:
        assert isinstance(config, ViTConfig)
        table = _position_table(_position_layer(model), config)
        found["position_similarity"] = analysis.position_similarity(table, config.num_prefix_positions)
        grid = config.grid(preprocessing_of(model).image_size)
        if grid != (1, 1):
            measured["position_similarity"] = locality.neighbourhood(found["position_similarity"], grid)
    return found, measured


def _root_layer(config: ViTConfig | ResNetConfig) -> str | None:
    """Name of the first convolution, or None if it is the patch embedding."""
    if isinstance(config, ViTConfig):
        if config.stem is None or isinstance(config.stem, ShiftedPatches):
            return None
        return "conv_stem.0.conv" if isinstance(config.stem, ConvStem) else "conv_root"
    return "resnet.root_block.standardized_conv2d" if config.preactivation else "conv_root"


def _position_layer(model: keras.Model) -> keras.layers.Layer | None:
    """The first layer that adds position embeddings. A model with one in every block has more."""
    kinds = (PositionEmbedding, PositionEmbedding2D, SinCosPositions)
    return next((layer for layer in model.layers if isinstance(layer, kinds)), None)


def _position_table(layer: keras.layers.Layer, config: ViTConfig) -> np.ndarray:
    """The table that the layer adds to the tokens: (1, T, D)."""
    if isinstance(layer, PositionEmbedding):
        return keras.ops.convert_to_numpy(layer.pos_embedding)
    num_tokens = config.num_prefix_positions + layer.grid[0] * layer.grid[1]
    return keras.ops.convert_to_numpy(layer(np.zeros((1, num_tokens, config.hidden_size), np.float32)))


def _attend(model, inputs, resized, figures, shown, layers: list[int], heads: list[int]) -> tuple[dict, dict]:
    """Arrays and measures of attention, batch by batch. Attention probabilities are not kept between batches."""
    config = config_of(model)
    assert isinstance(config, ViTConfig)
    grid, prefix = config.grid(preprocessing_of(model).image_size), config.num_prefix_tokens
    patch = tuple(side / count for side, count in zip(inputs.shape[1:3], grid, strict=True))
    # Grayscale images with light ink on black have a known foreground: the bright pixels.
    ink = "rollout" in figures and inputs.shape[-1] == 1 and config.stem is None
    if not ink and "distance" not in figures:
        inputs = inputs[:shown]
    to_patches = functools.partial(
        analysis.attention_to_patches, grid=grid, num_prefix_tokens=prefix, has_class_token=config.has_class_token
    )
    seen: dict[str, list] = {"distance": [], "renormalized": [], "rollout": [], "attention": [], "norms": []}
    for first, attentions, blocks in _batches(model, config, inputs, "norms" in figures):
        end = max(shown - first, 0)  # images of this batch that get maps
        if "distance" in figures:
            seen["distance"].append(_distances(attentions, grid, patch, prefix, renormalize=False))
            seen["renormalized"].append(_distances(attentions, grid, patch, prefix, renormalize=True))
        if "rollout" in figures and (ink or end):
            rolled = analysis.attention_rollout(a if ink else a[:end] for a in attentions)
            seen["rollout"].append(np.moveaxis(to_patches(rolled), 0, 1))
        if "attention" in figures and end:
            maps = [to_patches(attentions[layer][:end, heads]) for layer in layers]
            seen["attention"].append(np.stack(maps, axis=1))  # (B, L, H, h, w)
        if blocks and end:
            norms = [analysis.token_norms(analysis.patch_tokens(tokens[:end], grid, prefix)) for tokens in blocks]
            seen["norms"].append(np.stack(norms, axis=1))  # (B, L, h, w)
    found = {name: np.concatenate(parts) for name, parts in seen.items() if parts}
    measured: dict[str, Any] = {}
    if "distance" in found:
        for name, key in (("distance", "attention_distance"), ("renormalized", "attention_distance_renormalized")):
            found[key] = found.pop(name).mean(axis=0)  # (L, H)
        spread = found["attention_distance"]
        measured["attention_distance"] = [
            {"lowest": float(row.min()), "highest": float(row.max())} for row in spread
        ]  # of the heads of each layer, in pixels
    if ink:
        drawn = resized[..., 0] > 127.5
        drawn_on = drawn.any(axis=(1, 2)) & ~drawn.all(axis=(1, 2))
        if drawn_on.any():
            inside, outside = locality.weight_per_pixel(found["rollout"][drawn_on, -1], drawn[drawn_on])
            measured["rollout"] = {"ink": inside, "background": outside, "images": int(drawn_on.sum())}
        found["rollout"] = found["rollout"][:shown]
    return found, measured


def _distances(attentions: list[np.ndarray], grid, patch, num_prefix_tokens: int, *, renormalize: bool) -> np.ndarray:
    """Mean attention distance of each image, layer and head, (B, L, H) in pixels, computed on all cores."""

    def of_layer(probabilities: np.ndarray) -> np.ndarray:
        return analysis.mean_attention_distance(probabilities, grid, patch, num_prefix_tokens, renormalize=renormalize)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return np.stack(list(pool.map(of_layer, attentions)), axis=1)


def _batches(model, config, inputs, with_blocks: bool) -> Iterator[tuple[int, list[np.ndarray], list[np.ndarray]]]:
    """Yield the first image index, attention (B, H, T, T) of each layer and, optionally, tokens of each block."""
    grid = config.grid(preprocessing_of(model).image_size)
    axes = ("row", "column") if config.axial else ("",)
    names = [f"attention_{layer}_{axis}".rstrip("_") for layer in range(config.num_layers) for axis in axes]
    blocks = [f"block_{layer}" for layer in range(config.num_layers)] if with_blocks else []
    inside = intermediates(model, [*names, *blocks])
    num_tokens = grid[0] * grid[1] + config.num_prefix_tokens
    size = max(1, min(_LARGEST_BATCH, _HELD // (len(names) * config.num_heads * num_tokens**2)))
    shows_progress = len(inputs) > size and sys.stdout.isatty()
    progress = keras.utils.Progbar(len(inputs), unit_name="image") if shows_progress else None
    for first in range(0, len(inputs), size):
        outputs = inside(inputs[first : first + size], training=False)
        outputs = {name: _as_float32(value) for name, value in outputs.items()}
        attentions = [outputs[name] for name in names]
        if config.axial:
            attentions = [analysis.unfold_axial(a, grid, axes[layer % 2]) for layer, a in enumerate(attentions)]
        yield first, attentions, [outputs[name] for name in blocks]
        if progress:
            progress.add(min(size, len(inputs) - first))


def model_name(model: keras.Model) -> str:
    """What a model is: its official name, or its kind, and its size, as in "Small ResNet, 131,816 parameters"."""
    config, count = config_of(model), model.count_params()
    kind = official_name(config)
    if kind is None:
        kind = "ResNet" if isinstance(config, ResNetConfig) else "Vision Transformer"
        if isinstance(config, ViTConfig) and config.stem is not None:
            kind = "Hybrid of convolutions and Transformer"
        kind = f"Small {kind}" if count < _SMALL and not kind.startswith("Hybrid") else kind
    return f"{kind}, {count:,} parameters"


def _architecture(config: ViTConfig | ResNetConfig) -> str:
    if isinstance(config, ResNetConfig):
        return f"{len(config.block_units)} stages with {', '.join(map(str, config.block_units))} units"
    patch = " x ".join(map(str, config.patch))
    blocks = f"{config.num_layers} blocks of width {config.hidden_size} with {config.num_heads} heads"
    return f"{blocks}, patches of {patch} pixels"
