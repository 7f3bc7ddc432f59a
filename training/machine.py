"""Facts about a machine for training, its problems, and the command that repairs each."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping

from training.loop.devices.backend import only_jax_sees_gpu

# The first driver that runs programs of CUDA 12: NVIDIA, "CUDA Compatibility", minor version compatibility.
_DRIVER_OF_CUDA_12 = (525, 60)
# The first driver of CUDA 13, which the wheels of TensorFlow do not use.
_DRIVER_OF_CUDA_13 = (580,)
_TENSORFLOW = "2.21.0"
_WITH_CUDA = f'pip install "tensorflow[and-cuda]=={_TENSORFLOW}"'
_HUB = "https://huggingface.co"
# Libraries whose requirements are compared with what is installed.
_LIBRARIES = ("tensorflow", "tensorflow-cpu", "keras", "jax", "jaxlib", "tensorflow-datasets")
_ASK_TENSORFLOW = """
import json, tensorflow as tf
gpus = tf.config.list_physical_devices("GPU")
print(json.dumps({"is_cuda_build": bool(tf.sysconfig.get_build_info()["is_cuda_build"]), "gpus": len(gpus)}))
"""
_ASK_JAX = """
import json, jax
print(json.dumps({"platform": jax.default_backend(), "devices": jax.device_count()}))
"""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Facts about a machine, as `look_around` sees them."""

    python: str
    backend: str
    """The backend of Keras in training: tensorflow or jax."""
    packages: Mapping[str, str]
    """Installed distributions -> version, in lower case."""
    unmet: tuple[tuple[str, str], ...]
    """Libraries whose requirements other versions meet than the installed ones: a sentence, and the requirement."""
    cores: int
    memory: float
    """GB of main memory."""
    free_disk: float
    """GB free where the command runs."""
    reaches_hub: bool
    driver: str | None = None
    """Version of NVIDIA's driver."""
    gpus: tuple[str, ...] = ()
    """Names and memory of the GPUs that the driver knows."""
    tensorflow: Mapping[str, object] | None = None
    """is_cuda_build, and gpus that TensorFlow sees; or error, why it cannot be imported."""
    jax: Mapping[str, object] | None = None
    """platform and devices that JAX sees, or error; None where JAX is not installed."""
    uses_legacy_keras: bool = False
    """Whether TF_USE_LEGACY_KERAS is set."""

    @property
    def cuda(self) -> set[int]:
        """Major versions of the CUDA libraries that are installed as packages."""
        suffixes = {int(match[1]) for name in self.packages if (match := re.fullmatch(r"nvidia-.*-cu(\d+)", name))}
        plain = self.packages.get("nvidia-cublas")  # without a suffix since CUDA 13
        return suffixes | ({int(plain.partition(".")[0])} if plain else set())


def look_around() -> Machine:
    """Return what this machine has. Takes some seconds: TensorFlow and JAX are imported in processes of their own."""
    packages = {
        each.name.lower().replace("_", "-"): each.version for each in importlib.metadata.distributions() if each.name
    }
    driver, gpus = _nvidia()
    return Machine(
        platform.python_version(),
        os.environ.get("KERAS_BACKEND", "jax" if only_jax_sees_gpu() else "tensorflow"),
        packages,
        tuple(each for name in _LIBRARIES if name in packages for each in _unmet(name, packages)),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        shutil.disk_usage(".").free / 1e9,
        _reaches(_HUB),
        driver,
        gpus,
        _answer(_ASK_TENSORFLOW),
        _answer(_ASK_JAX) if "jax" in packages else None,
        os.environ.get("TF_USE_LEGACY_KERAS", "0") not in ("", "0", "False"),
    )


def problems(machine: Machine) -> list[tuple[str, str]]:
    """Return what is wrong, each as a sentence and the command that repairs it."""
    listed = [(sentence, f'pip install "{requirement}"') for sentence, requirement in machine.unmet]
    if "keras" in machine.packages and "keras-nightly" in machine.packages:
        sentence = "keras and keras-nightly are both installed, and overwrite each other's files."
        listed.append((sentence, "pip uninstall -y keras keras-nightly && pip install keras"))
    if machine.uses_legacy_keras:
        listed.append(("TF_USE_LEGACY_KERAS makes TensorFlow use Keras 2.", "unset TF_USE_LEGACY_KERAS"))
    for name, answer in (("TensorFlow", machine.tensorflow), ("JAX", machine.jax)):
        if answer and "error" in answer:
            listed.append((f"{name} cannot be imported: {answer['error']}", "pip install --force-reinstall ."))
    jax_sees_gpu = machine.backend == "jax" and (machine.jax or {}).get("platform") == "gpu"
    if machine.gpus and machine.tensorflow and machine.tensorflow.get("gpus") == 0 and not jax_sees_gpu:
        listed.append(_why_tensorflow_sees_no_gpu(machine))
    return listed


