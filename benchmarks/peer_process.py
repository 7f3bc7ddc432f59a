"""Runs one peer in its own process: `python -m benchmarks.peer_process MODULE PEER CASE`, the case as JSON.

The module has functions `PEERS` by name, and `measurements` of one of them, which yields JSON objects: one when the
peer is ready, one for each line of standard input, and a last one. The process writes each as a line to standard
output; all other output goes to standard error.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable

from benchmarks.case import Case


def main(name: str, peer: str, case: str) -> None:
    """`MODULE PEER CASE`"""
    module = importlib.import_module(name)
    with os.fdopen(os.dup(1), "w") as stream, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        for facts in module.measurements(module.PEERS[peer], Case(**json.loads(case)), sys.stdin):
            print(json.dumps(facts), file=stream, flush=True)


def timed(call: Callable[[], object]) -> tuple[float, object]:
    """Wall-clock seconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main(*sys.argv[1:])
