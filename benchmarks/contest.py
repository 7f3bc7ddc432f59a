"""Rounds in which everyone runs once: all see the same machine in the same minutes, and nobody runs beside another."""

import contextlib
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.case import NUM_CLASSES, Case
from benchmarks.peers import SIDE
from keras_vit import MODELS, ViTConfig
from keras_vit.models.complexity import costs

OURS, LIMIT = "keras_vit", "matrix_product"
# A training step is a forward pass and two products more for each of its products, of the same size.
_PASSES = {"inference": 1, "training": 3}
# Whose last block computes for the class token alone what nothing reads of other tokens.
_FORMS = ("saved_model", "onnx", "openvino", "tflite", "tflite_int8")
_SPARING = {"inference": [f"keras_vit_{form}" for form in _FORMS], "training": [OURS]}


@dataclasses.dataclass(frozen=True)
class Result:
    """What one peer did in a case."""

    peer: str
    seconds: tuple[float, ...]
    """Of its calls, one for each round."""
    prepare: float
    """Seconds until it could be called: imports, building, conversion."""
    first_call: float
    """Seconds, with all tracing and compilation that it puts off until then."""
    peak_bytes: int
    failure: str | None = None
    """Its last line, where it did not take part to the end."""

    @property
    def median(self) -> float:
        """Seconds of a call."""
        return statistics.median(self.seconds)


def hold(case: Case, peers: Sequence[str], rounds: int) -> list[Result]:
    """Start everyone, let them run in turn, and collect what they did; one who fails is reported and left out."""
    with contextlib.ExitStack() as stack:
        # One is ready before the next one starts: preparing takes all cores, too.
        contestants = [PeerProcess(peer, case, stack) for peer in peers]
        for _ in range(rounds):
            for contestant in contestants:
                contestant.run()
        return [contestant.end() for contestant in contestants]


def flops(case: Case, peer: str | None = None) -> int:
    """Floating-point operations in the matrix products and convolutions of one call, as the model is defined.

    Of a peer, those that it computes: ours leave out what no head reads (`class_token_only`), with the same result.
    """
    config = MODELS[case.model]
    multiply_adds = costs(config, (case.size, case.size), num_classes=NUM_CLASSES).multiply_adds
    if peer in _SPARING[case.task] and isinstance(config, ViTConfig) and config.classifier == "token":
        width, tokens = config.hidden_size, 1 + math.prod(config.grid((case.size, case.size)))
        # Of the last block's other tokens: query and output, MLP, scores and the mean of the values.
        multiply_adds -= (tokens - 1) * 2 * width * (width + config.mlp_dim + tokens)
    return 2 * multiply_adds * case.batch * _PASSES[case.task]


def rate(result: Result, case: Case) -> float:
    """Operations per second."""
    operations = 2 * SIDE[case.device] ** 3 if result.peer == LIMIT else flops(case, result.peer)
    return operations / result.median


class PeerProcess:
    """The process of a peer, which the stack ends."""

    def __init__(self, peer: str, case: Case, stack: contextlib.ExitStack):
        self.peer, self.failure, self.seconds = peer, None, []
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 (the stack closes it)
        command = [sys.executable, "-m", "benchmarks.contestant", peer, case.to_json()]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        self._errors, self.process = errors, stack.enter_context(subprocess.Popen(command, text=True, **pipes))
        self.ready = self._answer()

    def run(self) -> None:
        if self.failure is None:
            with contextlib.suppress(BrokenPipeError):  # one who is gone does not answer either
                self.process.stdin.write("\n")
                self.process.stdin.flush()
            if answer := self._answer():
                self.seconds.append(answer["seconds"])

    def end(self) -> Result:
        last = {}
        if self.failure is None:
            self.process.stdin.close()
            last = self._answer()
        return Result(
            self.peer,
            tuple(self.seconds),
            self.ready.get("prepare", 0.0),
            self.ready.get("first_call", 0.0),
            int(last.get("peak_bytes", 0)),
            self.failure,
        )

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
