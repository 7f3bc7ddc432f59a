"""Compares servers of image files under load: JPEG files in, probabilities out.

    python -m benchmarks.server --model ViT-S_16 --clients 1 4 16 --output server-speed

Each server has its own process, with its clients as threads in it, and the same number of threads for the model. The
clients wait for each answer before they send the next image. Only one server is under load at a time; they take turns
in every round. The product of two large matrices runs too, as the limit of the machine. The command writes
results.json and results.md.
"""

import contextlib
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from benchmarks.case import Case, Precision, processor
from benchmarks.comparison import LIMIT, PeerProcess, flops, rate, write_results
from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.cli.options import Count, Positive
from keras_vit.files.remote import output_folder

Peers = Literal["keras_vit_saved_model", "keras_vit_onnx", "timm"]
_ALL: tuple[Peers, ...] = get_args(Peers)
# Seconds of load in every setting before the first round.
_WARM_UP = 1.0
_HEAD = (
    "| clients | server | images/s, median (least to most) | relative time | p50, ms | p99, ms | limit |",
    "|---:|---|---:|---:|---:|---:|---:|",
)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compare servers of image files under load on this machine."""

    model: str = "ViT-S_16"
    """Name of the model."""
    size: Count = 224
    """Height and width of its images in pixels; the files have 500x375."""
    precision: Precision = "float32"
    """Precision of the products. ONNX Runtime has no bfloat16 on CPUs and is left out."""
    peers: tuple[Peers, ...] = _ALL
    """Servers to measure."""
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
    """Return the measurements of a server over all rounds (`benchmarks.server.peers.Load` as JSON), or its failure."""
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


def main(arguments: Sequence[str]) -> None:
    """`--model … --clients … --output DIR`"""
    parsed = parser.parse(Arguments, arguments, prog="python -m benchmarks.server", about=__doc__)
    cli.require_tensorflow()
    output = output_folder(parsed.output)
    peers = [peer for peer in parsed.peers if parsed.precision == "float32" or peer != "keras_vit_onnx"]
    case = Case("inference", parsed.model, 1, parsed.size, parsed.precision, parsed.threads)
    head = (
        f"{case.model}, server, {case.size} px, {case.precision}; {processor()}, {parsed.threads} threads, "
        f"{time.strftime('%Y-%m-%d')}, {parsed.rounds} rounds of {parsed.seconds:g} s"
    )
    lines = [f"# Servers of image files\n\n{head}\n", *_HEAD]
    print("\n".join(lines), flush=True)
    measured = []
    with contextlib.ExitStack() as stack:
        # Servers start one after the other, because preparing one uses all cores.
        servers = [PeerProcess(peer, case, stack, "benchmarks.server.peers") for peer in peers]
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
