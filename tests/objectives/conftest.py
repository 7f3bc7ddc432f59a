"""Fixtures of the techniques: a run to start from, and whether a run that was interrupted ends as if it was not."""

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np
import pytest

import keras_vit
from keras_vit import run_directory
from tests.interruptions import killed_after
from training.loop import pretrain as pretraining
from training.loop.run import RunDirectory
from training.options.common import DataOptions
from training.options.train import PretrainOptions
from training.recipes.pretrain import find_recipe
from training.recipes.schedules import Schedule


@pytest.fixture(name="upstream", scope="package")
def _upstream(tmp_path_factory) -> RunDirectory:
    """A finished run of a tiny model on the digits."""
    model = keras_vit.ViTConfig(patch_size=4, hidden_size=12, num_layers=2, num_heads=3, mlp_dim=20)
    recipe = dataclasses.replace(
        find_recipe("digits"), model=model, epochs=2, batch_size=200, schedule=Schedule(warmup_steps=2)
    )
    folder = tmp_path_factory.mktemp("runs") / "upstream"
    return pretraining.pretrain(
        PretrainOptions(source=DataOptions("digits"), workdir=str(folder), recipe=recipe), "tiny"
    )


@pytest.fixture(name="assert_resumes_exactly")
def _assert_resumes_exactly(tmp_path) -> Callable[[Callable[[pathlib.Path], object], int], None]:
    """Compare the run of a command, a function of the workdir, with one that is killed after a step and continued."""

    def compare(command: Callable[[pathlib.Path], object], step: int) -> None:
        command(tmp_path / "undisturbed")
        with killed_after(step):
            command(tmp_path / "killed")
        assert not (tmp_path / "killed" / run_directory.MODEL).exists()
        command(tmp_path / "killed")
        models = [run_directory.load_model(tmp_path / name) for name in ("undisturbed", "killed")]
        for here, there in zip(*(model.get_weights() for model in models), strict=True):
            np.testing.assert_array_equal(here, there)

    return compare
