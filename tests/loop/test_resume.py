"""A run that was killed, stopped or lost a worker ends in the bits of one that was not."""

import json
import os
import pathlib
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from keras_vit.files.npz import read_npz
from tests.interruptions import after_checkpoints, assert_ended_alike
from tests.loop.devices.test_data_service import running, stop
from tests.support import replaced
from training import pretrain
from training.loop import checkpoints, train
from training.loop.devices.strategies import CONTINUE_LATER

# The smallest run that has everything in it that could go wrong: dropout, shifts, an average, momenta, several epochs
# with several states in each.
COMMAND = [
    "-m", "training.pretrain", "digits", "--data", "digits", "--deterministic", "--seed", "5", "--epochs", "3",
    "--batch-size", "96", "--warmup-steps", "6", "--checkpoint-every", "4", "--ema-decay", "0.9",
    "--model.num-layers", "1", "--model.hidden-size", "24", "--model.mlp-dim", "48",
]  # fmt: skip
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
MIRRORED = ["--strategy", "mirrored", "--replicas", "2"]


def start(folder: pathlib.Path, *more: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen:
    command = [sys.executable, *launcher, *([sys.executable] if launcher else []), *COMMAND, "--workdir", str(folder)]
    return subprocess.Popen(
        replaced(command, *more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    )


def finish(folder: pathlib.Path, *more: str, launcher: tuple[str, ...] = ()) -> str:
    process = start(folder, *more, launcher=launcher)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output[-3000:]
    return output


def in_process(folder: pathlib.Path) -> None:
    pretrain.main([*COMMAND[2:], "--workdir", str(folder)])


@pytest.fixture(name="undisturbed", scope="module")
def _undisturbed(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    in_process(folder)
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_run_that_is_ended_and_then_asked_to_stop_leaves_with_the_documented_code_and_ends_in_the_same_bits(
    number, undisturbed, tmp_path, capfd
):
    def ask(step):
        if step == 8:  # a second Ctrl-C does not wait
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        if step == 20:
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a process of the background
    try:
        with after_checkpoints(ask):
            with pytest.raises(KeyboardInterrupt):
                in_process(tmp_path / "run")
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert "Ctrl-C again stops at once" in capfd.readouterr().err
            with pytest.raises(SystemExit) as left:
                in_process(tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.value.code == CONTINUE_LATER == 75
    error = capfd.readouterr().err
    assert f"its checkpoint is saved; the same command continues: {shlex.join(sys.orig_argv)}\n" in error
    assert ("Ctrl-C again stops at once" in error) == (number == signal.SIGINT)
    assert checkpoints.load_latest(tmp_path / "run" / "checkpoints")[0] == 21  # one step later
    in_process(tmp_path / "run")
    output = capfd.readouterr().out
    assert "Continuing after step 21, in epoch 2." in output
    assert "Epoch 3/3, step 42 of 42: accuracy" in output
    assert not set(output) & set("\r\b\x1b")
    assert_ended_alike(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_a_run_trains_in_another_thread_and_leaves_the_signals_alone(undisturbed, tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    thread = threading.Thread(target=in_process, args=(tmp_path / "run",))
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert_ended_alike(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_signal_after_the_last_step_does_not_say_that_training_stops_and_the_model_is_written(
    number, undisturbed, tmp_path, monkeypatch, capfd
):
    shutil.copytree(undisturbed, tmp_path / "run")
    (tmp_path / "run" / "model.keras").unlink()  # as a run that was killed after its last step
    monkeypatch.setattr(train, "write_curves", lambda run: os.kill(os.getpid(), number))
    in_process(tmp_path / "run")
    error = capfd.readouterr().err
    assert "Stopping after this step" not in error
    assert ("Training is complete; writing model.keras." in error) == (number == signal.SIGINT)
    assert (tmp_path / "run" / "model.keras").is_file()


def test_the_average_is_what_the_run_saves(undisturbed):
    import keras

    arrays = read_npz(max((undisturbed / "checkpoints").iterdir()))
    model = keras.models.load_model(undisturbed / "model.keras")
    averages = [arrays[name] for name in sorted(arrays) if name.startswith("ema/")]
    for weight, average in zip(model.trainable_weights, averages, strict=True):
        np.testing.assert_array_equal(np.array(weight), average)


def killed_at_random_moments(folder: pathlib.Path, kills: int, *more: str) -> int:
    """Starts the run again and again and kills it; returns how many kills hit the writing of a state."""
    rng, while_writing = random.Random(0), 0
    for kill in range(kills):
        process = start(folder, *more)
        wait_for_a_state = kill % 3 == 0
        begun, span = time.monotonic(), None
        before = set((folder / "checkpoints").glob("step-*")) if folder.exists() else set()
        while process.poll() is None:
            temporary = list((folder / "checkpoints").glob(".building/*/state.npz")) if wait_for_a_state else []
            if temporary:
                while_writing += 1
                break
            if span is None and set((folder / "checkpoints").glob("step-*")) - before:
                span = time.monotonic() + rng.uniform(0.0, 1.0)  # somewhere behind its first new state
            if not wait_for_a_state and span is not None and time.monotonic() > span:
                break
            assert time.monotonic() - begun < 300
            time.sleep(0.001)  # less than it takes to write a state
        process.kill()
        process.communicate()
        if (folder / "model.keras").exists():
            (folder / "model.keras").unlink()  # killed too late: begin anew
            for state in (folder / "checkpoints").iterdir():
                state.unlink()
    return while_writing


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], MIRRORED], ids=["single", "mirrored"])
def test_twenty_kills_change_no_bit(more, tmp_path):
    finish(tmp_path / "undisturbed", *more)
    assert killed_at_random_moments(tmp_path / "run", 20, *more) >= 3
    finish(tmp_path / "run", *more)
    assert_ended_alike(tmp_path / "run", tmp_path / "undisturbed")


LAUNCHER = ("-m", "training.launch", "--workers", "2", "--")


@pytest.fixture(name="undisturbed_workers", scope="module")
def _undisturbed_workers(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("workers") / "undisturbed"
    finish(folder, launcher=LAUNCHER)
    return folder


def signalled_second_worker(folder: pathlib.Path, number: signal.Signals) -> tuple[int, str]:
    """Sends a signal to the second of two workers after their first state: the launcher's exit code and output."""
    process = start(folder, launcher=LAUNCHER)
    while not list((folder / "checkpoints").glob("step-*")):
        assert process.poll() is None
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    of_index = {json.loads(_environment(child)["TF_CONFIG"])["task"]["index"]: int(child) for child in children}
    os.kill(of_index[1], number)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def _environment(process: str) -> dict[str, str]:
    parts = pathlib.Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
    return dict(part.split("=", 1) for part in parts if "=" in part)


@pytest.mark.slow
def test_when_a_worker_is_killed_the_other_stops_within_a_minute_and_both_continue(undisturbed_workers, tmp_path):
    code, output = signalled_second_worker(tmp_path / "run", signal.SIGKILL)
    assert code != 0
    assert "[0] A worker was lost or did not answer" in output
    assert "start all workers again with the same command" in output
    finish(tmp_path / "run", launcher=LAUNCHER)
    assert_ended_alike(tmp_path / "run", undisturbed_workers)


@pytest.mark.slow
def test_sigterm_to_one_worker_stops_all_at_the_same_step(undisturbed_workers, tmp_path):
    code, output = signalled_second_worker(tmp_path / "run", signal.SIGTERM)
    assert code == CONTINUE_LATER, output[-2000:]
    assert output.count("Training was interrupted and its checkpoint is saved") == 2
    finish(tmp_path / "run", launcher=LAUNCHER)
    assert_ended_alike(tmp_path / "run", undisturbed_workers)


@pytest.mark.slow
def test_of_two_processes_that_start_in_one_workdir_one_trains_and_the_other_says_who_does(tmp_path):
    long = ("--epochs", "80")  # so that none ends before the other has started, on a busy machine
    processes = [start(tmp_path / "run", *long) for _ in range(2)]
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 2], outputs
    (refused,) = (output for process, output in zip(processes, outputs, strict=True) if process.returncode == 2)
    assert "Another process, " in refused.splitlines()[-1]
    finish(tmp_path / "undisturbed", *long)
    assert_ended_alike(tmp_path / "run", tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], MIRRORED], ids=["single", "mirrored"])
def test_batches_of_a_data_service_change_no_bit_also_after_kills(more, tmp_path):
    finish(tmp_path / "undisturbed", *more)
    dispatcher, workers = running(2)
    served = ["--data-service", dispatcher.target, *more]
    finish(tmp_path / "served", *served)
    assert_ended_alike(tmp_path / "served", tmp_path / "undisturbed")
    killed_at_random_moments(tmp_path / "run", 2, *served)
    finish(tmp_path / "run", *served)
    assert_ended_alike(tmp_path / "run", tmp_path / "undisturbed")
    for worker in workers:
        stop(worker)
