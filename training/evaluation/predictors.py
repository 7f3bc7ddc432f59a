"""Whatever classifies images, opened for measuring: a run, a SavedModel and a TFLite file give the same."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from keras_vit import Preprocessing, UserError
from keras_vit.cli.progress import Progress
from keras_vit.cli.start import native_stderr_silenced
from keras_vit.errors import reading, refuse_without_effect
from keras_vit.files import tflite_metadata
from keras_vit.files.documents import read_json
from keras_vit.files.remote import check_saved_model_path, local_copy
from keras_vit.run import Run
from training.data.dataset import Split, bad_examples_reported, without_autograph
from training.data.pipeline import evaluation_batches
from training.loop.devices.strategies import open_strategy
from training.options.common import StrategyOptions
from training.options.evaluate import InputOptions

_ON_WHITE = "The model takes numbers and does not record a background for transparent images; white is used."
# What a run or a .keras file says of its images, and a TFLite file may say.
_IMAGE_FIELDS = ("resize", "crop_from", "value_range")
_FROM_BYTES, _FROM_TENSOR = "image_bytes", "image_tensor"


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A model of any kind, opened for measuring."""

    run: Run
    kind: str
    """The kind of model in words."""
    num_classes: int
    labels: tuple[str, ...]
    """The names of its classes; empty where it does not name them."""
    predict: Callable[[Split, int], tuple[np.ndarray, np.ndarray]]
    """Split, batch size -> logits (n, K) float32 and labels (n,) of every example, in order; of a split whose images
    may have several classes, labels (n, K) of 0 and 1."""
    is_multi_label: bool | None = None
    """Whether it is for images of several classes each; None where it does not say."""
    is_export: bool = True
    """Whether it is no Keras model."""


def open_predictor(run: Run, overrides: InputOptions, devices: StrategyOptions) -> Predictor:
    """Open a run directory, .keras file, checkpoint, SavedModel or .tflite file for measuring.

    The image size and the number of heads are those that the run was opened with. Raises UserError when it is none of
    these, or does not take the overrides or devices.
    """
    if run.saved_model is None and run.path.suffix != ".tflite":
        return _keras_predictor(run, overrides, devices)
    if devices != StrategyOptions("single"):
        raise UserError("An exported model runs on this machine's CPU alone; leave --strategy and --replicas out.")
    refuse_without_effect(overrides, [(("image_size", "num_heads"), False, "models of Keras: exports have one size")])
    return _tflite(run, overrides) if run.saved_model is None else _saved_model(run, run.saved_model, overrides)


# Keras models and checkpoints


def _keras_predictor(run: Run, overrides: InputOptions, devices: StrategyOptions) -> Predictor:
    strategy = None if devices.strategy == "multi-worker" else open_strategy(devices)
    if strategy is None or isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise UserError("Evaluation runs on one machine; give --strategy single, mirrored or tpu.")
    with strategy.scope():
        model = run.classifier
    own, num_classes, replicas = run.preprocessing, model.output_shape[1], strategy.num_replicas_in_sync
    if run.is_ours:
        _refuse_contradiction(overrides, own, _IMAGE_FIELDS, run)
    preprocessing = overrides.preprocessing(own)

    @tf.function(autograph=False)
    def forward(images: tf.Tensor) -> tf.Tensor:
        return strategy.run(lambda part: model(part, training=False), args=(images,))

    def compute_by_replicas(images: tf.Tensor) -> np.ndarray:
        parts = tf.split(images, replicas)
        shared = strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )
        return np.concatenate([part.numpy() for part in strategy.experimental_local_results(forward(shared))])

    compute = functools.partial(compute_in_keras, model) if replicas == 1 else compute_by_replicas
    predict = functools.partial(
        outputs, compute, preprocessing=preprocessing, num_classes=num_classes, multiple_of=replicas
    )
    is_multi_label = run.is_multi_label if run.config else None
    return Predictor(run, "Keras model", num_classes, run.class_names, predict, is_multi_label, is_export=False)


def _refuse_contradiction(overrides: InputOptions, own: Preprocessing, fields: Collection[str], run: Run) -> None:
    """Raise UserError for an option that differs from what the model itself says of its images, in these fields."""
    for name in fields:
        given, stored = getattr(overrides, name), getattr(own, name)
        if given is None or given == stored:
            continue
        if name == "value_range" and np.allclose(own.channel_ranges(), np.transpose([given]), atol=1e-5):
            continue
        option = f"--{name.replace('_', '-')}"
        raise UserError(f"{run.name} says itself that {option} is {stored}, but {given} was given; leave {option} out.")


