"""The signatures of a model that segments.

serving_default  image_bytes () an image file of any size -> segments at the size of the picture, seen upright. Of
                 semantic: label_map (H, W) int32. Of instance: masks (N, H, W) bool, classes (N,) int32, scores (N,)
                 and labels (N,), those with a score of 0.5 or more. Of panoptic: segment_map (H, W) int32, the number
                 of a segment or -1, with classes, scores and labels by number
image_tensor     image (B, h, w, C) float32 in the model's range -> the same at the size of the model's input, of all
                 queries, see `export.segmentation`
"""

import pathlib

import numpy as np
import tensorflow as tf

from export.files import save_module
from export.inference_model import inference_model
from export.tasks import Measures, Task, TaskReference
from keras_vit import task_of
from keras_vit.files.labels import LABELS, labels_text
from keras_vit.images import graph
from keras_vit.images.formats import LARGEST_SERVED
from keras_vit.models.config import SEGMENT_THRESHOLD, LinearSegmentationConfig, SegmentationConfig
from keras_vit.models.segment_outputs import segment_outputs

TENSOR = "image_tensor"


def write(task: Task, path: pathlib.Path) -> None:
    """Write signatures, weights and labels."""
    exported, preprocessing = task.exported, task.exported.preprocessing
    network = inference_model(exported.model, for_tensorflow=True, all_tokens=True)
    at_input, shape = task.network(network), (*preprocessing.image_size, preprocessing.channels)
    segmentation = task_of(exported.model)
    module = tf.Module()
    module.weights = [weight.value for weight in network.weights]
    module.labels = tf.constant([*exported.labels, ""])  # the last of queries of panoptic that are no object

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
        names = {"labels": tf.gather(module.labels, found["classes"])} if "classes" in found else {}
        return found | names

    functions = {"image_tensor": image_tensor, "serving_default": serving_default}
    save_module(module, path, {name: function.get_concrete_function() for name, function in functions.items()})
    (path / "assets").mkdir(exist_ok=True)
    (path / "assets" / LABELS).write_text(labels_text(exported.labels), encoding="utf-8")


def _resize(maps: tf.Tensor, size) -> tf.Tensor:
    return tf.image.resize(maps, tf.stack(size) if not isinstance(size, tuple) else size)


def _likely(outputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """The outputs of the queries that may reach the threshold: the masks of all of a large picture are large."""
    likely = tf.reduce_max(tf.nn.softmax(outputs["class_logits"][0])[:, :-1], axis=-1)
    chosen = tf.where((likely >= SEGMENT_THRESHOLD) | (likely >= tf.reduce_max(likely)))[:, 0]
    logits, masks = outputs["class_logits"], outputs["mask_logits"]
    return {"class_logits": tf.gather(logits, chosen, axis=1), "mask_logits": tf.gather(masks, chosen, axis=-1)}


def measure_files(task: Task, expected: TaskReference, signatures) -> Measures:
    """The share of pixels that are those of the Keras model, at the size of the pictures; nothing without objects."""
    model, preprocessing = task.exported.model, task.exported.preprocessing
    segmentation = task_of(model)
    assert isinstance(segmentation, SegmentationConfig | LinearSegmentationConfig)
    ours, theirs = [], []
    for data, image in zip(expected.samples.samples.encoded, expected.images(batch=False), strict=True):
        size = tuple(graph.decode_to_channels(tf.constant(data), preprocessing).shape[:2])
        outputs = model(image, training=False)
        if "class_logits" in outputs:
            outputs = _likely(outputs)
        found = segment_outputs(outputs, segmentation, preprocessing, size, threshold=SEGMENT_THRESHOLD)
        kept = {name: np.asarray(value)[0] for name, value in found.items()}
        if "masks" in kept:
            chosen = kept["scores"] >= SEGMENT_THRESHOLD
            kept = {name: value[chosen] for name, value in kept.items()}
        ours.append(kept)
        answer = signatures["serving_default"](image_bytes=tf.constant(data))
        theirs.append({name: answer[name].numpy() for name in kept})
    pairs = [pair for pair in zip(ours, theirs, strict=True) if "masks" not in pair[0] or len(pair[0]["masks"])]
    if not pairs:
        return {}
    measures = task.measure("SavedModel of files", *zip(*pairs, strict=True), exact=True)
    return {"equal_pixels_of_files": measures["equal_pixels"]}
