"""Exports a model as a SavedModel, and verifies it against the Keras model."""

import errno
import gc
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from export import parity, report
from export.files import directory_bytes, disk_errors, save_module, write_beside
from export.inference_model import in_dtype, inference_model
from export.options import SavedModelOptions
from export.saved_model import objects
from export.saved_model.model_card import model_card
from export.saved_model.signatures import (
    Servable,
    add_shapes,
    attention_names,
    measure_embeddings,
    signatures,
    write_embeddings,
    write_warmup_requests,
)
from export.source import ExportedModel
from export.tasks import Classification, Detection, Embedding, Measures, Segmentation, Task
from export.tflite.convert import write_served_file
from export.token_merging import merging_rules
from keras_vit.cli.progress import Progress
from keras_vit.errors import refuse_first
from keras_vit.files.atomic import staged, upload_folder
from keras_vit.files.labels import LABELS, labels_text
from keras_vit.files.remote import RemotePath, output_folder
from keras_vit.files.tables import short_name
from keras_vit.promise import OUTPUTS


class _Served(NamedTuple):
    """How a task other than classification is served."""

    tensor: str
    """Signature that takes images."""
    write: Callable[[Task, pathlib.Path], None]
    """Writes signatures, weights and labels."""
    measure_files: Callable[[Task, parity.Reference, Mapping], Measures]
    """Compares the signature that takes files with the Keras model."""


_SERVED: dict[type[Task], _Served] = {
    Embedding: _Served("embed_tensor", write_embeddings, measure_embeddings),
    Detection: _Served("image_tensor", objects.write_detector, objects.measure_boxes),
    Segmentation: _Served("image_tensor", objects.write_segmenter, objects.measure_segments),
}


def export_saved_model(task: Task, options: SavedModelOptions) -> tuple[pathlib.Path, Measures]:
    """Write the next version to `options.output`. Returns its path and its differences from the Keras model.

    The SavedModel is loaded again and run on all samples, as tensors and as files. Raises ParityError, and writes
    nothing, if float32 differs from the model by more than rounding, or if bfloat16 or merged tokens predict other
    classes for too many images. `options.source` is not used.
    """
    output, started = output_folder(options.output), time.perf_counter()
    task = task.prepared(options.max_disagreement)
    if options.attention:
        attention_names(task.exported.model)
    if options.merge_tokens:
        refuse_first(merging_rules(task.exported.model, options.merge_tokens))
    expected = task.reference()
    with staged(output) as stage, Progress("Writing the SavedModel"):
        version = stage / "version"
        if isinstance(task, Classification):
            _write(task.exported, options, version)
        else:
            _SERVED[type(task)].write(task, version)
        gc.collect()  # the traced graphs hold the weights in reference cycles, and the weights are loaded again next
        with disk_errors(version):
            if isinstance(task, Classification):
                measures, facts = _verify(task, version, expected, options)
            else:
                measures = facts = _verify_outputs(task, version, expected)
        if isinstance(task, Classification):
            _report(task.exported, version, options, facts, started)
        else:
            files = {"SavedModel": {**measures, "bytes": directory_bytes(version)}}
            task.report(version, "SavedModel", expected, files, report.Extra(takes_files=True))
        return put_as_next_version(version, output), measures


def _report(
    exported: ExportedModel, version: pathlib.Path, options: SavedModelOptions, facts: Mapping, started: float
) -> None:
    """Write the report and the model card of a classifier."""
    origin = exported.origin
    facts = {
        "artifact": "SavedModel",
        **origin.as_json(),
        "dtype": options.dtype,
        "xla": options.xla,
        "merge_tokens": options.merge_tokens or 0,
        "threshold": options.threshold,
        "images_from": origin.images,
        **facts,
        "export_seconds": round(time.perf_counter() - started, 1),
    }
    write_beside(version / "assets.extra", origin)
    card = model_card(exported.model, exported.labels, origin, facts, _interface(version))
    (version / "README.md").write_text(card, encoding="utf-8")
    report.write(version, f"{short_name(origin.name)} as SavedModel", facts)


def put_as_next_version(version: pathlib.Path, output: pathlib.Path) -> pathlib.Path:
    """Rename a directory to the next version in `output`. Tries again if another export takes the number first."""
    while True:
        number = 1 + max((int(entry.name) for entry in output.glob("*") if entry.name.isdecimal()), default=0)
        if isinstance(output, RemotePath):
            upload_folder(version, output / str(number))
            shutil.rmtree(version)
            return output / str(number)
        try:
            return version.rename(output / str(number))
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise


def _write(exported: ExportedModel, options: SavedModelOptions, path: pathlib.Path) -> None:
    """Write signatures, weights and labels of a classifier."""
    merge_tokens, preprocessing = options.merge_tokens or 0, exported.preprocessing
    model = inference_model(
        exported.model, options.dtype, for_tensorflow=True, all_tokens=options.attention, merge_tokens=merge_tokens
    )
    with tempfile.TemporaryDirectory() as assets:
        labels_file = pathlib.Path(assets) / LABELS
        labels_file.write_text(labels_text(exported.labels), encoding="utf-8")
        servable = Servable(model, exported.labels, str(labels_file))
        functions = signatures(
            model,
            servable.labels,
            attention=options.attention,
            xla=options.xla,
            scoring=exported.origin.scoring(options.threshold),
            unknown=exported.unknown,
        )
        servable.serve = tf.function(
            lambda image: functions["image_tensor"](image=image)["logits"],
            autograph=False,
            input_signature=[tf.TensorSpec(None, tf.float32)],
        )
        save_module(servable, path, functions)
    add_shapes(path, (*preprocessing.image_size, preprocessing.channels))


