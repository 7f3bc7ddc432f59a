"""Training steps on the backend of this process, for `test_jax.py`.

python -m tests.loop.jax_steps STATE OUTPUT CASE [DEVICES THAT SHARE A MODEL]
"""

import dataclasses
import pathlib
import sys
import tempfile

import keras
import numpy as np

import keras_vit
from keras_vit import Preprocessing, ViTConfig, preprocessing_of
from training.data.pipeline import evaluation_batches, training_batches
from training.data.sources import digits
from training.loop.build import build_trainer
from training.loop.devices.strategies import distributed, open_strategy
from training.options.common import Execution, StrategyOptions
from training.recipes.pretrain import RECIPES
from training.recipes.recipe import Schedule

STEPS, BATCH = 20, 48
ADAMW = dataclasses.replace(
    RECIPES["digits"], model=ViTConfig(patch_size=4, hidden_size=24, num_layers=2, num_heads=3, mlp_dim=48),
    batch_size=BATCH, learning_rate=3e-3, schedule=Schedule(warmup_steps=5), optimizer="adamw", weight_decay=0.1,
    clip_norm=0.5, ema_decay=0.9,
)  # fmt: skip
SGD = dataclasses.replace(ADAMW, optimizer="sgd", loss="sigmoid", learning_rate=0.05, accumulation=2, layer_decay=0.8)
CASES = {
    "adamw": ADAMW,
    "sgd": SGD,
    "muon": dataclasses.replace(ADAMW, optimizer="muon"),
    "remat": ADAMW,
    "distilled": ADAMW,
    "sharpness": dataclasses.replace(ADAMW, sharpness_radius=0.2),
    "features": dataclasses.replace(ADAMW, label_smoothing=0.0),
    # Of one other size, and of nothing, because each backend draws its own random numbers.
    "patch-sizes": dataclasses.replace(ADAMW, patch_sizes=(2,)),
    "patch-dropout": dataclasses.replace(ADAMW, patch_dropout=0.01),
    "self-distillation": dataclasses.replace(
        ADAMW, target="self-distillation", prototypes=12, head_width=16, local_crops=2, local_size=4,
        label_smoothing=0.0, accumulation=2,
    ),
}  # fmt: skip


def train(
    case: str, state: dict[str, np.ndarray] | None, model_parallel: int = 1, *, shard_weights: bool = False
) -> dict[str, np.ndarray]:
    """Train from a state or random weights; return it, the loss of each step and of the average, and the end."""
    recipe, execution = CASES[case], Execution(remat=case == "remat")
    if case == "distilled":
        recipe = dataclasses.replace(recipe, teacher=_teacher(), temperature=2.0)
    if case == "features":
        recipe = dataclasses.replace(recipe, teacher=_teacher(), distillation="features")
    source, strategy = digits(), open_strategy(StrategyOptions(), model_parallel, shard_weights=shard_weights)
    trainer = build_trainer(lambda: recipe.build(10), recipe, STEPS, strategy=strategy, execution=execution, seed=1)
    if state is None:
        rng = np.random.default_rng(2)
        for variable in trainer.network.trainable_variables:
            variable.assign(rng.normal(0.0, 0.1, variable.shape))
        for average, variable in zip(trainer.ema, trainer.network.trainable_variables, strict=True):
            average.assign(np.array(variable))  # of its own: a step donates each buffer once
    for name, variable in trainer.state.items() if state else ():
        variable.assign(state[f"begin/{name}"])
    begin = {f"begin/{name}": np.array(variable) for name, variable in trainer.state.items()}
    losses: list[float] = []
    batches = training_batches(
        source.train, recipe, preprocessing_of(trainer.network), num_classes=10, seed=1, first_step=0
    )
    trainer.fit(
        distributed(strategy, BATCH, lambda part: batches),
        steps_per_epoch=STEPS,
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))],
    )
    evaluation = evaluation_batches(
        source.evaluation, preprocessing_of(trainer.network), num_classes=10, batch_size=source.evaluation.num_examples
    )
    evaluated = trainer.evaluate(evaluation, verbose=0, return_dict=True)
    end = {f"end/{name}": np.array(variable) for name, variable in trainer.state.items()}
    return {"losses": np.array([float(loss) for loss in [*losses, evaluated["loss"]]]), **begin, **end}


def _teacher() -> str:
    """Write a model of another range of values with random weights, and return its path."""
    path = pathlib.Path(tempfile.mkdtemp()) / "teacher.keras"
    preprocessing = Preprocessing((8, 8), channels=1, value_range=(0.0, 255.0))
    model = keras_vit.build(ADAMW.model, preprocessing=preprocessing, num_classes=10)
    rng = np.random.default_rng(3)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(0.0, 0.5, variable.shape))
    model.save(path)
    return str(path)


if __name__ == "__main__":
    begin, output, name = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
    with np.load(begin / f"{name}.npz") as stored:
        np.savez(output / f"{name}.npz", **train(name, dict(stored), *map(int, sys.argv[4:])))
