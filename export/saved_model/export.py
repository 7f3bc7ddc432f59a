"""Exports a model as a SavedModel, and verifies it against the Keras model."""

import errno
import functools
import gc
import pathlib
import shutil
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from export import parity, report
from export.files import directory_bytes, disk_errors, save_module
from export.inference_model import in_dtype, inference_model
from export.options import SavedModelOptions
from export.saved_model import warmup
from export.saved_model.model_card import model_card
from export.saved_model.signatures import Servable, add_shapes, attention_names, signatures
from export.source import ExportedModel, Provenance
from export.tflite.served import write_served_file
from export.token_merging import merging_rules
from keras_vit import preprocessing_of, run_directory
from keras_vit.cli.progress import Progress
from keras_vit.errors import refuse_first
from keras_vit.files.atomic import staged, upload_folder
from keras_vit.files.labels import labels_text
from keras_vit.files.remote import RemotePath
from keras_vit.files.tables import short_name
from keras_vit.scores import Scoring


def export_saved_model(exported: ExportedModel, options: SavedModelOptions) -> tuple[pathlib.Path, parity.Parity]:
    """Write the next version to `options.output`. Returns its path and its differences from the Keras model.

    The SavedModel is loaded again and run on all samples. Raises ParityError, and writes nothing, if float32 differs
    from the model by more than rounding, or if bfloat16 or merged tokens predict other classes for too many images.
    `options.source` is not used.
    """
    output, dtype, merge_tokens = run_directory.output_folder(options.output), options.dtype, options.merge_tokens or 0
    exported = exported.with_logits()
    model, labels, origin = exported.model, exported.labels, exported.origin
    if options.attention:
        attention_names(model)
    if merge_tokens:
        refuse_first(merging_rules(model, merge_tokens))
    started = time.perf_counter()
    expected = parity.reference(
        in_dtype(model, "float32"), exported.preprocessing, exported.samples, multi_label=origin.multi_label
    )
    with staged(output) as stage, tempfile.TemporaryDirectory() as assets, Progress("Writing the SavedModel"):
        version = stage / "version"
        labels_file = pathlib.Path(assets) / run_directory.LABELS
        labels_file.write_text(labels_text(labels), encoding="utf-8")
        served = inference_model(
            model, dtype, for_tensorflow=True, all_tokens=options.attention, merge_tokens=merge_tokens
        )
        _write(served, exported, options, labels_file, version)
        del served
        gc.collect()  # the traced graphs hold the weights in reference cycles, and the weights are loaded again next
        with disk_errors(version):
            exact = dtype == "float32" and not merge_tokens
            form = f"SavedModel with --merge-tokens {merge_tokens}" if merge_tokens else f"{dtype} SavedModel"
            found, facts = _verify(version, expected, options.max_disagreement, origin, form, exact=exact)
            if exported.unknown is not None:
                facts |= _verify_unknown(version, expected, exported, exact=exact)
            if options.tflite:
                facts |= write_served_file(version, exported, expected)
        facts = {
            "artifact": "SavedModel",
            **origin.as_json(),
            "dtype": dtype,
            "xla": options.xla,
            "merge_tokens": merge_tokens,
            "threshold": options.threshold,
            "images_from": origin.images,
            **facts,
            "export_seconds": round(time.perf_counter() - started, 1),
        }
        card = model_card(model, labels, origin, facts, _interface(version))
        (version / "README.md").write_text(card, encoding="utf-8")
        report.write(version, f"{short_name(origin.name)} as SavedModel", facts)
        path = put_as_next_version(version, output)
    return path, found


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


def _write(
    model: keras.Model,
    exported: ExportedModel,
    options: SavedModelOptions,
    labels_file: pathlib.Path,
    path: pathlib.Path,
) -> None:
    """Write signatures, weights and labels of a model, which is `exported` as it is served."""
    servable = Servable(model, exported.labels, str(labels_file))
    scoring = Scoring(exported.origin.temperature, options.threshold, exported.origin.multi_label)
    functions = signatures(
        model,
        servable.labels,
        attention=options.attention,
        xla=options.xla,
        scoring=scoring,
        unknown=exported.unknown,
    )
    servable.serve = tf.function(
        lambda image: functions["image_tensor"](image=image)["logits"],
        autograph=False,
        input_signature=[tf.TensorSpec(None, tf.float32)],
    )
    save_module(servable, path, functions)
    preprocessing = preprocessing_of(model)
    add_shapes(path, (*preprocessing.image_size, preprocessing.channels))


def _verify(
    path: pathlib.Path,
    expected: parity.Reference,
    max_disagreement: float,
    origin: Provenance,
    form: str,
    *,
    exact: bool,
) -> tuple[parity.Parity, dict]:
    """Load a SavedModel, warm it up, and compare it with the Keras model. Raises ParityError if they differ."""
    loaded = tf.saved_model.load(path)
    image_shape = (*expected.preprocessing.image_size, expected.preprocessing.channels)
    warmed_up = warmup.write_requests(path, loaded.signatures, expected.samples.encoded[0], image_shape)
    logits, probabilities = [], []
    with Progress("verifying", len(expected.logits)) as progress:
        for files, images in expected.batches():
            logits.append(loaded.signatures["image_tensor"](image=tf.constant(images))["logits"])
            probabilities.append(loaded.signatures["serving_default"](image_bytes=tf.constant(files))["probabilities"])
            progress.update(len(files))
    found = parity.compare(expected, np.concatenate(logits))
    activation = tf.sigmoid if origin.multi_label else tf.nn.softmax
    difference = np.abs(np.concatenate(probabilities) - activation(expected.logits / origin.temperature)).max()
    if exact:
        parity.require_equal("SavedModel", found)
        parity.require_close("SavedModel's probabilities of encoded images", difference, expected.tolerance)
    else:
        parity.require_agreement(form, found, max_disagreement)
        from_files = parity.compare(expected, _logits_of(np.concatenate(probabilities), multi_label=origin.multi_label))
        parity.require_agreement(f"{form} with encoded images", from_files, max_disagreement)
    call = functools.partial(loaded.signatures["image_tensor"], image=tf.constant(images[:1]))
    latency = report.latency(call)
    del loaded, call
    facts = {
        "bytes": directory_bytes(path),
        **parity.as_json(found),
        "keras_accuracy": expected.accuracy,
        "encoded_images_max_abs_diff": float(difference),
        "warm_up_requests": warmed_up,
        "latency_ms": {"all_threads": latency},
        "operators": _operators(path),
    }
    return found, facts


def _verify_unknown(path: pathlib.Path, expected: parity.Reference, exported: ExportedModel, *, exact: bool) -> dict:
    """Compare the scores of unknown images with the Keras model's. Raises ParityError if `exact` and they differ."""
    assert exported.unknown is not None
    run = tf.saved_model.load(path).signatures["serving_default"]
    model = in_dtype(exported.model, "float32")
    scores = exported.unknown.scores(model, (images for _, images in expected.batches()))
    found = [run(image_bytes=tf.constant(files))["unknown_score"] for files, _ in expected.batches()]
    return parity.unknown_facts("SavedModel", exported.unknown, scores, np.concatenate(found), exact=exact)


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


def summary(path: pathlib.Path, found: parity.Parity) -> str:
    """The result of `export_saved_model` as a sentence for the terminal."""
    accuracy = "" if np.isnan(found.accuracy) else f", accuracy {found.accuracy:.4f}"
    return (
        f"{path}: {directory_bytes(path):,} bytes; logits within {found.max_abs_diff:.2g} of the Keras model on "
        f"{found.num_images:,} images{accuracy}; see {path / 'report.md'}."
    )
