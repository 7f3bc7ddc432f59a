"""Training on JAX with weights, gradients and optimizer state divided over devices of the CPU, in other processes."""

import json
import pathlib
import shutil
import types

import keras
import numpy as np
import pytest

from keras_vit.run import Run
from tests.loop.test_jax import assert_equal, killed_run, on_jax, run, weights
from training.loop.devices.jax_devices import DividedWeights

# Prints the bytes of the variables of each kind, and of their parts on each device, as lines of JSON.
_BYTES = """
import dataclasses, json
from tests.loop.jax_steps import ADAMW
from training.loop.devices.jax_devices import JaxDevices
from training.loop.build import build_trainer
from training.options.common import Execution

def bytes_of(model_parallel, shard_weights):
    model = dataclasses.replace(ADAMW.model, num_heads=4, hidden_size=64, num_layers=1)
    recipe = dataclasses.replace(ADAMW, model=model)
    devices = JaxDevices(model_parallel, shard_weights=shard_weights)
    trainer = build_trainer(lambda: recipe.build(16), recipe, 20, strategy=devices, execution=Execution(), seed=0)
    parts = {}
    for name, variable in trainer.state.items():
        kind = name.split("/")[0]
        whole, on_device = parts.setdefault(kind, [0, {}])
        parts[kind][0] += variable.value.nbytes
        for shard in variable.value.addressable_shards:
            on_device[shard.device.id] = on_device.get(shard.device.id, 0) + shard.data.nbytes
    return {kind: (whole, sorted(set(on_device.values()))) for kind, (whole, on_device) in parts.items()}

for case in %s:
    print(json.dumps([case, bytes_of(*case)]))
"""


def check_bytes(cases: str) -> None:
    lines = [line for line in on_jax("-c", _BYTES % cases, devices=8).splitlines() if line.startswith("[[")]
    for (model_parallel, shard_weights), parts in map(json.loads, lines):
        for kind in ("weight", "optimizer", "ema"):
            whole, on_each = parts[kind]
            share = max(on_each) / whole
            # Where devices share a model, the biases of the divided channels are not divided further.
            most = 0.126 if model_parallel == 1 else 0.15
            assert 1 / 8 <= share < most if shard_weights else share > 0.3, (kind, share)
            assert len(on_each) == 1, "the devices have equal shares"


@pytest.mark.slow
def test_each_of_eight_devices_has_an_eighth_of_weights_slots_and_averages():
    check_bytes("[(1, False), (4, False), (1, True), (2, True)]")


# Of a variable's path and shape, the axes it is divided along by eight devices, of which two share a model or none.
AXES = [
    ("Transformer.encoderblock_0.MlpBlock_3.Dense_0/kernel", (24, 48), (None, "batch"), ("batch", "model")),
    ("Transformer.encoderblock_0.MlpBlock_3.Dense_1/kernel", (48, 24), ("batch", None), ("model", "batch")),
    ("Transformer.encoderblock_0.MlpBlock_3.Dense_0/bias", (48,), ("batch",), ("model",)),
    ("Transformer.posembed_input/pos_embedding", (1, 17, 24), (None, None, "batch"), (None, None, "batch")),
    ("head/kernel", (12, 10), (None, None), ("batch", None)),
]


@pytest.mark.parametrize(("path", "shape", "alone", "shared"), AXES)
def test_the_longest_axis_that_the_devices_divide_is_divided(path, shape, alone, shared):
    variable = types.SimpleNamespace(path=path, shape=shape, trainable=True)
    for sizes, axes in (((8, 1), alone), ((4, 2), shared)):
        mesh = keras.distribution.DeviceMesh(sizes, ("batch", "model"), [f"cpu:{i}" for i in range(8)])
        assert DividedWeights(mesh, shard_weights=True).get_variable_layout(variable).axes == axes


@pytest.fixture(name="one_device", scope="module", params=["adamw", "sgd", "muon", "remat"])
def _one_device(request, tmp_path_factory) -> tuple[str, pathlib.Path]:
    folder = tmp_path_factory.mktemp("one")
    begin = _train(request.param, folder, "begin")
    _train(request.param, folder, "one", begin=begin)
    return request.param, folder


_STEPS = """
import pathlib, sys
import numpy as np
from tests.loop import jax_steps

case, begin, end, model_parallel, shard_weights = sys.argv[1:]
jax_steps.STEPS = 50 if begin else 1
state = dict(np.load(begin)) if begin else None
np.savez(end, **jax_steps.train(case, state, int(model_parallel), shard_weights=bool(shard_weights)))
"""


def _train(case: str, folder: pathlib.Path, name: str, *, begin="", model_parallel=1, devices=1) -> pathlib.Path:
    path = folder / f"{name}.npz"
    shard_weights = "yes" if devices > 1 else ""
    on_jax("-c", _STEPS, case, str(begin), str(path), str(model_parallel), shard_weights, devices=devices)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("model_parallel", [1, 2])
def test_fifty_steps_on_eight_devices_have_the_losses_of_one_device(model_parallel, one_device):
    case, folder = one_device
    path = _train(case, folder, "eight", begin=folder / "begin.npz", model_parallel=model_parallel, devices=8)
    with np.load(path) as eight, np.load(folder / "one.npz") as one:
        assert len(eight["losses"]) == 51  # the last is that of the average, evaluated
        np.testing.assert_allclose(eight["losses"], one["losses"], rtol=1e-5)


SHARDED = "--shard-weights"


@pytest.fixture(name="killed", scope="module")
def _killed(tmp_path_factory) -> pathlib.Path:
    return killed_run(tmp_path_factory.mktemp("killed") / "run", SHARDED)


@pytest.fixture(name="undisturbed", scope="module")
def _undisturbed(tmp_path_factory) -> Run:
    return run(tmp_path_factory.mktemp("undisturbed") / "run", SHARDED)


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_bits_and_opens_on_tensorflow(killed, undisturbed, tmp_path):
    assert_equal(undisturbed, run(shutil.copytree(killed, tmp_path / "run"), SHARDED, resumed=True))


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "more"), [(4, (SHARDED,)), (8, (SHARDED, "--model-parallel", "2")), (1, ())])
def test_it_continues_on_other_devices_and_without_the_option(devices, more, killed, undisturbed, tmp_path):
    resumed = run(shutil.copytree(killed, tmp_path / "run"), *more, devices=devices, resumed=True)
    for one, other in zip(undisturbed.metrics(), resumed.metrics(), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    for here, there in zip(weights(undisturbed), weights(resumed), strict=True):
        np.testing.assert_allclose(here, there, atol=1e-3)


@pytest.mark.slow
def test_micro_batches_in_bfloat16_and_frozen_layers_too(tmp_path):
    more = ("--precision", "bfloat16", "--accumulation", "2", "--freeze", "embedding", "--remat")
    one, eight = run(tmp_path / "one", *more, devices=1), run(tmp_path / "eight", SHARDED, *more)
    for here, there in zip(one.metrics(), eight.metrics(), strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-2)
