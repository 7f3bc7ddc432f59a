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
import tensorflow as tf

import keras_vit
from keras_vit import UserError, ViTConfig, preprocessing_of
from training.techniques.resized import Resized


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
            trained if (size, size) == config.patch else _at_patch_size(network, config, size) for size in patch_sizes
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


def _at_patch_size(network: keras.Model, config: ViTConfig, size: int) -> Resized:
    resized = dataclasses.replace(config, patch_size=size)
    classes = network.output_shape[-1]
    return Resized(
        network, lambda: keras_vit.build(resized, preprocessing=preprocessing_of(network), num_classes=classes)
    )
