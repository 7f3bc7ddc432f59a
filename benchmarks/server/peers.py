"""The servers: this project's SavedModel, its ONNX file in ONNX Runtime, and timm on torch.

The SavedModel decodes image files itself, in its graph. The others decode with Pillow in the threads of the clients.

`python -m benchmarks.server.peers PEER CASE` runs one of them: for each line of standard input, a JSON object with
arguments of `measure`, it writes what the clients measured.
"""

import concurrent.futures
import dataclasses
import functools
import io
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.case import Case, photographs, set_tensorflow_threads
from benchmarks.exported_peers import export_file, export_saved_model, exported
from benchmarks.peer_process import answers, timed
from benchmarks.peers import timm_model


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
    """Let clients send image files, each its next one after the answer to the last. Errors of the server are raised."""
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


def keras_vit_saved_model(case: Case) -> Server:
    """The SavedModel, loaded again."""
    import tensorflow as tf

    set_tensorflow_threads(case)
    with exported(export_saved_model, case) as directory:
        loaded = tf.saved_model.load(str(directory / "model"))
    classify = loaded.signatures["serving_default"]
    return Server(lambda file: file, lambda files: classify(image_bytes=tf.constant(files))["probabilities"].numpy())


def keras_vit_onnx(case: Case) -> Server:
    """The ONNX file in ONNX Runtime."""
    from export.onnx import export as onnx_export

    with exported(export_file, case) as directory:
        run = onnx_export.open_file(directory / onnx_export.FILE, case.threads)
    return _decoding(case, lambda images: _softmax(run(images)["logits"]))


def timm(case: Case) -> Server:
    """The model of timm on torch, with fused attention."""
    import torch

    torch.set_num_threads(case.threads)
    dtype = getattr(torch, case.precision)
    model = timm_model(case).eval().to(dtype)

    def forward(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().to(dtype)
            return model(pixels).float().softmax(-1).numpy()

    return _decoding(case, forward)


def _decoding(case: Case, forward: Callable[[np.ndarray], np.ndarray]) -> Server:
    """A server of a function from images (B, h, w, 3) in [-1, 1] to probabilities."""

    def stacked(images: Sequence[np.ndarray]) -> np.ndarray:
        return forward(np.stack(images))

    return Server(functools.partial(_decode, size=case.size), stacked)


def _decode(file: bytes, size: int) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(file)) as image:
        resized = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(resized, np.float32) / 127.5 - 1.0


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


PEERS = {peer.__name__: peer for peer in (keras_vit_saved_model, keras_vit_onnx, timm)}


def main(arguments: list[str]) -> None:
    """`PEER CASE`, the case as JSON."""
    case = Case(**json.loads(arguments[1]))
    with answers() as answer:
        files = photographs(64)
        prepare, server = timed(lambda: PEERS[arguments[0]](case))
        first, _ = timed(lambda: server.forward([server.decode(files[0])]))
        answer(prepare=prepare, first_call=first)
        for line in sys.stdin:
            answer(**dataclasses.asdict(measure(server, files, **json.loads(line))))
        answer()


if __name__ == "__main__":
    main(sys.argv[1:])
