"""Masked patch prediction: a Vision Transformer that says what is in the patches that are hidden from it.

Paper: "An Image is Worth 16x16 Words" (arXiv 2010.11929) appendix B.1.2. Of the embedded patches of each image a share
is corrupted; the encoder's output at the place of each is mapped to a prediction.
"""

import keras
from keras import ops

from keras_vit.models.config import ViTConfig
from keras_vit.models.layers import TokenDense
from keras_vit.models.vit import encoder, layer_norm, patch_tokens
from keras_vit.preprocessing import Preprocessing

# Of the corrupted patches, 80 % are replaced by the learned [mask], 10 % by another patch, and 10 % are unchanged.
_MASKED, _MASKED_OR_OTHER = 0.8, 0.9
# Outside training, the same patches of every image are corrupted, in any batch and on any replica.
_FIXED_SEED = 1


def masked_patch_model(
    config: ViTConfig, preprocessing: Preprocessing, *, outputs: int, corruption: float, name: str
) -> keras.Model:
    """Build the model: images (B, height, width, channels) in [-1, 1] -> a dict.

    "predictions" (B, h * w, outputs), one for each patch; "corrupted" (B, h * w) float32, 1 where a patch was
    corrupted and its prediction counts. All weights but "corruption" and "mask_head" are, by name, those of the model
    that `keras_vit.build` makes of the config without classes.
    """
    images, patches = patch_tokens(config, preprocessing)
    patches, corrupted = CorruptPatches(corruption, name="corruption")(patches)
    x = encoder(patches, config, config.grid(preprocessing.image_size))
    x = layer_norm(x, config.layer_norm_epsilon, "Transformer.encoder_norm")
    if config.num_prefix_tokens:
        x = x[:, config.num_prefix_tokens :]
    x = TokenDense(outputs, kernel_initializer="lecun_normal", name="mask_head")(x)
    return keras.Model(images, {"predictions": x, "corrupted": corrupted}, name=name)


class CorruptPatches(keras.layers.Layer):
    """Hides some of the embedded patches, in other places for every image and step of training.

    Args:
        corruption: share of the patches of each image, of which at least one is corrupted.

    Shape: (B, N, D) -> (B, N, D), and (B, N) float32 with 1 at the corrupted ones.
    """

    def __init__(self, corruption: float, **kwargs):
        super().__init__(**kwargs)
        self.corruption = corruption
        self.seed_generator = keras.random.SeedGenerator()

    def build(self, input_shape):
        self.mask_token = self.add_weight(
            name="mask_token", shape=input_shape[-1:], initializer=keras.initializers.RandomNormal(stddev=0.02)
        )

    def call(self, patches, training=False):
        count = patches.shape[1]
        shape = (ops.shape(patches)[0] if training else 1, count)
        place, what = (self._uniform(shape, training, i) for i in range(2))  # each (B, N)
        num_corrupted = max(round(self.corruption * count), 1)
        corrupted = place <= ops.sort(place, axis=-1)[:, num_corrupted - 1 : num_corrupted]

        # Any patch of the same image but itself.
        away = 1 + ops.floor(self._uniform(shape, training, 2) * (count - 1))
        other = (ops.arange(count) + ops.cast(away, "int32")) % count
        batch = ops.shape(patches)[0]
        other = ops.broadcast_to(other, (batch, count))
        others = ops.take_along_axis(patches, other[..., None], axis=1)

        masked = (corrupted & (what < _MASKED))[..., None]
        swapped = (corrupted & (what >= _MASKED) & (what < _MASKED_OR_OTHER))[..., None]
        mask = ops.cast(self.mask_token, patches.dtype)
        seen = ops.where(masked, mask, ops.where(swapped, others, patches))
        return seen, ops.broadcast_to(ops.cast(corrupted, "float32"), (batch, count))

    def _uniform(self, shape, training: bool, number: int):
        seed = self.seed_generator if training else _FIXED_SEED + number
        return keras.random.uniform(shape, dtype="float32", seed=seed)
