"""TFLite files: their metadata, operators, outputs, and latency."""

import concurrent.futures
import io
import os
import pathlib
import zipfile
from collections.abc import Iterable, Sequence

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from export import parity, report
from export.tflite.flatbuffer import pack, unpack
from keras_vit import Preprocessing
from keras_vit.cli.start import native_stderr_silenced
from keras_vit.files.labels import LABELS, labels_text
from keras_vit.files.tflite_metadata import preprocessing_text
from keras_vit.scores import UNKNOWN_SCORE

_MOST_WORKERS = 4  # largest number of interpreters in parallel
# Associated file, and ending of the file beside it, with inputs and outputs to compare on a phone.
GOLDEN = "golden.bin"
# TFLite Metadata (tflite-support, metadata_schema.fbs 1.0).
_METADATA, _IDENTIFIER, _PARSER = "TFLITE_METADATA", b"M001", "1.0.0"
_RGB, _GRAYSCALE, _AXIS_LABELS, _IMAGE, _NORMALIZATION = 1, 2, 2, 2, 1


def with_metadata(
    content: bytes,
    name: str,
    description: str,
    labels: Sequence[str],
    preprocessing: Preprocessing,
    raw_pixels: bool,
    terms: str,
) -> bytes:
    """Add TFLite Metadata to a file: the image size, its normalization, and labels.txt as an associated file.

    raw_pixels: whether the input is 0..255 and the model normalizes it. terms: license of the weights.
    """
    model = unpack(content)
    buffer = schema.BufferT()
    named = {end.tensorIndex: end.name.decode() for each in model.signatureDefs or () for end in each.outputs}
    outputs = [named.get(index, "logits") for index in model.subgraphs[0].outputs]
    metadata = _metadata(name, description, preprocessing, raw_pixels, terms, outputs)
    buffer.data = np.frombuffer(metadata, np.uint8)
    model.buffers.append(buffer)
    entry = schema.MetadataT()
    entry.name, entry.buffer = _METADATA, len(model.buffers) - 1
    model.metadata = [*(model.metadata or []), entry]
    stream = io.BytesIO(pack(model))
    with zipfile.ZipFile(stream, "a", zipfile.ZIP_STORED) as archive:
        entry_info = zipfile.ZipInfo(LABELS)  # without a date, for identical files from identical models
        archive.writestr(entry_info, labels_text(labels))
    return stream.getvalue()