def _verify_outputs(task: Task, version: pathlib.Path, expected: parity.Reference) -> Measures:
    """Load a SavedModel, and compare it with the Keras model on tensors and files."""
    served, loaded = _SERVED[type(task)], tf.saved_model.load(version).signatures
    found = expected.outputs_of(lambda images: loaded[served.tensor](image=tf.constant(images)))
    measures = task.measure("SavedModel", expected, found, exact=True)
    return measures | served.measure_files(task, expected, loaded)


def _verify(
    task: Classification, path: pathlib.Path, expected: parity.Reference, options: SavedModelOptions
) -> tuple[Measures, dict]:
    """Load a SavedModel, warm it up, and compare it with the Keras model. Raises ParityError if they differ."""
    origin, exact = task.exported.origin, options.dtype == "float32" and not options.merge_tokens
    form = f"SavedModel with --merge-tokens {options.merge_tokens}" if options.merge_tokens else None
    form = "SavedModel" if exact else form or f"{options.dtype} SavedModel"
    loaded = tf.saved_model.load(path)
    image_shape = (*expected.preprocessing.image_size, expected.preprocessing.channels)
    warmed_up = write_warmup_requests(path, loaded.signatures, expected.samples.encoded[0], image_shape)
    logits, probabilities, scores, decisions = [], [], [], list[parity.Outputs]()
    with Progress("verifying", len(expected.logits)) as progress:
        for files, images in expected.batches():
            logits += [*loaded.signatures["image_tensor"](image=tf.constant(images))["logits"].numpy()]
            answer = loaded.signatures["serving_default"](image_bytes=tf.constant(files))
            probabilities.append(answer["probabilities"])
            scores.append(answer.get("unknown_score"))
            promised = {name: answer[name].numpy() for name in OUTPUTS & {*answer}}
            decisions += [{name: value[row] for name, value in promised.items()} for row in range(len(files))]
            progress.update(len(files))
    measures = task.measure(form, expected, [{"logits": row} for row in logits], exact=exact)
    activation = tf.sigmoid if origin.multi_label else tf.nn.softmax
    difference = np.abs(np.concatenate(probabilities) - activation(expected.logits / origin.temperature)).max()
    if exact:
        parity.require_close("SavedModel's probabilities of encoded images", difference, expected.tolerance)
    else:
        from_files = _logits_of(np.concatenate(probabilities), multi_label=origin.multi_label)
        task.measure(f"{form} with encoded images", expected, [{"logits": row} for row in from_files], exact=False)
    first = next(images for _, images in expected.batches())[:1]
    latency = report.latency(lambda: loaded.signatures["image_tensor"](image=tf.constant(first)))
    facts = {
        "bytes": directory_bytes(path),
        **measures,
        "keras_accuracy": expected.accuracy,
        "encoded_images_max_abs_diff": float(difference),
        "warm_up_requests": warmed_up,
        "latency_ms": {"all_threads": latency},
        "operators": _operators(path),
    }
    if (unknown := task.exported.unknown) is not None:
        model = in_dtype(task.exported.model, "float32")
        ours = unknown.scores(model, (images for _, images in expected.batches()))
        facts |= parity.unknown_facts("SavedModel", unknown, ours, np.concatenate(scores), exact=exact)
    facts |= parity.promise_facts("SavedModel", origin.scoring(), expected, decisions, exact=exact)
    if options.tflite:
        facts |= write_served_file(path, task.exported, expected)
    return measures, facts


def _logits_of(probabilities: np.ndarray, *, multi_label: bool) -> np.ndarray:
    """Return logits that give these probabilities (n, K), finite for those that are rounded to 0 or 1."""
    bounded = np.clip(probabilities.astype(np.float64), 1e-30, 1.0)
    return np.log(bounded) - (np.log(np.maximum(1.0 - bounded, 1e-30)) if multi_label else 0.0)


def signature_definitions(path: pathlib.Path) -> dict:
    """The signatures of a SavedModel by name, as it stores them: `SignatureDef` with the names of their tensors."""
    saved = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    return saved.meta_graphs[0].signature_def


def _operators(path: pathlib.Path) -> dict[str, int]:
    """Number of operators in the graph and its functions, by name, the most frequent first."""
    graph = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes()).meta_graphs[0].graph_def
    parts = (graph.node, *(function.node_def for function in graph.library.function))
    return report.operator_table(node.op for part in parts for node in part)


def _interface(path: pathlib.Path) -> list[tuple[str, str, str, str, str]]:
    """Signature, side (input or output), name, type and shape of each tensor."""
    rows = []
    for name, definition in sorted(signature_definitions(path).items()):
        if name.startswith("__"):
            continue
        for side, tensors in (("input", definition.inputs), ("output", definition.outputs)):
            for tensor, info in sorted(tensors.items()):
                shape = ", ".join("B" if dim.size < 0 else str(dim.size) for dim in info.tensor_shape.dim)
                rows.append((name, side, tensor, tf.dtypes.as_dtype(info.dtype).name, f"({shape})"))
    return rows


def summary(task: Task, path: pathlib.Path, measures: Measures) -> str:
    """Return the result of `export_saved_model` as a sentence for the terminal."""
    size = f"{directory_bytes(path):,} bytes; " if isinstance(task, Classification) else ""
    return f"{path}: {size}{task.sentence(measures)}; see {path / 'report.md'}."
