"""From a model, a recipe and a source to a trained run directory: compile, fit, save, continue."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import keras
import matplotlib.figure
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled  # no public name; Keras asks it too

import keras_vit
from keras_vit import UserError, preprocessing_of
from training.arguments import Execution
from training.data import evaluation_batches, steps_per_epoch, training_batches
from training.inspect_callback import InspectEpochs
from training.keeper import Keeper
from training.learning_rate import LearningRate
from training.optimizers import make_optimizer
from training.recipe import Recipe
from training.run import Run, written_whole
from training.sources import Source, bad_labels_named
from training.strategies import check_alike, distributed, is_chief, lost_workers_named, several_workers
from training.trainer import Trainer

# Evaluation needs no gradients, so its batches may be larger than those of training.
_EVALUATION_BATCH = 500


def total_steps(recipe: Recipe, source: Source) -> int:
    """Training steps of the whole run. Raises UserError when the data are too few for the recipe."""
    steps_per_epoch(source.train, recipe.batch_size)  # at least one
    num_steps = recipe.num_steps(source.train.num_examples)
    if recipe.schedule.warmup_steps >= num_steps:
        raise UserError(
            f"The warm-up of {recipe.schedule.warmup_steps} steps leaves none of the run's {num_steps}; "
            f"give fewer, such as --warmup-steps {num_steps // 10}, or train longer."
        )
    return num_steps


def check_batch(recipe: Recipe, strategy: tf.distribute.Strategy) -> None:
    """Raises UserError when a batch cannot be shared evenly by the replicas and their micro-batches."""
    parts = strategy.num_replicas_in_sync * recipe.accumulation
    if recipe.batch_size % parts:
        raise UserError(
            f"A batch of {recipe.batch_size} images cannot be shared evenly by {strategy.num_replicas_in_sync} "
            f"replicas with {recipe.accumulation} micro-batches each; give --batch-size "
            f"{max(recipe.batch_size // parts, 1) * parts}."
        )


def build_trainer(
    make_model: Callable[[], keras.Model],
    recipe: Recipe,
    num_steps: int,
    *,
    strategy: tf.distribute.Strategy,
    execution: Execution,
    seed: int,
) -> Trainer:
    """Make the model under the strategy and compile its trainer, every variable of it made."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32" if execution.precision == "float32" else f"mixed_{execution.precision}")
    stop_asked = tf.Variable(0.0, trainable=False) if several_workers(strategy) else None
    try:
        with strategy.scope():
            return compiled(make_model(), recipe, num_steps, execution=execution, seed=seed, stop_asked=stop_asked)
    finally:
        keras.config.set_dtype_policy(policy)


def compiled(
    model: keras.Model,
    recipe: Recipe,
    num_steps: int,
    *,
    execution: Execution,
    seed: int = 0,
    stop_asked: tf.Variable | None = None,
) -> Trainer:
    """The recipe's trainer of a model, its optimizer with all its variables; called under the strategy's scope."""
    _freeze(model, recipe.freeze)
    if recipe.head_bias:
        head = next(layer for layer in model.layers if layer.name in ("head", "resnet.head.conv2d"))
        head.bias.assign(np.full(head.bias.shape, recipe.head_bias))
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
    trainer = Trainer(
        model,
        batch_size=recipe.batch_size,
        objective=recipe.objective(),
        accumulation=recipe.accumulation,
        ema_decay=recipe.ema_decay,
        seed=seed,
        remat=execution.remat,
        stop_asked=stop_asked,
    )
    trainer.compile(optimizer, jit_compile=_jit(execution), steps_per_execution=execution.steps_per_execution)
    return trainer


def _freeze(model: keras.Model, beginnings: tuple[str, ...]) -> None:
    for beginning in beginnings:
        layers = [layer for layer in model.layers if layer.name.startswith(beginning) and layer.weights]
        if not layers:
            names = ", ".join(layer.name for layer in model.layers if layer.weights)
            raise UserError(f"No layer to freeze begins with {beginning!r}; the layers are {names}.")
        for layer in layers:
            layer.trainable = False
    if not model.trainable_variables:
        raise UserError("All layers are frozen, so nothing is left to train; leave one of --freeze out.")


def _jit(execution: Execution) -> bool:
    """Whether Keras shall compile the step by XLA. A TPU compiles it itself; replicas on CPU or GPU fail with it."""
    if execution.xla == "on":
        if tf.distribute.has_strategy():
            raise UserError("XLA compiles the step of one device alone; leave --xla out, or give --strategy single.")
        if is_op_determinism_enabled():
            raise UserError("XLA is not used with --deterministic, where Keras turns it off; leave one of them out.")
        return True
    single_gpu = not tf.distribute.has_strategy() and bool(tf.config.list_physical_devices("GPU"))
    return execution.xla == "auto" and single_gpu and not is_op_determinism_enabled()


