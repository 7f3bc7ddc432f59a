"""JAX on several hosts: how they are found, which devices and rows each of them has, and what a lost one says."""

import contextlib
import json
import sys
import types
from collections.abc import Iterator

import jax
import keras
import pytest

from keras_vit import UserError
from training.loop.devices import jax_devices
from training.loop.devices.jax_devices import JaxDevices, connect_hosts
from training.loop.devices.strategies import (
    CONTINUE_LATER,
    StrategyOptions,
    distributed,
    is_chief,
    open_strategy,
    report_lost_workers,
)

ADDRESSES = ["host10:2222", "host9:2222"]


@pytest.fixture(name="connected")
def _connected(monkeypatch) -> Iterator[list[tuple]]:
    """JAX of the second of two hosts, and what it gets to connect them: address, options and settings by then.

    Each of them has two rows of a slice of 4 x 2 chips, which JAX counts column by column.
    """
    calls: list[tuple] = []
    settings: dict = {}
    chips = [types.SimpleNamespace(process_index=number % 4 // 2) for number in range(8)]
    others = types.SimpleNamespace(
        config=types.SimpleNamespace(update=settings.__setitem__),
        devices=lambda: chips,
        distributed=types.SimpleNamespace(
            initialize=lambda address, **options: calls.append((address, options, {**settings}))
        ),
        errors=jax.errors,
        process_count=lambda: 2,
        process_index=lambda: 1,
    )
    monkeypatch.setitem(sys.modules, "jax", others)
    monkeypatch.setattr(keras.distribution, "list_devices", lambda: [f"tpu:{number}" for number in range(8)])
    yield calls
    keras.distribution.set_distribution(None)


@pytest.fixture(name="opened")
def _opened(on_jax, connected, met, monkeypatch) -> list[tuple]:
    """The same for `open_strategy` on JAX."""
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "only-one")
    return connected


@pytest.mark.parametrize("cluster", ["TF_CONFIG", "SLURM"])
def test_the_processes_of_a_cluster_meet_before_jax_connects_them(cluster, opened, met, monkeypatch):
    if cluster == "SLURM":
        names = {"NTASKS": "2", "PROCID": "1", "STEP_NODELIST": "host[10,9]", "STEP_TASKS_PER_NODE": "1(x2)"}
        for name, value in names.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        monkeypatch.setenv("TF_CONFIG", "")  # open_strategy sets it
    else:
        config = {"cluster": {"worker": ADDRESSES}, "task": {"type": "worker", "index": 1}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    open_strategy(StrategyOptions())
    addresses = [address.replace("2222", "8888") for address in ADDRESSES] if cluster == "SLURM" else ADDRESSES
    ((address, others, settings),) = opened
    assert met == [(addresses, addresses[1], 600)]
    assert address == addresses[0]
    assert settings["jax_enable_preemption_service"] is False
    # JAX itself would give each task of SLURM a single GPU.
    expected = {"num_processes": 2, "process_id": 1, "cluster_detection_method": "deactivate"}
    assert expected.items() <= others.items()


def test_jax_finds_the_hosts_of_a_slice_itself_and_does_not_connect_one_host(opened, monkeypatch):
    open_strategy(StrategyOptions())
    assert not opened
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    open_strategy(StrategyOptions())
    ((address, others, _),) = opened
    assert address is None
    assert "num_processes" not in others


def test_an_old_python_is_refused(connected, monkeypatch):
    monkeypatch.setattr(jax_devices.sys, "version_info", (3, 10, 12))
    with pytest.raises(UserError, match=r"Several hosts need Python 3\.11 or newer"):
        connect_hosts()


def test_the_devices_that_share_a_model_are_of_one_host(connected):
    devices = JaxDevices(2, shard_weights=True)
    assert devices.num_replicas_in_sync == 4
    models = [["tpu:0", "tpu:1"], ["tpu:4", "tpu:5"], ["tpu:2", "tpu:3"], ["tpu:6", "tpu:7"]]
    assert keras.distribution.distribution().device_mesh.devices.tolist() == models
    with pytest.raises(UserError, match="4 devices of each host .* --model-parallel 8"):
        JaxDevices(8)


def test_each_host_reads_its_part_and_has_models_of_its_own_and_the_first_writes(connected):
    second = JaxDevices()
    assert distributed(second, 16, lambda part: part) == (1, 2)
    assert not is_chief(second)
    with second.on_this_host():
        assert keras.distribution.distribution().device_mesh.devices.tolist() == ["tpu:2", "tpu:3", "tpu:6", "tpu:7"]


def test_numbers_of_hosts_keep_their_64_bits():
    big = [2**56 + 1, 7]
    assert jax_devices.numbers_of_hosts(big).tolist() == [big]  # of this host alone


LOST = "UNKNOWN: Gloo AllGather failed: [pair.cc:538] Read error [127.0.0.1]:26519: Connection reset by peer"


@pytest.mark.parametrize(("message", "is_lost"), [(LOST, True), ("RESOURCE_EXHAUSTED: Out of memory", False)])
def test_a_lost_host_ends_with_the_code_to_start_again(message, is_lost, on_jax, connected, exit_codes, capsys):
    expected = contextlib.nullcontext() if is_lost else pytest.raises(jax.errors.JaxRuntimeError)
    with expected, report_lost_workers(JaxDevices()):
        raise jax.errors.JaxRuntimeError(message)
    assert exit_codes == ([CONTINUE_LATER] if is_lost else [])
    assert ("start all workers again" in capsys.readouterr().err) == is_lost
