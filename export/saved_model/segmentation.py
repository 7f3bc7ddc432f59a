"""Exports a model that segments as a SavedModel, and verifies it.

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

from export import report
from export.files import directory_bytes, save_module
from export.inference_model import inference_model
from export.saved_model.export import put_as_next_version
from export.segmentation import SegmentReference, compared, facts_of, reference_of, segments_model, table_of
from export.source import ExportedModel
from keras_vit import preprocessing_of, task_of
from keras_vit.files.atomic import staged
from keras_vit.files.labels import LABELS, labels_text
from keras_vit.files.tables import short_name
from keras_vit.images import graph
from keras_vit.models.config import LinearSegmentationConfig, SegmentationConfig
from keras_vit.models.segment_outputs import segment_outputs

_THRESHOLD = 0.5


def export_segmenter(exported: ExportedModel, output: pathlib.Path) -> tuple[pathlib.Path, float]:
    """Write the next version to `output`. Returns its path and the share of pixels that are those of the Keras model.

    The SavedModel is loaded again and run on all samples, as tensors and as files. Raises ParityError, and writes
    nothing, if it differs by more than rounding.
    """
    expected = reference_of(exported)
    with staged(output) as stage:
        version = stage / "version"
        _write(exported, version)
        loaded = tf.saved_model.load(version).signatures
        found = [
            {name: value.numpy()[0] for name, value in loaded["image_tensor"](image=tf.constant(image)).items()}
            for image in expected.images()
        ]
        row = compared("SavedModel", expected.outputs, found, exact=True)
        from_files = _compared_files(exported, expected, loaded["serving_default"])
        files = {"SavedModel": row | {"equal_pixels_of_files": from_files, "bytes": directory_bytes(version)}}
        title = f"Segmentation {short_name(exported.origin.name)} as SavedModel"
        facts = facts_of(exported.origin, "SavedModel of a segmentation", files)
        panels: dict = {"bytes": {"SavedModel": files["SavedModel"]["bytes"]}}
        report.write(version, title, facts, tables=[table_of(files)], panels=panels)
        return put_as_next_version(version, output), min(row["equal_pixels"], from_files)


def _write(exported: ExportedModel, path: pathlib.Path) -> None:
    network = inference_model(exported.model, for_tensorflow=True, all_tokens=True)
    preprocessing, task = preprocessing_of(exported.model), task_of(exported.model)
    at_input, shape = segments_model(network), (*preprocessing.image_size, preprocessing.channels)
    module = tf.Module()
    module.weights = [weight.value for weight in network.weights]
    module.labels = tf.constant(list(exported.labels))

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((None, *shape), tf.float32, name="image")])
    def image_tensor(image):
        return at_input(image, training=False)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((), tf.string, name="image_bytes")])
    def serving_default(image_bytes):
        pixels = graph.decode_to_channels(image_bytes, preprocessing)
        image = tf.ensure_shape(preprocessing.normalize(preprocessing.resized(pixels)), shape)
        outputs = network(image[None], training=False)
        if "class_logits" in outputs:
            outputs = _likely(outputs)
        found = segment_outputs(
            outputs, task, preprocessing, tf.unstack(tf.shape(pixels)[:2]), threshold=_THRESHOLD, resize=_resize
        )
        found = {name: value[0] for name, value in found.items()}
        if "masks" in found:
            chosen = tf.where(found["scores"] >= _THRESHOLD)[:, 0]
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
    chosen = tf.where((likely >= _THRESHOLD) | (likely >= tf.reduce_max(likely)))[:, 0]
    logits, masks = outputs["class_logits"], outputs["mask_logits"]
    return {"class_logits": tf.gather(logits, chosen, axis=1), "mask_logits": tf.gather(masks, chosen, axis=-1)}


def _compared_files(exported: ExportedModel, expected: SegmentReference, signature) -> float:
    """The share of pixels that are those of the Keras model, at the size of the pictures."""
    model, preprocessing, task = exported.model, preprocessing_of(exported.model), task_of(exported.model)
    assert isinstance(task, SegmentationConfig | LinearSegmentationConfig)
    ours, theirs = [], []
    for data, image in zip(expected.inputs.samples.encoded, expected.images(), strict=True):
        size = tuple(graph.decode_to_channels(tf.constant(data), preprocessing).shape[:2])
        outputs = model(image, training=False)
        if "class_logits" in outputs:
            outputs = _likely(outputs)
        found = segment_outputs(outputs, task, preprocessing, size, threshold=_THRESHOLD)
        kept = {name: np.asarray(value)[0] for name, value in found.items()}
        if "masks" in kept:
            chosen = kept["scores"] >= _THRESHOLD
            kept = {name: value[chosen] for name, value in kept.items()}
        ours.append(kept)
        answer = signature(image_bytes=tf.constant(data))
        theirs.append({name: answer[name].numpy() for name in kept})
    pairs = [pair for pair in zip(ours, theirs, strict=True) if "masks" not in pair[0] or len(pair[0]["masks"])]
    return compared("SavedModel of files", *zip(*pairs, strict=True), exact=True)["equal_pixels"] if pairs else 1.0
