"""Rounds in which everyone runs once: all see the same machine in the same minutes, and nobody runs beside another."""

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.case import NUM_CLASSES, Case
from benchmarks.peers import SIDE
from keras_vit import MODELS
from keras_vit.costs import costs

OURS, LIMIT = "keras_vit", "matrix_product"
# A training step is a forward pass and two products more for each of its products, of the same size.
_PASSES = {"inference": 1, "training": 3}


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
        contestants = [Contestant(peer, case, stack) for peer in peers]
        for _ in range(rounds):
            for contestant in contestants:
                contestant.run()
        return [contestant.end() for contestant in contestants]


def flops(case: Case) -> int:
    """Floating-point operations of one call in matrix products and convolutions."""
    cost = costs(MODELS[case.model], (case.size, case.size), num_classes=NUM_CLASSES)
    return 2 * cost.multiply_adds * case.batch * _PASSES[case.task]


def rate(result: Result, case: Case) -> float:
    """Operations per second."""
    operations = 2 * SIDE[case.device] ** 3 if result.peer == LIMIT else flops(case)
    return operations / result.median


class Contestant:
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
