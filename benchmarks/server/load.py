"""A server within one process, and clients in threads that wait for each answer before they send the next image."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Server:
    """A model that classifies image files."""

    decode: Callable[[bytes], Any]
    """Prepares one image file, in the thread of its client."""
    forward: Callable[[Sequence[Any]], np.ndarray]
    """Prepared images -> probabilities (B, K), in a thread of the server."""
    workers: int = 2
    """Threads of the server, each with one batch at a time: while one decodes, the other one is in the model."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What the clients of a server measured."""

    seconds: float
    """From the first request to the last answer."""
    latencies: tuple[float, ...]
    """Seconds from each request to its answer."""
    calls: int
    """Batches that the server computed."""


def measure(server: Server, files: Sequence[bytes], clients: int, largest_batch: int, seconds: float) -> Load:
    """Let clients send image files, each its next one after the answer to the last. An error of the server is raised.

    Args:
        server: what answers.
        files: JPEG files; each client begins at another one.
        clients: number of threads.
        largest_batch: a worker takes all waiting requests up to this number; 1 turns batching off.
        seconds: no request begins later than this after the first.
    """
    with serving(server, largest_batch) as (classify, batches), concurrent.futures.ThreadPoolExecutor(clients) as pool:
        start = time.perf_counter()

        def client(number: int) -> list[float]:
            latencies, now = [], time.perf_counter()
            for file in itertools.islice(itertools.cycle(files), number, None):
                if now >= start + seconds:
                    break
                classify(file)
                before, now = now, time.perf_counter()
                latencies.append(now - before)
            return latencies

        latencies = list(itertools.chain.from_iterable(pool.map(client, range(clients))))
        return Load(time.perf_counter() - start, tuple(latencies), len(batches))


@contextlib.contextmanager
def serving(server: Server, largest_batch: int) -> Iterator[tuple[Callable[[bytes], np.ndarray], list[int]]]:
    """A function from an image file to its probabilities (K,), and the sizes of the batches so far."""
    requests: queue.SimpleQueue = queue.SimpleQueue()
    batches: list[int] = []

    def classify(file: bytes) -> np.ndarray:
        answer: concurrent.futures.Future = concurrent.futures.Future()
        requests.put((server.decode(file), answer))
        return answer.result()

    def work() -> None:
        while batch := next_batch(requests, largest_batch):
            images, answers = zip(*batch, strict=True)
            batches.append(len(batch))
            try:
                for answer, probabilities in zip(answers, server.forward(images), strict=True):
                    answer.set_result(probabilities)
            except Exception as error:  # the clients raise it
                for answer in answers:
                    if not answer.done():
                        answer.set_exception(error)

    workers = [threading.Thread(target=work) for _ in range(server.workers)]
    for worker in workers:
        worker.start()
    try:
        yield classify, batches
    finally:
        for _ in workers:
            requests.put(None)
        for worker in workers:
            worker.join()


def next_batch(requests: queue.SimpleQueue, largest: int) -> list[tuple[Any, concurrent.futures.Future]]:
    """The first request, after waiting for it, and those that wait behind it; empty at the end of the service."""
    request, batch = requests.get(), []
    while request is not None:
        batch.append(request)
        if len(batch) == largest:
            break
        try:
            request = requests.get_nowait()
        except queue.Empty:
            break
    if request is None and batch:
        requests.put(None)  # the end; it is for the next call
    return batch
