"""Compile and fit: from a recipe, a source and a model to a trained run directory."""

import time

import keras
import matplotlib.figure
import numpy as np

from keras_vit import UserError, preprocessing_of
from training.data import evaluation_batches, steps_per_epoch, training_batches
from training.optimizers import make_optimizer
from training.recipes import Recipe
from training.run import Run, restore_state, save_state, written_whole
from training.schedules import LearningRate
from training.sources import Source, bad_labels_named

# Evaluation needs no gradients, so its batches may be larger than those of training.
EVALUATION_BATCH = 500


def total_steps(recipe: Recipe, source: Source) -> int:
    """Training steps of the whole run. Raises UserError when the data are too few for the recipe."""
    per_epoch = steps_per_epoch(source.train, recipe.batch_size)
    num_steps = recipe.steps if recipe.steps is not None else recipe.epochs * per_epoch
    if recipe.schedule.warmup_steps >= num_steps:
        raise UserError(
            f"The warm-up of {recipe.schedule.warmup_steps} steps leaves none of the run's {num_steps}; "
            f"give fewer, such as --warmup-steps {num_steps // 10}, or train longer."
        )
    return num_steps


def compile_model(model: keras.Model, recipe: Recipe, num_steps: int) -> None:
    """Give the model the recipe's optimizer, with its schedule, and loss."""
    optimizer = make_optimizer(
        recipe.optimizer,
        model,
        LearningRate(recipe.schedule, recipe.learning_rate, num_steps),
        clip_norm=recipe.clip_norm,
        weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay,
    )
    model.compile(
        optimizer,
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=recipe.label_smoothing),
        metrics=["accuracy"],
        jit_compile=False,  # XLA gains nothing on CPUs at these sizes, and a minute of compilation is lost
    )


def train(model: keras.Model, recipe: Recipe, source: Source, run: Run, *, seed: int) -> None:
    """Fit a model, from the last finished epoch where the run has one, and leave it in the run directory."""
    num_steps, num_classes = total_steps(recipe, source), len(source.labels)
    compile_model(model, recipe, num_steps)
    records = restore_state(run, model)
    run.write_metrics(records)
    if records:
        print(f"Continuing after epoch {len(records)}.")

    first_epoch, preprocessing, epoch_end = len(records), preprocessing_of(model), EpochEnd(run, records)
    per_epoch = min(steps_per_epoch(source.train, recipe.batch_size), num_steps)
    tensorboard = keras.callbacks.TensorBoard(run.path / "tensorboard", write_graph=False)
    validation = evaluation_batches(
        source.evaluation, preprocessing, num_classes=num_classes, batch_size=EVALUATION_BATCH
    )
    for begin, end, steps in _legs(first_epoch, num_steps, per_epoch):
        batches = training_batches(
            source.train, recipe, preprocessing, num_classes=num_classes, seed=seed, first_step=begin * per_epoch
        )
        with bad_labels_named():
            model.fit(
                batches,
                steps_per_epoch=steps,
                initial_epoch=begin,
                epochs=end,
                validation_data=validation,
                shuffle=False,
                callbacks=[keras.callbacks.TerminateOnNaN(), tensorboard, epoch_end],
            )
        if epoch_end.diverged_in is not None:
            raise UserError(
                f"The loss was no number any more in epoch {epoch_end.diverged_in}, so training stopped; "
                "the epochs before it are kept in the workdir: try a lower --learning-rate in another one."
            )
    write_curves(run)  # before the model, with which the run is finished
    run.save_model(model)


def _legs(first_epoch: int, num_steps: int, per_epoch: int) -> list[tuple[int, int, int]]:
    """(epoch to begin at, epoch to end before, steps in each): the whole epochs, then what is left of the steps."""
    whole, rest = divmod(num_steps, per_epoch)
    legs = [(first_epoch, whole, per_epoch), (whole, whole + 1, rest)]
    return [(begin, end, steps) for begin, end, steps in legs if first_epoch <= begin < end and steps]


class EpochEnd(keras.callbacks.Callback):
    """Writes the state and the metrics of each finished epoch, unless its loss is no number."""

    def __init__(self, run: Run, records: list[dict]):
        super().__init__()
        self._run = run
        self._records = records
        self.diverged_in: int | None = None

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        if not np.isfinite(logs["loss"]):
            self.diverged_in = epoch + 1
            return
        record = {"epoch": epoch + 1, **{name: float(value) for name, value in logs.items()}}
        record["learning_rate"] = float(self.model.optimizer.learning_rate)
        record["seconds"] = round(time.monotonic() - self._start, 3)
        self._records.append(record)
        save_state(self._run, self.model, self._records)
        self._run.write_metrics(self._records)


def write_curves(run: Run) -> None:
    """Loss and accuracy over the epochs, as curves.png."""
    records = run.metrics()
    epochs = [record["epoch"] for record in records]
    figure = matplotlib.figure.Figure(figsize=(9, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        axes.plot(epochs, [record[name] for record in records], color="tab:blue", label="training")
        axes.plot(epochs, [record[f"val_{name}"] for record in records], color="tab:orange", label="evaluation")
        axes.set(xlabel="epoch", title=name)
        axes.grid(alpha=0.3)
        axes.legend()
    with written_whole(run.path / "curves.png") as temporary:
        figure.savefig(temporary, dpi=120)
