"""Check that all workers of a run can reach each other, before TensorFlow connects them.

TensorFlow itself waits forever, without a message, for a worker that is missing or was started with other addresses.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from keras_vit import UserError
from keras_vit.errors import explained

# Maximum bytes of a greeting: enough for the addresses of several thousand workers.
_MAX_BYTES = 2**17
# Seconds to tolerate a wrong answer: an earlier run may still hold its port.
_TOLERANCE = 30.0


def wait_for_workers(workers: Sequence[str], here: str, timeout: float) -> None:
    """Wait until this worker has exchanged greetings with every other one, in both directions.

    All have the same addresses `host:port` in the same order; `here` is that of this one, whose port is released before
    TensorFlow opens it. Raises UserError for workers that do not answer within the timeout, in seconds, and for other
    programs that answer at their addresses.
    """
    others, everyone = set(workers) - {here}, list(workers)
    greeting = json.dumps({"from": here, "workers": everyone}).encode() + b"\n"
    called: set[str] = set()  # workers that this one has reached
    callers: set[str] = set()  # workers that have reached this one
    wrong: dict[str, list[str]] = {}  # addresses of another cluster, or [] for another program
    begin = time.monotonic()
    with _listen(here, greeting, callers, wrong):
        while missing := others - (called & callers):
            for address in missing - called:
                answer = _greet(address, greeting)
                if answer == {"from": address, "workers": everyone}:
                    called.add(address)
                    wrong.pop(address, None)
                elif answer is not None:
                    # A worker that is about to end answers nothing; what it said before counts.
                    wrong[address] = answer.get("workers") or wrong.get(address, [])
            waited = time.monotonic() - begin
            if waited > timeout or (wrong and waited > _TOLERANCE):
                raise UserError(_failure(missing, called, wrong, timeout))
            time.sleep(0.1)


def _failure(missing: set[str], called: set[str], wrong: dict[str, list[str]], timeout: float) -> str:
    for address, workers in sorted(dict(wrong).items()):  # a copy, because the thread may add to it
        if not workers:
            return f"Another program listens at {address}, not a worker of this run; correct its port in TF_CONFIG."
        other = f"was started with the addresses {', '.join(workers)[:300]}, unlike this one"
        return f"The worker at {address} {other}; give all workers the same cluster in TF_CONFIG."
    if silent := ", ".join(sorted(missing & called)):
        reach = "check that the address of this one can be reached from there"
        return f"After {timeout:g} seconds the worker at {silent} has not reached this one; {reach}."
    start = "start all workers of TF_CONFIG, and make sure that these addresses can be reached from here"
    return f"After {timeout:g} seconds no worker has answered at {', '.join(sorted(missing))}; {start}."


def _greet(address: str, greeting: bytes) -> dict | None:
    """Greet an address and return the answer: a worker's greeting, {} for anything else, None if nothing listens."""
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=2.0) as connection:
            try:
                connection.sendall(greeting)
                return _read(connection)
            except OSError:
                return {}
    except OSError:
        return None


def _read(connection: socket.socket) -> dict:
    """Read a greeting; {} for anything else."""
    with connection.makefile("rb") as stream:
        line = stream.readline(_MAX_BYTES)
    try:
        greeting = json.loads(line)
        return {"from": str(greeting["from"]), "workers": [str(worker) for worker in greeting["workers"]]}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}


@contextlib.contextmanager
def _listen(here: str, greeting: bytes, callers: set[str], wrong: dict[str, list[str]]) -> Iterator[None]:
    """Answer greetings at this worker's port; add those with the same addresses to `callers`, others to `wrong`."""
    expected = json.loads(greeting)["workers"]

    def answer() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(2.0)
                caller = _read(connection)
                if caller:
                    connection.sendall(greeting)
                    connection.recv(1)  # the caller closes first, which frees this port at once
                    if caller["workers"] == expected:
                        callers.add(caller["from"])
                    else:
                        wrong[caller["from"]] = caller["workers"]

    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with explained(lambda why: f"The port of this worker, {here}, is in use ({why}); give another.", OSError):
            server.bind(("", int(here.rsplit(":", 1)[1])))
        server.listen(128)
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread
            server.close()
            thread.join(timeout=5.0)
