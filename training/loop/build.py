"""Build what a recipe trains: the model under its strategy, the compiled trainer, and the trained model afterwards."""

import dataclasses
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit import UserError, preprocessing_of
from keras_vit.checkpoints.load import check_unchanged, values_by_key, weights_by_key
from keras_vit.errors import Rules, refuse_first
from keras_vit.models.config import DetectionConfig, SegmentationConfig, ViTConfig
from keras_vit.models.detection import CLASSES, max_overlap_of, with_classes
from keras_vit.models.layers import no_init_weights
from keras_vit.models.segmentation import block_predictions
from keras_vit.models.tasks import build_task, task_of
from training.devices.jax_devices import assign_whole, whole
from training.devices.strategies import on_this_host
from training.loop.jax_trainer import JaxTrainer
from training.loop.learning_rate import LearningRate
from training.loop.objectives import Classification, OfImages, distillation_objective, make_objective, uses_labels
from training.loop.optimizers import make_optimizer
from training.loop.trainer import StepOptions, Trainer, TrainingForward
from training.options.common import Execution
from training.recipes.dense import DenseRecipe, SegmentRecipe
from training.recipes.recipe import PretrainRecipe, PseudoLabelRecipe, Recipe
from training.techniques.distillation import two_headed
from training.techniques.feature_distillation import FeatureDistillation
from training.techniques.flexible_patches import FlexiblePatches
from training.techniques.lora import add_adapters
from training.techniques.patch_dropout import PatchDropout
from training.techniques.pseudo_labels import PseudoLabels
from training.techniques.segmentation import mask_annealing
from training.techniques.self_distillation import MultiCrop, averaging_decay


def build_trainer(
    make_model: Callable[[], keras.Model],
    recipe: Recipe,
    num_steps: int,
    *,
    strategy: tf.distribute.Strategy,
    execution: Execution,
    seed: int,
    class_weights: np.ndarray | None = None,
) -> Trainer:
    """Create the model under the strategy and compile its trainer, with all variables created.

    Args:
        make_model: returns the model; called once.
        num_steps: of the run.
        class_weights: (K,), see `training.loop.objectives.Classification`.
    """
    return compile_trainer(
        _new_model(make_model, strategy, execution),
        recipe,
        num_steps,
        strategy=strategy,
        execution=execution,
        seed=seed,
        class_weights=class_weights,
    )


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
    with no_init_weights():
        model = _new_model(make_model, strategy, execution)
    _prepare(model, recipe, strategy, execution)
    if not (isinstance(recipe, PretrainRecipe) and recipe.target == "self-distillation"):
        recipe = dataclasses.replace(recipe, ema_decay=None)
    return _make_trainer(model, recipe, num_steps, strategy=strategy, execution=execution, seed=0).network


def _new_model(
    make_model: Callable[[], keras.Model], strategy: tf.distribute.Strategy, execution: Execution
) -> keras.Model:
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32" if execution.precision == "float32" else f"mixed_{execution.precision}")
    try:
        with strategy.scope():
            return make_model()
    finally:
        keras.config.set_dtype_policy(policy)


def compile_trainer(
    model: keras.Model,
    recipe: Recipe,
    num_steps: int,
    *,
    execution: Execution,
    strategy: tf.distribute.Strategy | None = None,
    seed: int = 0,
    class_weights: np.ndarray | None = None,
) -> Trainer:
    """Compile the recipe's trainer for a model that was created under the strategy's scope, and build its optimizer."""
    strategy = strategy or tf.distribute.get_strategy()
    _prepare(model, recipe, strategy, execution)
    with strategy.scope():
        jit_compile = _jit_compile(execution, matches_on_host=isinstance(recipe, DenseRecipe))
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
    trainer = _make_trainer(
        model, recipe, num_steps, strategy=strategy, execution=execution, seed=seed, class_weights=class_weights
    )
    trainer.compile(optimizer, jit_compile=jit_compile, steps_per_execution=execution.steps_per_execution)
    return trainer


def _prepare(model: keras.Model, recipe: Recipe, strategy: tf.distribute.Strategy, execution: Execution) -> None:
    """Add adapters, freeze layers and set the bias of the head. Raises UserError where the model has no such layers."""
    _check_graph(model)
    with strategy.scope():
        refuse_first(_xla_rules(execution))
        if recipe.lora:
            add_adapters(model, recipe.lora, recipe.lora_on)
    _freeze(model, recipe.freeze)
    if recipe.head_bias:
        head = next(layer for layer in model.layers if layer.name in ("head", "resnet.head.conv2d"))
        head.bias.assign(np.full(head.bias.shape, recipe.head_bias))


def _check_graph(model: keras.Model) -> None:
    """Raise UserError for a model whose layers were changed; those of training without labels have others."""
    if not isinstance(model.output, dict):
        check_unchanged(model, "train it with its own fit, or give the model from before the change")


def _make_trainer(
    model: keras.Model,
    recipe: Recipe,
    num_steps: int,
    *,
    strategy: tf.distribute.Strategy,
    execution: Execution,
    seed: int,
    class_weights: np.ndarray | None = None,
) -> Trainer:
    """Return the recipe's trainer of a prepared model, which is not compiled yet."""
    with strategy.scope():
        objective = make_objective(recipe, preprocessing_of(model))
        training_objective: OfImages | None = distillation_objective(recipe, model)
        if class_weights is not None:
            training_objective = Classification(recipe.loss, recipe.label_smoothing, class_weights)
    validation = objective if uses_labels(recipe) else training_objective or objective
    if isinstance(validation, FeatureDistillation):
        validation = validation.in_evaluation()
    return (JaxTrainer if keras.backend.backend() == "jax" else Trainer)(
        model,
        StepOptions(
            batch_size=recipe.batch_size,
            accumulation=recipe.accumulation,
            ema_decay=_ema_decay(recipe, num_steps),
            sharpness_radius=recipe.sharpness_radius,
            seed=seed,
            remat=execution.remat,
        ),
        objective=training_objective or objective,
        validation=validation,
        strategy=strategy,
        training_forward=_training_forward(model, recipe, num_steps, seed, execution),
        after_step=mask_annealing(model, num_steps) if isinstance(recipe, SegmentRecipe) else None,
    )


