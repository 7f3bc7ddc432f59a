"""The training and evaluation step on JAX: what `Trainer` computes, from the same batches, in the same order.

One compiled function takes the values of all variables and returns the new ones. `keras.distribution` divides the
batch, and with `--model-parallel` and `--shard-weights` the weights, among the devices of all hosts; sums over the
batch are sums over all devices, and dropout masks do not depend on their number.
"""

import collections
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence

import keras
from keras import ops

from training.loop.devices import jax_devices
from training.loop.devices.strategies import several_workers
from training.loop.trainer import Trainer, segments


class JaxTrainer(Trainer):
    """`Trainer` on the JAX backend of Keras. Its variables, and so its checkpoints, are the same."""

    def __init__(self, network, recipe, **kwargs):
        super().__init__(network, recipe, **kwargs)
        # The values of all variables after a step, until something else needs them: to assign them takes time. In an
        # object of its own, because Keras would wrap the lists.
        self._after_step = types.SimpleNamespace(values=None)
        self._shards_weights = jax_devices.shards_weights()
        parts = self._segments
        if self._shards_weights and isinstance(self._forwards[0], keras.Model) and len(self._forwards) == 1:
            parts = self._forwards if isinstance(network.output, dict) else segments(*self._forwards)
        # With divided weights, blocks that are alike are one loop, which takes a fraction of the time to compile.
        key = _structure if self._shards_weights else id
        self._parts = [list(alike) for _, alike in itertools.groupby(parts, key)]
        if self._parts:
            self._forwards = [self._part_by_part]

    def _make_variables(self):
        super()._make_variables()
        # Keras lists them with the trainer's own, so they are arguments of the compiled step.
        self._constants = list(self._objective.constants)

    @property
    def state(self) -> dict[str, keras.Variable]:
        self.jax_state_sync()
        return super().state

    def read(self, variable):
        # An array of JAX keeps what NumPy reads of it, so this reads a copy: else the state would end up on this host.
        return jax_devices.whole(ops.copy(variable.value))

    @property
    def reads_together(self):
        return several_workers(self.distribute_strategy)

    def any_stop_requested(self):
        if self._stop_requested is None:
            return None
        return bool(jax_devices.numbers_of_hosts([int(self._stop_requested.numpy())]).any())

    def reset_metrics(self):
        self.jax_state_sync()
        super().reset_metrics()

    def jax_state_sync(self):
        """Assign to the variables what the last step made of them; Keras calls it, too, before it reads weights."""
        if (values := self._after_step.values) is not None:
            self._after_step.values = None
            for variable, value in _pairs(self._train_groups(), values):
                variable.assign(value)
        super().jax_state_sync()

    def _train_groups(self) -> list[Sequence[keras.Variable]]:
        return [*self._test_groups()[:2], self.optimizer.variables, []]

    def _test_groups(self) -> list[Sequence[keras.Variable]]:
        return [self.trainable_variables, self.non_trainable_variables, []]

    def batches(self, dataset) -> Iterator:
        """Return batches on the devices, each copied to them before the one before it is trained on."""
        ahead: collections.deque = collections.deque()
        for batch in dataset.as_numpy_iterator():
            ahead.append(keras.tree.map_structure(jax_devices.batch_on_devices, batch))
            if len(ahead) > 1:
                yield ahead.popleft()
        yield from ahead

    def _copy(self, variable):
        distribution = keras.distribution.distribution()
        layout = None if distribution is None else distribution.get_variable_layout(variable)
        # A buffer of its own: the step donates each buffer once.
        value = ops.copy(variable.value)
        return keras.Variable(value, trainable=False, dtype="float32", name="ema", layout=layout)

    def make_train_function(self, force=False):
        keras.Model.make_train_function(self, force)
        self.train_steps = self._train_steps

    def make_test_function(self, force=False):
        keras.Model.make_test_function(self, force)
        self.test_steps = self._test_steps

    def _train_steps(self, iterator, steps) -> dict:
        """One step, as `--steps-per-execution` is not for JAX."""
        values = self._after_step.values or _current(self._train_groups())
        logs, self._after_step.values = self.train_function(values, iterator)
        return logs

    def _test_steps(self, iterator, steps) -> dict:
        self.jax_state_sync()
        groups = self._test_groups()
        logs, values = self.test_function(_current(groups), iterator)
        for variable, value in _pairs(groups, values):
            variable.assign(value)
        return logs

    def train_step(self, state, data):
        groups = self._train_groups()
        with keras.StatelessScope(_pairs(groups, state)) as scope:
            gradients = self._accumulated if self._accumulation > 1 else self._gradients
            images, labels = data[:2]
            labels = self._objective.whole_batch(labels, _ones(labels), self._total)
            logs = self._update(*gradients(images, labels))
        return logs, _values(scope, groups)

    def test_step(self, state, data):
        images, labels, weights = data
        groups = self._test_groups()
        with keras.StatelessScope(_pairs(groups, state)) as scope:
            labels = self._validation.whole_batch(labels, weights, self._total)
            trained = [v.value for v in self.ema or self.network.trainable_variables]
            others = [v.value for v in self.network.non_trainable_variables]
            outputs, _ = self._call(self.network, False, trained, others, images)
            logs = self._logs(self.test_sums, self._validation.measure(images, labels, outputs, weights)[1])
        return logs, _values(scope, groups)

    def _total(self, value):
        return value  # of the whole batch already

    def _gradients(self, images, labels, micro=0, statistics=None):
        import jax

        variables = self.network.trainable_variables
        given = [(v, v.value) for group in self._test_groups() for v in group]
        given += zip(self._random, self.layer_seeds(micro), strict=True)
        given += zip(self._statistics, statistics or [v.value for v in self._statistics], strict=True)

        def loss_of(forward, trained):
            with keras.StatelessScope([*given, *zip(variables, trained, strict=True)]) as scope:
                outputs = forward(images, training=True)
                losses, sums = self._objective.measure(images, labels, outputs, _ones(labels))
            after = [scope.get_current_value(v) for v in self._statistics]
            return ops.sum(losses) / self._batch_size, (sums, after)

        def loss(trained):
            losses = [functools.partial(loss_of, forward, trained) for forward in self._forwards]
            return jax.lax.switch(self._objective.choice(), losses) if len(losses) > 1 else losses[0]()

        gradients_at, weights = jax.grad(loss, has_aux=True), [v.value for v in variables]
        gradients, (sums, statistics) = gradients_at(weights)
        if self._sharpness_radius:  # uphill for the micro-batch of all devices, where `Trainer` has replicas
            norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients))
            scale = self._sharpness_radius / (norm + 1e-12)
            gradients, _ = gradients_at([w + scale * g for w, g in zip(weights, gradients, strict=True)])
        return gradients, sums, statistics

    def _part_by_part(self, images, training):
        """Return the outputs of the network, one part after the other; for the gradient, parts are computed again."""
        import jax

        outputs = images
        for part, *alike in self._parts:
            policy = jax_devices.saves_no_weights({tuple(v.shape) for v in part.variables})
            call: Callable = functools.partial(self._call, part, training)
            call = jax.checkpoint(call, policy=None if self._segments else policy)
            groups = [_current((p.trainable_variables, p.non_trainable_variables)) for p in (part, *alike)]
            if alike:
                variables = (part.trainable_variables, part.non_trainable_variables)
                loop = jax.tree.map(lambda v, *values: jax_devices.stacked(v, values), variables, *groups)
                outputs, _ = jax.lax.scan(lambda x, given, call=call: (call(*given, x)[0], None), outputs, loop)
            else:
                outputs, others = call(*groups[0], outputs)
                for variable, value in zip(part.non_trainable_variables, others, strict=True):
                    variable.assign(value)
        return outputs

    def _call(self, part: keras.Model, training: bool, trained: list, others: list, inputs) -> tuple:
        """As `part.stateless_call`, with the weights that are divided among the devices collected."""
        if not self._shards_weights:
            return part.stateless_call(trained, others, inputs, training=training)
        dtypes = {id(v): layer.compute_dtype for layer in part.layers for v in layer.variables if v._autocast}

        def collected(variables, values) -> list:
            pairs = zip(variables, values, strict=True)
            return [jax_devices.gathered(v, value, dtypes.get(id(v), "float32")) for v, value in pairs]

        whole, used = collected(part.trainable_variables, trained), collected(part.non_trainable_variables, others)
        outputs, after = part.stateless_call(whole, used, inputs, training=training)
        # Frozen weights are left divided.
        others = [new if here is old else old for old, here, new in zip(others, used, after, strict=True)]
        return outputs, others

    def _repeated(self, step, start):
        import jax

        return jax.lax.fori_loop(0, self._accumulation, step, start)

    def _micro_batches(self, rows):
        """As that of `Trainer`, each micro-batch divided among all devices."""
        parts, distribution = super()._micro_batches(rows), keras.distribution.distribution()
        if distribution is None:
            return parts
        axes = [None, distribution.batch_dim_name, *(None for _ in rows.shape[1:])]
        layout = keras.distribution.TensorLayout(axes, distribution.device_mesh)
        return keras.distribution.distribute_tensor(parts, layout)

    def _zeros(self, variable):
        """Zeros that are divided among the devices as the variable is."""
        import jax

        zeros, distribution = super()._zeros(variable), keras.distribution.distribution()
        if distribution is None:
            return zeros
        return jax.lax.with_sharding_constraint(zeros, distribution.get_variable_layout(variable).backend_layout)

    def layer_seeds(self, micro) -> list:
        """Return the seed of each random layer, different for each step and micro-batch."""
        import jax

        if not self._random:
            return []
        key = jax.random.fold_in(jax.random.key(self._seed % 2**31), self.step.value)
        return list(jax.random.bits(jax.random.fold_in(key, micro), (len(self._random), 2), self._random[0].dtype))


def _structure(part: keras.Model) -> tuple:
    """Equal for parts of a network that compute the same from other weights."""
    wrapped = [getattr(layer, "layer", layer) for layer in part.layers]
    layers = tuple(
        (type(layer), getattr(layer, "rate", None), tuple((tuple(v.shape), v.trainable) for v in layer.variables))
        for layer in wrapped
    )
    counts = any(isinstance(layer, keras.layers.BatchNormalization) for layer in part.layers)
    return part.input.shape, layers, id(part) if counts else None


def _ones(labels):
    """Return the weights of complete batches: (B,)."""
    return ops.ones(keras.tree.flatten(labels)[0].shape[:1])


def _pairs(groups: Sequence[Sequence[keras.Variable]], state) -> list[tuple]:
    return [pair for group, values in zip(groups, state, strict=True) for pair in zip(group, values, strict=True)]


def _current(groups: Sequence[Sequence[keras.Variable]]) -> tuple[list, ...]:
    return tuple([variable.value for variable in group] for group in groups)


def _values(scope: keras.StatelessScope, groups: Sequence[Sequence[keras.Variable]]) -> tuple[list, ...]:
    return tuple([scope.get_current_value(v) for v in group] for group in groups)
