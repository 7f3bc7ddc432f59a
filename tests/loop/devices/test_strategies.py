"""Strategies: the same numbers on one device, two replicas and two workers; what is asked for and not there."""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

from keras_vit import UserError
from training.data.sources import open_source
from training.loop.devices import cluster
from training.loop.devices.strategies import CONTINUE_LATER, StrategyOptions, open_strategy, report_lost_workers
from training.loop.plan import Setup, resolve
from training.options.common import DataOptions
from training.options.train import PretrainOptions
from training.recipes.pretrain import RECIPES

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[3])}

# A process of its own: devices are made before TensorFlow starts.
_PROCESS = """
import dataclasses, pathlib, sys
import keras, numpy as np, tensorflow as tf
import keras_vit
from training.loop.devices import kernels
from training.loop.build import build_trainer
from keras_vit.run import Run
from training.data.sources import DataSet, array_split
from training.loop.devices.strategies import StrategyOptions, is_chief, open_strategy
from training.loop.plan import Setup, resolve
from training.loop.train import Training
from training.options.common import DataOptions, Execution
from training.options.train import PretrainOptions
from training.recipes.pretrain import RECIPES
from training.recipes.recipe import Schedule

# What is compiled for a CPU, and optimized, takes longer than the steps.
kernels.on_cpu = lambda: False
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
config = keras_vit.ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
dropping = dataclasses.replace(config, dropout_rate=0.5)
base = dataclasses.replace(
    RECIPES["digits"], model=config, batch_size=32, clip_norm=0.1, ema_decay=0.9, epochs=None, steps=16)
rng = np.random.default_rng(0)
images, labels = rng.integers(0, 256, (1003, 8, 8, 1), np.uint8), rng.integers(0, 5, 1003)
preprocessing = keras_vit.Preprocessing((8, 8), 1)
CLASSES = tuple("abcde")

def build(config=config):
    return keras_vit.build(config, preprocessing=preprocessing, num_classes=5)

def with_adapters():
    model = build()
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dense):
            layer.enable_lora(4)
    return model

CHANGED = {
    "sgd": dict(optimizer="sgd", learning_rate=0.5, schedule=Schedule(decay="constant")),
    "adamw": dict(optimizer="adamw", learning_rate=0.01, weight_decay=0.1, schedule=Schedule(warmup_steps=4)),
    "accumulated": dict(optimizer="adamw", learning_rate=0.01, weight_decay=0.1, schedule=Schedule(warmup_steps=4),
        accumulation=2),
    "muon": dict(optimizer="muon", learning_rate=0.01, weight_decay=0.1, schedule=Schedule(warmup_steps=4),
        accumulation=2),
    "lora": dict(optimizer="adamw", learning_rate=0.01, schedule=Schedule(warmup_steps=4), accumulation=2),
    "weighted": dict(optimizer="sgd", learning_rate=0.5, schedule=Schedule(decay="constant"), accumulation=2),
    "dropout": dict(optimizer="sgd", learning_rate=0.1, schedule=Schedule(decay="constant")),
}

def train(strategy, argument, several):
    name, _, at_once = argument.partition("@")
    several = int(at_once or several)
    recipe, split = dataclasses.replace(base, **CHANGED[name]), array_split(images, labels, CLASSES)
    keras.utils.set_random_seed(3)
    trainer = build_trainer(
        {"lora": with_adapters, "dropout": lambda: build(dropping)}.get(name, build),
        recipe, 16, strategy=strategy, execution=Execution(steps_per_execution=several), seed=1,
        class_weights=np.array([0.2, 0.5, 1, 2, 4], np.float32) if name == "weighted" else None,
    )
    run = Run.at(pathlib.Path(f"{sys.argv[1]}/{kind}-{argument}"))
    if is_chief(strategy):
        run.start({}, CLASSES)
    options = PretrainOptions(
        source=DataOptions("digits"), workdir=str(run.path), recipe=recipe, seed=1,
        execution=Execution(steps_per_execution=several, evaluate_every=16),
    )
    counts = []
    note = keras.callbacks.LambdaCallback(
        on_test_end=lambda logs: counts.append([np.array(total) for total in trainer.test_sums[1:]]))
    setup = Setup(DataSet(CLASSES, split, split), strategy)
    Training(resolve(options, setup, command="pretrain", recipe_name="tiny"), trainer, run, [note]).run_steps()
    return {
        argument: np.concatenate([np.ravel(weight) for weight in trainer.network.get_weights()]),
        argument + "_ema": np.concatenate([np.ravel(weight) for weight in trainer.ema]),
        argument + "_step": np.array(trainer.step),
        argument + "_counts": np.array(counts[0]),
    }

# Replicas first: their devices are made before TensorFlow starts.
for argument in sys.argv[2:]:
    kind, *names = argument.split(",")
    strategy, actual = open_strategy(StrategyOptions(kind, 2 if kind == "mirrored" else None)), {}
    for name in names:
        # Several steps of an execution, which do not divide those of the epoch.
        actual |= train(strategy, name, 1 if kind == "single" else 3)
    if is_chief(strategy):
        np.savez(f"{sys.argv[1]}/{kind}.npz", **actual)
"""


