"""Several steps per execution: the same bits as one, with any number of replicas, remainders of epochs included."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[3])}

# A process, because devices are made before TensorFlow starts. Two epochs of 7 steps, each with an evaluation.
_PROCESS = """
import dataclasses, pathlib, sys
import keras, numpy as np, tensorflow as tf
import keras_vit
from training.loop.devices.strategies import StrategyOptions, open_strategy
from training.data.sources import DataSet, array_split
from training.loop.build import build_trainer
from training.loop.plan import resolve
from keras_vit.run import Run
from training.loop.setup import Setup
from training.loop.train import Training
from training.options.common import DataOptions, Execution
from training.options.train import PretrainOptions
from training.recipes.pretrain import RECIPES

replicas = int(sys.argv[1])
tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(0)
strategy = open_strategy(StrategyOptions(strategy="mirrored", replicas=replicas))
config = keras_vit.ViTConfig(
    patch_size=4, hidden_size=6, num_layers=1, num_heads=2, mlp_dim=8, dropout_rate=0.1, classifier="gap"
)
recipe = dataclasses.replace(
    RECIPES["digits"], model=config, batch_size=16, clip_norm=0.1, ema_decay=0.9, epochs=None, steps=14)
rng = np.random.default_rng(0)
split = array_split(rng.integers(0, 256, (99, 8, 8, 1), np.uint8), rng.integers(0, 5, 99), tuple("abcde"))
preprocessing = keras_vit.Preprocessing((8, 8), 1)
found = {}
for steps in map(int, sys.argv[3:]):
    keras.utils.set_random_seed(3)
    trainer = build_trainer(
        lambda: keras_vit.build(config, preprocessing=preprocessing, num_classes=5), recipe, 14,
        strategy=strategy, execution=Execution(steps_per_execution=steps, deterministic=True), seed=1,
    )
    run = Run.at(pathlib.Path(sys.argv[2]).parent / str(steps))
    run.start({}, tuple("abcde"))
    options = PretrainOptions(
        source=DataOptions("digits"), workdir=str(run.path), recipe=recipe, seed=1,
        execution=Execution(steps_per_execution=steps, evaluate_every=7),
    )
    seen, counts = [], []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(int(np.array(trainer.step))),
        on_test_end=lambda logs: counts.append([np.array(total) for total in trainer.test_sums]))
    setup = Setup(DataSet(tuple("abcde"), split, split), strategy)
    Training(resolve(options, setup, command="pretrain", recipe_name="tiny"), trainer, run, [note]).run_steps()
    found[f"{steps} weights"] = np.concatenate([np.ravel(np.array(v)) for v in trainer.state.values()])
    found[f"{steps} counts"] = np.array(counts)
    found[f"{steps} seen"] = np.array(seen)
np.savez(sys.argv[2], **found)
"""


# The steps that are seen after each number of steps per execution.
SEEN = {1: list(range(1, 15)), 3: [3, 6, 7, 10, 13, 14], 50: [7, 14]}


# One device is in tests/loop/test_fit.py, replicas and workers with several steps, to 1e-5, in test_strategies.py.
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_several_steps_per_execution_end_in_the_bits_of_one(replicas, tmp_path):
    command = [sys.executable, "-c", _PROCESS, str(replicas), str(tmp_path / "end.npz"), *map(str, SEEN)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    end = dict(np.load(tmp_path / "end.npz"))
    for steps in SEEN:
        assert end[f"{steps} seen"].tolist() == SEEN[steps]
        np.testing.assert_array_equal(end[f"{steps} weights"], end["1 weights"])
        np.testing.assert_array_equal(end[f"{steps} counts"], end["1 counts"])
    assert np.isfinite(end["1 weights"]).all()
