"""GPTQ: kernels of dense layers are rounded so that each weight corrects the errors of those before it.

Rounding to nearest treats the weights one by one. But only the sum over the channels of the input matters, and the
channels of a Vision Transformer are correlated, so the error of one weight can be taken back by those that are rounded
after it ("GPTQ", arXiv 2210.17323, section 3). The kernels stay in float32, on the grid that quantization uses
afterwards: the largest weight of each scale stays as it is, so that quantization finds the same scale. In 8 bits each
unit has a scale, in 4 bits each block of 32 channels of a unit.
"""

from collections.abc import Collection, Iterable, Iterator

import keras
import numpy as np
import threadpoolctl
from scipy import linalg

from export.inference_model import float32_copy
from export.tflite.quantize import LARGEST_OF_FOUR, scale_block
from keras_vit.cli.progress import Progress, tracked

_LARGEST_OF_EIGHT = 127  # largest number of 8 bits, with as many below 0
_DAMPING = 0.01  # part of the mean square of the channels that is added to each, as in the paper
_BLOCK = 128  # channels that are rounded before their errors are passed on to all others
# Vectors for each channel of an input: with fewer, the correlations of its channels are unknown; more take time.
# DINOv2-S's error, relative to rounding to nearest, in Dense_0 of block 9, was 0.53 with 8, 0.36 with 32, 0.31 with 75.
_FEWEST, _ENOUGH = 2, 64
_MOST_NUMBERS = 2**27  # numbers of the second moments (D, D) in memory at a time


# Several threads of BLAS wait for each other in each of many products, several times as long as these take.
@threadpoolctl.threadpool_limits.wrap(limits=1, user_api="blas")
def round_kernels(model: keras.Model, batches: Iterable[np.ndarray], in_four_bits: Collection[str] = ()) -> keras.Model:
    """Return the model in float32, with the kernels of dense layers rounded to numbers of 8 bits.

    Layers with few inputs, such as the head, stay as they are: quantization rounds them to nearest.

    Args:
        model: classifier from `keras_vit.build`.
        batches: calibration images (B, h, w, C), in the model's range.
        in_four_bits: names of layers whose kernels get numbers of 4 bits.
    """
    copy = float32_copy(model)
    readers = _readers(model)
    # Each input is measured with others, and then its kernels are rounded: about the same time.
    with Progress("rounding weights (GPTQ)", 2 * len(readers), "steps") as progress:
        for measured in _second_moments(model, readers, list(batches)):
            progress.update(len(measured))
            for layers, moments, count in measured:
                if count >= _FEWEST * len(moments):
                    order, inverse = inverse_factor(moments)
                    for layer in layers:
                        kernel, *bias = copy.get_layer(layer.name).get_weights()
                        form = (LARGEST_OF_FOUR, scale_block(len(kernel))) if layer.name in in_four_bits else ()
                        copy.get_layer(layer.name).set_weights([rounded(kernel, order, inverse, *form), *bias])
                progress.update()
    return copy


def _readers(model: keras.Model) -> list[list[keras.layers.Layer]]:
    """Return the dense layers of a model, in one list those that read the same tensor."""
    readers: dict[int, list[keras.layers.Layer]] = {}
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dense):
            readers.setdefault(id(layer.input), []).append(layer)
    return list(readers.values())


def _second_moments(
    model: keras.Model, readers: list[list[keras.layers.Layer]], batches: list[np.ndarray]
) -> Iterator[list[tuple[list[keras.layers.Layer], np.ndarray, int]]]:
    """Yield dense layers that read the same tensor, the sum of x x^T over its vectors (D, D), and their number.

    Each list has those that are measured at a time.
    """
    left, num_images = list(readers), sum(map(len, batches))
    while left:
        chosen, numbers = list[list[keras.layers.Layer]](), 0
        while left and (not chosen or numbers + left[0][0].input.shape[-1] ** 2 <= _MOST_NUMBERS):
            chosen.append(left.pop(0))
            numbers += chosen[-1][0].input.shape[-1] ** 2
        tensors = [layers[0].input for layers in chosen]
        network = keras.Model(model.input, tensors)
        moments = [np.zeros((tensor.shape[-1],) * 2, np.float32) for tensor in tensors]
        counts, wanted = [0] * len(chosen), [_ENOUGH * len(sums) for sums in moments]
        for images in tracked(iter(batches), "calibration images"):  # the time so far: often a few batches are enough
            if all(count >= enough for count, enough in zip(counts, wanted, strict=True)):
                break
            for index, vectors in enumerate(keras.tree.flatten(network.predict_on_batch(images))):
                rows = np.asarray(vectors, np.float32).reshape(-1, vectors.shape[-1])
                if len(rows) * num_images < _FEWEST * len(moments[index]) * len(images):
                    wanted[index] = 0  # all images together have too few, such as the class tokens for the head
                if counts[index] < wanted[index]:
                    moments[index] += rows.T @ rows
                    counts[index] += len(rows)
        yield list(zip(chosen, moments, counts, strict=True))


def inverse_factor(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The channels, the largest first, and the upper Cholesky factor of the inverse of their moments (D, D)."""
    order = np.argsort(-np.diagonal(moments), kind="stable")
    damped = moments[np.ix_(order, order)].astype(np.float64)
    damped[np.diag_indices_from(damped)] += _DAMPING * np.trace(damped) / len(damped) + 1e-12
    return order, linalg.cholesky(linalg.inv(damped))


def rounded(
    kernel: np.ndarray,
    order: np.ndarray,
    inverse: np.ndarray,
    largest: int = _LARGEST_OF_EIGHT,
    block: int | None = None,
) -> np.ndarray:
    """Return a kernel (D, units) float32 whose weights are multiples of a step, up to `largest`.

    `inverse_factor` gives order and inverse. So many channels of a unit as `block` says, a divisor of D, have the same
    step; default all.
    """
    blocks = kernel.astype(np.float64).reshape(-1, block or len(kernel), kernel.shape[1])
    peaks = np.abs(blocks).max(axis=1, keepdims=True)
    steps = np.broadcast_to(np.maximum(peaks, 1e-30) / largest, blocks.shape).reshape(kernel.shape)[order]
    places = np.arange(blocks.shape[1])[:, None]
    pinned = (np.abs(blocks).argmax(axis=1)[:, None] == places).reshape(kernel.shape)[order]
    weights = kernel[order].astype(np.float64)
    ends = np.sign(weights) * largest
    result = np.empty_like(weights)
    for start in range(0, len(weights), _BLOCK):
        end = min(start + _BLOCK, len(weights))
        errors = np.empty((end - start, weights.shape[1]))
        for row in range(start, end):
            numbers = np.clip(np.round(weights[row] / steps[row]), -largest, largest)
            result[row] = np.where(pinned[row], ends[row], numbers) * steps[row]
            errors[row - start] = (weights[row] - result[row]) / inverse[row, row]
            weights[row + 1 : end] -= inverse[row, row + 1 : end, None] * errors[row - start]
        weights[end:] -= inverse[start:end, end:].T @ errors
    return result[np.argsort(order)].astype(np.float32)
