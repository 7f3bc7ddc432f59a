"""Training on JAX on two hosts, processes of four CPU devices each, beside one process with eight."""

import pathlib
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from keras_vit.run import Run
from tests.loop.test_jax import assert_equal, jax_process, weights
from tests.loop.test_sharded_weights import SHARDED
from training.loop.devices.strategies import CONTINUE_LATER

_LAUNCHER = ("-m", "training.launch", "--workers", "2", "--grace", "150", "--")


def started(workdir: pathlib.Path, *more: str, hosts: int, signalled=(0, 0, 0)) -> subprocess.CompletedProcess:
    program = ("-m", "tests.loop.jax_run", str(workdir), *map(str, signalled), *more)
    if hosts == 1:
        return jax_process(*program, devices=8)
    return jax_process(*_LAUNCHER, sys.executable, *program, devices=4)


def run(workdir: pathlib.Path, *more: str, hosts: int = 2) -> Run:
    done = started(workdir, *more, hosts=hosts)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "nothing to do" not in done.stdout
    return Run.at(workdir)


def assert_close(one: Run, two: Run, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    assert len(one.metrics()) == 4
    for here, there in zip(one.metrics(), two.metrics(), strict=True):
        for name in ("loss", "val_loss", "accuracy", "val_accuracy"):
            assert here[name] == pytest.approx(there[name], rel=rtol)
    for here, there in zip(weights(one), weights(two), strict=True):
        np.testing.assert_allclose(here, there, atol=atol)


@pytest.fixture(name="undisturbed", scope="module")
def _undisturbed(tmp_path_factory) -> Run:
    return run(tmp_path_factory.mktemp("undisturbed") / "run", SHARDED)


@pytest.fixture(name="stopped", scope="module")
def _stopped(tmp_path_factory) -> pathlib.Path:
    """A run of two hosts, of which the second got SIGTERM after step 6."""
    workdir = tmp_path_factory.mktemp("stopped") / "run"
    done = started(workdir, SHARDED, hosts=2, signalled=(1, int(signal.SIGTERM), 6))
    assert done.returncode == CONTINUE_LATER, done.stdout[-3000:]
    assert done.stdout.count("Training was interrupted and its checkpoint is saved") == 2
    assert {path.name.split("-")[1] for path in (workdir / "checkpoints").glob("step-*")} == {"00000006", "00000007"}
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), (SHARDED,), (SHARDED, "--model-parallel", "2")])
def test_two_hosts_train_as_one_with_eight_devices(more, undisturbed, tmp_path):
    two = undisturbed if more == (SHARDED,) else run(tmp_path / "two", *more)
    assert_close(run(tmp_path / "one", *more, hosts=1), two)


@pytest.mark.slow
def test_micro_batches_mixed_images_and_class_weights_too(tmp_path):
    more = (SHARDED, "--accumulation", "2", "--mixup", "0.5", "--remat", "--class-weights")
    assert_close(run(tmp_path / "one", *more, hosts=1), run(tmp_path / "two", *more))


@pytest.mark.slow
def test_sigterm_stops_both_after_the_same_step_and_they_continue_to_the_same_bits(stopped, undisturbed, tmp_path):
    assert_equal(run(shutil.copytree(stopped, tmp_path / "run"), SHARDED), undisturbed)


@pytest.mark.slow
def test_one_host_continues_what_two_began_and_the_other_way_round(stopped, undisturbed, tmp_path):
    assert_close(run(shutil.copytree(stopped, tmp_path / "run"), SHARDED, hosts=1), undisturbed, atol=1e-4)
    killed = tmp_path / "killed"
    done = started(killed, hosts=1, signalled=(0, int(signal.SIGKILL), 6))
    assert done.returncode == -signal.SIGKILL
    assert_close(run(killed, SHARDED), undisturbed, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "says"),
    [(0, r"the JAX distributed service|\[1\] A worker was lost"), (1, r"\[0\] A worker was lost or did not")],
)
def test_when_a_host_is_killed_the_other_ends_and_both_continue_to_the_same_bits(host, says, undisturbed, tmp_path):
    done = started(tmp_path / "run", SHARDED, hosts=2, signalled=(host, int(signal.SIGKILL), 8))
    assert done.returncode in (128 + signal.SIGKILL, 128 + signal.SIGABRT)  # whichever the launcher sees first
    assert re.search(says, done.stdout)  # of the first host, what the other one notices first
    assert_equal(run(tmp_path / "run", SHARDED), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("own", [("--learning-rate", "0.5"), ("--precision", "bfloat16")])
def test_hosts_with_different_options_are_refused(own, tmp_path):
    done = started(tmp_path / "run", SHARDED, ",", *own, hosts=2)
    assert done.returncode, done.stdout[-3000:]
    assert done.stdout.count("The workers differ in their settings or data; give all of them the same command") == 2
    assert not (tmp_path / "run" / "checkpoints").exists()
