"""The backend that training chooses by itself."""

import os
import sys

import pytest

from training.loop.devices import backend
from training.options.common import DataOptions
from training.options.train import PretrainOptions
from training.recipes.pretrain import find_recipe

GPU_JAX = {"tensorflow-cpu": "2.21.0", "jax-cuda13-plugin": "0.10.2"}
OPTIONS = PretrainOptions(source=DataOptions("digits"), workdir="never", recipe=find_recipe("digits"))


@pytest.mark.parametrize(
    ("packages", "environ", "device", "expected"),
    [
        (GPU_JAX, {}, "nvidia0", True),
        (GPU_JAX, {}, "nvidiactl", False),
        (GPU_JAX, {"CUDA_VISIBLE_DEVICES": "-1"}, "nvidia0", False),
        (GPU_JAX, {"CUDA_VISIBLE_DEVICES": "1"}, "nvidia1", True),
        ({"tensorflow-cpu": "2.21.0", "jax": "0.10.2"}, {}, "nvidia0", False),
        ({"tensorflow": "2.21.0", "jax-cuda12-plugin": "0.10.2"}, {}, "nvidia0", False),
    ],
)
def test_only_jax_sees_a_gpu_with_its_cuda_libraries_beside_tensorflow_for_cpus(
    packages, environ, device, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / device).touch()
    for name, version in packages.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(backend, "_ROOT", tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(os, "environ", environ)
    assert backend.only_jax_sees_gpu() == expected


def test_training_takes_jax_where_it_alone_sees_the_gpu_unless_the_user_chose(monkeypatch, capsys):
    monkeypatch.setattr(backend, "only_jax_sees_gpu", lambda: True)
    monkeypatch.setattr(backend.cli, "require_tensorflow", lambda: None)
    monkeypatch.setattr(backend.cli, "import_keras", lambda: None)
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    backend.prepare_backend(OPTIONS)
    assert not capsys.readouterr().out
    monkeypatch.delenv("KERAS_BACKEND")
    backend.prepare_backend(OPTIONS)
    assert os.environ["KERAS_BACKEND"] == "jax"
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("has_gpu", [True, False])
def test_on_gpus_jax_keeps_what_it_compiled_where_the_user_wants_it(has_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "_has_nvidia_gpu", lambda: has_gpu)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    backend.prepare_backend(OPTIONS)
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "mine"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    backend.prepare_backend(OPTIONS)
    assert os.environ.get("JAX_COMPILATION_CACHE_DIR") == (str(tmp_path / "jax") if has_gpu else None)
