"""Damaged files of every kind end in a result or a sentence, in 2 GB and 20 seconds each (`tests/fuzz.py`)."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FEW = {"images": 60, "tokenizers": 15, "features": 60}
MANY = {"images": 20_000, "tokenizers": 400, "keras": 20_000, "features": 20_000}


@pytest.mark.parametrize(
    "counts",
    [FEW, *(pytest.param({reader: count}, marks=pytest.mark.slow) for reader, count in MANY.items())],
    ids=",".join,
)
def test_damaged_files_end_in_a_result_or_a_sentence(counts):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    readers = [f"{reader}={count}" for reader, count in counts.items()]
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", *readers]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=6000)
    assert done.returncode == 0, done.stderr[-4000:]