def train(trainer: Trainer, recipe: Recipe, source: Source, run: Run, *, seed: int, execution: Execution) -> None:
    """Fit, from the last saved state where the run has one, and leave the trained model in the run directory.

    Raises:
        Stopped: after SIGTERM or Ctrl-C, with the state saved.
        UserError: when the loss is no number any more, or the disk is full; the last state stays.
    """
    strategy, num_steps = trainer.distribute_strategy, total_steps(recipe, source)
    keeper = Keeper(trainer, run, recipe.batch_size, execution.checkpoint_every, writes=is_chief(strategy))
    callbacks = [keeper]
    if execution.inspect_every and is_chief(strategy):
        callbacks.insert(0, InspectEpochs(lambda: _as_built(trainer), run.path, execution.inspect_every))
    with lost_workers_named(strategy), keeper.stop_signals_heeded(), bad_labels_named(source.train, source.evaluation):
        check_alike(strategy, {"the step that they continue after": keeper.step})
        _fit(trainer, recipe, source, keeper, callbacks, seed=seed, evaluate_every=execution.evaluate_every)
        if is_chief(strategy):
            write_curves(run)  # before the model, with which the run is finished
            run.save_model(_as_built(trainer))
        check_alike(strategy, {"the steps of the run": num_steps})  # so that none leaves while another one writes


def _fit(
    trainer: Trainer,
    recipe: Recipe,
    source: Source,
    keeper: Keeper,
    callbacks: Sequence[keras.callbacks.Callback],
    *,
    seed: int,
    evaluate_every: int | None,
) -> None:
    """All that is left, from one evaluation to the next by a `fit` of its own, an epoch to Keras: it may begin
    anywhere, and ends after its last step.
    """
    strategy, preprocessing = trainer.distribute_strategy, preprocessing_of(trainer.network)
    num_steps = total_steps(recipe, source)
    classes, per_epoch = len(source.labels), evaluate_every or steps_per_epoch(source.train, recipe.batch_size)
    size, num_batches = evaluation_size(source.evaluation.num_examples, strategy.num_replicas_in_sync)
    evaluation = functools.partial(
        evaluation_batches, source.evaluation, preprocessing, num_classes=classes, batch_size=size
    )
    evaluation = distributed(strategy, size, evaluation)
    while keeper.step < num_steps:
        begin, epoch = keeper.step, len(keeper.records)
        end = min((begin // per_epoch + 1) * per_epoch, num_steps)
        batches = functools.partial(
            training_batches,
            source.train,
            recipe,
            preprocessing,
            num_classes=classes,
            seed=seed,
            first_step=begin,
            num_steps=end - begin,
        )
        trainer.fit(
            distributed(strategy, recipe.batch_size, batches),
            steps_per_epoch=end - begin,
            initial_epoch=epoch,
            epochs=epoch + -(-(num_steps - begin) // per_epoch),  # for the display: the keeper stops after each
            validation_data=evaluation,
            validation_steps=num_batches,
            shuffle=False,
            verbose="auto" if is_chief(strategy) else 0,
            callbacks=list(callbacks),
        )


def evaluation_size(num_examples: int, replicas: int) -> tuple[int, int]:
    """Examples of a batch, which the replicas divide, and batches: as little padding as can be."""
    num_batches = -(-num_examples // _EVALUATION_BATCH)
    size = -(-num_examples // num_batches)
    return -(-size // replicas) * replicas, num_batches


def _as_built(trainer: Trainer) -> keras.Model:
    """The trained model as `keras_vit.build` makes it: of float32, not compiled, on one device, nothing frozen.

    With a moving average its weights are the average.
    """
    network = trainer.network
    averages = dict(zip((v.path for v in network.trainable_variables), trainer.ema, strict=False))
    return rebuilt(network, keras_vit.config_of(network), preprocessing_of(network), averages)


def rebuilt(
    model: keras.Model,
    config: keras_vit.ViTConfig | keras_vit.ResNetConfig,
    preprocessing: keras_vit.Preprocessing,
    instead: Mapping[str, keras.Variable] = MappingProxyType({}),
) -> keras.Model:
    """A new model of a config with the same weights, with the values of the model but for those given by path.

    One that was trained on masked patches ends with its features.
    """
    num_classes = None if isinstance(model.output, dict) else model.output_shape[-1]
    new = keras_vit.build(config, preprocessing=preprocessing, num_classes=num_classes, name=model.name)
    values = {variable.path: instead.get(variable.path, variable) for variable in model.weights}
    for variable in new.weights:
        variable.assign(np.array(values[variable.path]))
    return new


def write_curves(run: Run) -> None:
    """Loss and accuracy over the epochs, as curves.png."""
    records = run.metrics()
    epochs = [record["epoch"] for record in records]
    names = [name for name in ("loss", "accuracy") if name in records[-1]]
    figure = matplotlib.figure.Figure(figsize=(4.5 * len(names), 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        axes.plot(epochs, [record[name] for record in records], color="tab:blue", label="training")
        axes.plot(epochs, [record[f"val_{name}"] for record in records], color="tab:orange", label="evaluation")
        axes.set(xlabel="epoch", title=name)
        axes.grid(alpha=0.3)
        axes.legend()
    with written_whole(run.path / "curves.png") as temporary:
        figure.savefig(temporary, dpi=120)
