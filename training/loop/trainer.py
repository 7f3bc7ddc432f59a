"""The training step and evaluation step, the same on one device, several devices, several machines and a TPU.

`Trainer` differs from a stock `keras.Model`: losses are divided by the global batch, and gradients are summed over the
replicas before they are clipped or checked for infinities, where Keras takes those of each replica; gradients are
accumulated inside the step, where those of Keras' optimizers fail under every strategy; dropout seeds follow from seed,
step, replica, micro-batch and layer, where Keras draws the same mask on every replica; metrics are sums over all
examples, in variables that are equal on all replicas, so they are exact and continue bit for bit.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from keras_vit.models.attention import chunk_long_attention
from training.loop.devices.kernels import fast_here
from training.loop.devices.strategies import several_workers
from training.objectives.objective import Objective
from training.options.common import Execution
from training.recipes.recipe import Recipe

# Whose inner activations are computed again with rematerialization.
_BLOCK = re.compile(r"Transformer\.encoderblock_\d+(\.column)?|(resnet\.)?block\d+\.unit\d+")
_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


class Trainer(keras.Model):
    """A functional model and its training: objective, accumulation, moving average, dropout seeds, metrics.

    `training.loop.train` calls `train_steps` and `test_steps`, (iterator over batches, number of steps) -> logs of the
    last step, after `make_train_function` and `make_test_function`; Keras' `fit`, `evaluate` and `train_on_batch` work,
    too. The optimizer comes from `make_optimizer`, optionally in a `LossScaleOptimizer`.
    """

    def __init__(
        self,
        network: keras.Model,
        recipe: Recipe,
        *,
        objective: Objective,
        execution: Execution,
        strategy: tf.distribute.Strategy | None = None,
        seed: int = 0,
    ):
        """Create it for a network that the objective prepared, under the scope of a strategy, or for one device.

        But outside of that scope: within it Keras' `fit` would reduce a batch over the workers to build the model,
        which is already built, and fail (keras#20585). seed: of dropout and stochastic depth.

        With rematerialization, only the outputs of the blocks are kept, and their activations computed again for the
        gradient. On TensorFlow, attention of more than 1,024 tokens is then in chunks, see `chunk_long_attention`.
        """
        super().__init__(name="trainer", dtype="float32")
        self._strategy = strategy or tf.distribute.get_strategy()
        self.network = network
        self._objective, self._validation = objective, objective.evaluation()
        self._batch_size, self._accumulation = recipe.batch_size, recipe.accumulation
        self._ema_decay, self._seed = objective.averaging(recipe.ema_decay), seed
        self._sharpness_radius = recipe.sharpness_radius
        # Of this worker; after the same step `any_stop_requested` is true in all workers if one set it.
        self._stop_requested = tf.Variable(0.0, trainable=False) if several_workers(self._strategy) else None
        self._random = [v for v in network.non_trainable_variables if v.name == "seed_generator_state"]
        # Moving statistics, of batch normalization and of layers that have `statistics`. Other variables that are not
        # trained, such as the frozen kernels of LoRA, stay unchanged.
        norms = [layer for layer in network.layers if isinstance(layer, keras.layers.BatchNormalization)]
        self._statistics = [v for layer in norms for v in (layer.moving_mean, layer.moving_variance)]
        self._statistics += [v for layer in network.layers for v in getattr(layer, "statistics", ())]
        if execution.remat:
            chunk_long_attention(network)
        trained = fast_here(network)
        with self._strategy.scope():
            self._make_variables()
            self._forwards = objective.forwards(network, trained, self.step, self.ema)
        self._random.extend(objective.random)
        self._segments = segments(*self._forwards) if execution.remat else []
        self.built = True

    def _make_variables(self) -> None:
        self.step = self._number("step", "int32")
        self._any_stop_requested = self._number("any_stop_requested", "float32")
        # Of the losses, of the second metric, and of the weights (numbers of examples), by which both are divided.
        dtypes = {"loss": "float32", "metric": self._objective.metric_dtype, "weight": "int32"}
        self.sums = [self._number(name, dtype) for name, dtype in dtypes.items()]
        self.test_sums = [self._number(f"test_{total.name}", total.dtype) for total in self.sums]
        self.ema = [self._copy(variable) for variable in self.network.trainable_variables] if self._ema_decay else []

    def _number(self, name: str, dtype: str) -> keras.Variable:
        # Not aggregated: every replica computes the same value from sums over all replicas.
        return self.add_weight((), "zeros", dtype, trainable=False, aggregation="none", name=name)

    def _copy(self, variable: keras.Variable) -> keras.Variable:
        copy = self.add_weight(variable.shape, "zeros", "float32", trainable=False, aggregation="none", name="ema")
        copy.assign(variable)
        return copy

    @property
    def distribute_strategy(self) -> tf.distribute.Strategy:
        return self._strategy

    @property
    def metrics(self) -> list:
        """No Keras metrics: a step returns its metrics in the logs."""
        return []

    @property
    def state(self) -> dict[str, keras.Variable]:
        """All variables that training changes, by name; reading them needs no other worker."""
        groups = {
            "weight": [*self.network.trainable_variables, *self.network.non_trainable_variables],
            "optimizer": self.optimizer.variables,
            "ema": self.ema,
            "sum": self.sums,
            "step": [self.step],
        }
        return {f"{group}/{i:05d}": v for group, variables in groups.items() for i, v in enumerate(variables)}

    def read(self, variable: keras.Variable) -> np.ndarray:
        return np.array(variable)

    @property
    def reads_together(self) -> bool:
        """Whether a variable is read by all workers together, because each has only parts of it."""
        return False

    def request_stop(self) -> None:
        """Request a stop from all workers, with the next step."""
        if self._stop_requested is not None:
            self._stop_requested.assign(1.0)

    def any_stop_requested(self) -> bool | None:
        """Whether any worker requested a stop before the last step; None for a single worker."""
        return None if self._stop_requested is None else bool(self._any_stop_requested.numpy() > 0)

    def call(self, images, training=False):
        return self.network(images, training=training)

    def train_step(self, data):
        replica = tf.distribute.get_replica_context()
        # Set again, because iterators over several workers lose the static shape.
        rows = self._batch_size // replica.num_replicas_in_sync
        images, labels = tf.nest.map_structure(lambda x: tf.ensure_shape(x, (rows, *x.shape[1:])), tuple(data[:2]))
        labels = self._objective.whole_batch(labels, tf.ones(rows), self._total)
        gradients, sums, statistics = (self._accumulated if self._accumulation > 1 else self._gradients)(images, labels)
        stop = [] if self._stop_requested is None else [tf.identity(self._stop_requested)]
        if replica.num_replicas_in_sync > 1:
            parts = [gradients, sums, statistics, stop]
            flat = replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.nest.flatten(parts))
            gradients, sums, statistics, stop = tf.nest.pack_sequence_as(parts, flat)
            statistics = [total / replica.num_replicas_in_sync for total in statistics]
        for value in stop:
            self._any_stop_requested.assign(value)
        return self._update(gradients, sums, statistics)

    def _update(self, gradients, sums, statistics):
        """Update all variables from the sums over the replicas, and return the logs."""
        self.optimizer.apply(gradients, self.network.trainable_variables)
        for variable, value in zip(self._statistics, statistics, strict=True):
            variable.assign(value)
        decay = self._ema_decay(self.step.value) if callable(self._ema_decay) else self._ema_decay
        for average, variable in zip(self.ema, self.network.trainable_variables, strict=bool(self.ema)):
            average.assign(average + (1.0 - decay) * (variable - average))
        self.step.assign_add(1)
        self._objective.after_step(self.step.value)
        return self._logs(self.sums, sums)

    def _total(self, value):
        """Sum a tensor over the replicas."""
        replica = tf.distribute.get_replica_context()
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, value) if replica.num_replicas_in_sync > 1 else value

    def test_step(self, data):
        images, labels, weights = data
        labels = self._validation.whole_batch(labels, weights, self._total)
        averaged = list(zip(self.network.trainable_variables, self.ema, strict=False)) if self.ema else []
        with keras.StatelessScope(averaged):
            outputs = self.network(images, training=False)
        return self._logs(self.test_sums, self._total(self._validation.measure(images, labels, outputs, weights)[1]))

    def _accumulated(self, images, labels):
        """As `_gradients`, one micro-batch after the other."""
        images, labels = keras.tree.map_structure(self._micro_batches, (images, labels))
        zeros = [self._zeros(variable) for variable in self.network.trainable_variables]
        start = zeros, [ops.zeros(()) for _ in self.sums], [v.value for v in self._statistics]

        def add(index, totals):
            gradients, sums, statistics = totals
            of_micro_batch = keras.tree.map_structure(lambda x: x[index], (images, labels))
            more, more_sums, statistics = self._gradients(*of_micro_batch, index, statistics)
            added = [a + b for a, b in zip(gradients, more, strict=True)]
            return added, [a + b for a, b in zip(sums, more_sums, strict=True)], statistics

        return self._repeated(add, start)

    def _micro_batches(self, rows):
        """Rows (B, ...) -> (count, B / count, ...)."""
        return ops.reshape(rows, (self._accumulation, rows.shape[0] // self._accumulation, *rows.shape[1:]))

    def _zeros(self, variable: keras.Variable):
        return ops.zeros(variable.shape)

    def _repeated(self, step: Callable, start: tuple) -> tuple:
        """Return what (index, values) -> values makes of the start, for each micro-batch in turn."""
        # One at a time: in parallel the micro-batches would take the memory of the full batch.
        return tf.while_loop(
            lambda index, _: index < self._accumulation,
            lambda index, values: (index + 1, step(index, values)),
            (tf.constant(0), start),
            parallel_iterations=1,
        )[1]

    def _gradients(self, images, labels, micro=0, statistics=None):
        """Return gradients, the sums [loss, metric, weight], and the moving statistics after a micro-batch.

        micro: its number in the step. statistics: before it; None for those of the network.
        """
        computed = functools.partial(self._gradients_of, images, labels, micro, statistics)
        if len(self._forwards) == 1:
            return computed(self._forwards[0])
        # Gradients inside: TensorFlow cannot differentiate a switch over functions with custom gradients.
        return tf.switch_case(self._objective.choice(), [functools.partial(computed, each) for each in self._forwards])

    def _gradients_of(self, images, labels, micro, statistics, forward, weights=None):
        """As `_gradients`, of one of the forward passes, with `weights` in place of the variables.

        With a sharpness radius, the gradient is that of weights which are this far uphill ("Sharpness-Aware
        Minimization", arXiv 2010.01412), by the gradient of this micro-batch on this replica. A ViT-B/16 so has 79.9
        instead of 74.6% on ImageNet without strong augmentation (2106.01548).
        """
        variables = self.network.trainable_variables
        values = [
            *zip(self._random, self.layer_seeds(micro), strict=True),
            *zip(self._statistics, statistics or [v.value for v in self._statistics], strict=True),
        ]
        with tf.GradientTape() as tape:
            if weights is not None:
                tape.watch(weights)
                values += zip(variables, weights, strict=True)
            with keras.StatelessScope(values) as scope:
                if self._segments:
                    outputs = _rematerialized(self._segments, values, images)
                else:
                    outputs = forward(images, training=True)
                rows = tf.nest.flatten(labels)[0].shape[:1]
                losses, sums = self._objective.measure(images, labels, outputs, tf.ones(rows))
            loss = self.optimizer.scale_loss(tf.reduce_sum(losses) / self._batch_size)
        here = [variable.value for variable in variables] if weights is None else weights
        gradients = tape.gradient(loss, here, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        if self._sharpness_radius and weights is None:
            scale = self._sharpness_radius / (tf.linalg.global_norm(gradients) + 1e-12)
            uphill = [tf.convert_to_tensor(w) + scale * g for w, g in zip(here, gradients, strict=True)]
            gradients = self._gradients_of(images, labels, micro, statistics, forward, uphill)[0]
        return gradients, sums, [scope.get_current_value(variable) for variable in self._statistics]

    def layer_seeds(self, micro) -> list[tf.Tensor]:
        """Return the seed of each random layer, different for each step, replica and micro-batch."""
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)
        key = tf.stack([tf.constant(self._seed % 2**31, tf.int32), self.step.value])
        key = tf.random.experimental.stateless_fold_in(key, replica * self._accumulation + micro)
        if not self._random:
            return []
        return tf.unstack(tf.random.stateless_uniform((len(self._random), 2), key, None, None, self._random[0].dtype))

    def _logs(self, totals, sums) -> dict:
        """Add to the totals and return the means so far."""
        for total, value in zip(totals, sums, strict=True):
            total.assign_add(ops.cast(value, total.dtype))
        loss, metric, weight = (ops.cast(total.value, "float32") for total in totals)
        return dict(zip(self._objective.metrics, (loss / weight, metric / weight), strict=False))

    def reset_metrics(self):
        for total in (*self.sums, *self.test_sums):
            total.assign(0)

    def batches(self, dataset) -> Iterator:
        """Return an iterator for `train_steps` and `test_steps`."""
        return iter(dataset)

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            self.train_steps, self.train_function = self._compiled(self.train_step)
        return self.train_function

    def make_test_function(self, force=False):
        if self.test_function is None or force:
            self.test_steps, self.test_function = self._compiled(self.test_step)
        return self.test_function

    def _compiled(self, step) -> tuple[Callable[..., dict], Callable[..., dict]]:
        """Return (iterator, number of steps) -> logs of the last step, and iterator -> logs for Keras' own loops."""
        compiled = functools.partial(tf.function, autograph=False, reduce_retracing=True)
        on_replicas = compiled(functools.partial(self._strategy.run, step), jit_compile=self.jit_compile)

        def of_batch(logs):  # equal on all replicas
            return {name: self._strategy.experimental_local_results(value)[0] for name, value in logs.items()}

        def of_steps(iterator, steps):
            first = of_batch(on_replicas(args=(iterator.get_next(),)))
            if self.steps_per_execution == 1:
                return first
            return tf.while_loop(
                lambda done, _: done < steps,
                lambda done, _: (done + 1, of_batch(on_replicas(args=(iterator.get_next(),)))),
                (tf.constant(1), first),
                parallel_iterations=1,
            )[1]

        def of_keras(iterator):
            if isinstance(iterator, _ITERATORS):
                return steps_function(iterator, tf.constant(self.steps_per_execution))
            return of_batch(on_replicas(args=(next(iterator),)))  # by train_on_batch and test_on_batch

        steps_function = compiled(of_steps)
        return steps_function, of_keras


def segments(network: keras.Model) -> list[keras.Model]:
    """Split a network into consecutive models, each ending with a block and the last with the head.

    With rematerialization, only their outputs stay in memory ("Training Deep Nets with Sublinear Memory Cost", arXiv
    1604.06174). `keras.RematScope` is for layers that are built in it, one by one, whose inputs all stay; and dropout
    would draw another mask when it is computed again, behind the scope of the step's seeds.
    """
    ends = [layer.output for layer in network.layers if _BLOCK.fullmatch(layer.name)]
    return [keras.Model(begin, end) for begin, end in zip([network.input, *ends], [*ends, network.output], strict=True)]


def _rematerialized(parts: Sequence[keras.Model], values: Sequence[tuple[keras.Variable, tf.Tensor]], images):
    """Return what all segments make of images in training, with `values` in place of their variables."""
    outputs = images
    for part in parts:
        ids = {id(variable) for variable in part.variables}
        mapping = [(variable, value) for variable, value in values if id(variable) in ids]

        @tf.recompute_grad
        def segment(inputs, *states, part=part, mapping=mapping):  # once more after the caller's scope has ended
            with keras.StatelessScope(list(zip((variable for variable, _ in mapping), states, strict=True))):
                return part(inputs, training=True)

        outputs = segment(outputs, *(value for _, value in mapping))
    return outputs
