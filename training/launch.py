"""Start several workers of a training command on this machine, to try out what several machines will do.

    python -m training.launch --workers 2 -- python -m training.pretrain digits --data digits --workdir runs/two

Each worker gets a TF_CONFIG of its own with a free port, and what it prints is led in by its number. SIGTERM and Ctrl-C
are handed on to all. When a worker fails the others are given some time to notice, and are then ended.
"""

import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from keras_vit import UserError, cli


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Start several workers of a command on this machine."""

    workers: int = 2
    """Processes."""
    grace: float = 60.0
    """Seconds that the others have to end by themselves when one has failed."""


def launch(arguments: Arguments, command: Sequence[str]) -> int:
    """Run the workers to their end; returns the first exit code that is not 0, else 0."""
    if arguments.workers < 1 or not command:
        raise UserError(
            "training.launch takes --workers N, at least 1, and a command after --, as in: --workers 2 -- python -m "
            "training.pretrain digits --data digits --workdir runs/two."
        )
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(arguments.workers)]
    workers, readers = [], []
    for index in range(arguments.workers):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config), "PYTHONUNBUFFERED": "1"}
        worker = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # or Ctrl-C in a terminal would reach it twice
        )
        reader = threading.Thread(target=_echo, args=(index, worker), daemon=True)
        reader.start()
        workers.append(worker)
        readers.append(reader)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: [worker.send_signal(received) for worker in workers])
    code = _wait(workers, arguments.grace)
    for reader in readers:
        reader.join(timeout=5.0)
    return code


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _echo(index: int, worker: subprocess.Popen) -> None:
    for line in worker.stdout:
        print(f"[{index}] {line.rstrip()}", flush=True)


def _wait(workers: list[subprocess.Popen], grace: float) -> int:
    """The first exit code that is not 0, when all have ended; those that outlive a failed one too long are killed."""
    first, end = 0, math.inf
    while None in (codes := [worker.poll() for worker in workers]):
        if not first and (first := next(filter(None, codes), 0)):
            end = time.monotonic() + grace
        if time.monotonic() > end:
            for worker in workers:
                worker.kill()
        time.sleep(0.1)
    return first or next(filter(None, codes), 0)


def main(arguments: Sequence[str]) -> None:
    """`--workers N -- COMMAND`"""
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    parsed = cli.parse(Arguments, arguments[:split], prog="python -m training.launch -- COMMAND")
    code = launch(parsed, arguments[split + 1 :])
    sys.exit(128 - code if code < 0 else code)


if __name__ == "__main__":
    cli.run(main)
