"""Fixtures of the techniques: a run to start from, and whether a run that was interrupted ends as if it was not."""

import dataclasses

import pytest

import keras_vit
from keras_vit.run import Run
from training.loop import pretrain as pretraining
from training.options.common import DataOptions
from training.options.train import PretrainOptions
from training.recipes.pretrain import find_recipe
from training.recipes.recipe import Schedule


@pytest.fixture(name="upstream", scope="package")
def _upstream(tmp_path_factory) -> Run:
    """A finished run of a tiny model on the digits."""
    model = keras_vit.ViTConfig(patch_size=4, hidden_size=12, num_layers=2, num_heads=3, mlp_dim=20)
    recipe = dataclasses.replace(
        find_recipe("digits"), model=model, epochs=2, batch_size=200, schedule=Schedule(warmup_steps=2)
    )
    folder = tmp_path_factory.mktemp("runs") / "upstream"
    return pretraining.pretrain(
        PretrainOptions(source=DataOptions("digits"), workdir=str(folder), recipe=recipe), "tiny"
    )
