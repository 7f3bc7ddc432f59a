"""The devices of this host for training on JAX, with `keras.distribution`."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_vit import UserError

# Axes of a kernel, by the pattern of its path. The heads and the hidden layer of the MLP are divided, so that two dense
# layers need one sum over the devices ("Megatron-LM", arXiv 1909.08053, section 3).
_DIVIDED = {
    r".*\.(query|key|value|gate|Dense_0)/kernel": (None, "model"),
    r".*\.(query|key|value|gate|Dense_0)/bias": ("model",),
    r".*\.(out|Dense_1)/kernel": ("model", None),
}


class JaxDevices:
    """All GPUs or TPU chips of this host, else its CPU devices, in place of a strategy of tf.distribute.

    Creating it makes its distribution that of this process, for variables that are created afterwards. TensorFlow,
    which reads the data, leaves the GPUs.

    Args:
        model_parallel: devices that share one model. With 1, every device has all variables, and computes its rows of a
            batch. With more, the weights of attention and MLP, their optimizer slots and averages are divided among
            them, and they compute the same rows.
        shard_weights: whether the devices that compute different rows divide all weights, slots and averages among
            them, see `DividedWeights`.

    Raises UserError if the devices cannot be divided so.
    """

    def __init__(self, model_parallel: int = 1, *, shard_weights: bool = False):
        with contextlib.suppress(RuntimeError):  # TensorFlow is already initialized
            tf.config.set_visible_devices([], "GPU")
        devices = keras.distribution.list_devices()
        if len(devices) % model_parallel:
            raise UserError(
                f"{len(devices)} devices cannot be divided into models of {model_parallel} devices each; give "
                f"--model-parallel a divisor of {len(devices)}."
            )
        self.num_replicas_in_sync = len(devices) // model_parallel
        if model_parallel == 1 and not shard_weights:
            distribution = keras.distribution.DataParallel(devices=devices)
        else:
            shape = self.num_replicas_in_sync, model_parallel
            mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"), devices)
            distribution = DividedWeights(mesh, shard_weights=shard_weights)
        keras.distribution.set_distribution(distribution)

    def scope(self) -> contextlib.AbstractContextManager:
        """Return a context that does nothing; `keras.distribution` needs none."""
        return contextlib.nullcontext()


class DividedWeights(keras.distribution.ModelParallel):
    """`keras.distribution.ModelParallel` that divides the weights of attention and MLP, and with `shard_weights` all.

    These are divided along the axis batch, too, as are their gradients and what the optimizer keeps of them ("ZeRO",
    arXiv 1910.02054, stage 3). A step collects the weights of a layer when it computes it, see `gathered`.

    Args:
        mesh: with the axes batch and model.
        shard_weights: whether weights are also divided along the axis batch.
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
            if axis == "model" and size % parts:
                raise UserError(
                    f"{size} channels of {variable.path} cannot be divided among {parts} devices; give "
                    f"--model-parallel a divisor of {size}."
                )
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
    """A policy of `jax.checkpoint`: keep everything for the gradient but collected weights, which are collected again.

    shapes: of the weights; what a single value of such a shape becomes is a collected or a cast weight.
    """
    return lambda operation, *inputs, **_: len(inputs) != 1 or inputs[0].shape not in shapes


def gathered(variable: keras.Variable, value: Any, dtype: str) -> Any:
    """In a compiled step: a value of the variable, collected from the devices that divide it along the axis batch.

    Its gradient is summed into the parts of the devices, so that none has the whole of it either. XLA alone may divide
    the layer's products instead, or keep collected weights until the backward pass.

    Args:
        variable: whose layout the value has.
        value: in float32.
        dtype: that the layer computes in; half precision takes half the transfers.
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
        lambda value: (collect(value), None),
        lambda _, gradient: (constrain(gradient, part).astype(value.dtype),),
    )
    return collect(value)
