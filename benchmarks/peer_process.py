"""Runs one peer in its own process: `python -m benchmarks.peer_process PEER CASE`.

The process writes lines of JSON to standard output: first the seconds of preparation and of the first call, then the
seconds of one call for each line of standard input, and at the end of the input its peak memory. All other output goes
to standard error.
"""

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks.case import Case
from benchmarks.peers import PEERS


def main(arguments: list[str]) -> None:
    """`PEER CASE`, the case as JSON."""
    peer, case = PEERS[arguments[0]], Case(**json.loads(arguments[1]))
    with answers() as answer:
        prepare, call = timed(lambda: peer(case))
        first, _ = timed(call)
        timed(call)  # some frameworks allocate memory in the second call
        answer(prepare=prepare, first_call=first)
        for _ in sys.stdin:
            answer(seconds=timed(call)[0])
        answer(peak_bytes=_peak_bytes(case, arguments[0]))


@contextlib.contextmanager
def answers() -> Iterator[Callable[..., None]]:
    """A function that writes its arguments to standard output as a line of JSON; all other output goes to stderr."""
    with os.fdopen(os.dup(1), "w") as stream, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        yield lambda **facts: print(json.dumps(facts), file=stream, flush=True)


def _peak_bytes(case: Case, peer: str) -> int:
    """Peak memory of the process, or of what it allocated on the GPU."""
    if case.device == "cpu":
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if peer == "keras_vit_jax":
        return sys.modules["jax"].local_devices()[0].memory_stats()["peak_bytes_in_use"]
    if peer == "keras_vit":
        return sys.modules["tensorflow"].config.experimental.get_memory_info("GPU:0")["peak"]
    return sys.modules["torch"].cuda.max_memory_allocated()


def timed(call: Callable[[], object]) -> tuple[float, object]:
    """Wall-clock seconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main(sys.argv[1:])
