"""PatchDropout: each image is trained with a random part of its patches.

"PatchDropout: Economizing Vision Transformers Using Patch Dropout" (arXiv 2208.07220): keeping half of the patches
saves about half of the computation and memory of training, at little cost in accuracy.
"""

import keras
import tensorflow as tf

import keras_vit
from keras_vit import UserError, ViTConfig
from training.objectives.objective import Objective, OtherForward


class PatchDropout(OtherForward):
    """A network that computes a random part of the patches of each image. rate: share that is dropped, but not all."""

    without_remat = "--patch-sizes and --patch-dropout"

    def __init__(self, rate: float, objective: Objective):
        super().__init__(objective)
        self._rate = rate
        more = f"that --patch-dropout leaves {rate:.4g} of the patches out, which saves about that share"
        self.uncounted += (more,)

    def forwards(self, network, trained, step, averages):
        """Raises UserError for a model whose blocks need the complete grid."""
        config = keras_vit.config_of(network)
        if not isinstance(config, ViTConfig) or config.axial or config.position_injection != "input":
            raise UserError("--patch-dropout is for a Vision Transformer with positions at its input; leave it out.")
        if config.position_embedding in ("relative", "rotary"):
            raise UserError(f"--patch-dropout does not fit {config.position_embedding} positions; leave it out.")
        embedded = trained.get_layer("Transformer.encoderblock_0.LayerNorm_0").input
        self._prefix = config.num_prefix_tokens
        self._patches = embedded.shape[1] - self._prefix
        self._kept = max(round(self._patches * (1.0 - self._rate)), 1)
        self._stem = keras.Model(trained.input, embedded)
        self._blocks = keras.Model(embedded, trained.output)
        self._seed = keras.Variable([0, 0], dtype="int32", trainable=False, name="patch_dropout_seed")
        self.random = [self._seed]
        return [self._outputs]

    def _outputs(self, images, training):
        tokens = self._stem(images, training=training)  # (B, P + n, D)
        noise = tf.random.stateless_uniform((tf.shape(tokens)[0], self._patches), tf.convert_to_tensor(self._seed))
        kept = tf.sort(tf.math.top_k(noise, self._kept).indices, axis=-1)  # (B, k)
        patches = tf.gather(tokens[:, self._prefix :], kept, batch_dims=1)  # (B, k, D)
        tokens = tf.concat([tokens[:, : self._prefix], patches], axis=1)
        return self._blocks.call(tokens, training=training)  # not by __call__, which would expect all patches
