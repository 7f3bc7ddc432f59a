"""The devices of this host for training on JAX, with `keras.distribution`."""

import contextlib

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

    Raises UserError if the devices cannot be divided so.
    """

    def __init__(self, model_parallel: int = 1):
        with contextlib.suppress(RuntimeError):  # TensorFlow is already initialized
            tf.config.set_visible_devices([], "GPU")
        devices = keras.distribution.list_devices()
        if len(devices) % model_parallel:
            raise UserError(
                f"{len(devices)} devices cannot be divided into models of {model_parallel} devices each; give "
                f"--model-parallel a divisor of {len(devices)}."
            )
        self.num_replicas_in_sync = len(devices) // model_parallel
        if model_parallel == 1:
            distribution = keras.distribution.DataParallel(devices=devices)
        else:
            shape = self.num_replicas_in_sync, model_parallel
            distribution = DividedWeights(keras.distribution.DeviceMesh(shape, ("batch", "model"), devices))
        keras.distribution.set_distribution(distribution)

    def scope(self) -> contextlib.AbstractContextManager:
        """Return a context that does nothing; `keras.distribution` needs none."""
        return contextlib.nullcontext()


class DividedWeights(keras.distribution.ModelParallel):
    """`keras.distribution.ModelParallel` that divides the weights of attention and MLP, and no others.

    Args:
        mesh: with the axes batch and model.
    """

    def __init__(self, mesh: keras.distribution.DeviceMesh):
        layouts = keras.distribution.LayoutMap(mesh)
        for pattern, axes in _DIVIDED.items():
            layouts[pattern] = keras.distribution.TensorLayout(axes, mesh)
        super().__init__(layout_map=layouts, batch_dim_name="batch")

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
        return layout
