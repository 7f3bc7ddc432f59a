"""PatchCore's memory of good parts as a Keras layer: how far each patch is from the nearest one it knows.

Paper: "Towards Total Recall in Industrial Anomaly Detection" (arXiv 2106.08265), sections 3.1 and 3.3; the image score,
its weight and the blurred map are those of anomalib's PatchCore. Here the features are patch tokens of a Vision
Transformer, and the mean over a neighborhood leaves out what is outside the image.
"""

from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from keras_vit.models.build import feature_maps, preprocessing_of
from keras_vit.models.layers import PACKAGE

# Patches near the nearest one in memory that weight the score of an image (b in equation 7 of the paper), and the
# standard deviation of the blur of the map in pixels.
_NEIGHBORS, _BLUR = 9, 4.0


@keras.saving.register_keras_serializable(PACKAGE)
class PatchMemory(keras.layers.Layer):
    """Compares patches with a memory of good ones: (B, h, w, D) -> {"score": (B,), "map": (B, height, width)}.

    Args:
        size: number M of patches in memory.
        image_size: (height, width) of the map in pixels.
    """

    def __init__(self, size: int, image_size: Sequence[int], **kwargs):
        super().__init__(**kwargs)
        self.size, self.image_size = size, tuple(image_size)

    def build(self, input_shape):
        """Make the weight of the memory."""
        self.memory = self.add_weight(
            shape=(self.size, input_shape[-1]), initializer="zeros", trainable=False, name="memory"
        )
        self._to_rows, self._to_columns = (
            _blurred_upsampling(new, old) for new, old in zip(self.image_size, input_shape[1:3], strict=True)
        )

    def call(self, features):
        """Score each image, and each of its pixels."""
        _, rows, columns, width = features.shape
        memory = ops.cast(self.memory, "float32")
        patches = ops.reshape(ops.cast(features, "float32"), (-1, rows * columns, width))  # (B, N, D)
        distances = distances_to(patches, memory)  # (B, N, M)
        nearest = ops.min(distances, axis=-1)  # (B, N)
        grid = ops.reshape(nearest, (-1, rows, columns))
        heat = ops.matmul(ops.matmul(self._to_rows, grid), np.ascontiguousarray(self._to_columns.T))
        return {"score": self._weighted(distances, nearest, memory), "map": heat}

    def _weighted(self, distances, nearest, memory):
        """The largest distance of a patch of each image, times 1 minus the softmax of equation 7: (B,)."""
        at = ops.argmax(nearest, axis=-1)  # (B,)
        closest = ops.squeeze(ops.take_along_axis(distances, at[:, None, None], axis=1), axis=1)  # (B, M)
        match = ops.take(memory, ops.argmin(closest, axis=-1), axis=0)  # (B, D)
        around = ops.top_k(-distances_to(match, memory), min(_NEIGHBORS, self.size))[1]  # (B, b), itself first
        to_these = ops.take_along_axis(closest, around, axis=-1)  # (B, b)
        weight = 1.0 - ops.softmax(to_these, axis=-1)[:, 0] if self.size > 1 else 1.0
        return weight * ops.max(nearest, axis=-1)


def local_features(model: keras.Model, blocks: Sequence[int]) -> keras.Model:
    """Images -> patch tokens of some blocks (B, h, w, D), concatenated and averaged over 3 x 3 patches.

    Args:
        model: a Vision Transformer of `keras_vit.build`.
        blocks: their numbers, see `feature_maps`.

    Raises UserError for a ResNet and for blocks that it does not have.
    """
    maps = list(feature_maps(model, blocks).output.values())
    features = keras.layers.Concatenate(name="blocks", dtype="float32")(maps) if len(maps) > 1 else maps[0]
    average = keras.layers.AveragePooling2D(
        3, 1, "same", data_format="channels_last", name="neighborhood", dtype="float32"
    )
    return keras.Model(model.input, average(features), name=f"{model.name}_patches")


def anomaly_model(model: keras.Model, blocks: Sequence[int], memory: np.ndarray) -> keras.Model:
    """Images (B, height, width, C) -> {"score": (B,), "map": (B, height, width)} by a memory (M, D) of good patches."""
    features = local_features(model, blocks)
    layer = PatchMemory(len(memory), preprocessing_of(model).image_size, name="memory", dtype="float32")
    output = layer(features.output)
    layer.set_weights([memory])
    return keras.Model(model.input, output, name=f"{model.name}_anomaly")


def distances_to(x, memory):
    """Euclidean distances (…, M) of vectors (…, D) to those in memory (M, D)."""
    products = ops.matmul(x, ops.transpose(memory))
    squared = ops.sum(ops.square(x), -1, keepdims=True) - 2.0 * products + ops.sum(ops.square(memory), -1)
    return ops.sqrt(ops.maximum(squared, 0.0))


def _blurred_upsampling(new: int, old: int) -> np.ndarray:
    """(new, old): bilinear interpolation with pixel centers at halves, then a Gaussian blur inside the image."""
    places = (np.arange(new) + 0.5) * old / new - 0.5
    interpolation = np.stack([np.interp(places, np.arange(old), row) for row in np.eye(old)], axis=-1)
    distance = np.arange(new)[:, None] - np.arange(new)
    blur = np.exp(-0.5 * np.square(distance / _BLUR))
    return (blur / blur.sum(axis=-1, keepdims=True) @ interpolation).astype(np.float32)
