"""Build what a recipe trains: the model under its strategy, the objective, the compiled trainer, the trained model."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit import UserError, ViTConfig
from keras_vit.checkpoints.load import check_unchanged, values_by_key, weights_by_key
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.build import dtype_policy
from keras_vit.models.config import DetectionConfig, SegmentationConfig, TaskConfig, with_rates
from keras_vit.models.detection import CLASSES, max_overlap_of, with_classes
from keras_vit.models.layers import TokenDense, no_init_weights
from keras_vit.run import Run
from training.loop.devices.jax_devices import assign_whole, whole
from training.loop.devices.strategies import on_this_host
from training.loop.jax_trainer import JaxTrainer
from training.loop.optimizers import LearningRate, make_optimizer
from training.loop.trainer import Trainer
from training.objectives.dense import BoxSetPrediction, MaskSetPrediction, PixelClasses
from training.objectives.distillation import FeatureDistillation, HardDistillation, SoftDistillation
from training.objectives.masked_patches import MaskedPatches
from training.objectives.objective import Classification, Objective
from training.objectives.patches import FlexiblePatches, PatchDropout
from training.objectives.pseudo_labels import PseudoLabels
from training.objectives.self_distillation import SelfDistillation
from training.options.common import Execution
from training.recipes.dense import DetectRecipe, SegmentRecipe
from training.recipes.recipe import HEADS, PretrainRecipe, PseudoLabelRecipe, Recipe


def encoder_of(run: Run) -> tuple[keras.Model, ViTConfig, TaskConfig | None]:
    """Return a model that a new head is put on, its config and its task; refuse all but Vision Transformers."""
    check_unchanged(run.model, "give the model from before the change")
    config = keras_vit.config_of(run.model)
    if not isinstance(config, ViTConfig):
        raise UserError(f"{run.name} has no patch tokens for the new head to read; give a Vision Transformer.")
    return run.model, config, keras_vit.task_of(run.model)


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

    class_weights: (K,), see `training.objectives.objective.Classification`.
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
    trainer_class = JaxTrainer if keras.backend.backend() == "jax" else Trainer
    trainer = trainer_class(model, recipe, objective=objective, execution=execution, strategy=strategy, seed=seed)
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
    with strategy.scope():
        objective.forwards(model, model, keras.Variable(0, dtype="int32", trainable=False), ())
    return model


def _new_model(
    make_model: Callable[[], keras.Model], strategy: tf.distribute.Strategy, execution: Execution
) -> keras.Model:
    name = "float32" if execution.precision == "float32" else f"mixed_{execution.precision}"
    with dtype_policy(name), strategy.scope():
        return make_model()


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
        preprocessing: of the new model; default that of the model.
        rates: of dropout, see `keras_vit.build`. A ResNet has none but 0.
        averages: in place of the trainable weights, if there are any.
    """
    _check_graph(model)
    blueprint = Blueprint.of(model)
    task = blueprint.task
    if isinstance(task, SegmentationConfig):  # which training has annealed away
        task = dataclasses.replace(task, mask_attention=False)
    new = dataclasses.replace(
        blueprint,
        config=with_rates(blueprint.config, rates or {}),
        preprocessing=preprocessing or blueprint.preprocessing,
        task=task,
        classes=None,
        classifier_activation=None,
        dtype=None,
    ).build()
    if isinstance(task, DetectionConfig) and "class_logits" in model.output:
        classes = model.get_layer(CLASSES)
        embeddings = np.zeros((classes.num_classes, classes.embedding_size))
        new = with_classes(new, embeddings, max_overlap_of(model))
    with keras.StatelessScope(list(zip(model.trainable_variables, averages, strict=bool(averages)))):
        values = {key: whole(value) for key, value in values_by_key(model).items()}
    for key, variable in weights_by_key(new).items():
        assign_whole(variable, values[key])
    return new


