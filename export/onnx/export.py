"""Exports a model as an ONNX file, with a page that runs it in the browser, and verifies it against the Keras model.

Input: image (B, H, W, C) float32 in the value range of the model. Outputs: those of the task, by name, see
`export.tasks`. Keras writes the file, and ONNX Runtime runs it. The packages of requirements-onnx.txt are imported
inside functions, so that the command can report missing packages.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import logging
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from export import parity, report
from export.files import note_on_earlier, write_beside
from export.inference_model import in_dtype, inference_model
from export.options import OnnxOptions
from export.source import ExportedModel, Provenance
from export.tasks import Classification, Measures, Task
from keras_vit import Preprocessing, UserError, preprocessing_of
from keras_vit.cli.progress import Progress
from keras_vit.errors import ParityError, explained
from keras_vit.files.atomic import staged
from keras_vit.files.remote import output_folder
from keras_vit.files.tables import short_name
from keras_vit.models.build import exact_products
from keras_vit.promise import OUTPUTS
from keras_vit.scores import UNKNOWN_SCORE, features_and_logits

# Takes images (B, h, w, C) float32 and returns the outputs by name, such as logits (B, K).
Runner = Callable[[np.ndarray], dict[str, np.ndarray]]

FILE = "model.onnx"
PACKAGES = ("onnx", "onnxruntime", "tf2onnx")
REQUIREMENTS = "export/requirements-onnx.txt"
# From this version of the operators on ONNX Runtime sees the norms of the model, see `export.inference_model`.
_OPSET = 18
# An ONNX file is one protobuf message of less than 2 GiB, which holds the weights and the graph.
_MOST_WEIGHT_BYTES = 2**31 - 2**24
_BATCHES = (1, 5)  # further batch sizes to verify, on the first images
PAGE, FACTS = "classify.html", "classify.json"  # the page, and what it needs to know of the model


@exact_products()
def export_onnx(task: Task, options: OnnxOptions) -> tuple[pathlib.Path, Measures]:
    """Write the file. Returns its path and its differences from the Keras model.

    It is loaded again and run on all samples, with several batch sizes. Raises ParityError, and writes nothing, if the
    outputs differ from those of the model by more than rounding. Raises UserError if the output holds files of another
    model. `options.source` is not used.
    """
    output = output_folder(options.output)
    if options.web:
        check_page(task)
    require_packages()
    task = task.prepared()
    check_size(task.exported.model)
    texts = task.identity(output)
    expected, started = task.reference(), time.perf_counter()
    with staged(output) as stage, Progress("Writing the file"):
        file, exported = stage / FILE, task.exported
        write_file(_network(task), file, exported.labels, _metadata(exported, task))
        runner = open_file(file)
        found = expected.outputs_of(runner)
        measures = task.measure("onnx file", expected, found, exact=True)
        row = {**measures, "bytes": file.stat().st_size}
        extra = report.Extra(note_on_earlier(output, stage) if texts else [])
        if isinstance(task, Classification):
            row = _measure_classifier(file, runner, expected, measures, started)
            if (scorer := exported.unknown) is not None:
                batches = (images for _, images in expected.batches())
                scores = scorer.scores(in_dtype(exported.model, "float32"), batches)
                written = np.stack([outputs[UNKNOWN_SCORE] for outputs in found])
                row |= parity.unknown_facts("onnx file", scorer, scores, written, exact=True)
            decided = {name: np.stack([outputs[name] for outputs in found]) for name in OUTPUTS & {*found[0]}}
            row |= parity.promise_facts("onnx file", exported.origin.scoring(), expected, decided, exact=True)
            columns = {
                f"max diff, batch {size}": lambda row, size=size: f"{row['max_abs_diff_by_batch'][str(size)]:.3g}"
                for size in _BATCHES
            }
            extra = dataclasses.replace(extra, columns=columns, panels={"onnx: operators": row["operators"]})
        write_beside(stage, task.exported.origin)
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
        if options.web:
            write_page(stage, exported.preprocessing, exported.labels, exported.origin)
        task.report(stage, "ONNX", expected, {"onnx": row}, extra)
    return output / file.name, measures


def _network(task: Task) -> keras.Model:
    """Return the inference model with its outputs, of a classifier also the score of unknown images and decisions."""
    network = inference_model(task.exported.model, for_onnx=True, all_tokens=task.all_tokens)
    scorer, scoring = task.exported.unknown, task.exported.origin.scoring()
    if scorer is None and scoring.promise is None:
        return task.network(network)
    inside = features_and_logits(network)
    features, logits = inside.output["pre_logits"], inside.output["logits"]
    outputs = {"logits": logits}
    if scorer is not None:
        outputs[UNKNOWN_SCORE] = scorer.score(features, logits)
    if scoring.promise is not None:
        activation = keras.ops.sigmoid if scoring.is_multi_label else keras.ops.softmax
        outputs |= scoring.promise.decide(activation(logits / scoring.temperature))
    return keras.Model(inside.input, outputs)


def _metadata(exported: ExportedModel, task: Task) -> dict[str, str]:
    origin = exported.origin
    about = {"weights": origin.weights, "license": origin.license_text}
    if isinstance(task, Classification):
        about |= {"temperature": str(origin.temperature), "multi_label": str(origin.multi_label).lower()}
        if exported.unknown is not None:
            about["unknown_threshold"] = f"{exported.unknown.threshold:.9g}"
        if origin.promise is not None:
            about["promise"] = json.dumps(dataclasses.asdict(origin.promise))
    return about


def _measure_classifier(
    file: pathlib.Path, runner: Runner, expected: parity.Reference, measures: Measures, started: float
) -> dict[str, Any]:
    """Return size, speed and operators of a file, and its differences in other batches.

    Raises ParityError if one of these is larger than rounding.
    """
    first = next(expected.batches())[1]
    rows = np.arange(max(_BATCHES)) % len(first)  # repeated if there are fewer images
    images, differences = first[rows], dict[str, float]()
    for size in _BATCHES:
        logits = [runner(images[start : start + size])["logits"] for start in range(0, len(images), size)]
        differences[str(size)] = float(np.abs(np.concatenate(logits) - expected.logits[rows]).max())
        what = f"logits of the onnx file for {size} images at a time"
        parity.require_close(what, differences[str(size)], expected.tolerance)

    def latency(threads: int) -> float:
        run = open_file(file, threads)
        return report.latency(lambda: run(images[:1]))

    import onnx

    operators = report.operator_table(node.op_type for node in onnx.load(file).graph.node)
    return {
        "files": [file.name],
        **report.measurements(file.stat().st_size, measures, latency, operators, started),
        "max_abs_diff_by_batch": differences,
        "packages": {package: importlib.metadata.version(package) for package in PACKAGES},
    }


# The file


def require_packages(packages: Sequence[str] = PACKAGES) -> None:
    """Raise UserError if a package is not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(
            f"This needs {', '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed; "
            f'run `pip install ".[onnx]"` in a checkout, or without one `pip install {" ".join(missing)}`.'
        )


