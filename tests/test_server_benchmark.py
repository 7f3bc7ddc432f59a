"""The benchmark of servers: clients, batches and the table."""

import concurrent.futures
import json
import queue
import threading
import time

import numpy as np
import pytest

from benchmarks.case import Case
from benchmarks.server import __main__ as command
from benchmarks.server.__main__ import Setting, settings, summary, table
from benchmarks.server.load import Server, measure, next_batch
from keras_vit import UserError

FILES = [b"a", b"b", b"c", b"d"]


class Recording:
    """A server whose answer to a file is its letter; it notes the sizes of its batches."""

    def __init__(self, workers: int = 1):
        self.batches, self.lock = [], threading.Lock()
        self.server = Server(lambda file: file[0], self.forward, workers)

    def forward(self, letters) -> np.ndarray:
        """A batch takes a few milliseconds."""
        time.sleep(0.003)
        with self.lock:
            self.batches.append(len(letters))
        return np.array(letters)[:, None]


def test_without_batching_every_image_is_a_call_and_every_request_has_a_latency():
    recording = Recording(workers=2)
    load = measure(recording.server, FILES, clients=4, largest_batch=1, seconds=0.1)
    assert set(recording.batches) == {1}
    assert len(load.latencies) == load.calls == len(recording.batches) >= 4
    assert max(load.latencies) <= load.seconds


def test_the_waiting_requests_are_one_batch_up_to_the_largest():
    requests = queue.SimpleQueue()
    for number in (*range(6), None):
        requests.put(None if number is None else (number, concurrent.futures.Future()))
    sizes = [len(next_batch(requests, 4)) for _ in range(3)]
    assert sizes == [4, 2, 0]  # the last is the end of the service


def test_with_batching_no_call_has_more_than_the_largest_batch():
    recording = Recording()
    load = measure(recording.server, FILES, clients=6, largest_batch=4, seconds=0.1)
    assert max(recording.batches) <= 4
    assert (sum(recording.batches), len(recording.batches)) == (len(load.latencies), load.calls)


def test_every_client_gets_the_answer_to_its_own_image():
    from benchmarks.server import load

    answers = []
    with load.serving(Recording(workers=2).server, 4) as (classify, _):

        def client(letter: bytes) -> None:
            answers.append((letter[0], [int(classify(letter)[0]) for _ in range(5)]))

        threads = [threading.Thread(target=client, args=(letter,)) for letter in FILES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answers) == [(letter[0], 5 * [letter[0]]) for letter in FILES]


def test_an_error_of_the_server_ends_the_load():
    def forward(images) -> np.ndarray:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        measure(Server(lambda file: file, forward, 2), FILES, clients=3, largest_batch=2, seconds=60.0)


def test_a_table_has_rates_latencies_and_batches_and_compares_with_the_first_server(counted):
    case = Case("inference", "ViT-S_16", 1)
    fast = {"seconds": 2.0, "latencies": [0.1] * 98 + [0.5] * 2, "calls": 50}
    slow = {"seconds": 4.0, "latencies": [0.2] * 100, "calls": 100}
    ours = summary("timm", [fast, fast], None)
    assert ours == {"peer": "timm", "rates": [50.0, 50.0], "p50": 0.1, "p99": 0.5, "batch": 2.0, "failure": None}
    others = [summary("timm", [slow], None), summary("keras_vit_onnx", [], "no | onnxruntime")]
    first, second, third = table(Setting(4, True), case, [ours, *others], limit=20e9)
    assert first == "| 4 clients, batching | timm | 50.0 (50.0 to 50.0) | 1.00x | 100 | 500 | 2.0 | 50% |"
    assert second == "| 4 clients, batching | timm | 25.0 (25.0 to 25.0) | 2.00x | 200 | 200 | 1.0 | 25% |"
    assert third.startswith("| 4 clients, batching | keras_vit_onnx | failed: no / onnxruntime |")


def test_one_client_is_measured_without_batching_only():
    assert settings([1, 4]) == [Setting(1, False), Setting(4, False), Setting(4, True)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "ViT-S_61"], "no model named 'ViT-S_61'"),
        (["--clients", "4", "0"], "--clients.*0"),
        (["--seconds", "0"], "--seconds.*0"),
    ],
)
def test_invalid_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        command.main(options)


@pytest.mark.slow
def test_the_servers_are_measured_end_to_end_and_one_that_is_missing_is_reported(tmp_path, capsys):
    output = tmp_path / "speed"
    options = ["--model", "testing", "--size", "32", "--clients", "1", "4", "--seconds", "0.3", "--rounds", "2"]
    peers = ["--peers", "keras_vit_saved_model", "timm"]  # there is no model "testing" in timm
    command.main([*options, *peers, "--output", str(output)])
    found = json.loads((output / "results.json").read_text())["settings"]
    assert [(one["clients"], one["batching"]) for one in found] == [(1, False), (4, False), (4, True)]
    for one in found:
        ours, other = one["results"]
        assert ours["failure"] is None
        assert len(ours["rates"]) == 2
        assert 0 < ours["p50"] <= ours["p99"]
        assert (ours["batch"] > 1) == one["batching"]
        assert other["failure"]
    assert "| 4 clients, batching | keras_vit_saved_model |" in (output / "results.md").read_text()
    assert "| 1 client | timm | failed: " in capsys.readouterr().out
