"""The signatures of detectors and of models that segment.

A detector:

    serving_default  image_bytes (B,) image files of any size -> the k most likely objects: boxes (B, k, 4) left,
                     top, right and bottom in pixels of the given image, seen upright; scores (B, k), 0 to 1; classes
                     (B, k) int32; labels (B, k), their names. The score is 0 for boxes that the detector leaves out,
                     since they overlap more likely ones.
    image_tensor     image (B, h, w, C) float32 in the model's range -> detections (B, N, 4 + K), see `export.tasks`

A model that segments:

    serving_default  image_bytes () an image file of any size -> segments at the size of the image, seen upright. Of
                     semantic: label_map (H, W) int32. Of instance: masks (N, H, W) bool, classes (N,) int32, scores
                     (N,) and labels (N,), those with a score of 0.5 or more. Of panoptic: segment_map (H, W) int32, the
                     number of a segment or -1, with classes, scores and labels by number
    image_tensor     image (B, h, w, C) float32 in the model's range -> the same at the size of the model's input, of
                     all queries
"""

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from export.inference_model import inference_model
from export.parity import FLOAT_TOLERANCE
from export.saved_model.signatures import add_shapes, write
from export.tasks import Reference, Task
from keras_vit import Preprocessing, task_of
from keras_vit.errors import ParityError
from keras_vit.images import graph
from keras_vit.images.formats import LARGEST_SERVED
from keras_vit.models.config import SEGMENT_THRESHOLD, LinearSegmentationConfig, SegmentationConfig
from keras_vit.models.detection import SUPPRESSED
from keras_vit.models.segmentation import segment_outputs

_TOP = 100  # objects of an image, as in COCO
_TOLERANCE = 0.05  # pixels of the model's input by which a box may differ


def write_detector(task: Task, path: pathlib.Path) -> None:
    """Write signatures, weights and labels."""
    exported, preprocessing = task.exported, task.exported.preprocessing
    network = task.network(inference_model(exported.model, for_tensorflow=True, all_tokens=True))
    shape, count = (*preprocessing.image_size, preprocessing.channels), len(exported.labels)
    names = tf.constant(list(exported.labels))

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
        corners = _in_image(tf.gather(boxes, chosen, batch_dims=1), sizes, preprocessing)
        return {"boxes": corners, "scores": scores, "classes": classes, "labels": tf.gather(names, classes)}

    functions = {"image_tensor": image_tensor, "serving_default": serving_default}
    write(path, network, functions, exported.labels, names)
    add_shapes(path, shape)


def _decoder(preprocessing: Preprocessing) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """An image file -> (height, width, channels) float32 0..255, and height and width of the image, seen upright."""

    def decode(data: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        pixels = graph.decode_to_channels(data, preprocessing, most_pixels=LARGEST_SERVED)
        return tf.cast(preprocessing.resized(pixels), tf.float32), tf.cast(tf.shape(pixels)[:2], tf.float64)

    return decode


def _in_image(boxes: tf.Tensor, sizes: tf.Tensor, preprocessing: Preprocessing) -> tf.Tensor:
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


def measure_boxes(task: Task, expected: Reference, signatures) -> dict:
    """Raise ParityError unless files give the objects of the Keras model, by their scores. Returns nothing."""
    preprocessing = task.exported.preprocessing
    encoded = expected.samples.encoded
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


def write_segmenter(task: Task, path: pathlib.Path) -> None:
    """Write signatures, weights and labels."""
    exported, preprocessing = task.exported, task.exported.preprocessing
    network = inference_model(exported.model, for_tensorflow=True, all_tokens=True)
    at_input, shape = task.network(network), (*preprocessing.image_size, preprocessing.channels)
    segmentation = task_of(exported.model)
    names = tf.constant([*exported.labels, ""])  # the last of queries of panoptic that are no object

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((None, *shape), tf.float32, name="image")])
    def image_tensor(image):
        return at_input(image, training=False)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((), tf.string, name="image_bytes")])
    def serving_default(image_bytes):
        pixels = graph.decode_to_channels(image_bytes, preprocessing, most_pixels=LARGEST_SERVED)
        image = tf.ensure_shape(preprocessing.normalize(preprocessing.resized(pixels)), shape)
        outputs = network(image[None], training=False)
        if "class_logits" in outputs:
            outputs = _likely(outputs)
        found = segment_outputs(
            outputs,
            segmentation,
            preprocessing,
            tf.unstack(tf.shape(pixels)[:2]),
            threshold=SEGMENT_THRESHOLD,
            resize=_resize,
        )
        found = {name: value[0] for name, value in found.items()}
        if "masks" in found:
            chosen = tf.where(found["scores"] >= SEGMENT_THRESHOLD)[:, 0]
            found = {name: tf.gather(value, chosen) for name, value in found.items()}
        labels = {"labels": tf.gather(names, found["classes"])} if "classes" in found else {}
        return found | labels

    functions = {"image_tensor": image_tensor, "serving_default": serving_default}
    write(path, network, functions, exported.labels, names)


def _resize(maps: tf.Tensor, size) -> tf.Tensor:
    return tf.image.resize(maps, tf.stack(size) if not isinstance(size, tuple) else size)


def _likely(outputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """The outputs of the queries that may reach the threshold: the masks of all of a large image are large."""
    likely = tf.reduce_max(tf.nn.softmax(outputs["class_logits"][0])[:, :-1], axis=-1)
    chosen = tf.where((likely >= SEGMENT_THRESHOLD) | (likely >= tf.reduce_max(likely)))[:, 0]
    logits, masks = outputs["class_logits"], outputs["mask_logits"]
    return {"class_logits": tf.gather(logits, chosen, axis=1), "mask_logits": tf.gather(masks, chosen, axis=-1)}


def measure_segments(task: Task, expected: Reference, signatures) -> dict:
    """Return the share of pixels that are those of the Keras model, at the size of the images, if any has objects."""
    model, preprocessing = task.exported.model, task.exported.preprocessing
    segmentation = task_of(model)
    assert isinstance(segmentation, SegmentationConfig | LinearSegmentationConfig)
    ours, theirs = [], []
    images = (image[None] for _, batch in expected.batches() for image in batch)
    for data, image in zip(expected.samples.encoded, images, strict=True):
        size = tuple(graph.decode_to_channels(tf.constant(data), preprocessing).shape[:2])
        outputs = model(image, training=False)
        if "class_logits" in outputs:
            outputs = _likely(outputs)
        outputs = segment_outputs(outputs, segmentation, preprocessing, size, threshold=SEGMENT_THRESHOLD)
        segments = {name: np.asarray(value)[0] for name, value in outputs.items()}
        if "masks" in segments:
            chosen = segments["scores"] >= SEGMENT_THRESHOLD
            segments = {name: value[chosen] for name, value in segments.items()}
        ours.append(segments)
        answer = signatures["serving_default"](image_bytes=tf.constant(data))
        theirs.append({name: answer[name].numpy() for name in segments})
    pairs = [pair for pair in zip(ours, theirs, strict=True) if "masks" not in pair[0] or len(pair[0]["masks"])]
    if not pairs:
        return {}
    kept, found = zip(*pairs, strict=True)
    measures = task.measure("SavedModel of files", dataclasses.replace(expected, outputs=kept), found, exact=True)
    return {"equal_pixels_of_files": measures["equal_pixels"]}
