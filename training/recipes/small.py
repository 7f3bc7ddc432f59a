"""Small recipes of our own for training from scratch: digits, MNIST, a folder of photographs."""

import dataclasses

from keras_vit import ConvStem, ShiftedPatches, UserError, ViTConfig
from training.recipes.recipe import PretrainRecipe, Schedule


def with_shifted_patches(model: ViTConfig) -> ViTConfig:
    """Return the model with shifted patches and locality self-attention: SPT and LSA of arXiv 2112.13492."""
    return dataclasses.replace(model, patch_size=1, stem=ShiftedPatches(_side_of_patch(model)), locality_attention=True)


def with_early_convolutions(model: ViTConfig) -> ViTConfig:
    """Return the model with convolutions of the same total stride instead of its patches, doubling the channels."""
    strides = _prime_factors(_side_of_patch(model))
    channels = tuple(max(model.hidden_size >> (len(strides) - 1 - layer), 1) for layer in range(len(strides)))
    kernels = tuple(max(stride, 3) for stride in strides)
    return dataclasses.replace(model, patch_size=1, stem=ConvStem(channels, kernels, strides))


def compact(model: ViTConfig) -> ViTConfig:
    """Return the model with early convolutions and sequence pooling, in the manner of CCT (arXiv 2104.05704).

    CCT has max pooling instead of strides, and no normalization in its convolutions.
    """
    return dataclasses.replace(with_early_convolutions(model), classifier="sequence")


def _side_of_patch(model: ViTConfig) -> int:
    height, width = model.patch
    if height != width or height < 2:
        raise UserError(f"The stem replaces square patches of 2 pixels or more, not {height}x{width}.")
    return height


def _prime_factors(number: int) -> tuple[int, ...]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(factors)


_MNIST = ViTConfig(patch_size=7, hidden_size=96, num_layers=6, num_heads=3, mlp_dim=384, classifier="gap")
SMALL = {
    # The demo: scikit-learn's handwritten digits, 8x8 pixels. Dropout and shifts, because it has only 1,437 images.
    "digits": PretrainRecipe(
        model=dataclasses.replace(_MNIST, patch_size=4, num_layers=4, dropout_rate=0.1), image_size=(8, 8), channels=1,
        epochs=80, batch_size=32, learning_rate=2e-3, schedule=Schedule(warmup_steps=100), weight_decay=0.05,
        label_smoothing=0.1, shift=1,
    ),
    # The 7,850-parameter ViT of a well-known MNIST exercise, which reaches about 96 % with Adam in 15 epochs.
    "mnist-notes": PretrainRecipe(
        model=ViTConfig(patch_size=7, hidden_size=16, num_layers=2, num_heads=2, mlp_dim=64), image_size=(28, 28),
        channels=1, epochs=15, batch_size=128, learning_rate=5e-3, schedule=Schedule(warmup_steps=500),
    ),
    # A ViT for 28x28 grayscale images on two CPU cores. Patches of 7 instead of 4 pixels give 16 tokens instead of 49:
    # in the same time the model can be wider and train for more epochs, which helps on Fashion-MNIST.
    "mnist-small": PretrainRecipe(
        model=_MNIST, image_size=(28, 28), channels=1, epochs=14, batch_size=128, learning_rate=2e-3,
        schedule=Schedule(warmup_steps=468), weight_decay=0.05, label_smoothing=0.1, shift=1,
    ),
    # `mnist-small` without labels, for fine-tuning; grayscale patches have 8 mean colors.
    "mnist-masked-patch": PretrainRecipe(
        model=_MNIST, image_size=(28, 28), channels=1, target="patch-4x4", epochs=5, batch_size=128, learning_rate=2e-3,
        schedule=Schedule(warmup_steps=468), weight_decay=0.05,
    ),
    # The same by a masked autoencoder, with patches of 4 pixels, so that a quarter of them shows something.
    "mnist-mae": PretrainRecipe(
        model=dataclasses.replace(_MNIST, patch_size=4, position_embedding="sincos-2d"), image_size=(28, 28),
        channels=1, target="patch-normalized-pixels", corruption=0.75, decoder_layers=2, decoder_width=64, epochs=5,
        batch_size=128, learning_rate=2e-3, schedule=Schedule(warmup_steps=468), weight_decay=0.05,
    ),
    # The same by self-distillation. A crop of 12 pixels has 9 patches. Without changes of brightness and contrast, the
    # crops of an image are recognized by these alone.
    "mnist-dino": PretrainRecipe(
        model=dataclasses.replace(_MNIST, patch_size=4, classifier="token"), image_size=(28, 28), channels=1,
        target="self-distillation", prototypes=1024, head_width=256, local_crops=4, local_size=12, ema_decay=0.996,
        color_jitter=0.8, epochs=5, batch_size=32, learning_rate=5e-4, schedule=Schedule(warmup_steps=468),
        weight_decay=0.05,
    ),
    # The base of the studies: small enough for dozens of runs on a CPU.
    "study-small": PretrainRecipe(
        model=ViTConfig(patch_size=7, hidden_size=64, num_layers=4, num_heads=4, mlp_dim=128), image_size=(28, 28),
        channels=1, steps=1000, batch_size=128, learning_rate=2e-3, schedule=Schedule(warmup_steps=100),
        weight_decay=0.05,
    ),
    # A folder of your photos, on a CPU or any GPU.
    "photos-small": PretrainRecipe(
        model=dataclasses.replace(_MNIST, patch_size=8, hidden_size=192, stochastic_depth_rate=0.1),
        image_size=(64, 64), channels=3, resize="crop", epochs=100, batch_size=64, learning_rate=1e-3,
        schedule=Schedule(warmup_steps=50), weight_decay=0.05, label_smoothing=0.1, inception_crop=True, flip=True,
    ),
}  # fmt: skip
# The same for a few hundred photos, with strong augmentation against overfitting.
SMALL["photos-small-strong"] = dataclasses.replace(
    SMALL["photos-small"],
    epochs=300,
    randaugment_layers=2,
    randaugment_magnitude=10.0,
    random_erasing=0.25,
    mixup=0.8,
    cutmix=1.0,
)
# For a few thousand grayscale images of 28x28 pixels: `mnist-small` with patches of 4 pixels.
_FINE = dataclasses.replace(_MNIST, patch_size=4)
SMALL["small-data-shifted"] = dataclasses.replace(SMALL["mnist-small"], model=with_shifted_patches(_FINE))
SMALL["small-data-compact"] = dataclasses.replace(SMALL["mnist-small"], model=compact(_FINE))