def ends_of(folder: pathlib.Path, *runs: str, launcher: tuple[str, ...] = ()) -> dict[str, dict[str, np.ndarray]]:
    """What runs, each a strategy and names of what to train, ended with: weights, averages, steps, evaluation."""
    script = folder / "process.py"
    script.write_text(_PROCESS)
    command = [sys.executable, *launcher, *([sys.executable] if launcher else []), str(script), str(folder), *runs]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {file.stem: dict(np.load(file)) for file in folder.glob("*.npz")}


STRATEGIES = ["mirrored", pytest.param("multi-worker", marks=pytest.mark.slow)]


@pytest.fixture(name="replicas", scope="module")
def _replicas(tmp_path_factory) -> dict:
    return ends_of(tmp_path_factory.mktemp("replicas"), "mirrored,accumulated", "single,adamw")


@pytest.fixture(name="workers", scope="module")
def _workers(tmp_path_factory) -> dict:
    launcher = ("-m", "training.launch", "--workers", "2", "--")
    return ends_of(tmp_path_factory.mktemp("workers"), "multi-worker,accumulated", launcher=launcher)


@pytest.fixture(name="ends")
def _ends(replicas, request) -> dict:
    """What the strategy of a test ended with, beside one device; workers only where a test is about them."""
    several = "multi-worker" in request.node.callspec.params.values()
    return replicas | request.getfixturevalue("workers") if several else replicas


def assert_near(here: np.ndarray, there: np.ndarray, bound: float) -> None:
    assert np.linalg.norm(here - there) <= bound * np.linalg.norm(there)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_strategy_ends_with_clipping_and_micro_batches_where_one_device_does_with_whole_batches(ends, strategy):
    own, single = ends[strategy], ends["single"]
    for what in ("", "_ema"):
        assert_near(own[f"accumulated{what}"], single[f"adamw{what}"], bound=1e-5)
    assert own["accumulated_step"] == 16
    assert own["accumulated_counts"].tolist() == single["adamw_counts"].tolist()
    assert own["accumulated_counts"][1] == 1003  # every example once


@pytest.mark.slow
def test_two_replicas_end_where_one_device_does_with_sgd_muon_adapters_and_class_weights(tmp_path):
    ends = ends_of(tmp_path, "mirrored,sgd,muon,lora,weighted", "single,sgd,muon,lora,weighted")
    bounds = {"weighted": 1e-6, "weighted_ema": 1e-6, "sgd": 1e-6, "sgd_ema": 1e-6, "muon": 1e-5, "lora": 1e-5}
    for name, bound in {**bounds, "sgd_counts": 0.0, "sgd_step": 0.0}.items():
        assert_near(ends["mirrored"][name], ends["single"][name], bound)


@pytest.mark.slow
def test_several_steps_per_execution_of_replicas_end_in_the_bits_of_one(tmp_path):
    ends = ends_of(tmp_path, "mirrored,dropout@1,dropout@3,dropout@50")["mirrored"]
    for steps in (3, 50):
        for what in ("", "_ema", "_counts"):
            np.testing.assert_array_equal(ends[f"dropout@{steps}{what}"], ends[f"dropout@1{what}"])


