"""TFLite files of a model: converted, loaded afresh, and compared with the Keras model before they are there."""

import pathlib
import tempfile
import time
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from export import fingerprint, parity, report
from export.inference_model import in_dtype, plain
from export.options import TFLiteFormat, TFLiteOptions
from export.saved_model.export import save
from export.source import Provenance, check_classifier, open_source, read_folder
from export.tflite import quantize, tflite_file
from export.tflite.quantize import STATIC, WEIGHT_SHARE
from keras_vit import UserError, preprocessing_of, run_directory
from keras_vit.errors import ParityError
from keras_vit.files.atomic import staged
from keras_vit.run_directory import CALIBRATION, Samples

# Images on which the layers are compared, and layers that the report lists.
_COMPARED, _LISTED = 8, 30
# What a format must keep for the report to recommend it: agreement, and accuracy lost, in shares of images.
_WORTH_HAVING = (0.99, 0.005)


def export_tflite(
    model: keras.Model,
    labels: Sequence[str],
    samples: Samples,
    output: pathlib.Path,
    formats: Sequence[TFLiteFormat],
    *,
    calibration: Samples | None = None,
    origin: Provenance | None = None,
    uint8_input: bool = False,
    dynamic_batch: bool = False,
    max_disagreement: float = parity.LARGEST_DISAGREEMENT,
) -> dict[TFLiteFormat, tuple[pathlib.Path, parity.Parity]]:
    """Write one file for each format and return its path and its differences from the Keras model.

    Each file is loaded afresh and run on all samples; float32 must equal the model to float rounding, the others must
    agree on nearly all classes, else ParityError is raised and none of the files is put in place. UserError is raised
    for an output with files of another model. The other arguments are those of the command.
    """
    origin = origin or Provenance()
    _check_formats(formats, calibration, dynamic_batch)
    check_classifier(model)
    run_directory.check_classes(model, labels)
    run_directory.check_output(output)
    texts = fingerprint.claim(output, model, labels)
    ending = ("-uint8-input" if uint8_input else "") + ("-dynamic-batch" if dynamic_batch else "")
    preprocessing = preprocessing_of(model)
    expected = parity.reference(in_dtype(model, "float32"), preprocessing, samples)
    if calibration is not None:
        representative = parity.Reference(calibration, preprocessing, np.zeros(0))
        given = [image[None] for _, images in representative.batches(raw_pixels=uint8_input) for image in images]
    else:
        given = []
    written, rows, errors = {}, {}, {}
    with staged(output) as stage, tempfile.TemporaryDirectory(dir=stage) as drafts:
        drafted = {}
        for kind in formats:
            started = time.perf_counter()
            # All tokens together have wider ranges than the class tokens of a few images, so that fewer are cut off.
            all_tokens = kind in STATIC
            if all_tokens not in drafted:
                drafted[all_tokens] = pathlib.Path(drafts) / f"{kind}.tflite"
                options = {"uint8_input": uint8_input, "dynamic_batch": dynamic_batch, "all_tokens": all_tokens}
                drafted[all_tokens].write_bytes(convert(model, **options))
            float_file = drafted[all_tokens]
            content = float_file.read_bytes() if kind == "float32" else quantize.quantize(float_file, kind, given)
            file = stage / _file_name(kind, ending)
            about = f"{origin.name}, {kind}"
            file.write_bytes(tflite_file.with_metadata(content, model.name, about, labels, preprocessing, uint8_input))
            _require_weights(file, 4 * model.count_params(), WEIGHT_SHARE[kind])
            found = parity.compare(expected, run_tflite(file, expected, uint8_input))
            if kind == "float32":
                parity.require_equal("float32 TFLite file", found)
            else:
                parity.require_agreement(f"{kind} TFLite file", found, max_disagreement)
            written[kind] = (output / file.name, found)
            rows[kind] = _facts(file, found, started)
            if kind in STATIC:
                compared = [image[None] for image in next(expected.batches(raw_pixels=uint8_input))[1][:_COMPARED]]
                layers = [layer.name for layer in model.layers]
                errors[kind] = quantize.layer_errors(float_file, file, compared, layers)
        for draft in drafted.values():
            draft.unlink()
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
        pathlib.Path(drafts).rmdir()
        _report(stage, origin, expected, rows, errors)
    return written


