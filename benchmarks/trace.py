"""Says where the time of a call goes: `python -m benchmarks.trace --model ViT-B_16 --batch 1 --calls 20`.

The SavedModel runs under TensorFlow's profiler and the ONNX file under that of ONNX Runtime, each in a process of its
own with the same threads. For each kind of operation the table has the milliseconds of a call, its share, and the mean
number of threads of TensorFlow's pool that are busy: none where the thread that calls computes alone. The product of
two large matrices runs before: the table has the time that the products of the model would take at its rate. All rows
are of calls under the profiler, which are slower; the time above a table is without and with it. The requirements are
those of `make bench`.
"""

import collections
import concurrent.futures
import dataclasses
import json
import multiprocessing
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.case import NUM_CLASSES, Call, Case, Precision, random_images
from benchmarks.comparison import flops
from benchmarks.exported_peers import export_file, exported, keras_vit_saved_model
from benchmarks.history import processor
from benchmarks.peers import SIDE, matrix_product
from keras_vit import UserError, cli, run_directory
from keras_vit.cli import parser
from keras_vit.files.atomic import staged
from keras_vit.files.tables import markdown_table
from keras_vit.models.named_models import MODELS

PRODUCTS, OUTSIDE = "products", "between the operations"
# The first pattern that the type of an operation contains decides; the last one fits all.
_KINDS = {
    PRODUCTS: r"MatMul|Einsum|Gemm|Conv",
    "softmax": "Softmax",
    "normalization": "LayerNorm|Mean|SquaredDifference|Rsqrt",
    "copies": r"Transpose|Reshape|Concat|Slice|Split|Pack|Gather|Identity|Squeeze|Expand|Tile|Broadcast",
    "others, element by element": "",
}
_WARM_UP = 3
_NAMED = 4  # types of operations of a kind


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure the operations of a SavedModel and of an ONNX file."""

    model: str = "ViT-B_16"
    """Official name."""
    batch: int = 1
    """Images in a call."""
    precision: Precision = "float32"
    """Of the SavedModel; the ONNX file is there for float32 alone."""
    threads: int = 2
    """Threads of each."""
    calls: int = 20
    """Calls that are measured."""
    output: pathlib.Path = pathlib.Path("trace-results")
    """Directory for trace.md."""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UserError(f"There is no official model {self.model!r}; give one such as ViT-B_16.")
        for name in ("batch", "threads", "calls"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, but is {getattr(self, name)}.")


class Span(NamedTuple):
    """What a thread did, in nanoseconds since some moment."""

    begin: float
    end: float
    operation: str = ""
    """The type of the operation; "" for a task of a thread of the pool."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """Some calls of a model, one after the other."""

    milliseconds: float
    """Median of a call without the profiler."""
    traced: Sequence[float]
    """Milliseconds of each call under the profiler."""
    spans: Sequence[Span]
    """Of the operations."""
    helpers: Sequence[Sequence[Span]] | None
    """Of each thread of the pool, when it is busy, in order; None where the profiler does not say."""


def kind_of(operation: str) -> str:
    """The kind of an operation by its type, as "_FusedMatMul" of TensorFlow or "Gemm" of ONNX."""
    return next(kind for kind, pattern in _KINDS.items() if re.search(pattern, operation))


def merged(spans: Iterable[Span]) -> list[Span]:
    """The time that at least one of the spans takes, as spans in order that do not overlap."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.begin <= found[-1].end:
            found[-1] = Span(found[-1].begin, max(found[-1].end, span.end))
        else:
            found.append(Span(span.begin, span.end))
    return found


def shared(one: Sequence[Span], other: Sequence[Span]) -> float:
    """How long spans of both lists last at the same time; each list is sorted and does not overlap."""
    total, begin = 0.0, 0
    for span in one:
        while begin < len(other) and other[begin].end <= span.begin:
            begin += 1
        index = begin
        while index < len(other) and other[index].begin < span.end:
            total += min(span.end, other[index].end) - max(span.begin, other[index].begin)
            index += 1
    return total


def rows(trace: Trace, limit_ms: float) -> Iterator[tuple[str, ...]]:
    """Of each kind: milliseconds of a call, share of the call, busy threads of the pool, and the time at the limit.

    Args:
        trace: of the calls.
        limit_ms: what the products of a call would take at the rate of large matrices.
    """
    per_call, call = 1e-6 / len(trace.traced), statistics.mean(trace.traced)
    by_kind: dict[str, list[Span]] = collections.defaultdict(list)
    for span in trace.spans:
        by_kind[kind_of(span.operation)].append(span)
    for kind in _KINDS:
        spans = by_kind[kind]
        these = merged(spans)  # the products of query, key and value run at the same time
        took = sum(span.end - span.begin for span in these)
        threads = ""
        if trace.helpers is not None and took:
            helped = sum(shared(these, thread) for thread in trace.helpers)
            threads = f"{helped / took:.1f}"
        limit = f"{limit_ms:.1f}" if kind == PRODUCTS else ""
        milliseconds = took * per_call
        share = f"{milliseconds / call:.0%}"
        yield f"{kind}{_largest(spans)}", f"{milliseconds:.1f}", share, threads, limit
    busy = sum(span.end - span.begin for span in merged(trace.spans)) * per_call
    yield OUTSIDE, f"{call - busy:.1f}", f"{(call - busy) / call:.0%}", "", ""