def _ema_decay(recipe: Recipe, num_steps: int) -> float | Callable | None:
    """Return the decay of the moving average, or a function of the step where the average is a teacher."""
    if isinstance(recipe, PretrainRecipe) and recipe.target == "self-distillation":
        assert recipe.ema_decay is not None  # as the recipe checks
        return averaging_decay(recipe.ema_decay, num_steps)
    return recipe.ema_decay


def _training_forward(
    model: keras.Model, recipe: Recipe, num_steps: int, seed: int, execution: Execution
) -> Callable[[keras.Model, keras.Variable, list[keras.Variable]], TrainingForward] | None:
    """Return the trainer's `training_forward`; None if training computes what evaluation does."""
    of_crops = recipe if isinstance(recipe, PretrainRecipe) and recipe.target == "self-distillation" else None
    for applies, what in (
        (recipe.patch_sizes or recipe.patch_dropout, "--patch-sizes and --patch-dropout"),
        (of_crops, "--target self-distillation"),
        (isinstance(recipe, DenseRecipe), "Training with masks or boxes"),
        (isinstance(recipe, PseudoLabelRecipe), "Pictures without labels"),
    ):
        if execution.remat and applies:
            raise UserError(f"{what} cannot be combined with rematerialization; leave --remat out.")
    if of_crops is not None:
        return lambda network, step, averages: MultiCrop(model, network, averages, step, of_crops, num_steps)
    if isinstance(recipe, SegmentRecipe) and recipe.head == "eomt":
        return lambda network, step, averages: block_predictions(network)
    if isinstance(recipe, PseudoLabelRecipe):
        return lambda network, step, averages: PseudoLabels(model, network, averages)
    if recipe.patch_dropout:
        return lambda network, step, averages: PatchDropout(model, network, recipe.patch_dropout)
    if recipe.patch_sizes:
        return lambda network, step, averages: FlexiblePatches(model, network, step, recipe.patch_sizes, seed)
    if recipe.teacher and recipe.distillation == "hard":
        return lambda network, step, averages: two_headed(network)
    return None


def _freeze(model: keras.Model, names: tuple[str, ...]) -> None:
    for name in names:
        layers = [layer for layer in model.layers if f"{layer.name}.".startswith(f"{name}.") and layer.weights]
        if not layers:
            known = ", ".join(layer.name for layer in model.layers if layer.weights)
            raise UserError(f"No layer to freeze is named {name!r} or {name + '.…'!r}; the layers are {known}.")
        for layer in layers:
            layer.trainable = False
    if not model.trainable_variables:
        raise UserError("All layers are frozen, so there is nothing to train; freeze fewer layers.")


def _xla_rules(execution: Execution) -> Rules:
    """In the scope of the strategy."""
    is_on = execution.xla == "on"
    yield (
        is_on and tf.distribute.has_strategy(),
        "XLA compiles the step of a single device only; leave --xla out, or give --strategy single.",
    )
    yield (
        is_on and execution.deterministic,
        "XLA is not used with --deterministic, where Keras turns it off; leave one of them out.",
    )


def _jit_compile(execution: Execution, *, matches_on_host: bool) -> bool:
    """Whether Keras compiles the step with XLA. A TPU always does; several replicas on CPUs or GPUs cannot.

    Raises UserError if XLA is requested for a step that matches masks or boxes on the host, which it cannot on
    TensorFlow.
    """
    if matches_on_host and keras.backend.backend() == "tensorflow":
        if execution.xla == "on":
            raise UserError("Masks and boxes are matched by the processor, which XLA cannot; leave --xla out.")
        return False
    if execution.xla == "on" or keras.backend.backend() == "jax":
        return True
    single_gpu = not tf.distribute.has_strategy() and bool(tf.config.list_physical_devices("GPU"))
    return execution.xla == "auto" and single_gpu and not execution.deterministic


def trained_model(trainer: Trainer) -> keras.Model:
    """Return the trained model as `keras_vit.build` makes it: float32, not compiled, on one device, nothing frozen.

    With a moving average, its weights are the average. Adapters of LoRA are merged into their kernels.

    On several hosts with JAX, all of them must call this; each gets a model on its own devices.
    """
    network = trainer.network
    with on_this_host(trainer.distribute_strategy):
        return model_with_config(network, keras_vit.config_of(network), preprocessing_of(network), trainer.ema)


def model_with_config(
    model: keras.Model,
    config: keras_vit.ViTConfig | keras_vit.ResNetConfig,
    preprocessing: keras_vit.Preprocessing,
    averages: Sequence[keras.Variable] = (),
) -> keras.Model:
    """Build a new model from a config and copy the weights, with `averages` in place of the trainable ones if given.

    A model that was trained on masked patches becomes one that returns features; one that segments loses its mask
    attention, which is for training. Raises UserError for a model with
    other layers than its config says.
    """
    _check_graph(model)
    task = task_of(model)
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
        new = keras_vit.build(config, preprocessing=preprocessing, num_classes=num_classes, name=model.name)
    with keras.StatelessScope(list(zip(model.trainable_variables, averages, strict=bool(averages)))):
        values = {key: whole(value) for key, value in values_by_key(model).items()}
    for key, variable in weights_by_key(new).items():
        assign_whole(variable, values[key])
    return new
