"""Training steps with masks on the backend and devices of this process, for `test_dense.py`.

python -m tests.loop.dense_steps OUTPUT HEAD CASE [STATE]
"""

import dataclasses
import functools
import sys

import keras
import numpy as np

import keras_vit
from keras_vit import SegmentationConfig
from keras_vit.models.config import LinearSegmentationConfig
from tests.segmentation.shapes import LABELS, SIDE, shapes
from training.loop import build
from training.loop.build import build_trainer
from training.loop.devices.strategies import distributed, open_strategy
from training.objectives.dense import MaskSetPrediction
from training.options.common import Execution, StrategyOptions
from training.recipes.dense import EOMT, LINEAR, SegmentRecipe
from training.recipes.recipe import Schedule

TINY = keras_vit.ViTConfig(
    patch_size=8, hidden_size=24, num_layers=3, num_heads=3, mlp_dim=48, classifier="none", with_class_token=True
)
RECIPE = dataclasses.replace(
    EOMT, image_size=(SIDE, SIDE), batch_size=8, steps=6, num_queries=6, num_blocks=2,
    schedule=Schedule("polynomial", 2), learning_rate=1e-3, ema_decay=0.9, color_jitter=0.0,
)  # fmt: skip
SMALL_LINEAR = dataclasses.replace(LINEAR, image_size=(SIDE, SIDE), batch_size=8, steps=6)
RECIPES = {"eomt": RECIPE, "linear": SMALL_LINEAR}
CASES = {"single": (StrategyOptions("single"), 1), "accumulated": (StrategyOptions("single"), 2)}
CASES |= {"mirrored": (StrategyOptions("mirrored", 2), 1), "jax": (StrategyOptions(), 1)}
STEPS = 3


def make_model(recipe: SegmentRecipe, dropout_rate: float = 0.0) -> keras.Model:
    task: SegmentationConfig | LinearSegmentationConfig
    if recipe.head == "eomt":
        task = SegmentationConfig(len(LABELS), recipe.num_queries, recipe.num_blocks, 1, mask_attention=True)
    else:
        task = LinearSegmentationConfig(len(LABELS), recipe.blocks)
    config = dataclasses.replace(TINY, dropout_rate=dropout_rate)
    return keras_vit.segmentation_model(config, task, image_size=recipe.image_size)


def train(head: str, case: str, state: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Return the losses of some steps, and the state at the start."""
    devices, accumulation = CASES[case]
    recipe = dataclasses.replace(RECIPES[head], accumulation=accumulation)
    keras.utils.set_random_seed(0)
    strategy, source = open_strategy(devices), shapes(semantic=head == "linear")
    trainer = build_trainer(lambda: make_model(recipe), recipe, STEPS, strategy=strategy, execution=Execution(), seed=1)
    for name, variable in trainer.state.items() if state else ():
        variable.assign(state[name])
    begin = {name: np.array(variable) for name, variable in trainer.state.items()}
    preprocessing, batches = keras_vit.preprocessing_of(trainer.network), source.batches
    data = distributed(
        strategy,
        recipe.batch_size,
        lambda part: batches.training(
            source.train, recipe, preprocessing, seed=1, first_step=0, num_steps=STEPS, part=part
        ),
    )
    losses: list[float] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"])))
    trainer.fit(data, steps_per_epoch=STEPS, shuffle=False, verbose=0, callbacks=[note])
    return {"losses": np.array(losses), **begin}


if __name__ == "__main__":
    before = dict(np.load(sys.argv[4])) if sys.argv[4:] else None
    if before:
        before.pop("losses")
    # Each replica draws points of its own; with many of them the losses are alike.
    build.MaskSetPrediction = functools.partial(MaskSetPrediction, 4096)  # type: ignore[misc, assignment]
    np.savez(sys.argv[1], **train(sys.argv[2], sys.argv[3], before))
