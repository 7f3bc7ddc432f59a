"""Exports a model as a SavedModel, and verifies it against the Keras model."""

import errno
import gc
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from export import parity, report
from export.files import directory_bytes, disk_errors, write_beside
from export.inference_model import in_dtype, inference_model
from export.options import SavedModelOptions
from export.saved_model import dense_signatures
from export.saved_model.model_card import model_card
from export.saved_model.signatures import (
    add_shapes,
    attention_names,
    measure_embeddings,
    signatures,
    write,
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
from keras_vit.files.remote import RemotePath, output_folder
from keras_vit.files.tables import short_name
from keras_vit.images.formats import LARGEST_SERVED
from keras_vit.models.build import exact_products
from keras_vit.promise import OUTPUTS

# For each task other than classification: writes signatures, weights and labels; compares the signature that takes
# files with the Keras model.
_WRITE: dict[type[Task], Callable[[Task, pathlib.Path], None]] = {
    Embedding: write_embeddings,
    Detection: dense_signatures.write_detector,
    Segmentation: dense_signatures.write_segmenter,
}
_MEASURE_FILES: dict[type[Task], Callable[[Task, parity.Reference, Mapping], Measures]] = {
    Embedding: measure_embeddings,
    Detection: dense_signatures.measure_boxes,
    Segmentation: dense_signatures.measure_segments,
}


@exact_products()
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
    expected = task.reference(most_pixels=LARGEST_SERVED)
    with staged(output) as stage, Progress("Writing the SavedModel"):
        version = stage / "version"
        if isinstance(task, Classification):
            _write(task.exported, options, version)
        else:
            _WRITE[type(task)](task, version)
        gc.collect()  # the traced graphs hold the weights in reference cycles, and the weights are loaded again next
        with disk_errors(version):
            loaded = tf.saved_model.load(version)
            tensor = loaded.signatures["embed_tensor" if isinstance(task, Embedding) else "image_tensor"]
            found = expected.outputs_of(lambda images: tensor(image=tf.constant(images)))
            measures = task.measure(_form(options), expected, found, exact=_is_exact(options))
            if isinstance(task, Classification):
                facts = _measure_classifier(task, version, expected, options, loaded.signatures, measures)
                _report(task.exported, version, options, facts, started)
            else:
                measures |= _MEASURE_FILES[type(task)](task, expected, loaded.signatures)
                files = {"SavedModel": {**measures, "bytes": directory_bytes(version)}}
                task.report(version, "SavedModel", expected, files, report.Extra(takes_files=True))
        return put_as_next_version(version, output), measures


def _is_exact(options: SavedModelOptions) -> bool:
    """Whether the outputs differ from the model's by no more than rounding in float32."""
    return options.dtype == "float32" and not options.merge_tokens


def _form(options: SavedModelOptions) -> str:
    if options.merge_tokens:
        return f"SavedModel with --merge-tokens {options.merge_tokens}"
    return "SavedModel" if _is_exact(options) else f"{options.dtype} SavedModel"


def _report(
    exported: ExportedModel, version: pathlib.Path, options: SavedModelOptions, facts: Mapping, started: float
) -> None:
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
    merge_tokens, preprocessing = options.merge_tokens or 0, exported.preprocessing
    model = inference_model(
        exported.model, options.dtype, for_tensorflow=True, all_tokens=options.attention, merge_tokens=merge_tokens
    )
    names = tf.constant(list(exported.labels))
    functions = signatures(
        model,
        names,
        attention=options.attention,
        xla=options.xla,
        scoring=exported.origin.scoring(options.threshold),
        unknown=exported.unknown,
    )

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, tf.float32)])
    def serve(image):
        return functions["image_tensor"](image)["logits"]

    write(path, model, functions, exported.labels, names, serve)
    add_shapes(path, (*preprocessing.image_size, preprocessing.channels))


def _measure_classifier(
    task: Classification,
    path: pathlib.Path,
    expected: parity.Reference,
    options: SavedModelOptions,
    signatures: Mapping[str, Callable],
    measures: Measures,
) -> dict:
    """Warm a SavedModel up, and compare what it gives for files with the model. Raises ParityError if they differ."""
    origin, exact = task.exported.origin, _is_exact(options)
    image_shape = (*expected.preprocessing.image_size, expected.preprocessing.channels)
    warmed_up = write_warmup_requests(path, signatures, expected.samples.encoded[0], image_shape)
    with Progress("verifying", len(expected.logits)) as progress:
        answers = []
        for files, _ in expected.batches():
            answers.append(signatures["serving_default"](image_bytes=tf.constant(files)))
            progress.update(len(files))
    probabilities = np.concatenate([answer["probabilities"] for answer in answers])
    what = "SavedModel's probabilities of encoded images"
    difference = parity.probability_difference(what, expected, origin.temperature, probabilities, exact=exact)
    if not exact:
        from_files = _logits_of(probabilities, multi_label=origin.multi_label)
        rows = [{"logits": row} for row in from_files]
        task.measure(f"{_form(options)} with encoded images", expected, rows, exact=False)
    first = next(images for _, images in expected.batches())[:1]
    latency = report.latency(lambda: signatures["image_tensor"](image=tf.constant(first)))
    facts = {
        "bytes": directory_bytes(path),
        **measures,
        "keras_accuracy": expected.accuracy,
        "encoded_images_max_abs_diff": difference,
        "warm_up_requests": warmed_up,
        "latency_ms": {"all_threads": latency},
        "operators": _operators(path),
    }
    if (unknown := task.exported.unknown) is not None:
        ours = unknown.scores(in_dtype(task.exported.model, "float32"), (images for _, images in expected.batches()))
        scores = np.concatenate([answer["unknown_score"] for answer in answers])
        facts |= parity.unknown_facts("SavedModel", unknown, ours, scores, exact=exact)
    decided = {name: np.concatenate([answer[name] for answer in answers]) for name in OUTPUTS & {*answers[0]}}
    facts |= parity.promise_facts("SavedModel", origin.scoring(), expected, decided, exact=exact)
    if options.tflite:
        facts |= write_served_file(path, task.exported, expected)
    return facts


def _logits_of(probabilities: np.ndarray, *, multi_label: bool) -> np.ndarray:
    """Return logits that give these probabilities (n, K), finite for those that are rounded to 0 or 1."""
    bounded = np.clip(probabilities.astype(np.float64), 1e-30, 1.0)
    return np.log(bounded) - (np.log(np.maximum(1.0 - bounded, 1e-30)) if multi_label else 0.0)


def signature_definitions(path: pathlib.Path) -> dict:
    """The signatures of a SavedModel by name, as it stores them: `SignatureDef` with the names of their tensors."""
    saved = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    return saved.meta_graphs[0].signature_def


def _operators(path: pathlib.Path) -> dict[str, int]:
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
    size = f"{directory_bytes(path) / 1e6:,.2f} MB; " if isinstance(task, Classification) else ""
    return f"{path}: {size}{task.sentence(measures)}; see {path / 'report.md'}."