def check_size(model: keras.Model) -> None:
    """Raise UserError if the model is too large for a file."""
    weight_bytes = 4 * model.count_params()
    if weight_bytes > _MOST_WEIGHT_BYTES:
        raise UserError(
            f"The weights take {weight_bytes:,} bytes, but an ONNX file holds at most {_MOST_WEIGHT_BYTES:,}; export "
            "a SavedModel with `keras-vit saved-model`."
        )


def write_file(model: keras.Model, path: pathlib.Path, labels: Sequence[str], about: Mapping[str, str]) -> None:
    """Write a float32 model, from `inference_model` with `for_onnx`, for any batch size; one output is named logits.

    The file stores labels, preprocessing and the texts `about` the model. Raises ParityError unless it is valid.
    """
    named = model if isinstance(model.output, dict) else keras.Model(model.input, {"logits": model.output})
    image = keras.InputSpec(shape=model.input_shape, dtype="float32", name="image")
    with _silenced():
        named.export(str(path), format="onnx", verbose=False, input_signature=[image], opset_version=_OPSET)
    _finish(path, model, labels, about)


def _finish(path: pathlib.Path, model: keras.Model, labels: Sequence[str], about: Mapping[str, str]) -> None:
    """Add the metadata and the name of the batch axis.

    tf2onnx writes an unsupported operator under its TensorFlow name, and only logs a message.
    """
    import onnx

    written = onnx.load(path)
    nodes = written.graph.node
    if unsupported := sorted({node.op_type for node in nodes if not onnx.defs.has(node.op_type, node.domain)}):
        raise ParityError(
            f"The ONNX file has operators that ONNX does not support ({', '.join(unsupported)}), so it was not kept."
        )
    for end in (*written.graph.input, *written.graph.output):
        end.type.tensor_type.shape.dim[0].dim_param = "batch"
    preprocessing = json.dumps(dataclasses.asdict(preprocessing_of(model)))
    onnx.helper.set_model_props(written, {"labels": json.dumps(list(labels)), "preprocessing": preprocessing, **about})
    problems = onnx.checker.ValidationError, onnx.shape_inference.InferenceError
    with explained("The ONNX file is not valid ({}), so it was not kept.".format, *problems, kind=ParityError):
        onnx.checker.check_model(written, full_check=True)
    onnx.save(written, path)


def open_file(file: pathlib.Path, threads: int = 0) -> Runner:
    """Load a file as a function from images to outputs. With 0 threads ONNX Runtime chooses the number."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [end.name for end in session.get_outputs()]
    return lambda images: dict(zip(names, session.run(names, {"image": images}), strict=True))


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Hide NumPy deprecation warnings of the Keras exporter, and log messages of tf2onnx, which `_finish` checks."""
    logger = logging.getLogger("tf2onnx")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


# The page


def check_page(task: Task) -> None:
    """Raise UserError unless an image in a browser has the model's channels, and the model classifies it."""
    channels = task.exported.preprocessing.channels
    if not isinstance(task, Classification) or channels not in (1, 3):
        raise UserError(
            f"The page of --web is for classifiers of images with 1 or 3 channels, and this is a {task.noun} of "
            f"{channels}; leave --web out."
        )


def write_page(
    directory: pathlib.Path, preprocessing: Preprocessing, labels: Sequence[str], origin: Provenance
) -> None:
    """Write the page and its facts beside model.onnx."""
    page = pathlib.Path(__file__).with_name(PAGE).read_text(encoding="utf-8")
    (directory / PAGE).write_text(page, encoding="utf-8")
    facts = {
        "model": short_name(origin.name),
        "weights": origin.weights,
        "license": origin.license_text,
        "labels": list(labels),
        "preprocessing": dataclasses.asdict(preprocessing),
        "temperature": origin.temperature,
        "multi_label": origin.multi_label,
        "promise": [] if origin.promise is None else origin.promise.sentences(),
    }
    (directory / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def summary(task: Task, path: pathlib.Path, measures: Measures) -> str:
    if isinstance(task, Classification):
        return report.format_table({"onnx": (path, measures)})
    return f"{path}: {task.sentence(measures)}."
