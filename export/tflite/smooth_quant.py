"""SmoothQuant: the channels of a model become more even before it is quantized, without changing a bit of its outputs.

In large Vision Transformers a few channels of the activations are a hundred times as large as the others. One scale in
8 bits for all channels then leaves the others with a few levels. So each channel of a LayerNorm is divided by a number,
and its row in the products behind it is multiplied by it: "SmoothQuant" (arXiv 2211.10438) equation 4, "RepQ-ViT"
(arXiv 2212.08254). In the same way the channels of the value of attention move into the output product.

The numbers are powers of two, so the float32 model stays the same to the last bit.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import keras
import numpy as np
import threadpoolctl

from export.inference_model import float32_copy
from keras_vit.cli.progress import tracked
from keras_vit.models.attention import DotProductAttention
from keras_vit.models.layers import PoolTokens, no_init_weights

# Shares of the scale that the activations give; the weights give the rest. SmoothQuant takes 0.5 for most models.
_ALPHAS = (0.25, 0.5, 0.75, 1.0)
# The error of the products must fall to this share, so that models with even channels stay as they are.
_WORTHWHILE = 0.8
# Tokens on which the error is measured.
_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class ScaledActivation:
    """A tensor whose channels can be scaled."""

    source: str
    """Layer whose weights divide the channels: a LayerNorm, or the dense layer of the values."""
    tensor: str
    """Layer whose output the products read."""
    products: tuple[str, ...]
    """Dense layers that read it."""


@dataclasses.dataclass(frozen=True)
class Gain:
    """What scaling an activation gained."""

    alpha: float
    """Share of the activations in the scale."""
    before: float
    """Noise of the products in 8 bits, relative to their power."""
    after: float
    """The same, with scaled channels."""


def smooth_quant(
    model: keras.Model, batches: Iterable[np.ndarray], *, head: bool = True
) -> tuple[keras.Model, dict[str, Gain]]:
    """Return the model with scaled channels, in float32, and what was scaled, by the name of the layer that divides.

    The alpha of each activation is that with the least error of its products in 8 bits: the activation with one scale,
    weights with one for each output channel. Activations for which this gains little are left alone; if all are, the
    model itself is returned.

    Args:
        model: classifier from `keras_vit.build`.
        batches: calibration images (B, h, w, C), in the model's range.
        head: whether also the channels that the head reads may be scaled, which a score of unknown images reads too.
    """
    activations = [found for found in scalable_activations(model) if head or "head" not in found.products]
    if not activations:
        return model, {}
    copy = float32_copy(model)
    peaks, tokens = _seen(copy, [activation.tensor for activation in activations], batches)
    done: dict[str, Gain] = {}
    seen = list(zip(activations, peaks, tokens, strict=True))
    for activation, largest, rows in tracked(seen, "scaling channels (SmoothQuant)", unit="activations"):
        kernels = [np.asarray(copy.get_layer(name).kernel) for name in activation.products]
        # One thread of BLAS: several wait for each other in each of many small products.
        with threadpoolctl.threadpool_limits(1, user_api="blas"):
            scales, found = best_scales(largest, rows, kernels)
        if scales is None:
            continue
        done[activation.source] = found
        source = copy.get_layer(activation.source)
        source.set_weights([np.asarray(weight) / scales for weight in source.get_weights()])
        for name in activation.products:
            layer = copy.get_layer(name)
            kernel, *bias = layer.get_weights()
            layer.set_weights([kernel * scales[:, None], *bias])
    return (copy, done) if done else (model, {})


def scalable_activations(model: keras.Model) -> list[ScaledActivation]:
    """Return the tensors of a model that only dense layers read, and that a LayerNorm or attention makes."""
    readers = _readers(model)
    found = []
    for layer in model.layers:
        tensor = layer.name
        if isinstance(layer, keras.layers.LayerNormalization):
            source = layer.name
            if len(readers[tensor]) == 1 and _only_pools(model.get_layer(readers[tensor][0])):
                [tensor] = readers[tensor]
        elif isinstance(layer, DotProductAttention) and readers[f"{tensor}.value"] == [tensor]:
            source = f"{tensor}.value"
        else:
            continue
        if readers[tensor] and all(isinstance(model.get_layer(name), keras.layers.Dense) for name in readers[tensor]):
            found.append(ScaledActivation(source, tensor, tuple(readers[tensor])))
    return found


def _only_pools(layer: keras.layers.Layer) -> bool:
    """Whether a layer picks or averages tokens, channel by channel."""
    return isinstance(layer, PoolTokens) and layer.output.shape[-1] == layer.input.shape[-1]


def _readers(model: keras.Model) -> dict[str, list[str]]:
    """Return the names of the layers that read the output of each layer."""
    readers: dict[str, list[str]] = collections.defaultdict(list)
    made: dict[int, tuple[str, object]] = {}  # by id of a tensor, which is kept so that no other takes it

    def call(layer, *arguments, **options):
        for tensor in keras.tree.flatten((arguments, options)):
            if id(tensor) in made:
                readers[made[id(tensor)][0]].append(layer.name)
        outputs = layer(*arguments, **options)
        made.update((id(tensor), (layer.name, tensor)) for tensor in keras.tree.flatten(outputs))
        return outputs

    with no_init_weights():
        keras.models.clone_model(model, call_function=call)
    return readers


def _seen(
    model: keras.Model, names: Sequence[str], batches: Iterable[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return for each layer the largest |output| of each channel over all images, and some of its tokens (n, D)."""
    network = keras.Model(model.input, [model.get_layer(name).output for name in names])
    rng = np.random.default_rng(0)
    peaks: list[np.ndarray] = []
    kept: list[list[np.ndarray]] = [[] for _ in names]
    counts = [0] * len(names)
    for images in tracked(list(batches), "Measuring channels (SmoothQuant)", unit="batches"):
        outputs = [np.asarray(output, np.float32) for output in network.predict_on_batch(images)]
        rows = [output.reshape(-1, output.shape[-1]) for output in outputs]
        largest = [np.abs(tokens).max(axis=0) for tokens in rows]
        peaks = [np.maximum(*pair) for pair in zip(peaks, largest, strict=True)] if peaks else largest
        for index, tokens in enumerate(rows):
            missing = _TOKENS - counts[index]
            if missing > 0:
                chosen = rng.permutation(len(tokens))[: min(missing, -(-_TOKENS // 8))]
                kept[index].append(tokens[chosen])
                counts[index] += len(chosen)
    return peaks, [np.concatenate(tokens) for tokens in kept]


def best_scales(
    largest: np.ndarray, tokens: np.ndarray, kernels: Sequence[np.ndarray]
) -> tuple[np.ndarray | None, Gain]:
    """Return the powers of two (D,) that divide the channels, or None where they gain little, and what they gain.

    Args:
        largest: the largest |activation| of each channel (D,).
        tokens: some activations (n, D).
        kernels: of the products that read them, (D, units) each.
    """
    kernel = np.concatenate(kernels, axis=1).astype(np.float64)
    weights = np.abs(kernel).max(axis=1)
    products = tokens.astype(np.float64) @ kernel
    before = _noise(tokens, kernel, products, largest)
    best, chosen = Gain(0.0, before, before), None
    for alpha in _ALPHAS:
        scales = _powers_of_two(largest, weights, alpha)
        after = _noise(tokens / scales, kernel * scales[:, None], products, largest / scales)
        if after < best.after:
            best, chosen = Gain(alpha, before, after), scales
    return (chosen if best.after < _WORTHWHILE * before else None), best


def _powers_of_two(largest: np.ndarray, weights: np.ndarray, alpha: float) -> np.ndarray:
    """The scales of SmoothQuant, rounded; 1 for channels that are zero."""
    used = (largest > 0.0) & (weights > 0.0)
    logarithms = alpha * np.log2(np.where(used, largest, 1.0)) - (1.0 - alpha) * np.log2(np.where(used, weights, 1.0))
    # Only ratios matter, so the median stays.
    exponents = np.round(logarithms - np.median(logarithms[used], axis=0)) if used.any() else logarithms
    return np.where(used, np.exp2(exponents), 1.0).astype(np.float32)


def _noise(tokens: np.ndarray, kernel: np.ndarray, products: np.ndarray, largest: np.ndarray) -> float:
    """Noise of the products in 8 bits, relative to their power."""
    step = max(float(largest.max()), 1e-30) / 127.0
    steps = np.maximum(np.abs(kernel).max(axis=0), 1e-30) / 127.0
    rounded = np.round(tokens / step) * step @ (np.round(kernel / steps) * steps)
    return float(np.sum((rounded - products) ** 2) / max(np.sum(products**2), 1e-30))