def _check_formats(formats: Sequence[TFLiteFormat], calibration: Samples | None, dynamic_batch: bool) -> None:
    """Raise UserError for what cannot be had, before anything is converted."""
    if not formats:
        raise UserError(f"--formats takes at least one of {', '.join(TFLiteFormat.__args__)}, but none is given.")
    static = [kind for kind in formats if kind in STATIC]
    if static and calibration is None:
        raise UserError(f"{static[0]} needs representative images to fix its ranges; give --calibration FOLDER.")
    if static and dynamic_batch:
        raise UserError(f"{static[0]} has ranges for one image at a time; leave --dynamic-batch out.")


def _file_name(kind: TFLiteFormat, ending: str = "") -> str:
    return f"model-{kind}{ending}.tflite"


def convert(
    model: keras.Model, *, uint8_input: bool = False, dynamic_batch: bool = False, all_tokens: bool = False
) -> bytes:
    """The model as a float32 TFLite file, of batch 1 unless any batch is wanted, in the form of `plain`.

    Goes through a SavedModel: a concrete function converted directly keeps its variables outside, and the file would
    have no weights.
    """
    preprocessing, network = preprocessing_of(model), plain(model, all_tokens=all_tokens)
    shape = (None if dynamic_batch else 1, *preprocessing.image_size, preprocessing.channels)
    spec = tf.TensorSpec(shape, tf.uint8 if uint8_input else tf.float32, name="image")

    @tf.function(input_signature=[spec])
    def classify(image):
        return {"logits": network(preprocessing.normalize(image) if uint8_input else image, training=False)}

    module = tf.Module()
    module.weights = [weight.value for weight in network.weights]
    with tempfile.TemporaryDirectory() as directory:
        signatures = {"serving_default": classify.get_concrete_function()}
        save(module, pathlib.Path(directory), signatures)
        return tf.lite.TFLiteConverter.from_saved_model(directory).convert()


def _require_weights(file: pathlib.Path, weight_bytes: int, share: float) -> None:
    """Raise ParityError for a file too small to hold the weights, or too large to hold them in fewer bits."""
    size = file.stat().st_size
    if size < 0.9 * share * weight_bytes:
        raise ParityError(f"{file.name} has {size} bytes, too few for its weights, so it was not kept.")
    if share < 1.0 and size > (share + 0.5) / 1.5 * weight_bytes + 2**20:
        raise ParityError(f"{file.name} has {size} bytes: its weights were not quantised, so it was not kept.")


def run_tflite(file: pathlib.Path, expected: parity.Reference, raw_pixels: bool = False) -> np.ndarray:
    """Logits (n, K) of the reference's images by a TFLite file."""
    return tflite_file.run(file, expected, raw_pixels)


def _facts(file: pathlib.Path, found: parity.Parity, started: float) -> dict:
    return {
        "file": file.name,
        "bytes": file.stat().st_size,
        **parity.as_json(found),
        "latency_ms": {f"{threads}_threads": tflite_file.latency(file, threads) for threads in (1, 2)},
        "xnnpack_partitions": tflite_file.partitions(file),
        "operators": tflite_file.operators(file),
        "export_seconds": round(time.perf_counter() - started, 1),
    }


def recommend(rows: dict[TFLiteFormat, dict], keras_accuracy: float | None) -> str:
    """One sentence: which of the files to take, and which are not worth having."""
    agreement, lost = _WORTH_HAVING

    def worth(row: dict) -> bool:
        known = keras_accuracy is not None and row["accuracy"] is not None
        return row["agreement"] >= agreement and not (known and keras_accuracy - row["accuracy"] > lost)

    good = {kind: row for kind, row in rows.items() if worth(row)}
    poor = [kind for kind in rows if kind not in good]
    sentence = "None of these formats keeps the model's classes well enough; take float32."
    if good:
        best = min(good, key=lambda kind: good[kind]["latency_ms"]["1_threads"])
        row = good[best]
        sentence = (
            f"Recommended: {best}, the fastest on one thread ({row['latency_ms']['1_threads']:.3g} ms, "
            f"{row['bytes']:,} bytes) of those that agree with the model on at least {agreement:.0%} of the images"
            f" and lose at most {100 * lost:.1f} points of accuracy."
        )
    return sentence + (f" Not worth having for this model: {', '.join(poor)}." if poor and good else "")


