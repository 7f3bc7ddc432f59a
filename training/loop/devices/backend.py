"""Prepare the backend of Keras before it is imported: the options that it supports, and TensorFlow's TPU library."""

import importlib.metadata
import os
import pathlib
import platform
import re
import sys

from keras_vit import UserError, cli
from keras_vit.checkpoints.find import cache_folder
from keras_vit.cli.options import option_name
from keras_vit.errors import refuse_without_effect
from training.options.common import StrategyOptions, TrainingOptions

_ALL_DEVICES = "JAX uses all devices of all hosts"
# Options and fields of recipes that JAX does not support: the values that it does, besides none and zero, and why.
_ON_JAX: dict[str, tuple[tuple, str]] = {
    "strategy": (("auto",), _ALL_DEVICES),
    "replicas": ((), _ALL_DEVICES),
    "tpu": ((StrategyOptions.tpu,), _ALL_DEVICES),
    "worker_timeout": ((StrategyOptions.worker_timeout,), "JAX waits a minute"),
    "precision": (("float32", "bfloat16"), "--precision bfloat16 needs no loss scaling"),
    "steps_per_execution": ((1,), "every step is one call already"),
    "xla": (("auto", "on"), "XLA compiles every step"),
    "data_service": ((), "it was tried on TensorFlow alone"),
    "inspect_every": ((), "keras-vit inspect reads the finished run"),
    "profile_steps": ((), "TensorFlow's profiler does not see JAX"),
}
# Packages by which JAX runs on GPUs, and the driver in Windows Subsystem for Linux.
_JAX_WITH_CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_DRIVER_OF_WSL = "usr/lib/wsl/lib/libcuda.so.1"
_NEED_JAX = ("model_parallel", "shard_weights")
# The directory of dev, sys and usr.
_ROOT = pathlib.Path("/")
# PCI ids of Google's chips, as in JAX's hardware_utils.py: v2 and v3, a version without a public name, v4, v5p, v5e,
# v6e, 7x. Google's network adapters have the same vendor.
_VENDOR = "0x1ae0"
_CHIPS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
# From Keras' guide for TensorFlow on TPU VMs.
_XLA_FLAGS = (
    "--tf_mlir_enable_mlir_bridge=true",
    "--tf_mlir_enable_convert_control_to_data_outputs_pass=true",
    "--tf_mlir_enable_merge_control_flow_pass=true",
)


def prepare_backend(options: TrainingOptions) -> None:
    """Prepare the environment for the backend of Keras. Raises UserError for options that it does not support.

    Unless KERAS_BACKEND is set or Keras is imported, the backend is JAX where only JAX can use the GPU of this machine.
    On GPUs JAX keeps what it compiled, so that a second run begins sooner.
    """
    if "KERAS_BACKEND" not in os.environ and "keras" not in sys.modules and only_jax_sees_gpu():
        os.environ["KERAS_BACKEND"] = "jax"
        print("Training runs on the GPU with JAX: this TensorFlow is for CPUs (KERAS_BACKEND=tensorflow trains there).")
    if os.environ.get("KERAS_BACKEND") == "jax":
        _check_jax(options)
        if _has_nvidia_gpu():  # what is compiled for a CPU may not run on another one
            os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder() / "jax"))
        cli.import_keras()
        return
    refuse_without_effect(options, [(_NEED_JAX, False, "KERAS_BACKEND=jax in the environment")])
    prepare_tpu(options.devices)
    cli.require_tensorflow()


def _check_jax(options: TrainingOptions) -> None:
    parts = (options.devices, options.execution, options, options.recipe)
    given = {name: getattr(part, name) for part in parts for name in _ON_JAX if getattr(part, name, None)}
    for name, value in given.items():
        supported, reason = _ON_JAX[name]
        if value not in supported:
            raise UserError(
                f"{option_name(name)}{f' {value}' if supported else ''} is not supported with KERAS_BACKEND=jax "
                f"({reason}); leave it out, or set KERAS_BACKEND=tensorflow."
            )


