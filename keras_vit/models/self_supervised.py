"""The models of training without labels: masked patches, masked autoencoder, next patch, self-distillation.

Papers: "An Image is Worth 16x16 Words" (arXiv 2010.11929) appendix B.1.2, where some embedded patches are corrupted and
the encoder's output at the place of each is mapped to a prediction; "Masked Autoencoders Are Scalable Vision Learners"
(arXiv 2111.06377), where the encoder gets only the visible patches, and a small decoder predicts the others; "Scalable
Pre-training of Large Autoregressive Image Models" (arXiv 2401.08541, AIM), where each patch predicts the next one; and
"Emerging Properties in Self-Supervised Vision Transformers" (arXiv 2104.14294, DINO), where crops of an image are
assigned to prototypes.
"""

import keras
from keras import ops

from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models import vit
from keras_vit.models.attention import FORBIDDEN
from keras_vit.models.config import ViTConfig
from keras_vit.models.layers import TokenDense, gelu_erf, small_normal
from keras_vit.models.positions import SinCosPositions

# Channels of an attention head in the decoder of a masked autoencoder: 16 heads of 512 channels in the paper.
DECODER_HEAD = 32
# Of the corrupted patches, 80% are replaced by the learned [mask], 10% by another patch, and 10% are unchanged.
_MASKED, _MASKED_OR_OTHER = 0.8, 0.9
# Outside training, the same patches of every image are corrupted, in any batch and on any replica.
_FIXED_SEED = 1
# Of the moving mean of the teacher of self-distillation, as the paper sets it.
_CENTER_MOMENTUM = 0.9


def masked_patch_model(
    config: ViTConfig, preprocessing: Preprocessing, *, outputs: int, corruption: float, name: str
) -> keras.Model:
    """Build the model: images (B, height, width, channels) in [-1, 1] -> a dict.

    "predictions" (B, h * w, outputs), one for each patch; "corrupted" (B, h * w) float32, 1 where a patch was
    corrupted and its prediction counts. All weights but "corruption" and "mask_head" are, by name, those of the model
    that `keras_vit.build` makes of the config without classes.
    """
    images, patches = vit.image_and_patches(config, preprocessing)
    patches, corrupted = CorruptPatches(corruption, name="corruption")(patches)
    x = vit.encoder(patches, config, config.grid(preprocessing.image_size))
    x = vit.last_norm(x, config)
    if config.num_prefix_tokens:
        x = x[:, config.num_prefix_tokens :]
    x = TokenDense(outputs, kernel_initializer="lecun_normal", name="mask_head")(x)
    return keras.Model(images, {"predictions": x, "corrupted": corrupted}, name=name)


class CorruptPatches(keras.layers.Layer):
    """Hides a share of the embedded patches, at least one, in other places for every image and step of training.

    Shape: (B, N, D) -> (B, N, D), and (B, N) float32 with 1 at the corrupted ones.
    """

    def __init__(self, corruption: float, **kwargs):
        super().__init__(**kwargs)
        self.corruption = corruption
        self.seed_generator = keras.random.SeedGenerator()

    def build(self, input_shape):
        self.mask_token = self.add_weight(name="mask_token", shape=input_shape[-1:], initializer=small_normal())

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


def masked_autoencoder(
    config: ViTConfig,
    preprocessing: Preprocessing,
    *,
    outputs: int,
    corruption: float,
    decoder_layers: int,
    decoder_width: int,
    name: str,
) -> keras.Model:
    """Build the model: images (B, height, width, channels) in [-1, 1] -> a dict as that of `masked_patch_model`.

    As in the official code (facebookresearch/mae `models_mae.py`), int(h * w * (1 - corruption)) patches are visible.
    The initial weights are those of `keras_vit.build`, not its uniform ones. All weights of the encoder are, by name,
    those of the model that `keras_vit.build` makes of the config without classes.

    Args:
        config: of the encoder; its positions are "sincos-2d" or "learned".
        preprocessing: of the images.
        outputs: predictions for each patch.
        corruption: share of masked patches, 0.75 in the paper.
        decoder_layers: blocks of the decoder, 8 in the paper.
        decoder_width: width of the decoder, 512 in the paper; a multiple of 32, the width of a head.
        name: name of the model.
    """
    grid, prefix = config.grid(preprocessing.image_size), config.num_prefix_tokens
    images, patches = vit.image_and_patches(config, preprocessing)
    add_positions = vit.position_adder(config, grid)
    x = vit.embedded_tokens(patches, config, add_positions)
    visible, masked, places = RandomMasking(corruption, name="masking")(x[:, prefix:] if prefix else x)
    x = keras.layers.Concatenate(axis=1, name="visible_tokens")([x[:, :prefix], visible]) if prefix else visible
    x = vit.last_norm(vit.encoder_blocks(x, config, grid, add_positions), config)  # (B, prefix + n, D)
    decoder = ViTConfig(
        patch_size=config.patch_size,
        hidden_size=decoder_width,
        num_layers=decoder_layers,
        num_heads=decoder_width // DECODER_HEAD,
        mlp_dim=4 * decoder_width,
        gelu=config.gelu,
        layer_norm_epsilon=config.layer_norm_epsilon,
    )
    x = TokenDense(decoder_width, kernel_initializer="lecun_normal", name="decoder_embedding")(x)
    patches = RestorePatches(name="decoder_patches")(x[:, prefix:], places)  # (B, h * w, W)
    patches = SinCosPositions(grid, 0, name="decoder_positions")(patches)
    x = keras.layers.Concatenate(axis=1, name="decoder_tokens")([x[:, :prefix], patches]) if prefix else patches
    for layer in range(decoder_layers):
        x = vit.encoder_block(x, decoder, 0.0, f"decoder.block_{layer}", grid=grid)
    x = vit.layer_norm(x, config.layer_norm_epsilon, "decoder_norm")
    x = TokenDense(outputs, kernel_initializer="lecun_normal", name="mask_head")(x[:, prefix:] if prefix else x)
    return keras.Model(images, {"predictions": x, "corrupted": masked}, name=name)


