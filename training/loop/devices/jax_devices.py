"""The devices of one host or several for training on JAX, with `keras.distribution`.

Every host runs one process. The rows of a batch and the parts of the weights have the order of the hosts, so that each
process has consecutive rows, and the devices that share a model belong to one host.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit import UserError

# Axes of a kernel, by the pattern of its path. The heads and the hidden layer of the MLP are divided, so that two dense
# layers need one sum over the devices ("Megatron-LM", arXiv 1909.08053, section 3).
_DIVIDED = {
    r".*\.(query|key|value|gate|Dense_0)/kernel": (None, "model"),
    r".*\.(query|key|value|gate|Dense_0)/bias": ("model",),
    r".*\.(out|Dense_1)/kernel": ("model", None),
}
# Seconds without a sign of life after which a process is lost, and that a process waits for the others when it ends.
_LOST_AFTER = 60


def connect_hosts(workers: Sequence[str] = (), here: str = "", timeout: int = 300) -> None:
    """Connect the processes of all hosts, by `jax.distributed`; call it before JAX has listed its devices.

    `workers` are addresses `host:port`, the same everywhere, and `here` is that of this process; a TPU slice has a list
    of its own. When the first process is lost, or another is silent for a minute, JAX ends the others (SIGABRT) and
    says so. Raises UserError with a Python whose versions of JAX are too old.
    """
    import jax

    if sys.version_info < (3, 11):
        raise UserError("Several hosts need Python 3.11 or newer, and its version of JAX; install them on all hosts.")
    # Its handler would ignore SIGTERM until training begins.
    jax.config.update("jax_enable_preemption_service", False)
    cluster: dict[str, Any] = {}
    if workers:
        # Else JAX would look for a cluster, too, and give each task of SLURM a single GPU.
        method = "deactivate"
        cluster = {"num_processes": len(workers), "process_id": workers.index(here), "cluster_detection_method": method}
    jax.distributed.initialize(
        workers[0] if workers else None,
        **cluster,
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=_LOST_AFTER,
        shutdown_timeout_seconds=_LOST_AFTER,
    )


class JaxDevices:
    """All GPUs or TPU chips of the connected hosts, else their CPU devices, in place of a strategy of tf.distribute.

    Creating it makes its distribution that of this process, for variables that are created afterwards. TensorFlow,
    which reads the data, leaves the GPUs. `num_replicas_in_sync` parts of a batch are computed side by side, on all
    hosts; this process is number `host` of `num_hosts`. Raises UserError if the devices cannot be divided so.

    Args:
        model_parallel: devices that share one model. With more than 1, the weights of attention and MLP, their
            optimizer slots and averages are divided among them, and they compute the same rows of a batch.
        shard_weights: whether the devices that compute different rows divide all weights, see `DividedWeights`.
    """

    def __init__(self, model_parallel: int = 1, *, shard_weights: bool = False):
        with contextlib.suppress(RuntimeError):  # TensorFlow is already initialized
            tf.config.set_visible_devices([], "GPU")
        import jax

        devices, hosts = keras.distribution.list_devices(), [device.process_index for device in jax.devices()]
        self.num_hosts, self.host = jax.process_count(), jax.process_index()
        on_each = len(devices) // self.num_hosts
        check_divided(on_each, model_parallel, "devices" if self.num_hosts == 1 else "devices of each host")
        self.num_replicas_in_sync = len(devices) // model_parallel
        self._model_parallel, self._shard_weights = model_parallel, shard_weights
        # On a slice the chips of a host need not follow each other.
        by_host = [device for _, device in sorted(zip(hosts, devices, strict=True), key=lambda pair: pair[0])]
        self._of_this_host = by_host[self.host * on_each : (self.host + 1) * on_each]
        keras.distribution.set_distribution(self._distribution(by_host))

    def _distribution(self, devices: list[str]) -> keras.distribution.DataParallel | keras.distribution.ModelParallel:
        if self._model_parallel == 1 and not self._shard_weights:
            return keras.distribution.DataParallel(devices=devices)
        shape = len(devices) // self._model_parallel, self._model_parallel
        mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"), devices)
        return DividedWeights(mesh, shard_weights=self._shard_weights)

    def scope(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()  # `keras.distribution` needs none

    def on_this_host(self) -> contextlib.AbstractContextManager:
        """Return a context whose new variables are on the devices of this host alone, for a model of its own."""
        return contextlib.nullcontext() if self.num_hosts == 1 else self._distribution(self._of_this_host).scope()


class DividedWeights(keras.distribution.ModelParallel):
    """`keras.distribution.ModelParallel` that divides the weights of attention and MLP, and with `shard_weights` all.

    These are divided along the axis batch of the mesh, too, as are their gradients and what the optimizer keeps of them
    ("ZeRO", arXiv 1910.02054, stage 3). A step collects the weights of a layer when it computes it, see `gathered`.
    """

    def __init__(self, mesh: keras.distribution.DeviceMesh, *, shard_weights: bool = False):
        layouts = keras.distribution.LayoutMap(mesh)
        for pattern, axes in _DIVIDED.items():
            layouts[pattern] = keras.distribution.TensorLayout(axes, mesh)
        super().__init__(layout_map=layouts, batch_dim_name="batch")
        self.shard_weights = shard_weights

    def get_variable_layout(self, variable: keras.Variable) -> keras.distribution.TensorLayout:
        """As the base class. Raises UserError if an axis of the variable cannot be divided evenly."""
        layout = super().get_variable_layout(variable)
        parts = self.device_mesh.shape[1]
        for size, axis in zip(variable.shape, layout.axes, strict=True):
            if axis == "model":
                check_divided(size, parts, f"channels of {variable.path}")
        if self.shard_weights and variable.trainable and "batch" not in layout.axes:
            return self._along_batch(layout, variable.shape)
        return layout

    def _along_batch(self, layout: keras.distribution.TensorLayout, shape: tuple) -> keras.distribution.TensorLayout:
        """Divide the longest axis that is whole in the layout and that can be divided evenly, if there is one."""
        parts, sharing = self.device_mesh.shape
        whole = [axis is None or sharing == 1 for axis in layout.axes]
        sizes = [size if free and size % parts == 0 else 0 for size, free in zip(shape, whole, strict=True)]
        if not any(sizes):
            return layout
        axes = list(layout.axes)
        axes[sizes.index(max(sizes))] = "batch"
        return keras.distribution.TensorLayout(axes, self.device_mesh)


def check_divided(count: int, parts: int, what: str) -> None:
    """Raise UserError if the devices that share a model cannot divide something evenly."""
    if count % parts:
        raise UserError(f"{count} {what} cannot be divided by --model-parallel {parts}; give a divisor of {count}.")


def whole(values: Any) -> np.ndarray:
    """Return the values of a variable or tensor; if several hosts have parts of it, all of them must call this."""
    if keras.backend.backend() == "jax":
        values = keras.ops.convert_to_tensor(values)
        if not values.is_fully_addressable:
            from jax.experimental import multihost_utils

            return multihost_utils.process_allgather(values, tiled=True)
    return np.array(values)


def assign_whole(variable: keras.Variable, values: np.ndarray) -> None:
    """Assign values that every host has; no device gets more than its part."""
    distribution, placed = keras.distribution.distribution(), values
    if distribution is not None:
        import jax

        layout = distribution.get_variable_layout(variable)
        if jax.process_count() == 1:
            placed = keras.distribution.distribute_tensor(values, layout)
        else:  # the same would send the values of each host to all others, to compare them
            placed = jax.make_array_from_callback(values.shape, layout.backend_layout, lambda part: values[part])
    variable.assign(placed)


def batch_on_devices(rows: np.ndarray) -> Any:
    """Rows (B, ...) of this host -> the batch of all hosts on their devices, divided among them."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return keras.ops.convert_to_tensor(rows)
    import jax

    layout, hosts = distribution.get_data_layout(rows.shape), jax.process_count()
    if hosts == 1:
        return keras.distribution.distribute_tensor(rows, layout)
    shape = hosts * rows.shape[0], *rows.shape[1:]
    return jax.make_array_from_process_local_data(layout.backend_layout, rows, shape)


