"""Memory while a checkpoint is loaded: that of the model, for any dtype and order of the arrays."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from keras_vit.files.npz import read_npz
from tests.support import FIXTURES, WATCHED

_CLASSES = 400_000  # of the head, which is then nearly all of the file: 77 MB as float32
_LOAD = (
    WATCHED
    + """
import json, sys
import keras_vit

keras_vit.from_checkpoint(sys.argv[1])  # what the first use of the backend takes
found = {}
for path in sys.argv[2:]:
    model, reading = watched(lambda: keras_vit.from_checkpoint(path, **({"num_heads": 4} if "timm" in path else {})))
    _, filling = watched(lambda: keras_vit.load_checkpoint(model, path))
    found[path] = reading, filling
    del model
print(json.dumps(found))
"""
)


@pytest.fixture(name="files", scope="module")
def _files(tmp_path_factory) -> list[pathlib.Path]:
    folder, rng = tmp_path_factory.mktemp("large"), np.random.default_rng(0)
    arrays = read_npz(FIXTURES / "vit_token.npz")
    head = {"head/kernel": rng.random((48, _CLASSES), np.float32), "head/bias": np.zeros(_CLASSES, np.float32)}
    np.savez(folder / "rows.npz", **arrays | head)
    np.savez(folder / "columns.npz", **arrays | {key: np.asfortranarray(array) for key, array in head.items()})
    halves = {key: (array.view(np.uint32) >> 16).astype(np.uint16).view("V2") for key, array in head.items()}
    np.savez(folder / "bfloat16.npz", **arrays | halves)
    timm = safetensors.numpy.load_file(FIXTURES / "timm_vit.safetensors")
    timm |= {"head.weight": head["head/kernel"].reshape(_CLASSES, 48), "head.bias": head["head/bias"]}
    safetensors.numpy.save_file(timm, folder / "timm.safetensors")
    return sorted(folder.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="memory is read from Linux' /proc")
def test_loading_takes_the_memory_of_the_model_and_hardly_more(files):
    command = [sys.executable, "-c", _LOAD, FIXTURES / "vit_token.npz", *files]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    found, weights = json.loads(done.stdout.splitlines()[-1]), 4 * 49 * _CLASSES  # behind what is assumed
    assert len(found) == 4
    for path, (reading, filling) in found.items():
        assert reading < 1.5 * weights, path
        assert filling < 1.5 * weights, path