def with_golden_numbers(content: bytes, golden: bytes) -> bytes:
    """Add the associated file golden.bin to a file with metadata; see `export.tflite.accelerator.golden_numbers`."""
    stream = io.BytesIO(content)
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr(zipfile.ZipInfo(GOLDEN), golden, zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def _metadata(
    name: str, description: str, preprocessing: Preprocessing, raw_pixels: bool, terms: str, outputs: Sequence[str]
) -> bytes:
    """ModelMetadata of metadata_schema.fbs; the integer keys are the positions of its fields."""
    builder = flatbuffers.Builder(1024)
    lows, highs = (np.asarray(end) for end in preprocessing.channel_ranges())
    deviation = np.ones(1) if raw_pixels else 255.0 / (highs - lows)
    mean = np.zeros(1) if raw_pixels else -lows * deviation
    offsets = (builder.CreateNumpyVector(values.astype(np.float32)) for values in (mean, deviation))
    normalization = _table(builder, dict(enumerate(offsets)))
    unit = _table(builder, {1: normalization}, {0: _NORMALIZATION})
    height, width = preprocessing.image_size
    builder.StartObject(2)
    builder.PrependUint32Slot(0, width, 0)
    builder.PrependUint32Slot(1, height, 0)
    size = builder.EndObject()
    image = _table(builder, {1: size}, {0: _GRAYSCALE if preprocessing.channels == 1 else _RGB})
    content = _table(builder, {1: image}, {0: _IMAGE})
    text = {word: builder.CreateString(word) for word in (name, description, terms, "image", *outputs, LABELS, _PARSER)}
    values = "pixels 0..255" if raw_pixels else f"pixels 0..255 normalized to {preprocessing.value_range}"
    fields = {**preprocessing.resizing(), "value_range": preprocessing.value_range}
    about_input = builder.CreateString(f"{values}{preprocessing_text(fields)}")
    about_logits = builder.CreateString("one logit per class, in the order of the labels")
    labels = _table(builder, {0: text[LABELS]}, {2: _AXIS_LABELS})
    image_info = _table(builder, {0: text["image"], 1: about_input, 3: content, 4: _offsets(builder, [unit])})
    about_score = builder.CreateString("larger for an image of none of the classes; the description has its threshold")
    known = {"logits": {1: about_logits, 6: _offsets(builder, [labels])}, UNKNOWN_SCORE: {1: about_score}}
    infos = [_table(builder, {0: text[output], **known.get(output, {})}) for output in outputs]
    graph = _table(builder, {2: _offsets(builder, [image_info]), 3: _offsets(builder, infos)})
    graphs = _offsets(builder, [graph])
    model = _table(builder, {0: text[name], 1: text[description], 3: graphs, 5: text[terms], 7: text[_PARSER]})
    builder.Finish(model, _IDENTIFIER)
    return bytes(builder.Output())


def _table(builder: flatbuffers.Builder, offsets: dict[int, int], numbers: dict[int, int] | None = None) -> int:
    """A flatbuffer table of offsets and bytes, by the positions of their fields."""
    builder.StartObject(8)
    for position, offset in offsets.items():
        builder.PrependUOffsetTRelativeSlot(position, offset, 0)
    for position, number in (numbers or {}).items():
        builder.PrependUint8Slot(position, number, 0)
    return builder.EndObject()


def _offsets(builder: flatbuffers.Builder, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return builder.EndVector()


def interpreter(file: pathlib.Path, threads: int, batch_size: int = 1) -> Interpreter:
    """A new interpreter with allocated tensors for one image, or more with a dynamic batch."""
    made = Interpreter(model_path=str(file), num_threads=threads)
    details = made.get_input_details()[0]
    made.resize_tensor_input(details["index"], [batch_size, *details["shape"][1:]])
    with native_stderr_silenced():  # it prints the name of its delegate
        made.allocate_tensors()
    return made


def run_interpreter(content: bytes, images: Iterable[np.ndarray]) -> parity.Outputs:
    """Return the outputs (n, ...) of a file of batch 1 on images (h, w, C), on the CPU."""
    classify = Interpreter(model_content=content, num_threads=2).get_signature_runner()
    [image] = classify.get_input_details()
    found = [classify(**{image: pixels[None]}) for pixels in images]
    return {name: np.concatenate([outputs[name] for outputs in found]) for name in found[0]}


def run_samples(file: pathlib.Path, expected: parity.Reference, raw_pixels: bool = False) -> list[parity.Outputs]:
    """Return the outputs for the sample images, one image at a time in parallel interpreters."""
    workers = min(_MOST_WORKERS, os.cpu_count() or 1, len(expected.samples.encoded))
    runners = [interpreter(file, 1).get_signature_runner() for _ in range(workers)]

    def run_worker(worker: int, images: np.ndarray) -> list[parity.Outputs]:
        return [runners[worker](image=image[None]) for image in images[worker::workers]]

    def run(images: np.ndarray) -> parity.Outputs:
        parts = list(pool.map(run_worker, range(workers), [images] * workers))
        rows = [parts[index % workers][index // workers] for index in range(len(images))]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return expected.outputs_of(run, raw_pixels=raw_pixels)


def run_together(file: pathlib.Path, expected: parity.Reference, raw_pixels: bool = False) -> list[parity.Outputs]:
    """Return the outputs for the sample images in batches, of a file that takes any."""

    def run(images: np.ndarray) -> parity.Outputs:
        return interpreter(file, 1, len(images)).get_signature_runner()(image=images)

    return expected.outputs_of(run, raw_pixels=raw_pixels)


def latency(file: pathlib.Path, threads: int) -> float:
    made = interpreter(file, threads)
    details = made.get_input_details()[0]
    made.set_tensor(details["index"], np.zeros([1, *details["shape"][1:]], details["dtype"]))
    return report.latency(made.invoke)


def operators(file: pathlib.Path) -> dict[str, int]:
    reference = Interpreter(model_path=str(file), experimental_op_resolver_type=OpResolverType.BUILTIN_REF)
    return report.operator_table(operator["op_name"] for operator in reference._get_ops_details())


def partitions(file: pathlib.Path) -> int:
    """Number of partitions of the graph that XNNPACK runs; each boundary costs a copy."""
    return sum(operator["op_name"] == "DELEGATE" for operator in interpreter(file, 1)._get_ops_details())
