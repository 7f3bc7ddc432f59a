"""ONNX and OpenVINO files of a model: written, loaded, and compared with the Keras model before they are there."""

import pathlib
import time
from collections.abc import Sequence

import keras
import numpy as np
import tqdm

from export import fingerprint, parity, report
from export.inference_model import in_dtype, plain
from export.onnx import runtimes
from export.onnx.runtimes import FILES, Runner
from export.options import OnnxFormat, OnnxOptions
from export.source import Provenance, check_classifier, open_source
from keras_vit import UserError, preprocessing_of, run_directory
from keras_vit.errors import ParityError
from keras_vit.files.atomic import staged
from keras_vit.run_directory import Samples

# In what numbers the first images are given to an artifact, beside the batches of all of them.
_BATCHES = (1, 5)


def export_onnx(
    model: keras.Model,
    labels: Sequence[str],
    samples: Samples,
    output: pathlib.Path,
    formats: Sequence[OnnxFormat] = ("onnx",),
    *,
    origin: Provenance | None = None,
) -> dict[OnnxFormat, tuple[pathlib.Path, parity.Parity]]:
    """Write each format and return the path that its runtime is given, and its differences from the Keras model.

    Each is loaded afresh and run on all samples, in batches and one by one; the logits must equal the model's to float
    rounding, else ParityError is raised and nothing is put in place. UserError is raised for an output with files of
    another model. The other arguments are those of the command.
    """
    origin = origin or Provenance()
    if not formats:
        raise UserError(f"--formats takes at least one of {', '.join(OnnxFormat.__args__)}, but none is given.")
    runtimes.require_packages(formats)
    check_classifier(model)
    run_directory.check_classes(model, labels)
    run_directory.check_output(output)
    for kind in formats:
        runtimes.require_room(kind, model)
    texts = fingerprint.claim(output, model, labels)
    expected = parity.reference(in_dtype(model, "float32"), preprocessing_of(model), samples)
    network = plain(model, for_onnx=True)
    written, rows, notes = {}, {}, []
    with staged(output) as stage:
        for kind in dict.fromkeys(formats):
            started = time.perf_counter()
            runtimes.write(network, kind, stage, labels)
            file = stage / FILES[kind][0]
            found, batches = _verify(file, kind, expected)
            written[kind] = (output / file.name, found)
            rows[kind] = _facts(file, kind, expected, found, batches, started)
            if kind == "openvino":
                notes += _of_own_precision(file, expected)
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
        _report(stage, origin, expected, rows, notes)
    return written


def _verify(file: pathlib.Path, kind: OnnxFormat, expected: parity.Reference) -> tuple[parity.Parity, dict[str, float]]:
    """Run a file on all images, and on the first ones in other numbers at a time.

    Returns the differences of the first from the Keras model, and the largest of the others by that number. Raises
    ParityError where one is beyond float rounding.
    """
    runner = runtimes.open_file(file, kind)
    found = parity.compare(expected, _run(runner, expected, file.name))
    parity.require_equal(f"{kind} file", found)
    first = next(expected.batches())[1]
    rows = np.arange(max(_BATCHES)) % len(first)  # again from the first one where there are fewer
    images, differences = first[rows], {}
    for size in _BATCHES:
        logits = [runner(images[start : start + size]) for start in range(0, len(images), size)]
        differences[str(size)] = float(np.abs(np.concatenate(logits) - expected.logits[rows]).max())
        if not differences[str(size)] <= expected.tolerance:
            raise ParityError(
                f"The logits of the {kind} file for {size} images at a time differ from the model's by up to "
                f"{differences[str(size)]:.3g}, more than {expected.tolerance:.3g}, so it was not kept."
            )
    return found, differences


def _run(runner: Runner, expected: parity.Reference, name: str) -> np.ndarray:
    """Logits (n, K) of the reference's images."""
    logits = []
    with tqdm.tqdm(desc=f"Running {name}", total=len(expected.logits), unit="image", disable=None) as progress:
        for _, images in expected.batches():
            logits.append(runner(images))
            progress.update(len(images))
    return np.concatenate(logits)


