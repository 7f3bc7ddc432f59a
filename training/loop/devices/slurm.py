"""The workers of a SLURM job, from the variables that srun sets."""

import itertools
import re
from collections.abc import Mapping

from keras_vit import UserError

# Port of the first task on each machine.
_PORT = 8888


def slurm_config(environ: Mapping[str, str]) -> dict:
    """Return the TF_CONFIG of this task; the tasks have the order of their machines in the job step.

    TensorFlow's SlurmClusterResolver sorts the machines by name, so that node10 comes before node9 and gets the place
    of another task, and it needs nvidia-smi.

    Raises UserError if the process was not started by srun.
    """
    try:
        hosts = _hosts(environ["SLURM_STEP_NODELIST"])
        counts = _counts(environ["SLURM_STEP_TASKS_PER_NODE"])
        index = int(environ["SLURM_PROCID"])
        workers = [f"{host}:{_PORT + task}" for host, count in zip(hosts, counts, strict=True) for task in range(count)]
        if not 0 <= index < len(workers):
            raise ValueError(f"SLURM_PROCID is {index} of {len(workers)} tasks")
    except (KeyError, ValueError) as error:
        raise UserError(
            f"The workers cannot be found in the environment of the SLURM job ({error}); start the command with srun, "
            "as docs/clusters/slurm.sh does, or set TF_CONFIG."
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


def _counts(tasks: str) -> list[int]:
    """Expand "2(x3),1" to 2, 2, 2, 1."""
    counts = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE is {tasks!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
