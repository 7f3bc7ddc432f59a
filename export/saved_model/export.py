"""A SavedModel of a model: written, loaded afresh, and compared with the Keras model before it is there."""

import contextlib
import errno
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from export import parity, report
from export.inference_model import in_dtype, plain
from export.options import Dtype, SavedModelOptions
from export.saved_model import cpp_loader, warmup
from export.saved_model.model_card import model_card
from export.saved_model.signatures import Servable, attention_names, describe, has_constants, signatures
from export.source import Provenance, check_classifier, open_source
from keras_vit import UserError, preprocessing_of, run_directory
from keras_vit.errors import ParityError
from keras_vit.files.atomic import staged
from keras_vit.files.labels import labels_text
from keras_vit.run_directory import Samples

# Images that also go through the C++ loader, and calls of which the time is taken at most.
_NATIVE_IMAGES, _NATIVE_REPEATS = 4, 30


def export_saved_model(
    model: keras.Model,
    labels: Sequence[str],
    samples: Samples,
    output: pathlib.Path,
    *,
    origin: Provenance | None = None,
    dtype: Dtype = "float32",
    attention: bool = False,
    xla: bool = False,
    max_disagreement: float = parity.LARGEST_DISAGREEMENT,
) -> tuple[pathlib.Path, parity.Parity]:
    """Write the next version below `output` and return its path and its differences from the Keras model.

    All signatures are checked on the samples after a fresh load; when they differ from the model beyond rounding,
    ParityError is raised and nothing is kept. The other arguments are those of the command.
    """
    origin = origin or Provenance()
    check_classifier(model)
    run_directory.check_classes(model, labels)
    run_directory.check_output(output)
    if attention:
        attention_names(model)
    if xla and dtype == "bfloat16":
        raise UserError("XLA makes bfloat16 slower on a CPU, not faster; give --xla or --dtype bfloat16, not both.")
    started = time.perf_counter()
    expected = parity.reference(in_dtype(model, "float32"), preprocessing_of(model), samples)
    with staged(output) as stage, tempfile.TemporaryDirectory() as assets:
        version = stage / "version"
        labels_file = pathlib.Path(assets) / run_directory.LABELS
        labels_file.write_text(labels_text(labels), encoding="utf-8")
        served = plain(model, dtype, for_tensorflow=True, all_tokens=attention)
        constants = has_constants(served)
        _write(served, labels, labels_file, version, attention=attention, xla=xla)
        del served
        gc.collect()  # the graphs just traced refer to each other in circles; the weights are about to be read again
        with disk_errors(version):
            found, facts = _verify(version, expected, dtype, max_disagreement, constants)
        facts = {
            "artifact": "SavedModel",
            "model": origin.name,
            "dtype": dtype,
            "xla": xla,
            "images_from": origin.images,
            **facts,
            "export_seconds": round(time.perf_counter() - started, 1),
        }
        card = model_card(model, labels, origin, facts, _interface(version))
        (version / "README.md").write_text(card, encoding="utf-8")
        report.write(version, f"{origin.name} as SavedModel", facts)
        path = _put_as_next_version(version, output)
    return path, found


def _put_as_next_version(version: pathlib.Path, output: pathlib.Path) -> pathlib.Path:
    """Rename a finished directory to the next number in `output`; while another export takes it first, to the next."""
    while True:
        number = 1 + max((int(entry.name) for entry in output.iterdir() if entry.name.isdecimal()), default=0)
        try:
            return version.rename(output / str(number))
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise


def _write(
    model: keras.Model, labels: Sequence[str], labels_file: pathlib.Path, path: pathlib.Path, **options: bool
) -> None:
    """Signatures, weights and labels; the model given is released with the end of the call."""
    servable = Servable(model, labels, str(labels_file))
    save(servable, path, signatures(model, servable.labels, **options))
    preprocessing = preprocessing_of(model)
    describe(path, (*preprocessing.image_size, preprocessing.channels))


def save(module: tf.Module, path: pathlib.Path, functions: dict) -> None:
    """tf.saved_model.save with the OSError for a full disk, for which TensorFlow has an error of its own."""
    with disk_errors(path):
        tf.saved_model.save(module, path, signatures=functions)


