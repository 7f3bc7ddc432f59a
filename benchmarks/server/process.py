"""Runs one server in its own process: `python -m benchmarks.server.process PEER CASE`.

The process writes lines of JSON to standard output: first the seconds of preparation and of the first call, then for
each line of standard input, a JSON object with arguments of `measure`, what the clients measured.
"""

import dataclasses
import json
import sys

from benchmarks.case import Case
from benchmarks.peer_process import answers, timed
from benchmarks.server.load import measure
from benchmarks.server.peers import PEERS
from benchmarks.server.photographs import photographs

_FILES = 64


def main(arguments: list[str]) -> None:
    """`PEER CASE`, the case as JSON."""
    case = Case(**json.loads(arguments[1]))
    with answers() as answer:
        files = photographs(_FILES)
        prepare, server = timed(lambda: PEERS[arguments[0]](case))
        first, _ = timed(lambda: server.forward([server.decode(files[0])]))
        answer(prepare=prepare, first_call=first)
        for line in sys.stdin:
            answer(**dataclasses.asdict(measure(server, files, **json.loads(line))))
        answer()


if __name__ == "__main__":
    main(sys.argv[1:])
