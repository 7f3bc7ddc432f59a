"""The workers of a run: from TF_CONFIG or a SLURM job, or started on this machine; they meet before training.

TensorFlow itself waits forever, without a message, for a worker that is missing or was started with other addresses.
"""

import contextlib
import io
import itertools
import json
import math
import os
import re
import signal
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_vit import UserError
from keras_vit.errors import explained

# Port of the first SLURM task on each machine.
_SLURM_PORT = 8888
# Maximum bytes of a greeting: enough for the addresses of several thousand workers.
_MAX_BYTES = 2**17
# Seconds to tolerate a wrong answer: an earlier run may still hold its port.
_TOLERANCE = 30.0


def several_workers_started() -> bool:
    """Whether TF_CONFIG or SLURM started this process as one of several."""
    return len(_tf_config()[0]) > 1 or int(os.environ.get("SLURM_NTASKS", 1)) > 1


def met_workers(timeout: int) -> tuple[list[str], str]:
    """Return the addresses of all workers and that of this one, once they have met; a SLURM job gets its TF_CONFIG."""
    if not os.environ.get("TF_CONFIG"):
        os.environ["TF_CONFIG"] = json.dumps(slurm_config(os.environ))
    workers, here = _tf_config()
    wait_for_workers(workers, here, timeout)
    return workers, here


def _tf_config() -> tuple[list[str], str]:
    """Return the addresses of the workers in TF_CONFIG, the chief first, and that of this one; none without it."""
    text = os.environ.get("TF_CONFIG")
    if not text:
        return [], ""
    expected = '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
    advice = "correct it, or remove it to train on this machine alone"
    with explained(
        f"TF_CONFIG should be {expected}, but is {text[:200]!r}; {advice}.",
        *(ValueError, TypeError, LookupError, AttributeError),
    ):
        config = json.loads(text)
        cluster, task = {name: config["cluster"].get(name, ()) for name in ("chief", "worker")}, config["task"]
        workers = [*cluster["chief"], *cluster["worker"]]
        if not all(0 < int(worker.rpartition(":")[2]) < 2**16 and ":" in worker for worker in workers):
            raise ValueError("port")
        if int(task["index"]) < 0:
            raise ValueError("index")
        return workers, cluster[task["type"]][int(task["index"])]


def slurm_config(environ: Mapping[str, str]) -> dict:
    """Return the TF_CONFIG of this task of a SLURM job; the tasks have the order of their machines in the job step.

    TensorFlow's SlurmClusterResolver sorts the machines by name, so that node10 comes before node9 and gets the place
    of another task, and it needs nvidia-smi. Raises UserError if the process was not started by srun.
    """
    try:
        hosts, index = _hosts(environ["SLURM_STEP_NODELIST"]), int(environ["SLURM_PROCID"])
        groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ["SLURM_STEP_TASKS_PER_NODE"])  # of "2(x3),1"
        counts = [int(count) for count, times in groups for _ in range(int(times or 1))]
        pairs = zip(hosts, counts, strict=True)
        workers = [f"{host}:{_SLURM_PORT + task}" for host, count in pairs for task in range(count)]
        if not 0 <= index < len(workers):
            raise ValueError(f"SLURM_PROCID is {index} of {len(workers)} tasks")
    except (KeyError, ValueError) as error:
        raise UserError(
            f"The workers are neither in TF_CONFIG nor in the environment of a SLURM job ({error}); start the command "
            "with srun, as docs/clusters/slurm.sh does, set TF_CONFIG, or try it out with keras-vit launch --workers 2."
        ) from error
    return {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}


