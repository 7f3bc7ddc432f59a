"""Train a model by a recipe: compile the trainer, fit, save the trained model in the run directory."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit import UserError, preprocessing_of
from keras_vit.checkpoints.load import check_unchanged, values_by_key, weights_by_key
from keras_vit.models.layers import no_init_weights
from training.devices.strategies import (
    check_equal_on_workers,
    distributed,
    is_chief,
    report_lost_workers,
    several_workers,
)
from training.input.pipeline import evaluation_batches, resized_once, steps_per_epoch, training_batches
from training.input.sources import Source, bad_examples_reported
from training.loop.callbacks import ForwardCallbacks, ProfileSteps, ProgressLines, TrainingCheckpoint
from training.loop.inspect_callback import InspectEpochs
from training.loop.jax.trainer import JaxTrainer
from training.loop.objectives import distillation_objective, make_objective
from training.loop.optimizers import LearningRate, make_optimizer
from training.loop.run import Run, write_curves
from training.loop.trainer import Trainer, TrainingForward
from training.options.common import Execution
from training.recipes.recipe import PretrainRecipe, Recipe
from training.techniques.distillation import two_headed
from training.techniques.flexible_patches import FlexiblePatches
from training.techniques.lora import add_adapters
from training.techniques.patch_dropout import PatchDropout
from training.techniques.self_distillation import MultiCrop, averaging_decay

# Evaluation computes no gradients, so its batches may be larger than those of training.
_EVALUATION_BATCH = 500


def build_trainer(
    make_model: Callable[[], keras.Model],
    recipe: Recipe,
    num_steps: int,
    *,
    strategy: tf.distribute.Strategy,
    execution: Execution,
    seed: int,
    deterministic: bool = False,
) -> Trainer:
    """Create the model under the strategy and compile its trainer, with all variables created.

    Args:
        make_model: returns the model; called once.
        num_steps: of the run.
        deterministic: whether TensorFlow's operations are deterministic, which excludes XLA.
    """
    model = _new_model(make_model, strategy, execution)
    return compile_trainer(
        model, recipe, num_steps, strategy=strategy, execution=execution, seed=seed, deterministic=deterministic
    )


def checked_model(
    make_model: Callable[[], keras.Model],
    recipe: Recipe,
    num_steps: int,
    *,
    strategy: tf.distribute.Strategy,
    execution: Execution,
    deterministic: bool,
) -> keras.Model:
    """Return the network that `build_trainer` would train, without weights and optimizer, which take memory.

    Raises UserError for whatever `build_trainer` refuses. See there for the arguments.
    """
    with no_init_weights():
        model = _new_model(make_model, strategy, execution)
    _prepare(model, recipe, strategy, execution, deterministic)
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
    deterministic: bool = False,
) -> Trainer:
    """Compile the recipe's trainer for a model that was created under the strategy's scope, and build its optimizer."""
    strategy = strategy or tf.distribute.get_strategy()
    _prepare(model, recipe, strategy, execution, deterministic)
    with strategy.scope():
        jit_compile = _jit_compile(execution, deterministic)
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
    trainer = _make_trainer(model, recipe, num_steps, strategy=strategy, execution=execution, seed=seed)
    trainer.compile(optimizer, jit_compile=jit_compile, steps_per_execution=execution.steps_per_execution)
    return trainer


def _prepare(
    model: keras.Model, recipe: Recipe, strategy: tf.distribute.Strategy, execution: Execution, deterministic: bool
) -> None:
    """Add adapters, freeze layers and set the bias of the head. Raises UserError where the model has no such layers."""
    _check_graph(model)
    with strategy.scope():
        _check_xla(execution, deterministic)
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
) -> Trainer:
    """Return the recipe's trainer of a prepared model, which is not compiled yet."""
    stop_requested = tf.Variable(0.0, trainable=False) if several_workers(strategy) else None
    with strategy.scope():
        objective, training_objective = make_objective(recipe), distillation_objective(recipe, model)
    return (JaxTrainer if keras.backend.backend() == "jax" else Trainer)(
        model,
        batch_size=recipe.batch_size,
        objective=training_objective or objective,
        accumulation=recipe.accumulation,
        ema_decay=_ema_decay(recipe, num_steps),
        seed=seed,
        sharpness_radius=recipe.sharpness_radius,
        remat=execution.remat,
        stop_requested=stop_requested,
        strategy=strategy,
        validation=objective,
        training_forward=_training_forward(model, recipe, num_steps, seed, execution),
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
    if execution.remat and (recipe.patch_sizes or recipe.patch_dropout):
        raise UserError("--patch-sizes and --patch-dropout do not support rematerialization; leave --remat out.")
    if isinstance(recipe, PretrainRecipe) and recipe.target == "self-distillation":
        if execution.remat:
            raise UserError("--target self-distillation does not support rematerialization; leave --remat out.")
        return lambda network, step, averages: MultiCrop(model, network, averages, step, recipe, num_steps)
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


def _check_xla(execution: Execution, deterministic: bool) -> None:
    """Raise UserError where XLA is requested and cannot be used; in the scope of the strategy."""
    if execution.xla == "on" and tf.distribute.has_strategy():
        raise UserError("XLA compiles the step of a single device only; leave --xla out, or give --strategy single.")
    if execution.xla == "on" and deterministic:
        raise UserError("XLA is not used with --deterministic, where Keras turns it off; leave one of them out.")


def _jit_compile(execution: Execution, deterministic: bool) -> bool:
    """Whether Keras compiles the step with XLA. A TPU always does; several replicas on CPUs or GPUs cannot."""
    if execution.xla == "on" or keras.backend.backend() == "jax":
        return True
    single_gpu = not tf.distribute.has_strategy() and bool(tf.config.list_physical_devices("GPU"))
    return execution.xla == "auto" and single_gpu and not deterministic


def train(
    trainer: Trainer,
    recipe: Recipe,
    source: Source,
    run: Run,
    *,
    seed: int,
    execution: Execution,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> None:
    """Fit, from the latest checkpoint if there is one, and save the trained model in the run directory.

    Args:
        callbacks: of the caller. Their `model` is the trainer. They see one begin and one end of training, and may set
            `model.stop_training`, which ends the run and saves the model as it is. Their own state is not saved: when
            an interrupted run continues, they start fresh. With several workers, the callbacks of each worker must
            make the same decisions.

    Raises:
        TrainingInterrupted: after SIGTERM or Ctrl-C, with a checkpoint saved.
        UserError: if the loss is not finite or the disk is full; the last checkpoint remains.
    """
    strategy, num_steps = trainer.distribute_strategy, recipe.num_steps(source.train.num_examples)
    epoch_steps = steps_per_epoch(source.train, recipe.batch_size)
    checkpoint = TrainingCheckpoint(
        trainer, run, recipe.batch_size, epoch_steps, execution.checkpoint_every, writes=is_chief(strategy)
    )
    run_callbacks: list[keras.callbacks.Callback] = [checkpoint]
    if execution.inspect_every and is_chief(strategy):
        run_callbacks.insert(0, InspectEpochs(lambda: trained_model(trainer), run.path, execution.inspect_every))
    per_epoch = execution.evaluate_every or epoch_steps
    with (
        contextlib.ExitStack() as stack,
        report_lost_workers(strategy),
        checkpoint.handle_stop_signals(),
        bad_examples_reported(source.train, source.evaluation),
    ):
        if execution.profile_steps and is_chief(strategy):
            first, last = execution.profile_steps
            profile = ProfileSteps(
                run.path / "profile", first, last, lambda: checkpoint.step, execution.steps_per_execution
            )
            stack.callback(profile.stop)
            run_callbacks.append(profile)  # after the callback that counts the steps
        check_equal_on_workers(strategy, {"the step of their checkpoint": checkpoint.step})
        left = num_steps - checkpoint.step
        epochs, evaluations = left / epoch_steps, left // per_epoch
        source = resized_once(source, recipe, preprocessing_of(trainer.network), epochs=epochs, evaluations=evaluations)
        _fit(
            trainer,
            recipe,
            source,
            checkpoint,
            run_callbacks,
            callbacks,
            seed=seed,
            num_steps=num_steps,
            per_epoch=per_epoch,
        )
        checkpoint.on_complete()
        if is_chief(strategy):
            write_curves(run)  # before the model, which marks the run as finished
            run.save_model(trained_model(trainer))
        # No worker exits while the chief still writes.
        check_equal_on_workers(strategy, {"the steps of the run": checkpoint.step})


def split_into_fits(begin: int, end: int, per_epoch: int) -> list[tuple[int, int]]:
    """Return (epochs, steps per epoch) of each `fit`: the rest of an epoch, complete epochs, a shorter last one."""
    rest = min(-begin % per_epoch, end - begin)
    complete, last = divmod(end - begin - rest, per_epoch)
    return [(epochs, steps) for epochs, steps in ((1, rest), (complete, per_epoch), (1, last)) if epochs and steps]


def _fit(
    trainer: Trainer,
    recipe: Recipe,
    source: Source,
    checkpoint: TrainingCheckpoint,
    run_callbacks: Sequence[keras.callbacks.Callback],
    callbacks: Sequence[keras.callbacks.Callback],
    *,
    seed: int,
    num_steps: int,
    per_epoch: int,
) -> None:
    """Fit the remaining steps in up to three calls of `fit`; for Keras an epoch ends at each evaluation.

    The caller's callbacks see a single training.
    """
    strategy, preprocessing = trainer.distribute_strategy, preprocessing_of(trainer.network)
    num_classes = len(source.labels)
    size, num_batches = evaluation_size(source.evaluation.num_examples, strategy.num_replicas_in_sync)
    make_evaluation = functools.partial(
        evaluation_batches, source.evaluation, preprocessing, num_classes=num_classes, batch_size=size
    )
    evaluation = distributed(strategy, size, make_evaluation)
    # Endless, because Keras counts in executions of several steps and may ask for more at the end of an epoch.
    batches = functools.partial(
        training_batches, source.train, recipe, preprocessing, num_classes=num_classes, seed=seed, num_steps=None
    )
    fits = split_into_fits(checkpoint.step, num_steps, per_epoch)
    last_epoch = len(checkpoint.records) + sum(epochs for epochs, _ in fits)
    user_callbacks = keras.callbacks.CallbackList(list(callbacks), model=trainer, epochs=last_epoch, steps=per_epoch)
    trainer.stop_training = False
    user_callbacks.on_train_begin()
    on_terminal = is_chief(strategy) and sys.stdout.isatty()
    epoch_steps = steps_per_epoch(source.train, recipe.batch_size)
    prints_lines = is_chief(strategy) and not on_terminal
    lines = [ProgressLines(lambda: checkpoint.step, num_steps, epoch_steps)] if prints_lines else []
    for epochs, steps in fits:
        if trainer.stop_training:
            break
        epoch = len(checkpoint.records)
        trainer.epoch_steps, trainer.evaluation_steps = steps, num_batches
        trainer.fit(
            distributed(strategy, recipe.batch_size, functools.partial(batches, first_step=checkpoint.step)),
            steps_per_epoch=steps,
            initial_epoch=epoch,
            epochs=epoch + epochs,
            validation_data=evaluation,
            validation_steps=num_batches,
            shuffle=False,
            callbacks=keras.callbacks.CallbackList(
                [ForwardCallbacks(user_callbacks), *run_callbacks, *lines],
                add_history=True,
                add_progbar=on_terminal,
                verbose=1,
                model=trainer,
                epochs=last_epoch,
                steps=steps,
            ),
        )
    user_callbacks.on_train_end(checkpoint.records[-1] if fits else None)


def evaluation_size(num_examples: int, replicas: int) -> tuple[int, int]:
    """Return a batch size that the replicas divide, and the number of batches, with the least padding."""
    num_batches = -(-num_examples // _EVALUATION_BATCH)
    size = -(-num_examples // num_batches)
    return -(-size // replicas) * replicas, num_batches


def trained_model(trainer: Trainer) -> keras.Model:
    """Return the trained model as `keras_vit.build` makes it: float32, not compiled, on one device, nothing frozen.

    With a moving average, its weights are the average. Adapters of LoRA are merged into their kernels.
    """
    network = trainer.network
    return rebuilt(network, keras_vit.config_of(network), preprocessing_of(network), trainer.ema)


def rebuilt(
    model: keras.Model,
    config: keras_vit.ViTConfig | keras_vit.ResNetConfig,
    preprocessing: keras_vit.Preprocessing,
    averages: Sequence[keras.Variable] = (),
) -> keras.Model:
    """Build a new model from a config and copy the weights, with `averages` in place of the trainable ones if given.

    A model that was trained on masked patches becomes one that returns features. Raises UserError for a model with
    other layers than its config says.
    """
    _check_graph(model)
    num_classes = None if isinstance(model.output, dict) else model.output_shape[-1]
    new = keras_vit.build(config, preprocessing=preprocessing, num_classes=num_classes, name=model.name)
    with keras.StatelessScope(list(zip(model.trainable_variables, averages, strict=bool(averages)))):
        values = {key: np.array(value) for key, value in values_by_key(model).items()}
    for key, variable in weights_by_key(new).items():
        variable.assign(values[key])
    return new
