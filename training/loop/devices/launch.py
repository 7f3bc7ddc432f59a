"""Start several workers of a command on this machine, each with its TF_CONFIG."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence

from keras_vit import UserError


def launch(command: Sequence[str], count: int, grace: float) -> int:
    """Run `count` workers of a command until they end; return the first nonzero exit code, else 0.

    After one failed, the others have `grace` seconds to end by themselves.
    """
    if not command:
        raise UserError("keras-vit launch takes a command after --, as in: --workers 2 -- keras-vit pretrain digits …")
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(count)]
    workers, readers = [], []
    for index in range(count):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        worker = subprocess.Popen(
            command,
            env={**os.environ, "TF_CONFIG": json.dumps(config), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # else Ctrl-C in a terminal would reach it twice
        )
        workers.append(worker)
        readers.append(threading.Thread(target=_print_output, args=(index, worker), daemon=True))
        readers[-1].start()

    def forward(number: int, _) -> None:
        for worker in workers:
            worker.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    code = _wait(workers, grace)
    for reader in readers:
        reader.join(timeout=5.0)
    return code


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:  # all open at once, so that they differ
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _print_output(index: int, worker: subprocess.Popen) -> None:
    """Print the output of a worker, each line with the worker's index."""
    for line in worker.stdout or ():
        print(f"[{index}] {line.rstrip()}", flush=True)


def _wait(workers: list[subprocess.Popen], grace: float) -> int:
    """Wait for all workers and return the first nonzero exit code, else 0. After a failure, kill the others in time."""
    first, end = 0, math.inf
    while None in (codes := [worker.poll() for worker in workers]):
        if not first and (first := next(filter(None, codes), 0)):
            end = time.monotonic() + grace
        if time.monotonic() > end:
            for worker in workers:
                worker.kill()
        time.sleep(0.1)
    return first or next(filter(None, codes), 0)