def _report(
    stage: pathlib.Path, origin: Provenance, expected: parity.Reference, rows: dict[TFLiteFormat, dict], errors: dict
) -> None:
    keras_accuracy = parity.known(parity.accuracy(expected, expected.logits))
    facts = {
        "artifact": "TFLite",
        "model": origin.name,
        "images_from": origin.images,
        "num_images": len(expected.logits),
        "keras_accuracy": keras_accuracy,
        "formats": rows,
        "layer_errors": {kind: dict(list(found.items())[:_LISTED]) for kind, found in errors.items()},
        "recommendation": recommend(rows, keras_accuracy),
    }
    facts["notes"] = [facts["recommendation"]]
    columns = ("format", "bytes", "max diff", "mean diff", "agreement", "accuracy", "1 thread, ms", "2 threads, ms",
               "operators", "XNNPACK partitions")  # fmt: skip
    table = [
        (kind, f"{row['bytes']:,}", f"{row['max_abs_diff']:.3g}", f"{row['mean_abs_diff']:.3g}",
         f"{row['agreement']:.4f}", "not known" if row["accuracy"] is None else f"{row['accuracy']:.4f}",
         *(f"{ms:.3g}" for ms in row["latency_ms"].values()), sum(row["operators"].values()), row["xnnpack_partitions"])
        for kind, row in rows.items()
    ]  # fmt: skip
    known = "not known" if keras_accuracy is None else f"{keras_accuracy:.4f}"
    heading = f"{len(expected.logits):,} {origin.images}; accuracy of the Keras model {known}"
    tables = [(heading, columns, table)]
    tables += [
        (f"{kind}: noise as a share of the signal's power, worst first", ("layer", "noise"),
         [(name, f"{error:.3g}") for name, error in list(found.items())[:_LISTED]])
        for kind, found in errors.items()
    ]  # fmt: skip
    panels = {
        "agreement with the Keras model": {kind: row["agreement"] for kind, row in rows.items()},
        "latency of one image on one thread, ms": {kind: row["latency_ms"]["1_threads"] for kind, row in rows.items()},
        "megabytes": {kind: row["bytes"] / 1e6 for kind, row in rows.items()},
        **{f"{kind}: noise / signal": found for kind, found in errors.items()},
    }
    report.write(stage, f"{origin.name} as TFLite", facts, tables, panels)


def read_calibration(run: str | None, folder: str | None, number: int, labels: Sequence[str]) -> Samples:
    """Representative images: of a folder, else the training images that the run keeps."""
    if number < 1:
        raise UserError(f"--calibration-images must be at least 1, but is {number}.")
    if folder is not None:
        found, where = read_folder(folder, labels, most=number), folder
    elif run is not None:
        if not (pathlib.Path(run) / CALIBRATION).is_file():
            raise UserError(
                f"{run} keeps no training images ({CALIBRATION}) to fix the ranges of int8 and int16x8 on; give "
                "--calibration FOLDER of representative images, or train again."
            )
        kept = Samples.load(pathlib.Path(run) / CALIBRATION)
        found, where = Samples(kept.encoded[:number], kept.labels[:number]), f"{run}/{CALIBRATION}"
    else:
        raise UserError(
            "A checkpoint has no images to fix the ranges of int8 and int16x8 on; give --calibration FOLDER."
        )
    if len(found.encoded) < number:
        raise UserError(
            f"--calibration-images asks for {number} images, but {where} has {len(found.encoded)}; give that number, "
            "or more images."
        )
    return found


def export_command(arguments: TFLiteOptions) -> None:
    """Open the source, export it and print what came of it."""
    parity.check_share(arguments.max_disagreement)
    source, calibration = open_source(arguments.source), None
    if any(kind in STATIC for kind in arguments.formats):
        calibration = read_calibration(
            arguments.source.run, arguments.calibration, arguments.calibration_images, source.labels
        )
    written = export_tflite(
        source.model,
        source.labels,
        source.samples,
        pathlib.Path(arguments.output),
        arguments.formats,
        calibration=calibration,
        origin=source.origin,
        uint8_input=arguments.uint8_input,
        dynamic_batch=arguments.dynamic_batch,
        max_disagreement=arguments.max_disagreement,
    )
    rows = [
        (kind, str(path), f"{path.stat().st_size:,}", f"{found.max_abs_diff:.2g}", f"{found.agreement:.4f}",
         "" if np.isnan(found.accuracy) else f"{found.accuracy:.4f}")
        for kind, (path, found) in written.items()
    ]  # fmt: skip
    print(parity.as_table(rows, ("format", "file", "bytes", "max |logit diff|", "agreement", "accuracy")))
