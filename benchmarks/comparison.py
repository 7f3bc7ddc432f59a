"""Runs several peers on one case in turn, a call of each in every round, so that all meet the same conditions."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.case import NUM_CLASSES, Case
from benchmarks.peers import SIDE
from keras_vit import MODELS, ViTConfig
from keras_vit.files.atomic import staged

REFERENCE, LIMIT = "keras_vit", "matrix_product"
_PASSES = {"inference": 1, "training": 3}  # a training step has two products more for each of a forward pass
# Peers whose last block computes only the class token, because the head reads no other token.
_ARTIFACTS = ("saved_model", "onnx", "openvino", "tflite", "tflite_int8")
_CLASS_TOKEN_ONLY = {"inference": [f"keras_vit_{artifact}" for artifact in _ARTIFACTS], "training": [REFERENCE]}


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurements of one peer in a case."""

    peer: str
    seconds: tuple[float, ...]
    """Time of each call, one per round."""
    prepare: float
    """Seconds to import, build and convert, before the first call."""
    first_call: float
    """Seconds of the first call, which includes tracing and compilation."""
    peak_bytes: int
    failure: str | None = None
    """Last line of the error, if the peer failed."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def compare(case: Case, peers: Sequence[str], rounds: int) -> list[Result]:
    """Start all peers, run them in turn, and return their results. A peer that fails is reported and skipped."""
    with contextlib.ExitStack() as stack:  # peers start one after the other, because preparing one uses all cores
        processes = [PeerProcess(peer, case, stack) for peer in peers]
        for _ in range(rounds):
            for process in processes:
                process.run()
        return [process.end() for process in processes]


def flops(case: Case, peer: str | None = None) -> int:
    """Return the floating-point operations in the matrix products and convolutions of one call.

    With a peer, those that it computes: exports of this project leave out what the head does not read.
    """
    config = MODELS[case.model]
    multiply_adds = _multiply_adds(case.model, case.size)
    if peer in _CLASS_TOKEN_ONLY[case.task] and isinstance(config, ViTConfig) and config.classifier == "token":
        width, tokens = config.hidden_size, 1 + math.prod(config.grid((case.size, case.size)))
        # Other tokens in the last block: query and output, MLP, scores and the weighted mean of the values.
        multiply_adds -= (tokens - 1) * 2 * width * (width + config.mlp_dim + tokens)
    return 2 * multiply_adds * case.batch * _PASSES[case.task]


@functools.cache
def _multiply_adds(model: str, size: int) -> int:
    """Multiply-adds of one image, counted by another process.

    This one must not load a backend: it would hold memory while the peers are timed, and JAX most of the GPU.
    """
    code = (
        "from keras_vit import MODELS\n"
        "from keras_vit.models.complexity import costs\n"
        f"print(costs(MODELS[{model!r}], ({size}, {size}), num_classes={NUM_CLASSES}).multiply_adds)"
    )
    backend = "tensorflow" if importlib.util.find_spec("tensorflow") else "jax"
    environment = {"KERAS_BACKEND": backend, **os.environ, "CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout.split()[-1])


def write_results(output: pathlib.Path, document: Any, lines: Sequence[str]) -> None:
    """Write results.json and results.md."""
    with staged(output) as stage:
        (stage / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (stage / "results.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


def rate(result: Result, case: Case) -> float:
    """Operations per second."""
    operations = 2 * SIDE[case.device] ** 3 if result.peer == LIMIT else flops(case, result.peer)
    return operations / result.median


class PeerProcess:
    """The process of one peer. The exit stack closes it."""

    def __init__(self, peer: str, case: Case, stack: contextlib.ExitStack, module: str = "benchmarks.peers"):
        self.peer, self.failure, self.seconds = peer, None, []
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 (the stack closes it)
        command = [sys.executable, "-m", "benchmarks.peer_process", module, peer, json.dumps(dataclasses.asdict(case))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        self._errors, self.process = errors, stack.enter_context(subprocess.Popen(command, text=True, **pipes))
        self.ready = self._answer()

    def run(self) -> None:
        """Time one call, unless the peer has failed."""
        if answer := self.ask():
            self.seconds.append(answer["seconds"])

    def ask(self, request: str = "") -> dict:
        """Send a line to the process and return its answer; empty if the peer has failed."""
        if self.failure is not None:
            return {}
        with contextlib.suppress(BrokenPipeError):  # a dead process does not answer either
            self.process.stdin.write(f"{request}\n")
            self.process.stdin.flush()
        return self._answer()

    def end(self) -> Result:
        """Close the input of the process and return its measurements."""
        last = {}
        if self.failure is None:
            self.process.stdin.close()
            last = self._answer()
        prepare, first = (self.ready.get(name, 0.0) for name in ("prepare", "first_call"))
        return Result(self.peer, tuple(self.seconds), prepare, first, int(last.get("peak_bytes", 0)), self.failure)

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        code = self.process.wait()
        self._errors.seek(0)
        self.failure = ([line.strip() for line in self._errors if line.strip()] or [f"exit code {code}"])[-1][:200]
        return {}