def numbers_of_hosts(numbers: Sequence[int]) -> np.ndarray:
    """Return the numbers (n,) of every host, (hosts, n) int64; all hosts must call this."""
    from jax.experimental import multihost_utils

    # JAX has 32 bits.
    halves = multihost_utils.process_allgather(np.array(numbers, np.int64).view(np.int32))
    return np.ascontiguousarray(halves).view(np.int64)


def shards_weights() -> bool:
    """Whether the weights of this process are divided along the axis batch."""
    distribution = keras.distribution.distribution()
    return isinstance(distribution, DividedWeights) and distribution.shard_weights


def stacked(variable: keras.Variable, values: Sequence) -> Any:
    """In a compiled step: values that have the layout of the variable, stacked along a new first axis."""
    import jax

    layout = keras.distribution.distribution().get_variable_layout(variable)
    of_stack = keras.distribution.TensorLayout((None, *layout.axes), layout.device_mesh)
    return jax.lax.with_sharding_constraint(keras.ops.stack(values), of_stack.backend_layout)


def saves_no_weights(shapes: set[tuple[int, ...]]) -> Callable[..., bool]:
    """Return a policy of `jax.checkpoint`: keep everything for the gradient but collected weights of these shapes.

    What a single value of such a shape becomes is a collected or a cast weight.
    """
    return lambda operation, *inputs, **_: len(inputs) != 1 or inputs[0].shape not in shapes


def gathered(variable: keras.Variable, value: Any, dtype: str) -> Any:
    """In a compiled step: a value of the variable, collected from the devices that divide it along the axis batch.

    Its gradient is summed into the parts of the devices, so that none has the whole of it either. XLA alone may divide
    the layer's products instead, or keep collected weights until the backward pass. The float32 value is cast to the
    dtype that the layer computes in before: half precision takes half the transfers.
    """
    import jax

    divided = keras.distribution.distribution().get_variable_layout(variable)
    if "batch" not in divided.axes:
        return value
    axes = [None if axis == "batch" else axis for axis in divided.axes]
    whole = keras.distribution.TensorLayout(axes, divided.device_mesh).backend_layout
    part, constrain = divided.backend_layout, jax.lax.with_sharding_constraint

    @jax.custom_vjp
    def collect(value):
        # The first constraint keeps XLA from collecting before the cast.
        return constrain(constrain(value.astype(dtype), part), whole)

    collect.defvjp(
        lambda value: (collect(value), None), lambda _, gradient: (constrain(gradient, part).astype(value.dtype),)
    )
    return collect(value)