@pytest.mark.parametrize(
    ("strategy", "replicas", "words"),
    [
        ("mirrored", None, "strategy mirrored takes GPUs, but this machine has 0"),
        ("tpu", None, "The TPU 'local' cannot be reached .*TPUs not found"),
        ("single", 2, "--replicas applies only to --strategy mirrored"),
        ("multi-worker", None, "neither in TF_CONFIG nor .* SLURM job"),
    ],
)
def test_devices_that_are_not_there_are_refused(strategy, replicas, words, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(UserError, match=words):
        open_strategy(StrategyOptions(strategy, replicas))
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["a"] * 3 if kind == "GPU" else [])
    with pytest.raises(UserError, match="takes 4, but this machine has 3"):
        open_strategy(StrategyOptions("mirrored", 4))


@pytest.mark.parametrize(
    ("fields", "owner"), [({"tpu": "my-tpu"}, "--strategy tpu"), ({"worker_timeout": 9}, "--strategy multi-worker")]
)
def test_options_of_another_strategy_are_refused(fields, owner):
    for strategy in ("auto", owner.removeprefix("--strategy ")):
        StrategyOptions(strategy, **fields)
    with pytest.raises(UserError, match=f"applies only to {owner}; give that, or leave it out"):
        StrategyOptions("mirrored", **fields)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"cluster": {"worker": ["a:1"]}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
        '{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": ["a:99999"]}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}',
    ],
)
def test_a_wrong_tf_config_is_refused(text, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(UserError, match="TF_CONFIG should be .* correct it"):
        open_strategy(StrategyOptions(strategy="multi-worker"))


def test_a_worker_that_never_arrives_is_named_with_its_address(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        absent = f"127.0.0.1:{other.getsockname()[1]}"
        here = f"127.0.0.1:{taken.getsockname()[1]}"
    config = {"cluster": {"worker": [here, absent]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(UserError, match=f"no worker has answered at {absent}"):
        open_strategy(StrategyOptions(strategy="multi-worker", worker_timeout=1))


def free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:  # all open at once, so that they differ
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]


def met(calls: list[tuple]) -> list[str | None]:
    """What each worker says when all of them meet at once: None, or why not."""

    def one(call):
        try:
            cluster.wait_for_workers(*call)
        except UserError as mistake:
            return str(mistake)

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


def test_workers_meet():
    workers = free_addresses(3)
    assert met([(workers, here, 60) for here in workers]) == [None] * 3


def test_a_worker_that_ends_after_its_answer_is_not_taken_for_another_program():
    here, other = free_addresses(2)
    host, port = other.split(":")
    with socket.create_server((host, int(port))) as server:

        def answer_once_and_end() -> None:
            for number in range(5):
                with contextlib.suppress(OSError), server.accept()[0] as connection:
                    connection.recv(2**16)
                    if number == 0:
                        connection.sendall(json.dumps({"from": other, "workers": [other, "gone:1"]}).encode() + b"\n")

        threading.Thread(target=answer_once_and_end, daemon=True).start()
        with pytest.raises(UserError, match=f"{other} was started with the addresses {other}, gone:1"):
            cluster.wait_for_workers([here, other], here, 0.4)


def test_workers_with_different_ports_report_it_on_both_sides():
    chief, right, wrong = free_addresses(3)
    chiefs, others = met([([chief, right], chief, 1), ([chief, wrong], wrong, 1)])
    assert f"The worker at {wrong} was started with the addresses {chief}, {wrong}, unlike this one" in chiefs
    assert f"The worker at {chief} was started with the addresses {chief}, {right}, unlike this one" in others


def test_another_server_at_the_port_of_a_worker_is_reported():
    here = free_addresses(1)[0]
    with socket.create_server(("127.0.0.1", 0)) as other:
        there = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError, match=f"Another program listens at {there}"):
            cluster.wait_for_workers([here, there], here, 1)


def test_a_taken_port_is_refused(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        here = f"127.0.0.1:{taken.getsockname()[1]}"
        config = {"cluster": {"worker": [here, "127.0.0.1:9"]}, "task": {"type": "worker", "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        with pytest.raises(UserError, match=f"port of this worker, {here}, is in use"):
            open_strategy(StrategyOptions(strategy="multi-worker"))


def test_workers_are_found_by_themselves(met, monkeypatch):
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    open_strategy(StrategyOptions(worker_timeout=7))
    assert met == [(["a:1", "b:1"], "a:1", 7)]


@pytest.mark.parametrize(
    ("batch_size", "replicas", "accumulation", "fits"), [(31, 2, 1, 30), (34, 4, 2, 32), (31, 64, 1, 64)]
)
def test_a_batch_that_cannot_be_shared_is_refused_with_one_that_can(batch_size, replicas, accumulation, fits):
    class Strategy:
        num_replicas_in_sync = replicas

    recipe = dataclasses.replace(RECIPES["digits"], batch_size=batch_size, accumulation=accumulation)
    options = PretrainOptions(source=DataOptions("digits"), workdir="never", recipe=recipe)
    opened = Setup(open_source(options.source), Strategy())
    with pytest.raises(UserError, match=f"by {replicas} replicas .* give --batch-size {fits}"):
        resolve(options, opened, command="pretrain", recipe_name="digits")
    options = dataclasses.replace(options, recipe=dataclasses.replace(recipe, batch_size=fits))
    assert resolve(options, opened, command="pretrain", recipe_name="digits").recipe.batch_size == fits


def test_a_failed_worker_ends_the_launch_with_its_exit_code(tmp_path):
    script = (
        "import json, os, sys, time\n"
        "if json.loads(os.environ['TF_CONFIG'])['task']['index']: sys.exit(3)\n"
        "time.sleep(300)"
    )
    command = [sys.executable, "-m", "training.launch", "--grace", "0.1", "--", sys.executable, "-c", script]
    assert subprocess.run(command, timeout=200, env=ENVIRONMENT).returncode == 3


@pytest.fixture(name="first_of_two")
def _first_of_two():
    """The strategy of worker 0, as far as a lost worker is looked for."""

    class Resolver:
        task_type, task_id = "worker", 0

    class Strategy(tf.distribute.MultiWorkerMirroredStrategy):
        cluster_resolver = Resolver()

        def __init__(self):  # without waiting for the other worker
            pass

    return Strategy()


_GONE = "Collective ops is aborted by: "
LOST = [
    tf.errors.UnavailableError(
        None, None, f"Graph execution error:\n\nDetected at node Collective\n{_GONE}recvmsg:Connection reset by peer\n"
        "Additional GRPC information from remote target /job:worker/replica:0/task:1",
    ),
    tf.errors.InternalError(
        None, None, f"{_GONE}Error reported from /job:worker/task:1: The following tasks are unhealthy (stopped "
        "sending heartbeats)",
    ),
    tf.errors.DeadlineExceededError(None, None, "Collective has timed out during execution."),
    tf.errors.UnavailableError(
        None, None, f"{_GONE}Deadline Exceeded RPC: /tensorflow.CoordinationService/Heartbeat"
    ),
]  # fmt: skip
OWN = [
    tf.errors.InternalError(None, None, "cuDNN launch failure : input shape ([32,3,224,224])"),
    tf.errors.InternalError(None, None, "/job:worker/replica:0/task:0/device:GPU:0: cuDNN launch failure"),
    tf.errors.CancelledError(None, None, "Cancelled"),
]


@pytest.mark.parametrize("error", [*LOST, *OWN])
def test_a_lost_worker_is_named_and_ends_with_the_code_to_start_again(error, first_of_two, exit_codes, capsys):
    expected = contextlib.nullcontext() if error in LOST else pytest.raises(type(error))
    with expected, report_lost_workers(first_of_two):
        raise error
    assert exit_codes == ([CONTINUE_LATER] if error in LOST else [])
    message = capsys.readouterr().err
    assert ("A worker was lost or did not answer" in message) == (error in LOST)
    assert any(word in message for word in ("task:1", "timed out", "Heartbeat")) == (error in LOST)