@contextlib.contextmanager
def disk_errors(path: pathlib.Path) -> Iterator[None]:
    """Raises TensorFlow's error of a full disk as the operating system's."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        full = os.strerror(errno.ENOSPC)
        if full not in error.message:
            raise
        raise OSError(errno.ENOSPC, full, str(path)) from error


def _verify(
    path: pathlib.Path, expected: parity.Reference, dtype: Dtype, max_disagreement: float, constants: bool
) -> tuple[parity.Parity, dict]:
    """Load a SavedModel afresh, warm it up, and compare it with the Keras model. Raises ParityError if they differ."""
    loaded = tf.saved_model.load(path)
    # With constants each signature takes memory of its own for the weights, and few servers use more than one.
    warmed_up = {name: loaded.signatures[name] for name in (("serving_default",) if constants else loaded.signatures)}
    image_shape = (*expected.preprocessing.image_size, expected.preprocessing.channels)
    warmup.write_requests(path, warmed_up, expected.samples.encoded[0], image_shape)
    warmed_up = warmup.replay(path, warmed_up)
    logits, probabilities = [], []
    for files, images in expected.batches():
        logits.append(loaded.signatures["image_tensor"](image=tf.constant(images))["logits"])
        probabilities.append(loaded.signatures["serving_default"](image_bytes=tf.constant(files))["probabilities"])
    found = parity.compare(expected, np.concatenate(logits))
    difference = np.abs(np.concatenate(probabilities) - tf.nn.softmax(expected.logits)).max()
    if dtype == "float32":
        parity.require_equal("SavedModel", found)
        if not difference <= expected.tolerance:
            raise ParityError(
                f"The SavedModel's probabilities of encoded images differ from the model's by {difference:.3g}, more "
                f"than {expected.tolerance:.3g}, so it was not kept."
            )
    else:
        parity.require_agreement("bfloat16 SavedModel", found, max_disagreement)
        from_files = parity.compare(expected, np.log(np.concatenate(probabilities) + 1e-30))
        parity.require_agreement("bfloat16 SavedModel, given encoded images,", from_files, max_disagreement)
    del loaded
    facts = {
        "bytes": directory_bytes(path),
        **parity.as_json(found),
        "keras_accuracy": parity.known(parity.accuracy(expected, expected.logits)),
        "encoded_images_max_abs_diff": float(difference),
        "warm_up_requests": warmed_up,
        **run_cpp_loader(path, expected, expected.tolerance if dtype == "float32" else np.inf),
        "operators": _operators(path),
    }
    return found, facts


def run_cpp_loader(path: pathlib.Path, expected: parity.Reference, tolerance: float) -> dict:
    """A SavedModel through TensorFlow's C++ loader, as TF Serving has it, on one thread and on two: latency, logits.

    Raises ParityError when the logits are not those of the model. Where the library has another form, an empty dict.
    """
    if cpp_loader.library_path() is None:
        return {}
    signature = _signature_definitions(path)["image_tensor"]
    images = next(images for _, images in expected.batches())[:_NATIVE_IMAGES]
    latency = {}
    with tempfile.TemporaryDirectory() as directory:
        given, answer = pathlib.Path(directory) / "images.npy", pathlib.Path(directory) / "logits.npy"
        np.save(given, images)
        for threads in (1, 2):
            command = [
                sys.executable, "-I", cpp_loader.__file__, str(path), str(threads), str(_NATIVE_REPEATS),
                signature.inputs["image"].name, signature.outputs["logits"].name, str(given), str(answer),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode:
                raise ParityError(
                    f"TensorFlow's C++ loader cannot run the SavedModel ({done.stderr[-300:]}), so it was not kept."
                )
            seconds = json.loads(done.stdout)["seconds"]
            latency[f"{threads}_threads"] = report.typical(seconds)
        difference = float(np.abs(np.load(answer) - expected.logits[: len(images)]).max())
    if not difference <= tolerance:
        raise ParityError(
            f"The logits of the SavedModel by the C++ loader differ from the model's by {difference:.3g}, more than "
            f"{tolerance:.3g}, so it was not kept."
        )
    return {"cpp_loader_max_abs_diff": difference, "latency_ms": latency}


def _signature_definitions(path: pathlib.Path) -> dict:
    saved = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    return saved.meta_graphs[0].signature_def


def _operators(path: pathlib.Path) -> dict[str, int]:
    """How often each operator is in the graph and its functions, the most frequent first."""
    graph = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes()).meta_graphs[0].graph_def
    parts = (graph.node, *(function.node_def for function in graph.library.function))
    return report.operator_table(node.op for part in parts for node in part)


def _interface(path: pathlib.Path) -> list[tuple[str, str, str, str, str]]:
    """Signature, whether input or output, name, type and shape of every tensor."""
    rows = []
    for name, definition in sorted(_signature_definitions(path).items()):
        if name.startswith("__"):
            continue
        for side, tensors in (("input", definition.inputs), ("output", definition.outputs)):
            for tensor, info in sorted(tensors.items()):
                shape = ", ".join("B" if dim.size < 0 else str(dim.size) for dim in info.tensor_shape.dim)
                rows.append((name, side, tensor, tf.dtypes.as_dtype(info.dtype).name, f"({shape})"))
    return rows


def directory_bytes(path: pathlib.Path) -> int:
    """Size of all files below a directory."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def export_command(arguments: SavedModelOptions) -> None:
    """Open the source, export it and print what came of it."""
    parity.check_share(arguments.max_disagreement)
    source = open_source(arguments.source)
    path, found = export_saved_model(
        source.model,
        source.labels,
        source.samples,
        pathlib.Path(arguments.output),
        origin=source.origin,
        dtype=arguments.dtype,
        attention=arguments.attention,
        xla=arguments.xla,
        max_disagreement=arguments.max_disagreement,
    )
    accuracy = "" if np.isnan(found.accuracy) else f", accuracy {found.accuracy:.4f}"
    print(
        f"{path}: {directory_bytes(path):,} bytes; logits within {found.max_abs_diff:.2g} of the Keras model on "
        f"{found.num_images:,} images{accuracy}; see {path / 'report.md'}."
    )