def _facts(
    file: pathlib.Path,
    kind: OnnxFormat,
    expected: parity.Reference,
    found: parity.Parity,
    batches: dict[str, float],
    started: float,
) -> dict:
    image = next(expected.batches())[1][:1]
    return {
        "files": list(FILES[kind]),
        "bytes": sum((file.parent / name).stat().st_size for name in FILES[kind]),
        **parity.as_json(found),
        "max_abs_diff_by_batch": batches,
        "latency_ms": {
            f"{threads}_threads": runtimes.latency(runtimes.open_file(file, kind, threads), image) for threads in (1, 2)
        },
        "operators": runtimes.operators(file, kind),
        "packages": runtimes.versions(kind),
        "export_seconds": round(time.perf_counter() - started, 1),
    }


def _of_own_precision(file: pathlib.Path, expected: parity.Reference) -> list[str]:
    """What OpenVINO's answers are without the request for float32, where they are others on this processor."""
    name, runner = runtimes.own_precision(file)
    if name == "f32":
        return []
    found = parity.compare(expected, _run(runner, expected, f"{file.name} in {name}"))
    return [
        f"The figures are those of INFERENCE_PRECISION_HINT f32. Without it OpenVINO computes in {name} on this "
        f"processor: logits differ from the model's by up to {found.max_abs_diff:.3g}, and {found.agreement:.2%} of "
        "the images fall into the same class."
    ]


def _report(stage: pathlib.Path, origin: Provenance, expected: parity.Reference, rows: dict, notes: list[str]) -> None:
    accuracy = parity.known(parity.accuracy(expected, expected.logits))
    facts = {
        "artifact": "ONNX and OpenVINO",
        "model": origin.name,
        "images_from": origin.images,
        "num_images": len(expected.logits),
        "keras_accuracy": accuracy,
        "formats": rows,
        "notes": notes,
    }
    columns = ("format", "bytes", "max diff", "mean diff", *(f"max diff, batch {size}" for size in _BATCHES),
               "agreement", "accuracy", "1 thread, ms", "2 threads, ms", "operators")  # fmt: skip
    table = [
        (kind, f"{row['bytes']:,}", f"{row['max_abs_diff']:.3g}", f"{row['mean_abs_diff']:.3g}",
         *(f"{difference:.3g}" for difference in row["max_abs_diff_by_batch"].values()), f"{row['agreement']:.4f}",
         "not known" if row["accuracy"] is None else f"{row['accuracy']:.4f}",
         *(f"{ms:.3g}" for ms in row["latency_ms"].values()), sum(row["operators"].values()))
        for kind, row in rows.items()
    ]  # fmt: skip
    known = "not known" if accuracy is None else f"{accuracy:.4f}"
    heading = f"{len(expected.logits):,} {origin.images}; accuracy of the Keras model {known}"
    panels = {
        "latency of one image on one thread, ms": {kind: row["latency_ms"]["1_threads"] for kind, row in rows.items()},
        "megabytes": {kind: row["bytes"] / 1e6 for kind, row in rows.items()},
        **{f"{kind}: operators": row["operators"] for kind, row in rows.items()},
    }
    report.write(stage, f"{origin.name} as {' and '.join(rows)}", facts, [(heading, columns, table)], panels)


def export_command(arguments: OnnxOptions) -> None:
    """Open the source, export it and print what came of it."""
    runtimes.require_packages(arguments.formats)  # before a large model is read
    source = open_source(arguments.source)
    written = export_onnx(
        source.model,
        source.labels,
        source.samples,
        pathlib.Path(arguments.output),
        arguments.formats,
        origin=source.origin,
    )
    rows = [
        (kind, str(path), f"{found.max_abs_diff:.2g}", f"{found.agreement:.4f}",
         "" if np.isnan(found.accuracy) else f"{found.accuracy:.4f}")
        for kind, (path, found) in written.items()
    ]  # fmt: skip
    print(parity.as_table(rows, ("format", "file", "max |logit diff|", "agreement", "accuracy")))
