"""Find the TPU of this machine and set the environment that TensorFlow needs for it, before TensorFlow is imported."""

import importlib.metadata
import os
import pathlib
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence

from keras_vit import UserError
from training.options.common import StrategyOptions

_INSTALL = "install requirements-tpu.txt, as docs/how-to/tpu.md describes"
# Google's network adapters have the same vendor, so the device counts, too. The numbers are those of JAX's
# hardware_utils.py: v2 and v3, a version without a public name, v4, v5p, v5e, v6e, 7x.
_VENDOR = "0x1ae0"
_CHIPS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
# From Keras' guide for TensorFlow on TPU VMs.
_XLA_FLAGS = (
    "--tf_mlir_enable_mlir_bridge=true",
    "--tf_mlir_enable_convert_control_to_data_outputs_pass=true",
    "--tf_mlir_enable_merge_control_flow_pass=true",
)


def has_tpu(root: str | os.PathLike = "/") -> bool:
    """Whether this machine has a TPU that this process may open.

    A TPU from v5e on is a file in /dev/vfio, an older one /dev/accel*. Other hardware has such files, too: drivers of
    NVIDIA create /dev/accel*. So one of Google's chips must be on the PCI bus. root: the directory of dev and sys.
    """
    dev, devices = pathlib.Path(root, "dev"), pathlib.Path(root, "sys/bus/pci/devices")
    files = any(dev.glob("accel[0-9]*")) or any(dev.glob("accel/accel[0-9]*")) or any(dev.glob("vfio/[0-9]*"))
    return files and any(_is_chip(device) for device in devices.glob("*"))


def _is_chip(device: pathlib.Path) -> bool:
    try:
        return (device / "vendor").read_text().strip() == _VENDOR and (device / "device").read_text().strip() in _CHIPS
    except OSError:
        return False


def may_be_slice(environ: Mapping[str, str] = os.environ, root: str | os.PathLike = "/") -> bool:
    """Whether the TPU of this host may be a part of a slice of several hosts, which their metadata server then knows.

    Where one of these variables names the hosts, as on GKE, Kaggle and Colab, there is no such server.
    """
    hosts = environ.get("TPU_PROCESS_ADDRESSES", environ.get("TPU_WORKER_HOSTNAMES"))
    if hosts is not None:
        return "," in hosts
    return "TPU_SKIP_MDS_QUERY" not in environ and has_tpu(root)


def prepare_tpu(
    options: StrategyOptions,
    *,
    environ: MutableMapping[str, str] = os.environ,
    root: str | os.PathLike = "/",
    packages: Sequence[str] | None = None,
) -> None:
    """Set libtpu's environment if a TPU of this machine is requested or found; call it before TensorFlow is imported.

    Variables that are already set remain. A TPU with a name of its own is on another machine. `packages` are the
    directories of installed packages, by default Python's own.

    Raises UserError if the TPU is absent, or if tensorflow-tpu or the libtpu that it requires is not installed.
    """
    if environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow" or options.tpu != "local":
        return
    present = has_tpu(root)
    if options.strategy != "tpu" and not (options.strategy == "auto" and present):
        return
    if not present:
        raise UserError(
            "--strategy tpu was given, but this machine has no TPU: no chip of Google's has a file in /dev/vfio or "
            "/dev/accel*; run on a Cloud TPU VM, give --tpu the name of one, or use another --strategy."
        )
    library = _find_libtpu(sys.path if packages is None else packages)
    environ.setdefault("PJRT_DEVICE", "TPU")
    environ.setdefault("NEXT_PLUGGABLE_DEVICE_USE_C_API", "true")
    environ.setdefault("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", str(library))
    flags = environ.get("TF_XLA_FLAGS", "").split()
    names = {flag.split("=")[0] for flag in flags}
    environ["TF_XLA_FLAGS"] = " ".join([*flags, *(flag for flag in _XLA_FLAGS if flag.split("=")[0] not in names)])


def _find_libtpu(packages: Sequence[str]) -> pathlib.Path:
    """Return the path of libtpu.so, of the version that tensorflow-tpu requires."""
    installed = {name: _distribution(name, packages) for name in ("tensorflow-tpu", "libtpu")}
    tensorflow, libtpu = installed.values()
    requirement = next((line for line in (tensorflow and tensorflow.requires) or () if re.match(r"libtpu\b", line)), "")
    version = re.search(r"==\s*([\w.]+)", requirement)
    path = None if libtpu is None else pathlib.Path(str(libtpu.locate_file("libtpu/libtpu.so")))
    if tensorflow and libtpu and path and path.is_file() and (not version or version[1] == libtpu.version):
        return path
    here = ", ".join(f"{name} {package.version if package else 'is missing'}" for name, package in installed.items())
    exact = f" {version[1]}" if version else ""
    raise UserError(
        f"This machine has a TPU, which needs tensorflow-tpu and the libtpu.so of its libtpu{exact}, but {here}; "
        f"{_INSTALL}, or give --strategy single to train on the CPU."
    )


def _distribution(name: str, packages: Sequence[str]) -> importlib.metadata.Distribution | None:
    return next(iter(importlib.metadata.distributions(name=name, path=list(packages))), None)
