"""Before TensorFlow connects several workers: each sees that all others are there, and are workers of the same run.

TensorFlow itself waits without end, and without a word, for one that does not come or was started with other addresses.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from keras_vit import UserError

# Bytes of a greeting at most: the addresses of some thousand workers.
_LONGEST = 2**17
# Seconds for what is wrong at first to become right: a run before that still holds its port.
_PATIENCE = 30.0


def wait_for_workers(workers: Sequence[str], here: str, timeout: float) -> None:
    """Wait until this worker has exchanged greetings with every other one, both ways.

    The port is given back before TensorFlow takes it.

    Args:
        workers: addresses of all, `host:port`, which must be the same, in the same order, in every worker.
        here: that of this worker.
        timeout: seconds.

    Raises UserError for workers that do not come, and for what answers in their place.
    """
    others = set(workers) - {here}
    greeting = json.dumps({"from": here, "workers": list(workers)}).encode() + b"\n"
    called, callers, wrong = set(), set(), {}
    begin = time.monotonic()
    with _answering(here, greeting, callers, wrong):
        while missing := others - (called & callers):
            for address in missing - called:
                answer = _greeted(address, greeting)
                if answer == {"from": address, "workers": list(workers)}:
                    called.add(address)
                    wrong.pop(address, None)
                elif answer is not None:
                    wrong[address] = answer.get("workers", [])
            waited = time.monotonic() - begin
            if waited > timeout or (wrong and waited > _PATIENCE):
                raise UserError(_absence(missing, called, wrong, timeout))
            time.sleep(0.1)


def _absence(missing: set[str], called: set[str], wrong: dict[str, list[str]], timeout: float) -> str:
    for address, workers in sorted(dict(wrong).items()):  # the thread may add to it
        if workers:
            return (
                f"The worker at {address} was started with the addresses {', '.join(workers)[:300]}, others than this "
                "one; give all workers the same cluster in TF_CONFIG."
            )
        return f"What listens at {address} is no worker of this training; correct its port in TF_CONFIG."
    if unheard := sorted(missing & called):
        return (
            f"After {timeout:g} seconds the worker at {', '.join(unheard)} has not found this one; see that the "
            "address of this one can be reached from there."
        )
    return (
        f"After {timeout:g} seconds no worker has come to {', '.join(sorted(missing))}; start all workers of "
        "TF_CONFIG, and see that these addresses can be reached from here."
    )


def _greeted(address: str, greeting: bytes) -> dict | None:
    """What answers at an address: a worker's greeting, {} for anything else, None where nothing listens."""
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
    """A greeting; {} where what comes is none."""
    with connection.makefile("rb") as stream:
        line = stream.readline(_LONGEST)
    try:
        found = json.loads(line)
        return {"from": str(found["from"]), "workers": [str(worker) for worker in found["workers"]]}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}


@contextlib.contextmanager
def _answering(here: str, greeting: bytes, callers: set[str], wrong: dict[str, list[str]]) -> Iterator[None]:
    """Greets whoever calls at this worker's port; `callers` takes those with the same addresses, `wrong` the others."""
    expected = json.loads(greeting)["workers"]

    def answer() -> None:
        while True:
            try:
                connection, _ = door.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(2.0)
                caller = _read(connection)
                if caller:
                    connection.sendall(greeting)
                    connection.recv(1)  # the caller closes first, so that this port is free at once
                    if caller["workers"] == expected:
                        callers.add(caller["from"])
                    else:
                        wrong[caller["from"]] = caller["workers"]

    with socket.socket() as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(("", int(here.rsplit(":", 1)[1])))
        except OSError as error:
            raise UserError(f"The port of this worker, {here}, is taken ({error.strerror}); give another.") from error
        door.listen(128)
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)  # wakes the thread
            door.close()
            thread.join(timeout=5.0)
