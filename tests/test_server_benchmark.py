"""The benchmark of servers: clients and the table."""

import json
import threading
import time

import numpy as np
import pytest

import benchmarks.server as command
from benchmarks.server import Server, measure

FILES = [b"a", b"b", b"c", b"d"]


def test_every_request_has_a_latency_and_so_many_are_in_the_model_as_there_are_workers():
    inside, most, lock = 0, 0, threading.Lock()

    def forward(image) -> np.ndarray:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.003)
        with lock:
            inside -= 1
        return np.array([[image]])

    load = measure(Server(lambda file: file[0], forward, 2), FILES, clients=4, seconds=0.1)
    assert most == 2
    assert len(load["latencies"]) >= 4
    assert max(load["latencies"]) <= load["seconds"]


def test_an_error_of_the_server_ends_the_load():
    def forward(image) -> np.ndarray:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        measure(Server(lambda file: file, forward, 2), FILES, clients=3, seconds=60.0)


@pytest.mark.slow
def test_the_servers_are_measured_end_to_end_and_one_that_is_missing_is_reported(tmp_path, capsys):
    output = tmp_path / "speed"
    options = ["--model", "testing", "--size", "32", "--clients", "1", "4", "--seconds", "0.3", "--rounds", "2"]
    command.main([*options, "--output", str(output)])
    found = json.loads((output / "results.json").read_text())["clients"]
    assert [one["clients"] for one in found] == [1, 4]
    for one in found:
        ours, _, other = one["results"]
        assert ours["failure"] is None
        assert len(ours["rates"]) == 2
        assert 0 < ours["p50"] <= ours["p99"]
        assert other["failure"]  # there is no model "testing" in timm
    assert "| 4 | keras_vit_saved_model |" in (output / "results.md").read_text()
    assert "| 1 | timm | failed: " in capsys.readouterr().out