def _why_tensorflow_sees_no_gpu(machine: Machine) -> tuple[str, str]:
    version = tuple(map(int, re.findall(r"\d+", machine.driver or "0")[:2]))
    cuda = 13 if version >= _DRIVER_OF_CUDA_13 else 12
    if version < _DRIVER_OF_CUDA_12:
        needed = ".".join(map(str, _DRIVER_OF_CUDA_12))
        return (
            f"The driver {machine.driver} is too old for CUDA 12, which needs {needed}.",
            "sudo apt install nvidia-open",
        )
    if not (machine.tensorflow or {}).get("is_cuda_build"):
        return (
            "There is a GPU, but this TensorFlow is built for CPUs.",
            f"pip uninstall -y tensorflow-cpu && {_WITH_CUDA}",
        )
    if 12 not in machine.cuda:
        others = "" if not machine.cuda else f", only those of CUDA {', '.join(map(str, sorted(machine.cuda)))}"
        return f"TensorFlow needs the libraries of CUDA 12, which are not installed{others}.", _WITH_CUDA
    return (
        "TensorFlow does not see the GPU, which may be too new for its CUDA libraries; JAX may support it.",
        f'pip uninstall -y tensorflow && pip install "tensorflow-cpu=={_TENSORFLOW}" "jax[cuda{cuda}]"',
    )


def description(machine: Machine) -> list[tuple[str, str]]:
    """Return rows of what there is, and where training would run."""
    versions = ("keras", "tensorflow", "tensorflow-cpu", "jax", "numpy")
    installed = [f"{name} {machine.packages[name]}" for name in versions if name in machine.packages]
    gpus = (machine.tensorflow or {}).get("gpus", "not imported")
    seen = [f"TensorFlow: {gpus}", f"JAX: {(machine.jax or {}).get('platform', 'not installed')}"]
    tunes = gpus not in (0, "not imported")
    return [
        ("Python", machine.python),
        ("Packages", ", ".join(installed)),
        ("Backend", machine.backend),
        ("CPU", f"{machine.cores} cores, {machine.memory:.0f} GB of memory"),
        ("Free disk", f"{machine.free_disk:.0f} GB"),
        ("GPU", "; ".join(machine.gpus) or "none"),
        ("Driver", machine.driver or "none"),
        ("GPUs seen by", ", ".join(seen)),
        ("Hugging Face hub", "reachable" if machine.reaches_hub else "not reachable; pass local checkpoints by path"),
        ("Training runs on", _place(machine)),
        ("keras-vit auto", "fine-tunes all weights" if tunes else "trains a linear head on frozen features"),
    ]


def _place(machine: Machine) -> str:
    answer = machine.jax if machine.backend == "jax" else machine.tensorflow
    number = answer and (answer.get("devices") if answer.get("platform") == "gpu" else answer.get("gpus"))
    if number:
        return f"{number} GPU{'s' if number != 1 else ''} with {machine.backend}"
    return f"the CPU with {machine.backend}"


def _nvidia() -> tuple[str | None, tuple[str, ...]]:
    """Return the version of the driver, and name and memory of each GPU."""
    command = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None, ()
    cells = [[cell.strip() for cell in line.split(",")] for line in lines]
    rows = [row for row in cells if len(row) == 3]  # other lines are messages, such as of no device
    return (rows[0][0], tuple(f"{name}, {memory}" for _, name, memory in rows)) if rows else (None, ())


def _answer(code: str) -> dict[str, object]:
    """Return the JSON object that a new Python process prints last, or the error that it ends with."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": "the import takes more than 120 seconds"}
    if done.returncode:
        return {"error": (done.stderr.strip() or f"the process ended with {done.returncode}").splitlines()[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def _unmet(name: str, packages: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires(name) or ():
        needed = Requirement(text)
        version = packages.get(needed.name.lower().replace("_", "-"))
        applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if applies and version is not None and not needed.specifier.contains(version, prereleases=True):
            requirement = f"{needed.name}{needed.specifier}"
            yield f"{name} {packages[name]} needs {requirement}, but {version} is installed.", requirement


def _reaches(address: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=5):
            return True
    except OSError:
        return False
