"""Shared by the tests of features: models that are opened often are read once."""

import functools
import os
import pathlib

import pytest

from keras_vit.checkpoints import from_checkpoint


@pytest.fixture(autouse=True, scope="package")
def _models_are_read_once():
    """No command changes the weights of the model whose features it takes."""
    load = from_checkpoint.load_named_model
    read = functools.cache(lambda path, _: load(pathlib.Path(path)))

    def load_once(path: pathlib.Path):
        return read(os.path.realpath(path), path.stat().st_mtime_ns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_checkpoint, "load_named_model", load_once)
        yield
