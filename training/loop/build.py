"""Build what a recipe trains: the model under its strategy, the compiled trainer, and the trained model afterwards."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit import UserError, preprocessing_of
from keras_vit.checkpoints.load import check_unchanged, values_by_key, weights_by_key
from keras_vit.models.build import dtype_policy
from keras_vit.models.config import DetectionConfig, SegmentationConfig, ViTConfig
from keras_vit.models.detection import CLASSES, max_overlap_of, with_classes
from keras_vit.models.layers import no_init_weights
from keras_vit.models.tasks import build_task, task_of
from training.loop.devices.jax_devices import assign_whole, whole
from training.loop.devices.strategies import on_this_host
from training.loop.jax_trainer import JaxTrainer
from training.loop.optimizers import LearningRate, make_optimizer
from training.loop.trainer import StepOptions, Trainer
from training.objectives.objective import Objective
from training.objectives.of_recipe import objective_of
from training.objectives.trained_weights import choose_trained_weights
from training.options.common import Execution
from training.recipes.recipe import Recipe


def build_trainer(
    make_model: Callable[[], keras.Model],
    recipe: Recipe,
    num_steps: int,
    *,
    execution: Execution,
    strategy: tf.distribute.Strategy | None = None,
    seed: int = 0,
    class_weights: np.ndarray | None = None,
) -> Trainer:
    """Create the model under the strategy and compile the recipe's trainer, with all variables created.

    class_weights: (K,), see `training.objectives.classification.Classification`.
    """
    strategy = strategy or tf.distribute.get_strategy()
    model = _new_model(make_model, strategy, execution)
    objective = objective_of(recipe, num_steps, seed, class_weights)
    model = _prepared(model, recipe, objective, strategy, execution)
    with strategy.scope():
        wanted = execution.xla == "on" or (execution.xla == "auto" and tf.config.list_physical_devices("GPU"))
        with_xla = keras.backend.backend() == "jax" or (bool(wanted) and not _without_xla(execution, objective))
        optimizer = make_optimizer(
            recipe.optimizer,
            model,
            LearningRate(recipe.schedule, recipe.learning_rate, num_steps),
            clip_norm=recipe.clip_norm,
            weight_decay=recipe.weight_decay,
            layer_decay=recipe.layer_decay,
        )
        if execution.precision == "float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
            optimizer.build(model.trainable_variables)
    step = StepOptions(
        batch_size=recipe.batch_size,
        accumulation=recipe.accumulation,
        ema_decay=objective.averaging(recipe.ema_decay),
        sharpness_radius=recipe.sharpness_radius,
        seed=seed,
        remat=execution.remat,
    )
    trainer = _trainer_class()(model, step, objective=objective, strategy=strategy)
    trainer.compile(optimizer, jit_compile=with_xla, steps_per_execution=execution.steps_per_execution)
    return trainer


def network_to_train(
    make_model: Callable[[], keras.Model],
    recipe: Recipe,
    num_steps: int,
    *,
    strategy: tf.distribute.Strategy,
    execution: Execution,
) -> keras.Model:
    """Return the network that `build_trainer` would train, without weights and optimizer, which take memory.

    Raises UserError for whatever `build_trainer` refuses. See there for the arguments.
    """
    objective = objective_of(recipe, num_steps)
    with no_init_weights():
        model = _new_model(make_model, strategy, execution)
    model = _prepared(model, recipe, objective, strategy, execution)
    return _trainer_class()(model, StepOptions(recipe.batch_size), objective=objective, strategy=strategy).network


def _new_model(
    make_model: Callable[[], keras.Model], strategy: tf.distribute.Strategy, execution: Execution
) -> keras.Model:
    name = "float32" if execution.precision == "float32" else f"mixed_{execution.precision}"
    with dtype_policy(name), strategy.scope():
        return make_model()


def _trainer_class() -> type[Trainer]:
    return JaxTrainer if keras.backend.backend() == "jax" else Trainer


def _prepared(
    model: keras.Model, recipe: Recipe, objective: Objective, strategy: tf.distribute.Strategy, execution: Execution
) -> keras.Model:
    """Return the model to train. Raises UserError where recipe, model, devices and execution do not fit."""
    if recipe.uses_labels:
        _check_graph(model)
    counts_twice = any(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers)
    without_remat = objective.without_remat or "A model with batch normalization" * counts_twice
    if execution.remat and without_remat:
        raise UserError(f"{without_remat} cannot be combined with rematerialization; leave --remat out.")
    with strategy.scope():
        if execution.xla == "on" and (reason := _without_xla(execution, objective)):
            raise UserError(f"XLA cannot compile this step, because {reason}; leave --xla out.")
        choose_trained_weights(model, recipe)
        return objective.prepare(model)


def _check_graph(model: keras.Model) -> None:
    """Raise UserError for a model whose layers were changed; those of training without labels have others."""
    if not isinstance(model.output, dict):
        check_unchanged(model, "train it with its own fit, or give the model from before the change")


def _without_xla(execution: Execution, objective: Objective) -> str:
    """Return why XLA cannot compile a step in the scope of the strategy, if it cannot. A TPU always does."""
    if objective.matches_on_host and keras.backend.backend() == "tensorflow":
        return "masks and boxes are matched by the processor"
    if tf.distribute.has_strategy():
        return "it is one of several devices (give --strategy single)"
    return "Keras turns it off with --deterministic" if execution.deterministic else ""


def trained_model(trainer: Trainer) -> keras.Model:
    """Return the trained model as `keras_vit.build` makes it: float32, not compiled, on one device, nothing frozen.

    With a moving average, its weights are the average. Adapters of LoRA are merged into their kernels. On several hosts
    with JAX, all of them must call this; each gets a model on its own devices.
    """
    with on_this_host(trainer.distribute_strategy):
        return rebuilt(trainer.network, averages=trainer.ema)


def rebuilt(
    model: keras.Model,
    preprocessing: keras_vit.Preprocessing | None = None,
    *,
    rates: Mapping[str, float] | None = None,
    averages: Sequence[keras.Variable] = (),
) -> keras.Model:
    """Build a model anew from its config, and copy its weights.

    A model that was trained on masked patches becomes one that returns features; one that segments loses its mask
    attention, which is for training. Raises UserError for a model with other layers than its config says.

    Args:
        model: of keras_vit.
        preprocessing: of the new model; default that of the model.
        rates: of dropout, see `keras_vit.build`. A ResNet has none but 0.
        averages: in place of the trainable weights, if there are any.
    """
    _check_graph(model)
    config, task = keras_vit.config_of(model), task_of(model)
    preprocessing = preprocessing or preprocessing_of(model)
    if task is not None and isinstance(config, ViTConfig):
        if isinstance(task, SegmentationConfig):  # which training has annealed away
            task = dataclasses.replace(task, mask_attention=False)
        new = build_task(config, task, preprocessing, name=model.name)
        if "class_logits" in model.output and isinstance(task, DetectionConfig):
            classes = model.get_layer(CLASSES)
            embeddings = np.zeros((classes.num_classes, classes.embedding_size))
            new = with_classes(new, embeddings, max_overlap_of(model))
    else:
        num_classes = None if isinstance(model.output, dict) else model.output_shape[-1]
        applied: dict[str, Any] = {
            name: rate for name, rate in (rates or {}).items() if rate or isinstance(config, ViTConfig)
        }
        new = keras_vit.build(config, preprocessing=preprocessing, num_classes=num_classes, name=model.name, **applied)
    with keras.StatelessScope(list(zip(model.trainable_variables, averages, strict=bool(averages)))):
        values = {key: whole(value) for key, value in values_by_key(model).items()}
    for key, variable in weights_by_key(new).items():
        assign_whole(variable, values[key])
    return new
