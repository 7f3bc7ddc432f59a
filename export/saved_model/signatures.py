"""The signatures of a SavedModel: the named inputs and outputs for TF Serving.

K classes, B images (0 or more), image size h x w with C channels:

    serving_default     image_bytes (B,) image files of any size, decoded, resized and normalized in the graph as in
                        evaluation -> probabilities (B, K), and the top 5 classes: classes (B, 5) int32, labels (B, 5)
                        their names, scores (B, 5) their probabilities; with a threshold, accepted (B,) bool; with
                        a score of unknown images, unknown_score (B,) and unknown (B,) bool; with a promise,
                        answered (B,) and label_set (B, K) bool
    image_tensor        image (B, h, w, C) float32 in the model's range -> logits (B, K), probabilities (B, K); and
                        unknown_score (B,), answered (B,) and label_set (B, K), likewise
    image_tensor_uint8  image (B, h, w, C) uint8, 0..255 -> the same
    features            image_bytes (B,) -> features (B, D), the input of the head ("pre_logits")
    attention           image_bytes (B,) -> attention_0 … (B, heads, N, N), softmax probabilities; optional
    classify            inputs (B,) serialized tf.Example with the file in "image/encoded" -> classes (B, 5) names,
                        scores (B, 5), the names that the Classify API of TF Serving requires

A tensor of another shape is INVALID_ARGUMENT with both shapes. Loaders do not compare the shape of an input with the
signature, and the convolution kernels of TensorFlow abort the process if the rank is wrong. So the graphs accept any
shape and check it first (`tf.ensure_shape`). With shapes in the graph, the optimizer could remove this check as always
true. So `add_shapes` writes the shapes only to the signatures.

An export of embeddings has others:

    embed         image_bytes (B,) image files of any size -> embeddings (B, D)
    embed_tensor  image (B, h, w, C) float32 in the model's range -> embeddings (B, D)
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from export.files import disk_errors
from export.inference_model import inference_model
from export.tasks import Reference, Task
from keras_vit import Preprocessing, UserError, ViTConfig, config_of, intermediates, preprocessing_of
from keras_vit.errors import ParityError
from keras_vit.files.labels import LABELS, labels_text
from keras_vit.images.formats import LARGEST_SERVED, format_list
from keras_vit.promise import OUTPUTS
from keras_vit.scores import TOP_K, Scoring, UnknownScorer

ENCODED = "image/encoded"  # feature of a tf.Example with the image file, as usual in TensorFlow datasets
# The requests that TF Serving runs before a new version takes traffic, in the directory of a SavedModel.
WARMUP_FILE = pathlib.Path("assets.extra") / "tf_serving_warmup_requests"
# Makes a function of a batch of image files.
_of_files = functools.partial(
    tf.function, autograph=False, input_signature=[tf.TensorSpec(None, tf.string, name="image_bytes")]
)


def attention_names(model: keras.Model) -> list[str]:
    """Names of the attention probabilities in `keras_vit.intermediates`. Raises UserError if there are none."""
    config = config_of(model)
    if not isinstance(config, ViTConfig):
        raise UserError(f"The model {model.name!r} is a ResNet without attention blocks; leave --attention out.")
    ends = ("_row", "_column") if config.axial else ("",)
    return [f"attention_{layer}{end}" for layer in range(config.num_layers) for end in ends]


def signatures(
    model: keras.Model,
    labels: tf.Tensor,
    *,
    attention: bool = False,
    xla: bool = False,
    scoring: Scoring | None = None,
    unknown: UnknownScorer | None = None,
) -> dict[str, Callable]:
    """Return functions over the variables of a classifier, from `inference_model`.

    Args:
        labels: the names of the classes (K,), a constant that `write` keeps.
        attention: whether to add the attention probabilities. Raises UserError if the model has none.
        xla: whether XLA compiles the network. Image files are decoded outside of it.
        scoring: how the logits become probabilities; its threshold adds "accepted" to serving_default.
        unknown: adds "unknown_score", and to serving_default "unknown".
    """
    scoring, preprocessing = scoring or Scoring(), preprocessing_of(model)
    images = tf.TensorSpec((None, *preprocessing.image_size, preprocessing.channels), tf.float32, name="image")
    inner = intermediates(model, ["pre_logits"]).output
    network = _network(keras.Model(model.input, {"logits": model.output, **inner}), images, xla)

    @_of_files
    def decoded(image_bytes):
        return decode_batch(tf.ensure_shape(image_bytes, (None,)), preprocessing)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, tf.float32, name="image")])
    def image_tensor(image):
        return _scored(network(tf.ensure_shape(image, images.shape)), scoring, unknown)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, tf.uint8, name="image")])
    def image_tensor_uint8(image):
        return image_tensor(preprocessing.normalize(tf.ensure_shape(image, images.shape)))

    @_of_files
    def features(image_bytes):
        return {"features": network(decoded(image_bytes))["pre_logits"]}

    serving_default = _serving_default(lambda files: image_tensor(decoded(files)), labels, scoring, unknown)
    functions = {
        "serving_default": serving_default,
        "image_tensor": image_tensor,
        "image_tensor_uint8": image_tensor_uint8,
        "features": features,
        "classify": _classify(serving_default),
    }
    if attention:
        attending = _network(intermediates(model, attention_names(model)), images, xla)
        functions["attention"] = _of_files(lambda image_bytes: attending(decoded(image_bytes)))
    return functions


def _scored(inside: dict[str, tf.Tensor], scoring: Scoring, unknown: UnknownScorer | None) -> dict[str, tf.Tensor]:
    """Return logits, probabilities, and the score of unknown images from what the head reads and gives."""
    logits = inside["logits"]
    activation = tf.sigmoid if scoring.is_multi_label else tf.nn.softmax
    scores = {} if unknown is None else {"unknown_score": unknown.score(inside["pre_logits"], logits)}
    probabilities = activation(logits / scoring.temperature)
    decisions = {} if scoring.promise is None else scoring.promise.decide(probabilities)
    return {"logits": logits, "probabilities": probabilities, **scores, **decisions}


def _serving_default(
    classify_files: Callable, labels: tf.Tensor, scoring: Scoring, unknown: UnknownScorer | None
) -> Callable:
    """Return the signature of image files; `classify_files` gives their probabilities and scores."""

    @_of_files
    def serving_default(image_bytes):
        found = classify_files(image_bytes)
        scores, classes = tf.math.top_k(found["probabilities"], min(TOP_K, labels.shape[0]))
        outputs = {
            "probabilities": found["probabilities"],
            "classes": classes,
            "labels": tf.gather(labels, classes),
            "scores": scores,
        }
        if scoring.threshold is not None:
            outputs["accepted"] = scores[:, 0] >= scoring.threshold
        if unknown is not None:
            score = found["unknown_score"]
            outputs |= {"unknown_score": score, "unknown": score > unknown.threshold}
        return outputs | {name: found[name] for name in OUTPUTS & {*found}}

    return serving_default


def _classify(serving_default: Callable) -> Callable:
    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, tf.string, name="inputs")])
    def classify(inputs):
        parsed = tf.io.parse_example(tf.ensure_shape(inputs, (None,)), {ENCODED: tf.io.FixedLenFeature((), tf.string)})
        outputs = serving_default(parsed[ENCODED])
        return {"classes": outputs["labels"], "scores": outputs["scores"]}

    return classify


def _network(model: keras.Model, images: tf.TensorSpec, xla: bool) -> Callable:
    """The model at inference, with float32 inputs and outputs for any compute dtype."""
    compute = tf.dtypes.as_dtype(model.layers[0].compute_dtype)

    @tf.function(autograph=False, jit_compile=xla or None, input_signature=[images])
    def run(image):
        outputs = model(tf.cast(image, compute), training=False)
        return tf.nest.map_structure(lambda value: tf.cast(value, tf.float32), outputs)

    return run


def add_shapes(directory: pathlib.Path, image_shape: Sequence[int]) -> None:
    """Add the shapes of images (h, w, C) to the inputs of a SavedModel, and the method of the Classify API."""
    file = directory / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    for graph in saved.meta_graphs:
        if "classify" in graph.signature_def:
            graph.signature_def["classify"].method_name = tf.saved_model.CLASSIFY_METHOD_NAME
        for definition in graph.signature_def.values():
            for name, info in definition.inputs.items():
                shape = (None, *image_shape) if name == "image" else (None,)
                info.tensor_shape.CopyFrom(tf.TensorShape(shape).as_proto())
    file.write_bytes(saved.SerializeToString(deterministic=True))


def write_embeddings(task: Task, path: pathlib.Path) -> None:
    """Write the signatures and weights of embeddings."""
    preprocessing = task.exported.preprocessing
    model = task.network(inference_model(task.exported.model, for_tensorflow=True))
    shape = (*preprocessing.image_size, preprocessing.channels)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, tf.float32, name="image")])
    def embed_tensor(image):
        return model(tf.ensure_shape(image, (None, *shape)), training=False)

    @_of_files
    def embed(image_bytes):
        return embed_tensor(decode_batch(tf.ensure_shape(image_bytes, (None,)), preprocessing))

    write(path, model, {"embed": embed, "embed_tensor": embed_tensor})
    add_shapes(path, shape)


def write(
    path: pathlib.Path,
    network: keras.Model,
    functions: Mapping[str, Any],
    labels: Sequence[str] = (),
    names: tf.Tensor | None = None,
    serve: Callable | None = None,
) -> None:
    """Write a SavedModel of signatures over the weights of a network.

    Tracking the Keras model too would store each weight twice. The weights are no constants of the graph, which oneDNN
    would put in order once instead of in each call: TensorFlow keeps copies of these for each signature, gigabytes for
    ViT-B (`benchmarks/README.md`).

    Args:
        labels: class names for assets/labels.txt; none for no such file.
        names: a constant that the signatures read.
        serve: the endpoint of Keras' own exports, images (B, h, w, C) -> logits (B, K), as the Keras model is called;
            `keras.layers.TFSMLayer(directory)` and `tf.saved_model.load(directory).serve(images)` use it.
    """
    module = tf.Module()
    module.weights, module.names, module.serve = [weight.value for weight in network.weights], names, serve
    with disk_errors(path):
        signatures = {name: function.get_concrete_function() for name, function in functions.items()}
        tf.saved_model.save(module, path, signatures=signatures)
    if labels:
        (path / "assets").mkdir(exist_ok=True)
        (path / "assets" / LABELS).write_text(labels_text(labels), encoding="utf-8")


def measure_embeddings(task: Task, expected: Reference, signatures) -> dict:
    """Return nothing to report. Raises ParityError unless files give the embeddings of the Keras model."""
    files = (files for files, _ in expected.batches())
    batches = [signatures["embed"](image_bytes=tf.constant(each))["embeddings"] for each in files]
    found = [{"embeddings": row} for row in np.concatenate(batches)]
    task.measure("SavedModel with encoded images", expected, found, exact=True)
    return {}


def decode_batch(image_bytes: tf.Tensor, preprocessing: Preprocessing) -> tf.Tensor:
    """Decode image files (B,) in parallel to (B, height, width, channels) float32 in the value range of the model.

    An element of another format, or with more than LARGEST_SERVED pixels, is INVALID_ARGUMENT with its index. The error
    of a decoder does not name the element of the batch. So each file is an element of a tf.data pipeline: those that
    fail are missing from the result, and the error of the request lists their indices.
    """
    shape = (*preprocessing.image_size, preprocessing.channels)
    count = tf.size(image_bytes, out_type=tf.int64)

    @tf.autograph.experimental.do_not_convert  # the rewriting takes longer than the tracing
    def decode(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return index, tf.ensure_shape(
            tf.cast(preprocessing.read(image_bytes[index], most_pixels=LARGEST_SERVED), tf.float32), shape
        )

    images = tf.data.Dataset.range(count).map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    images = images.ignore_errors()
    end = tf.data.Dataset.from_tensors((tf.constant(-1, tf.int64), tf.zeros(shape)))  # for an empty batch
    indices, pixels = images.concatenate(end).batch(count + 1).get_single_element()
    missing = tf.sets.difference(tf.range(count)[None], indices[None, :-1]).values
    limit = f"no whole {format_list()} of at most {LARGEST_SERVED // 10**6} megapixels"
    message = tf.strings.format(f"image_bytes{{}}: {limit}", missing)  # image_bytes[3 5]: no whole …
    with tf.control_dependencies([tf.debugging.Assert(tf.size(missing) == 0, [message])]):
        return preprocessing.normalize(tf.ensure_shape(tf.identity(pixels[:-1]), (None, *shape)))


def write_warmup_requests(
    directory: pathlib.Path, signatures: Mapping, image_file: bytes, image_shape: Sequence[int]
) -> list[str]:
    """Write one request per signature, call the signature with it, and return the names of the signatures.

    TensorFlow creates kernels and allocates memory in the first call of each signature, so without them the first users
    of a version have to wait. The requests have an image file, or a black image (h, w, C). The format is a TFRecord of
    tensorflow.serving.PredictionLog. The messages have few fields, so they are written here: the package
    tensorflow-serving-api conflicts with tensorflow-cpu.

    Raises ParityError unless each call returns one row per output.
    """
    path = directory / WARMUP_FILE
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for name, function in sorted(signatures.items()):
            (argument,) = function.structured_input_signature[1].values()
            model_spec = _field(1, _field(3, name.encode()))
            if argument.name == "inputs":
                feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[image_file]))
                example = tf.train.Example(features=tf.train.Features(feature={ENCODED: feature})).SerializeToString()
                value = tf.constant([example])
                log = _field(2, _field(1, model_spec + _field(2, _field(1, _field(1, example)))))
            else:
                is_file = argument.dtype == tf.string
                value = tf.constant([image_file]) if is_file else tf.zeros((1, *image_shape), argument.dtype)
                tensor = tf.make_tensor_proto(value.numpy()).SerializeToString()
                entry = _field(1, argument.name.encode()) + _field(2, tensor)
                log = _field(6, _field(1, model_spec + _field(2, entry)))
            writer.write(log)
            outputs = function(**{argument.name: value})
            if not all(len(tensor) == 1 for tensor in outputs.values()):
                raise ParityError(f"The warm-up request of {name} did not return one result; nothing was exported.")
    return sorted(signatures)


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a protobuf message: its number with the wire type of bytes, the length, and the content."""
    length, encoded = len(content), bytearray([number << 3 | 2])
    while length > 127:
        encoded.append(length & 127 | 128)
        length >>= 7
    return bytes([*encoded, length]) + content
