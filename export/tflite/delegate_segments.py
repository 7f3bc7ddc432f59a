"""Label maps, masks and segments in operators that GPUs compute: float32 numbers in place of integers and Booleans.

GPUs have no argmax, and ours has no TOP_K, which the WebGPU accelerator computes wrongly. So places of largest numbers
come from arithmetic, which is exact below 2,048 in float16 too.

Axes: B batch, Q queries, K classes, H and W rows and columns of the model's input.
"""

import numpy as np
import tensorflow as tf

from export.segmentation import SegmentOutputs
from keras_vit.models.config import LinearSegmentationConfig
from keras_vit.models.segment_outputs import LEAST_VISIBLE

# Its square is above one over the smallest difference of numbers near 1, also in float16.
_STEEP = 2.0**15


class DelegateSegments(SegmentOutputs):
    """The outputs of `SegmentOutputs` from those of a model in four axes, with four axes: maps (B, H, W, 1), masks
    (B, Q, H, W), classes and scores (B, 1, Q, 1).
    """

    def call(self, outputs):
        if isinstance(self.task, LinearSegmentationConfig):
            return {"label_map": _largest(self._at_input(outputs["pixel_logits"]))[0]}
        probabilities = tf.nn.softmax(outputs["class_logits"])  # (B, 1, Q, K + 1)
        masks = self._at_input(outputs["mask_logits"])  # (B, H, W, Q)
        if self.task.task == "semantic":
            return {"label_map": _largest(_product(tf.sigmoid(masks), probabilities[..., :-1]))[0]}
        if self.task.task == "instance":
            return _instances(masks, probabilities[..., :-1])
        return _panoptic(masks, probabilities, self.task.stuff)

    def _at_input(self, maps):
        height, width = self.preprocessing.image_size
        return maps if maps.shape[1:3] == (height, width) else tf.image.resize(maps, (height, width))


def _product(pixels, classes):
    """(B, H, W, Q) and (B, 1, Q, K) -> (B, H, W, K)."""
    _, height, width, queries = pixels.shape
    flat = tf.matmul(tf.reshape(pixels, (-1, 1, height * width, queries)), classes)
    return tf.reshape(flat, (-1, height, width, classes.shape[-1]))


def _is_positive(x):
    """1 where x is above 0, else 0."""
    for _ in range(2):
        x = 1.0 - tf.nn.relu(1.0 - tf.nn.relu(x) * _STEEP)
    return x


def _largest(scores):
    """The first place of the largest of (..., K) as (..., 1), and 1 at this place of (..., K), else 0."""
    size = scores.shape[-1]
    among_largest = 1.0 - _is_positive(tf.reduce_max(scores, -1, keepdims=True) - scores)
    ranks = among_largest * np.arange(size, 0, -1, dtype=np.float32)  # the first has the largest
    highest = tf.reduce_max(ranks, -1, keepdims=True)
    return float(size) - highest, 1.0 - _is_positive(highest - ranks)


def _area(masks):
    """The share of the pixels in masks (B, H, W, Q): (B, 1, 1, Q)."""
    return tf.reduce_mean(masks, (1, 2), keepdims=True)


def _transposed(numbers):
    """(B, 1, Q, 1) -> (B, 1, 1, Q), and the inverse."""
    return tf.transpose(numbers, (0, 1, 3, 2))


def _instances(masks, probabilities):
    inside = _is_positive(masks)
    pixels = masks.shape[1] * masks.shape[2]
    certainty = _area(inside * tf.sigmoid(masks)) / (_area(inside) + np.full((1, 1, 1, 1), 1e-6 / pixels, np.float32))
    scores = tf.reduce_max(probabilities, -1, keepdims=True) * _transposed(certainty)
    classes, _ = _largest(probabilities)
    return {"masks": tf.transpose(inside, (0, 3, 1, 2)), "classes": classes, "scores": scores}


def _panoptic(masks, probabilities, stuff):
    """As `keras_vit.models.segment_outputs` has it."""
    num_queries, nothing = probabilities.shape[2], probabilities.shape[-1] - 1
    labels, is_label = _largest(probabilities)  # (B, 1, Q, 1), (B, 1, Q, K + 1)
    scores = tf.reduce_max(probabilities, -1, keepdims=True)
    kept = _transposed(_is_positive(float(nothing) - labels))  # (B, 1, 1, Q)
    weighted = tf.sigmoid(masks) * (_transposed(scores) * kept) + (kept - 1.0)
    own = _largest(weighted)[1] * kept
    whole = (1.0 - _is_positive(-masks)) * kept
    visible = own * whole
    valid = _is_positive(_area(visible)) * _is_positive(_area(own) - LEAST_VISIBLE * _area(whole))
    # All masks of a class of stuff have the number of its first.
    same = tf.matmul(is_label, _transposed(is_label * _transposed(valid)))  # (B, 1, Q, Q)
    first, _ = _largest(same)
    of_stuff = np.isin(np.arange(nothing + 1), stuff).astype(np.float32)
    is_stuff = tf.reduce_max(is_label * of_stuff, -1, keepdims=True)
    queries = np.arange(num_queries, dtype=np.float32).reshape(1, 1, -1, 1)
    numbers = _transposed(queries + (first - queries) * is_stuff)
    segments = tf.reduce_max(visible * valid * (numbers + 1.0), -1, keepdims=True) - 1.0
    return {"segment_map": segments, "classes": labels, "scores": scores * _transposed(valid)}