def next_patch_model(
    config: ViTConfig, preprocessing: Preprocessing, *, outputs: int, head_layers: int, head_width: int, name: str
) -> keras.Model:
    """Build the model of AIM: images (B, height, width, channels) in [-1, 1] -> a dict as that of `masked_patch_model`.

    Patches are read row by row. A prefix of each image, of a random length, attends to all of itself; every later patch
    attends to itself and those before it. The output of a patch predicts the next one: "predictions" is at the place of
    the predicted patch, and "corrupted" is 1 behind the prefix. All weights of the encoder are, by name, those of the
    model that `keras_vit.build` makes of the config without classes.

    Args:
        config: of the encoder, without class token and registers.
        preprocessing: of the images.
        outputs: predictions for each patch.
        head_layers: residual MLPs of the head, which predicts each patch by itself; 12 in the paper. 0: a dense layer.
        head_width: width of the head, 2,048 in the paper.
        name: name of the model.
    """
    grid = config.grid(preprocessing.image_size)
    images, patches = vit.image_and_patches(config, preprocessing)
    add_positions = vit.position_adder(config, grid)
    x = vit.embedded_tokens(patches, config, add_positions)
    bias, predicted = PrefixMask(name="prefix")(x)
    x = vit.last_norm(vit.encoder_blocks(x, config, grid, add_positions, bias), config)
    x = keras.layers.ZeroPadding1D((1, 0), name="next_patch")(x[:, :-1])  # the first patch has none before it
    if head_layers:
        x = TokenDense(head_width, kernel_initializer="lecun_normal", name="head_embedding")(x)
    for layer in range(head_layers):
        y = vit.layer_norm(x, config.layer_norm_epsilon, f"head.norm_{layer}")
        y = vit.mlp(y, 4 * head_width, config.gelu, 0.0, f"head.mlp_{layer}")
        x = keras.layers.Add(name=f"head.block_{layer}")([x, y])
    if head_layers:
        x = vit.layer_norm(x, config.layer_norm_epsilon, "head_norm")
    x = TokenDense(outputs, kernel_initializer="lecun_normal", name="mask_head")(x)
    return keras.Model(images, {"predictions": x, "corrupted": predicted}, name=name)


