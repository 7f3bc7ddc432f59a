"""The doctor's sentences about machines whose parts do not fit together."""

import dataclasses
import re

import pytest

from training.machine import Machine, description, look_around, problems

CARD = "NVIDIA H100 80GB HBM3, 81559 MiB"
SOUND = Machine(
    python="3.11.7",
    backend="tensorflow",
    packages={"keras": "3.15.1", "tensorflow": "2.21.0", "numpy": "2.4.6", "nvidia-cudnn-cu12": "9.10"},
    unmet=(),
    cores=16,
    memory=128.0,
    free_disk=64.0,
    reaches_hub=True,
    driver="580.82.07",
    gpus=(CARD,),
    tensorflow={"is_cuda_build": True, "gpus": 1},
)
BLIND = dataclasses.replace(SOUND, tensorflow={"is_cuda_build": True, "gpus": 0})


def test_a_sound_machine_has_no_problem_and_trains_on_its_gpu():
    assert not problems(SOUND)
    rows = dict(description(SOUND))
    assert (rows["Training runs on"], rows["keras-vit auto"]) == ("1 GPU with tensorflow", "fine-tunes all weights")
    assert "linear head" in dict(description(BLIND))["keras-vit auto"]
    on_jax = dataclasses.replace(SOUND, backend="jax", jax={"platform": "gpu", "devices": 2})
    assert dict(description(on_jax))["Training runs on"] == "2 GPUs with jax"
    cpu_build = {"tensorflow": {"is_cuda_build": False, "gpus": 0}}
    assert not problems(dataclasses.replace(on_jax, **cpu_build))
    assert dict(description(BLIND))["Training runs on"] == "the CPU with tensorflow"


@pytest.mark.parametrize(
    ("machine", "changes", "words", "command"),
    [
        (BLIND, {"driver": "470.57.02"}, "driver 470.57.02 is too old", "nvidia-open"),
        (BLIND, {"tensorflow": {"is_cuda_build": False, "gpus": 0}}, "built for CPUs", "uninstall -y tensorflow-cpu"),
        (BLIND, {"packages": {"nvidia-cublas": "13.0.2"}}, "CUDA 12, .* only those of CUDA 13", "and-cuda"),
        (BLIND, {"packages": {}}, "CUDA 12, which are not installed", "and-cuda"),
        (BLIND, {}, "does not see the GPU", "jax[cuda13]"),
        (BLIND, {"driver": "535.54.03"}, "does not see the GPU", "jax[cuda12]"),
        (SOUND, {"packages": {"keras": "3.15.1", "keras-nightly": "3.16"}}, "keras and keras-nightly", "uninstall"),
        (SOUND, {"unmet": (("keras needs numpy<2.5, but 2.6 is installed.", "numpy<2.5"),)}, "2.6", '"numpy<2.5"'),
        (SOUND, {"uses_legacy_keras": True}, "Keras 2", "unset TF_USE_LEGACY_KERAS"),
        (SOUND, {"tensorflow": {"error": "ImportError: libcudart"}}, "TensorFlow cannot be imported", "pip install"),
    ],
)
def test_each_problem_has_a_sentence_and_a_command(machine, changes, words, command):
    ((sentence, repair),) = problems(dataclasses.replace(machine, **changes))
    assert command in repair
    assert re.search(words, sentence)


def test_this_machine_is_described(monkeypatch):
    monkeypatch.setattr("training.machine._answer", lambda code: {"is_cuda_build": False, "gpus": 0})
    monkeypatch.setattr("training.machine._HUB", "http://127.0.0.1:9")
    machine = look_around()
    assert not machine.unmet
    assert not machine.reaches_hub
    assert machine.memory > machine.cores * 0.1
    assert "keras" in machine.packages
    assert machine.packages.keys() & {"tensorflow", "tensorflow-cpu"}
