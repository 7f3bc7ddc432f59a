"""Which dense layers of an int4-weights file keep 8 bits: those whose rounding to 4 bits changes the logits most.

The others have a scale for each block of 32 channels of a unit: with one for the whole unit, the logits of DINOv2-S
have 1.7 times the error.

The errors of the layers are far from equal: of a ViT of six blocks on Fashion-MNIST, the attention of the first block
had 63 % of the squared error of all, and 6 % of the weights (benchmarks/logs/exports.md). Layers that read the same
tensor, such as query, key and value, stay together: ai-edge-quantizer 0.10.0 breaks those in 4 bits beside one in 8
bits.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from export.tflite.flatbuffer import Product, products, with_weights
from keras_vit.cli.progress import tracked

# Share of the weights of all dense layers that may stay in 8 bits.
SHARE = 0.25
LARGEST = 7  # of the numbers of 4 bits, with as many below 0
_BLOCK = 32  # channels, the smallest number that LiteRT has


@dataclasses.dataclass(frozen=True)
class DenseLayers:
    """Dense layers that read the same tensor."""

    outputs: tuple[str, ...]
    """Names of the tensors that they make."""
    error: float
    """Their part of the mean squared error of the logits, of all layers rounded to 4 bits one after the other."""
    weights: float
    """Their part of the weights."""


def in_eight_bits(
    content: bytes, logits: Callable[[bytes], np.ndarray], excluded: Sequence[str], share: float = SHARE
) -> list[DenseLayers]:
    """Return the layers that keep 8 bits, those with the largest error for their weights first.

    Args:
        content: the float32 file.
        logits: of a file, on some calibration images.
        excluded: outputs of dense layers that have 8 bits anyway, as the head.
        share: of the weights, at most.
    """
    groups: dict[str, list[Product]] = collections.defaultdict(list)
    for product in products(content):
        if product.weights.ndim == 2 and product.outputs not in excluded:
            groups[product.inputs].append(product)
    expected = logits(content)
    errors = {
        name: float(np.mean(np.square(logits(with_weights(content, _rounded(group))) - expected)))
        for name, group in tracked(groups.items(), "errors of 4 bits", unit="inputs of dense layers")
    }
    sizes = {name: sum(product.weights.size for product in group) for name, group in groups.items()}
    all_errors, left = sum(errors.values()) or 1.0, share * sum(sizes.values())
    found = []
    for name in sorted(groups, key=lambda name: -errors[name] / sizes[name]):
        if sizes[name] <= left:
            left -= sizes[name]
            outputs = tuple(product.outputs for product in groups[name])
            found.append(DenseLayers(outputs, errors[name] / all_errors, sizes[name] / sum(sizes.values())))
    return found


def has_blocks(channels: int) -> bool:
    """Whether a number of channels can be divided into blocks; if not, all channels of a unit have the same scale."""
    return channels % _BLOCK == 0


def scale_block(channels: int) -> int:
    """Channels of a unit that have the same scale in 4 bits."""
    return _BLOCK if has_blocks(channels) else channels


def _rounded(group: Sequence[Product]) -> dict[str, np.ndarray]:
    """Output -> weights (units, D), rounded to 4 bits."""
    found = {}
    for product in group:
        blocks = product.weights.reshape(len(product.weights), -1, scale_block(product.weights.shape[1]))
        steps = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True), 1e-30) / LARGEST
        found[product.outputs] = (np.round(blocks / steps) * steps).reshape(product.weights.shape).astype(np.float32)
    return found