def only_jax_sees_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU for which JAX has CUDA libraries, and TensorFlow is built for CPUs."""
    if not _has_nvidia_gpu():
        return False
    # There are no GPU libraries in TensorFlow for ARM.
    for_cpus = not _installed("tensorflow") or platform.machine() == "aarch64"
    return for_cpus and any(map(_installed, _JAX_WITH_CUDA))


def _has_nvidia_gpu() -> bool:
    has_gpu = any((_ROOT / "dev").glob("nvidia[0-9]*")) or (_ROOT / _DRIVER_OF_WSL).exists()
    return has_gpu and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def _installed(name: str) -> importlib.metadata.Distribution | None:
    return next(iter(importlib.metadata.distributions(name=name)), None)


def has_tpu() -> bool:
    """Whether this machine has a TPU that this process may open.

    A TPU from v5e on is a file in /dev/vfio, an older one /dev/accel*. Drivers of NVIDIA create /dev/accel*, too, so
    one of Google's chips must be on the PCI bus.
    """
    patterns = ("accel[0-9]*", "accel/accel[0-9]*", "vfio/[0-9]*")
    has_file = any(any((_ROOT / "dev").glob(pattern)) for pattern in patterns)
    return has_file and any(map(_is_chip, (_ROOT / "sys/bus/pci/devices").glob("*")))


def _is_chip(device: pathlib.Path) -> bool:
    try:
        return (device / "vendor").read_text().strip() == _VENDOR and (device / "device").read_text().strip() in _CHIPS
    except OSError:
        return False


def may_be_slice() -> bool:
    """Whether the TPU of this host may be a part of a slice of several hosts, which their metadata server then knows.

    Where one of these variables names the hosts, as on GKE, Kaggle and Colab, there is no such server.
    """
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES", os.environ.get("TPU_WORKER_HOSTNAMES"))
    if hosts is not None:
        return "," in hosts
    return "TPU_SKIP_MDS_QUERY" not in os.environ and has_tpu()


def prepare_tpu(options: StrategyOptions) -> None:
    """Set libtpu's environment if a TPU of this machine is requested or there; call it before TensorFlow is imported.

    Variables that are already set remain. A TPU with a name of its own is on another machine. Raises UserError if the
    TPU is absent, or if tensorflow-tpu or the libtpu that it requires is not installed.
    """
    if os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow" or options.tpu != "local":
        return
    present = has_tpu()
    if options.strategy != "tpu" and not (options.strategy == "auto" and present):
        return
    if not present:
        raise UserError(
            "--strategy tpu was given, but this machine has no TPU: no chip of Google's has a file in /dev/vfio or "
            "/dev/accel*; run on a Cloud TPU VM, give --tpu the name of one, or use another --strategy."
        )
    library = _find_libtpu()
    os.environ.setdefault("PJRT_DEVICE", "TPU")
    os.environ.setdefault("NEXT_PLUGGABLE_DEVICE_USE_C_API", "true")
    os.environ.setdefault("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", str(library))
    flags = os.environ.get("TF_XLA_FLAGS", "").split()
    names = {flag.split("=")[0] for flag in flags}
    os.environ["TF_XLA_FLAGS"] = " ".join([*flags, *(flag for flag in _XLA_FLAGS if flag.split("=")[0] not in names)])


def _find_libtpu() -> pathlib.Path:
    """Return the path of libtpu.so, of the version that tensorflow-tpu requires."""
    tensorflow, libtpu = map(_installed, ("tensorflow-tpu", "libtpu"))
    requirements = (tensorflow.requires if tensorflow else None) or ()
    version = re.search(r"^libtpu\b.*==\s*([\w.]+)", "\n".join(requirements), re.MULTILINE)
    if tensorflow and libtpu and (not version or version[1] == libtpu.version):
        path = pathlib.Path(str(libtpu.locate_file("libtpu/libtpu.so")))
        if path.is_file():
            return path
    installed = {"tensorflow-tpu": tensorflow, "libtpu": libtpu}
    here = ", ".join(f"{name} {package.version if package else 'is missing'}" for name, package in installed.items())
    exact = f" {version[1]}" if version else ""
    raise UserError(
        f"This machine has a TPU, which needs tensorflow-tpu and the libtpu.so of its libtpu{exact}, but {here}; "
        "install requirements-tpu.txt, as docs/how-to/tpu.md describes, or give --strategy single to train on the CPU."
    )
