"""A network at another patch size or image size, on the weights of the original."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit import UserError, ViTConfig, preprocessing_of
from keras_vit.checkpoints.load import values_by_key, weights_by_key
from keras_vit.models.layers import no_init_weights
from keras_vit.models.weight_resizing import resize_patch_kernel, resize_position_embedding
from training.loop.devices.cpu_kernels import on_cpu, with_cpu_kernels

_KERNEL, _POSITIONS = "embedding/kernel", "Transformer/posembed_input/pos_embedding"


class Resized:
    """A network at another size: images, training -> its outputs.

    Patch kernel and learned positions are resized in each call, as `keras_vit.adapt` does once.
    """

    def __init__(self, network: keras.Model, build: Callable[[], keras.Model]):
        """Create it under the strategy of the network, whose weights are used. build: returns it at the other size.

        Raises UserError for a network with other weights whose shapes depend on the size.
        """
        self._network = network
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy(network.get_layer("embedding").dtype_policy)
        try:
            with no_init_weights():
                model = build()
        finally:
            keras.config.set_dtype_policy(policy)
        self._variables, self._seeds = weights_by_key(model), _seeds(model)
        self._model = with_cpu_kernels(model) if on_cpu() else model
        config, resized = keras_vit.config_of(network), keras_vit.config_of(model)
        assert isinstance(config, ViTConfig)  # as the callers check
        assert isinstance(resized, ViTConfig)
        self._matrices = {}
        if config.patch != resized.patch:
            self._matrices[_KERNEL] = _kernel_matrix(config.patch, resized.patch)
        old, new = config.grid(preprocessing_of(network).image_size), resized.grid(preprocessing_of(model).image_size)
        if _POSITIONS in self._variables and old != new:
            prefix = config.num_prefix_positions
            table = np.eye(prefix + old[0] * old[1], dtype=np.float32)
            self._matrices[_POSITIONS] = resize_position_embedding(table, old, new, prefix)
        for key, variable in weights_by_key(network).items():
            if key not in self._matrices and "lora" not in key and self._variables[key].shape != variable.shape:
                only = f"Training at several sizes resizes learned positions only, not {key}"
                raise UserError(f"{only}; leave --patch-sizes and --local-crops out.")

    def __call__(self, images, training):
        # Read outside of the scope below, because the variables may have other values in that of the caller.
        mapping = [
            (new, tf.convert_to_tensor(old)) for new, old in zip(self._seeds, _seeds(self._network), strict=True)
        ]
        for key, value in values_by_key(self._network).items():
            value, variable = tf.convert_to_tensor(value), self._variables[key]
            if key in self._matrices:
                matrix = self._matrices[key]
                value = tf.reshape(matrix @ tf.reshape(value, (matrix.shape[1], -1)), variable.shape)
            mapping.append((variable, value))
        with keras.StatelessScope(mapping):
            return self._model(images, training=training)


def _kernel_matrix(old: tuple[int, int], new: tuple[int, int]) -> np.ndarray:
    """Return the (new h * w, old h * w) matrix that resizes a patch kernel."""
    size = old[0] * old[1]
    basis = np.eye(size, dtype=np.float32).reshape(*old, 1, size)
    return resize_patch_kernel(basis, new).reshape(new[0] * new[1], size)


def _seeds(model: keras.Model) -> list[keras.Variable]:
    return [variable for variable in model.non_trainable_variables if variable.name == "seed_generator_state"]