class PrefixMask(keras.layers.Layer):
    """An attention mask for autoregressive training, with another prefix for every image and step of training.

    Outside training, the prefix is the first half. Its length is 1 to N - 1 patches, each as likely.

    Shape: (B, N, D) -> an attention bias (B, 1, N, N), and (B, N) float32 with 1 behind the prefix.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator()

    def call(self, tokens, training=False):
        batch, count = ops.shape(tokens)[0], tokens.shape[1]
        if training:
            length = keras.random.randint((batch, 1), 1, count, seed=self.seed_generator)
        else:
            length = ops.full((batch, 1), count // 2, dtype="int32")
        place = ops.arange(count, dtype="int32")
        behind = ops.cast(place[None] >= length, "float32")  # (B, N)
        later = ops.cast(place[None] > place[:, None], "float32")  # (N, N)
        bias = FORBIDDEN * later[None, None] * behind[:, None, None]
        return ops.cast(bias, tokens.dtype), behind


class RandomMasking(keras.layers.Layer):
    """Leaves out a share of the patches, in other places for every image and step of training.

    Shape: (B, N, D) -> the visible patches (B, n, D), (B, N) float32 with 1 at the masked ones, and (B, N) int32: for
    each place its patch in the list of visible, then masked patches.
    """

    def __init__(self, share: float, **kwargs):
        super().__init__(**kwargs)
        self.share = share
        self.seed_generator = keras.random.SeedGenerator()

    def call(self, patches, training=False):
        batch, count = ops.shape(patches)[0], patches.shape[1]
        noise = keras.random.uniform(
            (batch if training else 1, count), dtype="float32", seed=self.seed_generator if training else _FIXED_SEED
        )
        order = ops.argsort(noise, axis=-1)  # the visible patches come first
        places = ops.broadcast_to(ops.argsort(order, axis=-1), (batch, count))
        order = ops.broadcast_to(order, (batch, count))
        num_visible = int(count * (1.0 - self.share))
        visible = ops.take_along_axis(patches, order[:, :num_visible, None], axis=1)
        return visible, ops.cast(places >= num_visible, "float32"), ops.cast(places, "int32")


class RestorePatches(keras.layers.Layer):
    """Puts visible patches (B, n, D) back to their places (B, N), those of `RandomMasking`, among learned tokens."""

    def build(self, visible_shape, places_shape):
        self.mask_token = self.add_weight(name="mask_token", shape=visible_shape[-1:], initializer=small_normal())

    def call(self, visible, places):
        num_masked = places.shape[1] - visible.shape[1]
        mask = ops.broadcast_to(
            ops.cast(self.mask_token, visible.dtype), (ops.shape(visible)[0], num_masked, visible.shape[2])
        )
        return ops.take_along_axis(ops.concatenate([visible, mask], axis=1), places[..., None], axis=1)


def self_distillation_model(
    config: ViTConfig, preprocessing: Preprocessing, *, prototypes: int, head_width: int, name: str
) -> keras.Model:
    """Build the model of DINO: images (B, height, width, channels) in [-1, 1] -> a dict.

    "student" (B, prototypes) float32, the cosine of each prototype and the features after the head; "teacher" the same
    less its moving mean. All weights but those of the head are, by name, those of the model that `keras_vit.build`
    makes of the config without classes. As in the official code (facebookresearch/dino
    `vision_transformer.py:DINOHead`) the head has two hidden layers and a bottleneck of unit length, and the prototypes
    have unit length too.

    Args:
        config: of the backbone.
        preprocessing: of the images.
        prototypes: their number, 65,536 in the paper.
        head_width: of the hidden layers, 2,048 in the paper; the bottleneck is an eighth of it.
        name: name of the model.
    """
    backbone = vit.vision_transformer(config, preprocessing, None, name)
    x, kernel = backbone.output, keras.initializers.TruncatedNormal(stddev=0.02)
    for layer in range(2):
        x = TokenDense(head_width, activation=gelu_erf, kernel_initializer=kernel, name=f"projection_{layer}")(x)
    x = TokenDense(head_width // 8, kernel_initializer=kernel, name="projection_2")(x)
    # float32, because the probabilities are those of 25 times the cosines.
    x = keras.layers.UnitNormalization(dtype="float32", name="unit_length")(x)
    student = Prototypes(prototypes, dtype="float32", name="prototypes")(x)
    teacher = Center(dtype="float32", name="center")(student)
    return keras.Model(backbone.input, {"student": student, "teacher": teacher}, name=name)


class Prototypes(keras.layers.Layer):
    """The products with `count` vectors of unit length: (B, W) -> (B, count)."""

    def __init__(self, count: int, **kwargs):
        super().__init__(**kwargs)
        self.count = count

    def build(self, input_shape):
        limit = input_shape[-1] ** -0.5
        self.kernel = self.add_weight(
            name="kernel",
            shape=(input_shape[-1], self.count),
            initializer=keras.initializers.RandomUniform(-limit, limit),
        )

    def call(self, x):
        return ops.matmul(x, ops.normalize(self.kernel, axis=0))


class Center(keras.layers.Layer):
    """Subtracts a moving mean over batches, which only `update` changes: (B, K) -> (B, K)."""

    def build(self, input_shape):
        self.center = self.add_weight(name="center", shape=input_shape[-1:], initializer="zeros", trainable=False)

    def call(self, x):
        return x - self.center

    @property
    def statistics(self) -> list[keras.Variable]:
        return [self.center]

    def update(self, x, parts: int = 1) -> None:
        """Move the mean toward that of x (B, K), one of `parts` of the batch, which together move it as one does."""
        momentum = _CENTER_MOMENTUM ** (1.0 / parts)
        self.center.assign(momentum * self.center + (1.0 - momentum) * ops.mean(x, axis=0))
