"""Runs one input pipeline in its own process: `python -m benchmarks.input.process PEER CASE`.

The process writes lines of JSON to standard output: the first one when its imports are done, then for each line of
standard input, a JSON object with the folder and the number of batches, the seconds that these batches took.
"""

import functools
import gc
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Iterator

from benchmarks.case import Case
from benchmarks.input.augmented_peers import PEERS
from benchmarks.peer_process import answers, timed

# Batches before the timed ones.
_WARM_UP = 3


def main(arguments: list[str]) -> None:
    """`PEER CASE`, the case as JSON; of the case only the threads count."""
    workers = Case(**json.loads(arguments[1])).threads
    with answers() as answer:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:workers])  # of the workers too
        answer(prepare=0.0)
        for line in sys.stdin:
            request = json.loads(line)
            batches = PEERS[arguments[0]](pathlib.Path(request["folder"]), workers)
            _take(batches, _WARM_UP)
            seconds, _ = timed(functools.partial(_take, batches, request["batches"]))
            del batches  # an open pipeline would go on while the next one is timed
            gc.collect()
            answer(seconds=seconds)
        answer()
        os._exit(0)  # worker processes of the pipelines wait for more


def _take(batches: Iterator, count: int) -> None:
    for _ in itertools.islice(batches, count):
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