def outputs(
    compute: Callable[[tf.Tensor], np.ndarray],
    split: Split,
    batch_size: int,
    *,
    preprocessing: Preprocessing,
    num_classes: int,
    multiple_of: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `compute` gives for the images (B, h, w, C) of all examples, (n, …) float32, and labels (n,).

    The labels are (n, K) of 0 and 1 where an image may have several classes. Every batch has the same B: at
    most `batch_size`, rounded up to a multiple of `multiple_of`.
    """
    computed, labels = [], []
    batch_size = -(-min(batch_size, split.num_examples) // multiple_of) * multiple_of
    batches = evaluation_batches(split, preprocessing, num_classes=num_classes, batch_size=batch_size)
    with bad_examples_reported(split), Progress("Running the model", split.num_examples) as progress:
        for images, one_hot, weights in batches:
            real = weights.numpy() > 0.0
            computed.append(compute(images)[real].astype(np.float32))
            labels.append((one_hot.numpy() if split.multi_label else np.argmax(one_hot, axis=-1))[real])
            progress.update(int(real.sum()))
    return np.concatenate(computed), np.concatenate(labels)


def compute_in_keras(model: keras.Model, images: tf.Tensor) -> np.ndarray:
    """Return what a model computes from a batch, on any backend of Keras."""
    return model.predict_on_batch(keras.ops.convert_to_tensor(images))


def accuracy(
    model: keras.Model, split: Split, preprocessing: Preprocessing, *, num_classes: int, batch_size: int
) -> float:
    """Return the share of the images of a split whose highest logit is that of their label."""
    compute = functools.partial(compute_in_keras, model)
    logits, labels = outputs(compute, split, batch_size, preprocessing=preprocessing, num_classes=num_classes)
    return float(np.mean(logits.argmax(axis=-1) == labels))


# Exported models


class _Signature(NamedTuple):
    function: Callable
    input: str
    spec: tf.TensorSpec
    output: str
    num_classes: int

    def logits(self, images: tf.Tensor, *, multi_label: bool) -> np.ndarray:
        """Images as the signature takes them -> (B, K)."""
        value = self.function(**{self.input: images})[self.output]
        if self.output == "probabilities":
            # Of several classes, probabilities of float32 are rounded to 1 from a logit of 17 on.
            value = tf.minimum(value, 1.0 - 2.0**-24) if multi_label else value
            value = tf.math.log(value) - (tf.math.log1p(-value) if multi_label else 0.0)
        return value.numpy()


def _signatures(path: pathlib.Path) -> dict[str, _Signature]:
    """Return the signatures that take encoded images, and float images: the first of each.

    Their shapes are those that the file states; a graph may take any shape and check it then.
    """
    check_saved_model_path(path)
    with reading(path, "a SavedModel", OSError, KeyError, RuntimeError, tf.errors.OpError, advice="it may be damaged"):
        loaded = tf.saved_model.load(str(path))
    saved = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    definitions = {name: value for graph in saved.meta_graphs for name, value in graph.signature_def.items()}
    usable: dict[str, _Signature] = {}
    for signature in loaded.signatures:
        inputs, outs = _specs(definitions[signature].inputs), _specs(definitions[signature].outputs)
        output = next((name for name in ("logits", "probabilities") if name in outs and outs[name].shape.rank == 2), "")
        if len(inputs) != 1 or not output or outs[output].shape[1] is None:
            continue
        ((name, spec),) = inputs.items()
        usual = _Signature(loaded.signatures[signature], name, spec, output, outs[output].shape[1])
        if spec.dtype == tf.string and spec.shape.rank == 1:
            usable.setdefault(_FROM_BYTES, usual)
        elif spec.dtype == tf.float32 and spec.shape.rank == 4 and None not in spec.shape[1:]:
            usable.setdefault(_FROM_TENSOR, usual)
    if not usable:
        raise UserError(
            f"{path} has no signature from images to logits or probabilities, only "
            f"{', '.join(loaded.signatures) or 'none at all'}; export the model by keras-vit saved-model."
        )
    return usable


def _specs(tensors: Mapping[str, Any]) -> dict[str, tf.TensorSpec]:
    return {
        name: tf.TensorSpec(tf.TensorShape(info.tensor_shape), tf.dtypes.as_dtype(info.dtype))
        for name, info in tensors.items()
    }


def _saved_model(run: Run, path: pathlib.Path, overrides: InputOptions) -> Predictor:
    """Open the folder of a version, by the signature that takes encoded images, unless only one takes numbers."""
    usable = _signatures(path)
    form = _FROM_BYTES if _FROM_BYTES in usable else _FROM_TENSOR
    signature = usable[form]
    num_classes = signature.num_classes
    if form == _FROM_BYTES:
        refuse_without_effect(overrides, [(_IMAGE_FIELDS, False, "models that take pixels, not image files")])
        evaluated: Callable = _outputs_of_files
    else:
        print(_ON_WHITE)
        (_, height, width, channels) = signature.spec.shape
        preprocessing = overrides.preprocessing(Preprocessing((height, width), channels))
        evaluated = functools.partial(outputs, preprocessing=preprocessing, num_classes=num_classes)

    def predict(split: Split, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        return evaluated(functools.partial(signature.logits, multi_label=split.multi_label), split, batch_size)

    report = path / "report.json"
    facts = read_json(report) if report.is_file() else None
    is_multi_label = facts.get("multi_label") if isinstance(facts, dict) else None
    is_multi_label = is_multi_label if isinstance(is_multi_label, bool) else None
    return Predictor(run, f"SavedModel by {form}", num_classes, run.labels, predict, is_multi_label)


def _outputs_of_files(
    compute: Callable[[tf.Tensor], np.ndarray], split: Split, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the same as `outputs`, for encoded images (B,); others are encoded as PNG, which loses nothing."""

    @without_autograph
    def file(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = split.read(index)
        if split.target and split.multi_label:
            label = split.target(index)
        return image if image.dtype == tf.string else tf.io.encode_png(image), label

    computed, labels = [], []
    data = tf.data.Dataset.range(split.num_examples).map(file, num_parallel_calls=tf.data.AUTOTUNE).batch(batch_size)
    with bad_examples_reported(split), Progress("Running the export", split.num_examples) as progress:
        for images, numbers in data.prefetch(tf.data.AUTOTUNE):
            computed.append(compute(images))
            labels.append(numbers.numpy())
            progress.update(len(images))
    return np.concatenate(computed), np.concatenate(labels)


def _tflite(run: Run, overrides: InputOptions) -> Predictor:
    path = local_copy(run.path)
    content = path.read_bytes()
    interpreter, taken, returned = _open_interpreter(run, path)
    metadata, names = tflite_metadata.read_metadata(content), tflite_metadata.read_names(content, run.name)
    num_classes = int(returned["shape"][1])
    preprocessing = _tflite_preprocessing(run, taken, metadata, overrides)
    lows, highs = (np.asarray(end) for end in preprocessing.channel_ranges())

    def compute(images: tf.Tensor) -> np.ndarray:
        logits = []
        for image in images.numpy():
            if taken["dtype"] == np.uint8:
                image = np.round(255.0 * (image - lows) / (highs - lows)).astype(np.uint8)
            interpreter.set_tensor(taken["index"], image[None])
            interpreter.invoke()
            logits.append(interpreter.get_tensor(returned["index"]))
        return np.concatenate(logits)

    predict = functools.partial(outputs, compute, preprocessing=preprocessing, num_classes=num_classes)
    is_multi_label = None if metadata is None else metadata.multi_label
    return Predictor(run, "TFLite file", num_classes, run.labels if names is None else names, predict, is_multi_label)


def _open_interpreter(run: Run, path: pathlib.Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the interpreter of a TFLite file, and the details of the tensor that it takes and of its logits.

    Raises UserError for a damaged file, and for one of other tensors.
    """
    from ai_edge_litert.interpreter import Interpreter  # here, so that measuring a run needs no TFLite

    with (
        reading(run.path, "a TFLite model", RuntimeError, advice="it may be damaged"),
        native_stderr_silenced(),  # it announces its delegate
    ):
        interpreter = Interpreter(model_path=str(path), num_threads=2)
        interpreter.allocate_tensors()
    taken, returned = interpreter.get_input_details(), interpreter.get_output_details()
    if len(returned) == 2:  # beside the logits, the unknown_score (1,)
        returned = [details for details in returned if len(details["shape"]) == 2]
    shapes = [tuple(int(side) for side in tensor["shape"]) for tensor in (*taken, *returned)]
    fits = len(taken) == len(returned) == 1 and len(shapes[0]) == 4 and shapes[0][0] == 1 and len(shapes[1]) == 2
    if not fits or taken[0]["dtype"] not in (np.float32, np.uint8) or returned[0]["dtype"] != np.float32:
        raise UserError(
            f"{run.name} should take one image (1, H, W, C), float32 or uint8, and give float32 logits (1, K), but its "
            f"tensors have shapes {', '.join(map(str, shapes))}; export the model by keras-vit tflite."
        )
    return interpreter, taken[0], returned[0]


def _tflite_preprocessing(
    run: Run, taken: dict[str, Any], metadata: tflite_metadata.TFLiteMetadata | None, overrides: InputOptions
) -> Preprocessing:
    """Return the preprocessing of a TFLite file: as its metadata say, else as the overrides do.

    Prints what the file does not tell. Raises UserError for overrides that contradict the file.
    """
    _, height, width, channels = map(int, taken["shape"])
    own, fields = Preprocessing((height, width), channels), list[str]()
    resizing = {} if metadata is None else metadata.preprocessing
    if taken["dtype"] == np.uint8:
        refuse_without_effect(overrides, [(("value_range",), False, "models of floating-point images")])
        own = dataclasses.replace(own, value_range=resizing.get("value_range", (0.0, 255.0)))
    elif metadata is not None and metadata.value_range is not None:
        own, fields = dataclasses.replace(own, value_range=metadata.value_range), ["value_range"]
    if resizing:
        known = own.resizing()
        own = dataclasses.replace(own, **{name: value for name, value in resizing.items() if name in known})
        fields += ["resize", "crop_from"]
    _refuse_contradiction(overrides, own, fields, run)
    if "background" not in resizing:
        print(_ON_WHITE)
    if metadata is not None and metadata.temperature is not None:
        print(
            f"The file returns logits that are not calibrated: an app divides them by {metadata.temperature:.6g}. Log "
            "loss and ECE here are those without it."
        )
    if overrides.resize is None and not resizing:
        print("The TFLite file does not say how images are resized; here they are stretched, unless --resize is given.")
    return overrides.preprocessing(own)
