"""The signatures of a detector.

serving_default  image_bytes (B,) image files of any size -> of each the k likeliest objects: boxes (B, k, 4) left, top,
                 right and bottom in pixels of the given picture, seen upright; scores (B, k), 0 to 1; classes (B, k)
                 int32; labels (B, k), their names. The score is 0 for boxes that the detector leaves out, since they
                 overlap more likely ones.
image_tensor     image (B, h, w, C) float32 in the model's range -> detections (B, N, 4 + K), see `export.detection`
"""

import pathlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from export.files import save_module
from export.inference_model import inference_model
from export.parity import FLOAT_TOLERANCE
from export.saved_model.signatures import add_shapes
from export.tasks import Measures, Task, TaskReference
from keras_vit import Preprocessing
from keras_vit.errors import ParityError
from keras_vit.files.labels import LABELS, labels_text
from keras_vit.images import graph
from keras_vit.images.formats import LARGEST_SERVED
from keras_vit.models.detection import SUPPRESSED

TENSOR = "image_tensor"
# Objects of a picture, as in COCO.
_TOP = 100
# Pixels of the model's input by which a box may differ.
_TOLERANCE = 0.05


def write(task: Task, path: pathlib.Path) -> None:
    """Write signatures, weights and labels."""
    exported, preprocessing = task.exported, task.exported.preprocessing
    network = task.network(inference_model(exported.model, for_tensorflow=True, all_tokens=True))
    shape, count = (*preprocessing.image_size, preprocessing.channels), len(exported.labels)
    module = tf.Module()
    module.weights = [weight.value for weight in network.weights]
    module.labels = tf.constant(list(exported.labels))

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, tf.float32, name="image")])
    def image_tensor(image):
        return network(tf.ensure_shape(image, (None, *shape)), training=False)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, tf.string, name="image_bytes")])
    def serving_default(image_bytes):
        images, sizes = tf.map_fn(
            _decoder(preprocessing),
            tf.ensure_shape(image_bytes, (None,)),
            fn_output_signature=(tf.TensorSpec(shape, tf.float32), tf.TensorSpec((2,), tf.float64)),
        )
        detections = image_tensor(preprocessing.normalize(images))["detections"]
        boxes, logits = detections[..., :4], tf.ensure_shape(detections[..., 4:], (None, None, count))
        highest, chosen = tf.math.top_k(tf.reduce_max(logits, axis=-1), min(_TOP, detections.shape[1]))
        scores = tf.where(highest > SUPPRESSED, tf.sigmoid(highest), 0.0)
        classes = tf.gather(tf.argmax(logits, axis=-1, output_type=tf.int32), chosen, batch_dims=1)
        corners = _in_picture(tf.gather(boxes, chosen, batch_dims=1), sizes, preprocessing)
        return {"boxes": corners, "scores": scores, "classes": classes, "labels": tf.gather(module.labels, classes)}

    functions = {
        name: f.get_concrete_function()
        for name, f in (("image_tensor", image_tensor), ("serving_default", serving_default))
    }
    save_module(module, path, functions)
    (path / "assets").mkdir(exist_ok=True)
    (path / "assets" / LABELS).write_text(labels_text(exported.labels), encoding="utf-8")
    add_shapes(path, shape)


def _decoder(preprocessing: Preprocessing) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """An image file -> (height, width, channels) float32 0..255, and height and width of the picture, seen upright."""

    def decode(data: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        pixels = graph.decode_to_channels(data, preprocessing, most_pixels=LARGEST_SERVED)
        return tf.cast(preprocessing.resized(pixels), tf.float32), tf.cast(tf.shape(pixels)[:2], tf.float64)

    return decode


def _in_picture(boxes: tf.Tensor, sizes: tf.Tensor, preprocessing: Preprocessing) -> tf.Tensor:
    """As `Preprocessing.boxes_in_picture` for a batch: boxes (B, k, 4), sizes (B, 2) -> (B, k, 4), cut at the edges."""
    height, width = preprocessing.image_size
    limits = [sizes[:, 0, None], sizes[:, 1, None]]  # (B, 1)
    rows, columns = preprocessing.axes(limits, tf)
    x, y, w, h = tf.unstack(tf.cast(boxes, tf.float64), axis=-1)  # (B, k)
    edges = [(x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height]
    placed = [
        tf.clip_by_value(edge * scale + shift, 0.0 * limit, limit)
        for edge, (scale, shift), limit in zip(edges, (columns, rows) * 2, limits[::-1] * 2, strict=True)
    ]
    return tf.cast(tf.stack(placed, axis=-1), tf.float32)


def measure_files(task: Task, expected: TaskReference, signatures) -> Measures:
    """Nothing to report. Raises ParityError unless files give the objects of the Keras model, by their scores."""
    preprocessing = task.exported.preprocessing
    encoded = expected.samples.samples.encoded
    for number, (data, outputs) in enumerate(zip(encoded, expected.outputs, strict=True)):
        answer = signatures["serving_default"](image_bytes=tf.constant([data]))
        found = {name: answer[name].numpy()[0] for name in ("boxes", "scores")}
        detections = outputs["detections"]
        size = preprocessing.decode(tf.constant(data)).shape[:2]
        logits = detections[:, 4:].max(axis=-1)
        corners = preprocessing.boxes_in_picture(detections[:, :4], tuple(size))
        corners = np.clip(corners, 0, [size[1], size[0]] * 2)
        order = np.argsort(-logits, kind="stable")[: len(found["scores"])]
        scores = np.where(logits > SUPPRESSED, 1.0 / (1.0 + np.exp(-logits)), 0.0)
        tolerance = FLOAT_TOLERANCE * max(1.0, float(np.abs(detections).max()))
        difference = float(np.abs(found["scores"] - scores[order]).max())
        # Where scores are equal up to rounding, their boxes may come in another order.
        near = np.abs(found["scores"][:, None] - scores[None]) <= tolerance
        apart = np.abs(found["boxes"][:, None] - corners[None]).max(axis=-1)
        pixels = float(np.where(near, apart, np.inf).min(axis=1).max())
        allowed = _TOLERANCE * max(max(size) / min(preprocessing.image_size), 1.0)
        if not (difference <= tolerance and pixels <= allowed):
            raise ParityError(
                f"The SavedModel's objects of image {number} differ from the model's by {difference:.3g} in a score "
                f"and {pixels:.3g} pixels, so it was not kept."
            )
    return {}