def _hosts(nodes: str) -> list[str]:
    """Expand a list such as "gpu[08-10,12],big1"."""
    hosts = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        parts = re.split(r"\[([^\]]*)\]", name)  # text, ranges, text, ...
        choices = [_numbers(part) if place % 2 else [part] for place, part in enumerate(parts)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return hosts


def _numbers(ranges: str) -> list[str]:
    """Expand "08-10,12" to 08, 09, 10, 12."""
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def wait_for_workers(workers: Sequence[str], here: str, timeout: float) -> None:
    """Wait until this worker has exchanged greetings with every other one, in both directions.

    All have the same addresses `host:port` in the same order; `here` is that of this one, whose port is released before
    TensorFlow opens it. Raises UserError for workers that do not answer within the timeout, in seconds, and for other
    programs that answer at their addresses.
    """
    others, greeting = set(workers) - {here}, {"from": here, "workers": list(workers)}
    called: set[str] = set()  # workers that this one has reached
    callers: set[str] = set()  # workers that have reached this one
    wrong: dict[str, list[str]] = {}  # addresses of another cluster, or [] for another program
    begin = time.monotonic()
    with _listening(greeting, callers, wrong):
        while missing := others - (called & callers):
            for address in missing - called:
                answer = _greet(address, greeting)
                if answer == {**greeting, "from": address}:
                    called.add(address)
                    wrong.pop(address, None)
                elif answer is not None:
                    # A worker that is about to end answers nothing; what it said before counts.
                    wrong[address] = answer.get("workers") or wrong.get(address, [])
            waited = time.monotonic() - begin
            if waited > timeout or (wrong and waited > _TOLERANCE):
                raise UserError(_failure(missing, called, dict(wrong), timeout))
            time.sleep(0.1)


def _failure(missing: set[str], called: set[str], wrong: dict[str, list[str]], timeout: float) -> str:
    for address, workers in sorted(wrong.items()):
        if not workers:
            return f"Another program listens at {address}, not a worker of this run; correct its port in TF_CONFIG."
        other = f"was started with the addresses {', '.join(workers)[:300]}, unlike this one"
        return f"The worker at {address} {other}; give all workers the same cluster in TF_CONFIG."
    if silent := ", ".join(sorted(missing & called)):
        reach = "check that the address of this one can be reached from there"
        return f"After {timeout:g} seconds the worker at {silent} has not reached this one; {reach}."
    start = "start all workers of TF_CONFIG, and make sure that these addresses can be reached from here"
    return f"After {timeout:g} seconds no worker has answered at {', '.join(sorted(missing))}; {start}."


def _greet(address: str, greeting: dict) -> dict | None:
    """Greet an address and return the answer: a worker's greeting, {} for anything else, None if nothing listens."""
    host, port = address.rsplit(":", 1)
    try:
        connection = socket.create_connection((host, int(port)), timeout=2.0)
    except OSError:
        return None
    try:
        with connection, connection.makefile("rwb") as stream:
            _send(stream, greeting)
            return _read(stream)
    except OSError:
        return {}


def _send(stream: io.BufferedIOBase, greeting: dict) -> None:
    stream.write(json.dumps(greeting).encode() + b"\n")
    stream.flush()


def _read(stream: io.BufferedIOBase) -> dict:
    """Read a greeting; {} for anything else."""
    try:
        greeting = json.loads(stream.readline(_MAX_BYTES))
        return {"from": str(greeting["from"]), "workers": [str(worker) for worker in greeting["workers"]]}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}


@contextlib.contextmanager
def _listening(greeting: dict, callers: set[str], wrong: dict[str, list[str]]) -> Iterator[None]:
    """Answer greetings at this worker's port; add those with the same addresses to `callers`, others to `wrong`."""

    class Answer(socketserver.StreamRequestHandler):
        timeout = 2.0

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                if caller := _read(self.rfile):
                    _send(self.wfile, greeting)
                    self.rfile.read(1)  # the caller closes first, which frees this port at once
                    if caller["workers"] == greeting["workers"]:
                        callers.add(caller["from"])
                    else:
                        wrong[caller["from"]] = caller["workers"]

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address, daemon_threads, request_queue_size = True, True, 128

    here = greeting["from"]
    with explained(lambda why: f"The port of this worker, {here}, is in use ({why}); give another.", OSError):
        server = Server(("", int(here.rsplit(":", 1)[1])), Answer)
    with server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


def launch(command: Sequence[str], count: int, grace: float) -> int:
    """Run `count` workers of a command on this machine, each with its TF_CONFIG, until they end.

    After one failed, the others have `grace` seconds to end by themselves. Return the first nonzero exit code, else 0.
    """
    if not command:
        raise UserError("keras-vit launch takes a command after --, as in: --workers 2 -- keras-vit pretrain digits …")
    with contextlib.ExitStack() as stack:  # all open at once, so that they differ
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
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

    def forward(number: int, _: Any) -> None:
        for worker in workers:
            worker.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    code = _wait(workers, grace)
    for reader in readers:
        reader.join(timeout=5.0)
    return code


def _print_output(index: int, worker: subprocess.Popen) -> None:
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
