"""PatchDropout: each image is trained with a random part of its patches.

"PatchDropout: Economizing Vision Transformers Using Patch Dropout" (arXiv 2208.07220): keeping half of the patches
saves about half of the computation and memory of training, at little cost in accuracy.
"""

import keras
import tensorflow as tf

import keras_vit
from keras_vit import UserError, ViTConfig


class PatchDropout:
    """A network that computes a random part of the patches of each image: images, training -> its outputs."""

    def __init__(self, network: keras.Model, trained: keras.Model, rate: float):
        """Create it under the strategy of the network.

        Args:
            network: built by `keras_vit.build`.
            trained: the same network, perhaps with faster kernels.
            rate: share of the patches that is dropped; at least one patch stays.

        Raises UserError for a model whose blocks need the complete grid.
        """
        config = keras_vit.config_of(network)
        if not isinstance(config, ViTConfig) or config.axial or config.position_injection != "input":
            raise UserError("--patch-dropout is for a Vision Transformer with positions at its input; leave it out.")
        if config.position_embedding in ("relative", "rotary"):
            raise UserError(f"--patch-dropout does not fit {config.position_embedding} positions; leave it out.")
        embedded = trained.get_layer("Transformer.encoderblock_0.LayerNorm_0").input
        self._prefix = config.num_prefix_tokens
        self._patches = embedded.shape[1] - self._prefix
        self._kept = max(round(self._patches * (1.0 - rate)), 1)
        self._stem = keras.Model(trained.input, embedded)
        self._blocks = keras.Model(embedded, trained.output)
        self.seed = keras.Variable([0, 0], dtype="int32", trainable=False, name="patch_dropout_seed")
        """Of the draw, (2,); in a step it has another value for each replica and micro-batch."""

    def __call__(self, images, training):
        tokens = self._stem(images, training=training)  # (B, P + n, D)
        noise = tf.random.stateless_uniform((tf.shape(tokens)[0], self._patches), tf.convert_to_tensor(self.seed))
        kept = tf.sort(tf.math.top_k(noise, self._kept).indices, axis=-1)  # (B, k)
        patches = tf.gather(tokens[:, self._prefix :], kept, batch_dims=1)  # (B, k, D)
        tokens = tf.concat([tokens[:, : self._prefix], patches], axis=1)
        return self._blocks.call(tokens, training=training)  # not by __call__, which would expect all patches
