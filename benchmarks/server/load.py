"""A server within one process, and clients in threads that wait for each answer before they send the next image."""

import concurrent.futures
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Server:
    """A model that classifies image files."""

    decode: Callable[[bytes], Any]
    """Prepares one image file."""
    forward: Callable[[Sequence[Any]], np.ndarray]
    """Prepared images -> probabilities (B, K)."""
    workers: int = 2
    """Images in the model at the same time: while one is decoded there, the other one is computed."""


@dataclasses.dataclass(frozen=True)
class Load:
    """The measurements of the clients of a server."""

    seconds: float
    """From the first request to the last answer."""
    latencies: tuple[float, ...]
    """Seconds from each request to its answer."""


def measure(server: Server, files: Sequence[bytes], clients: int, seconds: float) -> Load:
    """Let clients send image files, each its next one after the answer to the last. An error of the server is raised.

    Args:
        server: what answers.
        files: JPEG files; each client begins at another one.
        clients: number of threads.
        seconds: no request begins later than this after the first.
    """
    workers, start = threading.Semaphore(server.workers), time.perf_counter()

    def client(number: int) -> list[float]:
        latencies, now = [], time.perf_counter()
        for file in itertools.islice(itertools.cycle(files), number, None):
            if now >= start + seconds:
                break
            image = server.decode(file)
            with workers:
                server.forward([image])
            before, now = now, time.perf_counter()
            latencies.append(now - before)
        return latencies

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        latencies = list(itertools.chain.from_iterable(pool.map(client, range(clients))))
    return Load(time.perf_counter() - start, tuple(latencies))