def _largest(spans: Sequence[Span]) -> str:
    """` (Gemm, MatMul)` for the types of operations that take longest."""
    times: collections.Counter[str] = collections.Counter()
    for span in spans:
        times[span.operation.removeprefix("_")] += span.end - span.begin
    return f" ({', '.join(name for name, _ in times.most_common(_NAMED))})" if times else ""


def trace_saved_model(case: Case, calls: int) -> Trace:
    """Run the SavedModel under TensorFlow's profiler."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    call = keras_vit_saved_model(case)
    median = statistics.median(_times(call, calls))
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        traced = _times(call, calls, warm_up=0)
        tf.profiler.experimental.stop()
        space = xplane_pb2.XSpace()
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        space.ParseFromString(file.read_bytes())
    [plane] = [plane for plane in space.planes if plane.name == "/host:CPU"]
    names = {number: metadata.name for number, metadata in plane.event_metadata.items()}
    operations, helpers = [], []
    for line in plane.lines:
        started, busy = None, []
        for event in sorted(line.events, key=lambda event: event.offset_ps):
            name = names[event.metadata_id]
            begin = line.timestamp_ns + event.offset_ps / 1e3
            if name == "ThreadpoolListener::StartRegion":
                started = begin
            elif name == "ThreadpoolListener::StopRegion" and started is not None:
                busy.append(Span(started, begin))
                started = None
            elif "/" in name and re.search(r":\w+$", name):  # "model/layer/node:Operation"
                operations.append(Span(begin, begin + event.duration_ps / 1e3, name.rpartition(":")[2]))
        if "Eigen" in line.name:  # not the threads that run the operations
            helpers.append(merged(busy))
    return Trace(median, traced, operations, helpers)


def trace_onnx(case: Case, calls: int) -> Trace:
    """Run the ONNX file under the profiler of ONNX Runtime, which does not tell what other threads do."""
    import onnxruntime

    with exported(export_file, case, "onnx") as directory, tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = case.threads
        options.profile_file_prefix = f"{folder}/trace"
        [path] = directory.glob("*.onnx")
        images = random_images(case)
        runs = []
        for options.enable_profiling in (False, True):
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            feed = {session.get_inputs()[0].name: images}
            warm_up = 0 if options.enable_profiling else _WARM_UP  # the profile has every call
            runs.append(_times(lambda session=session, feed=feed: session.run(None, feed), calls, warm_up))
        events = json.loads(pathlib.Path(session.end_profiling()).read_text())
    spans = [
        Span(event["ts"] * 1e3, (event["ts"] + event["dur"]) * 1e3, event["args"]["op_name"])
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    ]
    return Trace(statistics.median(runs[0]), runs[1], spans, None)


def _times(call: Call, calls: int, warm_up: int = _WARM_UP) -> list[float]:
    """Milliseconds of each call, after some that do not count."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _limit(case: Case, peer: str, calls: int) -> float:
    """Milliseconds that the operations of a call would take at the rate of the product of large matrices."""
    return statistics.median(_times(matrix_product(case), calls)) * flops(case, peer) / (2 * SIDE["cpu"] ** 3)


def _in_process(function, *arguments):
    """The result of a function in a process of its own, so that it has its own threads."""
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main(arguments: Sequence[str]) -> None:
    """`--model NAME --batch N --precision P`"""
    options = parser.parse(Arguments, arguments, prog="python -m benchmarks.trace", about=__doc__)
    output = run_directory.output_folder(options.output)
    case = Case("inference", options.model, options.batch, precision=options.precision, threads=options.threads)
    peers = {"keras_vit_saved_model": ("our SavedModel in TensorFlow", trace_saved_model)}
    if options.precision == "float32":
        peers["keras_vit_onnx"] = ("our ONNX file in ONNX Runtime", trace_onnx)
    parts = [f"{case.title}, {NUM_CLASSES} classes; {processor()}, {time.strftime('%Y-%m-%d')}, {options.calls} calls"]
    for peer, (name, function) in peers.items():
        limit = _in_process(_limit, case, peer, options.calls)
        trace = _in_process(function, case, options.calls)
        head = ("operations", "ms", "share", "busy threads", "at the limit, ms")
        parts += [
            f"{name}: {trace.milliseconds:.1f} ms a call, under the profiler {statistics.mean(trace.traced):.1f}",
            markdown_table(head, [*rows(trace, limit)], num_text_columns=1),
        ]
    text = "\n\n".join(parts) + "\n"
    print(text)
    with staged(output) as stage:
        (stage / "trace.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    cli.run(main)