def objective_of(recipe: Recipe, num_steps: int, seed: int = 0, class_weights: np.ndarray | None = None) -> Objective:
    """Return the objective of a run. class_weights: (K,), see `Classification`."""
    objective = _technique(recipe, num_steps, class_weights)
    if recipe.patch_dropout:
        return PatchDropout(recipe.patch_dropout, objective)
    if recipe.patch_sizes:
        return FlexiblePatches(recipe.patch_sizes, seed, objective)
    return objective


def _technique(recipe: Recipe, num_steps: int, class_weights: np.ndarray | None) -> Objective:
    match recipe:
        case SegmentRecipe():
            return MaskSetPrediction(num_steps=num_steps) if recipe.head == "eomt" else PixelClasses()
        case DetectRecipe():
            return BoxSetPrediction()
        case PretrainRecipe(target="self-distillation"):
            return SelfDistillation(recipe, num_steps)
        case PretrainRecipe() if recipe.target != "classes":
            return MaskedPatches.of(recipe)
        case PseudoLabelRecipe():
            return PseudoLabels(recipe)
    if recipe.teacher is None:
        return Classification(recipe.loss, recipe.label_smoothing, class_weights)
    if recipe.distillation == "features":
        return FeatureDistillation(recipe.teacher)
    distillation = HardDistillation if recipe.distillation == "hard" else SoftDistillation
    return distillation(recipe.teacher, recipe.label_smoothing, recipe.temperature)


def choose_trained_weights(model: keras.Model, recipe: Recipe) -> None:
    """Add adapters, freeze layers and set the bias of the head. Raises UserError where the model has no such layers."""
    if recipe.lora:
        add_adapters(model, recipe.lora, recipe.lora_on)
    with_weights = [layer for layer in model.layers if layer.weights]
    for layer in _named("--freeze", recipe.freeze, with_weights, _first_parts):
        layer.trainable = False
    if not model.trainable_variables:
        raise UserError("All layers are frozen, so there is nothing to train; freeze fewer layers.")
    if recipe.head_bias:
        head = next(layer for layer in model.layers if layer.name in ("head", "resnet.head.conv2d"))
        head.bias.assign(np.full(head.bias.shape, recipe.head_bias))


def add_adapters(model: keras.Model, rank: int, names: Sequence[str]) -> None:
    """Add adapters to dense layers of a model; they and its heads are then all that is trained (LoRA).

    "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685): the kernels of a trained model stay as they
    are, and a product of two thin matrices is added to some of them. On images: `benchmarks/logs/techniques.md`. The
    adapters are those of Keras (`Dense.enable_lora`), with a scale of 1, and initially change nothing.

    names: last parts of the names of layers, such as query, or encoderblock_0.MlpBlock_3.Dense_0. Raises UserError if a
    name is that of no dense layer.
    """
    dense = [layer for layer in model.layers if isinstance(layer, TokenDense) and layer.name not in HEADS]
    adapted = _named("--lora-on", names, dense, _last_parts)
    for layer in model.layers:
        if layer.weights and layer not in adapted and layer.name not in HEADS:
            layer.trainable = False
    for layer in adapted:
        layer.enable_lora(rank)
        if layer.bias is not None:
            layer.bias.trainable = False


def _first_parts(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[:count]) for count in (2, 1, *range(3, len(words) + 1))]


def _last_parts(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[-count:]) for count in range(1, len(words) + 1)]


def _named(
    option: str, names: Sequence[str], layers: Sequence[keras.layers.Layer], parts: Callable[[str], list[str]]
) -> list[keras.layers.Layer]:
    """Return the layers that have one of the names among the parts of theirs. Raises UserError for a name of none."""
    chosen: dict[keras.layers.Layer, None] = {}
    for name in names:
        named = [layer for layer in layers if name in parts(layer.name)]
        if not named:
            known = ", ".join(dict.fromkeys(parts(layer.name)[0] for layer in layers)) or "none"
            raise UserError(f"{option} {name} names no layer of this model that can be chosen; these are {known}.")
        chosen |= dict.fromkeys(named)
    return list(chosen)
