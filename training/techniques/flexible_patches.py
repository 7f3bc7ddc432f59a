"""FlexiViT: training with another patch size in each step, so that one model serves at any of them.

"FlexiViT: One Model for All Patch Sizes" (arXiv 2212.08013): at patch sizes from 8 to 48, one FlexiViT-B is about as
accurate as a ViT-B that was trained at this size, and better than one that was trained at another (its Figure 3).
Kernel and position embeddings are resized as by `keras_vit.adapt(model, patch_size=…)`, which makes
the model of another size from the trained one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit import UserError, ViTConfig, preprocessing_of
from keras_vit.checkpoints.load import values_by_key, weights_by_key
from keras_vit.models.layers import no_init_weights
from keras_vit.models.resizing import resize_patch_kernel, resize_position_embedding
from training.devices.cpu_kernels import on_cpu, with_cpu_kernels

_KERNEL, _POSITIONS = "embedding/kernel", "Transformer/posembed_input/pos_embedding"


class FlexiblePatches:
    """A network at several patch sizes, one of which is computed in each step.

    One graph holds all sizes, each traced once. The step and the seed decide, the same on all replicas and for all
    micro-batches.
    """

    def __init__(
        self, network: keras.Model, trained: keras.Model, step: keras.Variable, patch_sizes: Sequence[int], seed: int
    ):
        """Create it under the strategy of the network.

        Args:
            network: built by `keras_vit.build`; its weights are used at all sizes.
            trained: the same network, perhaps with faster kernels; computed at its own size.
            step: training steps done.
            patch_sizes: in pixels.
            seed: of the run.

        Raises UserError for a model whose weights depend on the grid in other ways than learned positions do.
        """
        self._step, self._seed = step, seed
        config = keras_vit.config_of(network)
        if not isinstance(config, ViTConfig) or config.stem is not None:
            raise UserError("--patch-sizes are for a Vision Transformer that cuts the image itself; leave them out.")
        self.networks: list[Callable] = [
            trained if (size, size) == config.patch else _Resized(network, config, size) for size in patch_sizes
        ]
        """images, training -> outputs of the network, one for each size."""

    def index(self) -> tf.Tensor:
        """Return the number of the size of this step."""
        key = tf.stack([tf.constant(self._seed % 2**31, tf.int32), self._step.value])
        return tf.random.stateless_uniform((), key, 0, len(self.networks), tf.int32)

    def switch(self, compute: Callable[[Callable], Any]) -> Any:
        """Return what `compute` makes of the network of this step's size.

        Gradients are computed inside: TensorFlow cannot differentiate a switch over functions with custom gradients.
        """
        return tf.switch_case(self.index(), [functools.partial(compute, network) for network in self.networks])


class _Resized:
    """The network at another patch size, on the weights of the original."""

    def __init__(self, network: keras.Model, config: ViTConfig, patch_size: int):
        self._network, preprocessing = network, preprocessing_of(network)
        resized = dataclasses.replace(config, patch_size=patch_size)
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy(network.get_layer("embedding").dtype_policy)
        try:
            with no_init_weights():
                model = keras_vit.build(resized, preprocessing=preprocessing, num_classes=network.output_shape[-1])
        finally:
            keras.config.set_dtype_policy(policy)
        self._variables, self._seeds = weights_by_key(model), _seeds(model)
        self._model = with_cpu_kernels(model) if on_cpu() else model
        old, new = config.grid(preprocessing.image_size), resized.grid(preprocessing.image_size)
        self._matrices = {_KERNEL: _kernel_matrix(config.patch, patch_size)}
        prefix = config.num_prefix_positions
        if _POSITIONS in self._variables:
            table = np.eye(prefix + old[0] * old[1], dtype=np.float32)
            self._matrices[_POSITIONS] = resize_position_embedding(table, old, new, prefix)
        for key, variable in weights_by_key(network).items():
            if key not in self._matrices and "lora" not in key and self._variables[key].shape != variable.shape:
                raise UserError(f"--patch-sizes resize learned positions only, not {key}; leave them out.")

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


def _kernel_matrix(old: tuple[int, int], new: int) -> np.ndarray:
    """Return the (new * new, h * w) matrix that resizes a patch kernel."""
    size = old[0] * old[1]
    basis = np.eye(size, dtype=np.float32).reshape(*old, 1, size)
    return resize_patch_kernel(basis, (new, new)).reshape(new * new, size)


def _seeds(model: keras.Model) -> list[keras.Variable]:
    return [variable for variable in model.non_trainable_variables if variable.name == "seed_generator_state"]
