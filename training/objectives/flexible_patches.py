"""FlexiViT: training with another patch size in each step, so that one model serves at any of them.

"FlexiViT: One Model for All Patch Sizes" (arXiv 2212.08013): at patch sizes from 8 to 48, one FlexiViT-B is about as
accurate as a ViT-B that was trained at this size, and better than one that was trained at another (its Figure 3).
Kernel and position embeddings are resized as by `keras_vit.adapt(model, patch_size=…)`, which makes the model of
another size from the trained one.
"""

import dataclasses
from collections.abc import Sequence

import keras
import tensorflow as tf

import keras_vit
from keras_vit import UserError, ViTConfig, preprocessing_of
from training.objectives.objective import Objective, OtherForward
from training.objectives.resized import Resized


class FlexiblePatches(OtherForward):
    """A network at several patch sizes, one of which is computed in each step.

    The step and the seed of the run decide, the same on all replicas and for all micro-batches.
    """

    without_remat = "--patch-sizes and --patch-dropout"

    def __init__(self, patch_sizes: Sequence[int], seed: int, objective: Objective):
        super().__init__(objective)
        self._patch_sizes, self._seed = patch_sizes, seed
        sizes = ", ".join(map(str, patch_sizes))
        more = f"that --patch-sizes trains with patches of {sizes} pixels in turn: smaller ones are more tokens"
        self.uncounted += (more,)

    def forwards(self, network, trained, step, averages):
        """Raises UserError for a model whose weights depend on the grid in other ways than learned positions do."""
        self._step = step
        config = keras_vit.config_of(network)
        if not isinstance(config, ViTConfig) or config.stem is not None:
            raise UserError("--patch-sizes are for a Vision Transformer that cuts the image itself; leave them out.")
        return [
            trained if (size, size) == config.patch else _at_patch_size(network, config, size)
            for size in self._patch_sizes
        ]

    def choice(self) -> tf.Tensor:
        key = tf.stack([tf.constant(self._seed % 2**31, tf.int32), self._step.value])
        return tf.random.stateless_uniform((), key, 0, len(self._patch_sizes), tf.int32)


def _at_patch_size(network: keras.Model, config: ViTConfig, size: int) -> Resized:
    resized, classes = dataclasses.replace(config, patch_size=size), network.output_shape[-1]
    return Resized(
        network, lambda: keras_vit.build(resized, preprocessing=preprocessing_of(network), num_classes=classes)
    )
