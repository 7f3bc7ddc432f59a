"""Compares servers of image files under load: JPEG files in, probabilities out.

    python -m benchmarks.server --model ViT-S_16 --clients 1 4 16 --output server-speed

The servers are this project's SavedModel, which also decodes the files, and its ONNX file in ONNX Runtime and timm on
torch, for which Pillow decodes in the threads of the clients. Each has its own process, with its clients as threads in
it, and the same number of threads for the model. The clients wait for each answer before they send the next image. Only
one server is under load at a time; they take turns in every round. The product of two large matrices runs too, as the
limit of the machine. The command writes results.json and results.md.
"""

import concurrent.futures
import contextlib
import dataclasses
import io
import itertools
import json
import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.case import Case, Precision, photographs, processor, set_tensorflow_threads
from benchmarks.comparison import LIMIT, PeerProcess, flops, rate, write_results
from benchmarks.exported_peers import export_onnx, export_saved_model, exported
from benchmarks.peer_process import timed
from benchmarks.peers import timm_model
from export.fastest.runtime_process import RUNTIMES
from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.cli.options import Count, Positive
from keras_vit.files.remote import output_folder
from keras_vit.scores import softmax

_WARM_UP = 1.0  # seconds of load in every setting before the first round
_HEAD = "| clients | server | images/s, median (least to most) | relative time | p50, ms | p99, ms | limit |"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compare servers of image files under load on this machine."""

    model: str = "ViT-S_16"
    """Name of the model."""
    size: Count = 224
    """Height and width of its images in pixels; the files have 500x375."""
    precision: Precision = "float32"
    """Precision of the products. ONNX Runtime has no bfloat16 on CPUs and is left out."""
    clients: tuple[Count, ...] = (1, 4, 16)
    """Numbers of clients at once."""
    seconds: Positive = 10.0
    """Seconds of load on each server in every round."""
    rounds: Count = 3
    """Rounds of each number of clients."""
    threads: Count = 2
    """Threads of each server for the model."""
    output: pathlib.Path = pathlib.Path("server-results")
    """Directory for results.json and results.md."""


def summary(peer: str, loads: Sequence[dict], failure: str | None) -> dict[str, Any]:
    """Return the measurements of a server over all rounds, see `measure`, or its failure."""
    if failure is not None or not loads:
        return {"peer": peer, "failure": failure or "no round"}
    latencies = np.concatenate([load["latencies"] for load in loads])
    p50, p99 = np.quantile(latencies, (0.5, 0.99)).tolist()  # seconds from a request to its answer
    rates = [len(load["latencies"]) / load["seconds"] for load in loads]  # images per second
    return {"peer": peer, "rates": rates, "p50": p50, "p99": p99, "failure": None}


def table(clients: int, case: Case, results: Sequence[dict[str, Any]], limit: float) -> list[str]:
    """Return Markdown rows, one per server, each compared with the first one and with the limit."""
    lines = []
    for served in results:
        head = f"| {clients} | {served['peer']} |"
        if served["failure"] is not None:
            lines.append(f"{head} failed: {served['failure'].replace('|', '/')} | | | | |")
            continue
        images = statistics.median(served["rates"])
        share = f"{images * flops(case, served['peer']) / limit:.0%}" if limit else ""
        relative = "" if results[0]["failure"] else f"{statistics.median(results[0]['rates']) / images:.2f}x"
        lines.append(
            f"{head} {images:.1f} ({min(served['rates']):.1f} to {max(served['rates']):.1f}) | {relative} "
            f"| {1e3 * served['p50']:.0f} | {1e3 * served['p99']:.0f} | {share} |"
        )
    return lines


class Server(NamedTuple):
    """A model that classifies image files: `decode` prepares one, and `forward` gives its probabilities (1, K)."""

    decode: Callable[[bytes], Any]
    forward: Callable[[Any], np.ndarray]
    workers: int = 2
    """Images in the model at the same time: while one is decoded there, the other one is computed."""


def measure(server: Server, files: Sequence[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """Let clients send image files, each its next one after the answer to the last. Errors of the server are raised.

    Returns the seconds from the first request to the last answer, and the latencies from each request to its answer.
    """
    workers, start = threading.Semaphore(server.workers), time.perf_counter()

    def client(number: int) -> list[float]:
        latencies, now = [], time.perf_counter()
        for file in itertools.islice(itertools.cycle(files), number, None):
            if now >= start + seconds:
                break
            image = server.decode(file)
            with workers:
                server.forward(image)
            before, now = now, time.perf_counter()
            latencies.append(now - before)
        return latencies

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        latencies = list(itertools.chain.from_iterable(pool.map(client, range(clients))))
    return {"seconds": time.perf_counter() - start, "latencies": latencies}


def keras_vit_saved_model(case: Case) -> Server:
    """The SavedModel, loaded again."""
    import tensorflow as tf

    set_tensorflow_threads(case)
    with exported(export_saved_model, case) as path:
        loaded = tf.saved_model.load(str(path))
    classify = loaded.signatures["serving_default"]
    classify.loaded = loaded  # whose weights it does not hold itself
    return Server(lambda file: tf.constant([file]), lambda file: classify(image_bytes=file)["probabilities"].numpy())


def keras_vit_onnx(case: Case) -> Server:
    """The ONNX file in ONNX Runtime."""
    with exported(export_onnx, case) as path:
        run = RUNTIMES["onnx"](str(path), case.threads, ())
    return Server(_decoder(case), lambda image: softmax(run(image)))


def timm(case: Case) -> Server:
    """The model of timm on torch, with fused attention."""
    import torch

    torch.set_num_threads(case.threads)
    dtype = getattr(torch, case.precision)
    model = timm_model(case).eval().to(dtype)

    def forward(image: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            pixels = torch.from_numpy(image).permute(0, 3, 1, 2).contiguous().to(dtype)
            return model(pixels).float().softmax(-1).numpy()

    return Server(_decoder(case), forward)


def _decoder(case: Case) -> Callable[[bytes], np.ndarray]:
    """An image file -> (1, h, w, 3) in [-1, 1]."""
    from PIL import Image

    def decode(file: bytes) -> np.ndarray:
        with Image.open(io.BytesIO(file)) as image:
            resized = image.convert("RGB").resize((case.size, case.size), Image.Resampling.BILINEAR)
        return np.asarray(resized, np.float32)[None] / 127.5 - 1.0

    return decode


PEERS = {peer.__name__: peer for peer in (keras_vit_saved_model, keras_vit_onnx, timm)}


def measurements(peer: Callable[[Case], Server], case: Case, requests: Iterable[str]) -> Iterator[dict]:
    """Yield the seconds of preparation and of the first image, then for each request what the clients measure."""
    files = photographs(64)
    prepare, server = timed(lambda: peer(case))
    yield {"prepare": prepare, "first_call": timed(lambda: server.forward(server.decode(files[0])))[0]}
    for request in requests:
        yield measure(server, files, **json.loads(request))
    yield {}


def main(arguments: Sequence[str]) -> None:
    """`--model … --clients … --output DIR`"""
    parsed = parser.parse(Arguments, arguments, prog="python -m benchmarks.server", about=__doc__)
    cli.require_tensorflow()
    output = output_folder(parsed.output)
    peers = [peer for peer in PEERS if parsed.precision == "float32" or peer != "keras_vit_onnx"]
    case = Case("inference", parsed.model, 1, parsed.size, parsed.precision, parsed.threads)
    head = (
        f"{case.model}, server, {case.size} px, {case.precision}; {processor()}, {parsed.threads} threads, "
        f"{time.strftime('%Y-%m-%d')}, {parsed.rounds} rounds of {parsed.seconds:g} s"
    )
    lines = [f"# Servers of image files\n\n{head}\n", _HEAD, "|---:|---|---:|---:|---:|---:|---:|"]
    print("\n".join(lines), flush=True)
    measured = []
    with contextlib.ExitStack() as stack:
        # Servers start one after the other, because preparing one uses all cores.
        servers = [PeerProcess(peer, case, stack, "benchmarks.server") for peer in peers]
        product = PeerProcess(LIMIT, case, stack)
        loads = _loads(servers, product, parsed)
        failures = [server.end().failure for server in servers]
        product = product.end()
    limit = 0.0 if product.failure else rate(product, case)
    for clients, rounds in loads.items():
        results = [summary(*each) for each in zip(peers, rounds, failures, strict=True)]
        lines += table(clients, case, results, limit)
        measured.append({"clients": clients, "results": results})
    print("\n".join(lines[3:]), flush=True)
    write_results(output, {"machine": head, "limit": limit, "clients": measured}, lines)


def _loads(servers: Sequence[PeerProcess], product: PeerProcess, arguments: Arguments) -> dict[int, list[list[dict]]]:
    """Return the loads of all rounds, for each number of clients and each server. The servers take turns."""
    loads: dict[int, list[list[dict]]] = {clients: [[] for _ in servers] for clients in arguments.clients}
    for clients, rounds in loads.items():
        for server in servers:
            server.ask(json.dumps({"clients": clients, "seconds": min(_WARM_UP, arguments.seconds)}))
        for _ in range(arguments.rounds):
            product.run()
            for server, loads_of_server in zip(servers, rounds, strict=True):
                if load := server.ask(json.dumps({"clients": clients, "seconds": arguments.seconds})):
                    loads_of_server.append(load)
    return loads


if __name__ == "__main__":
    cli.run(main)
