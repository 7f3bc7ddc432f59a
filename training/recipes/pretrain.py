"""Named recipes for training from scratch: small ones of our own, then those of the papers.

Vision Transformer: "An Image is Worth 16x16 Words" (arXiv 2010.11929) Table 3. AugReg: "How to train your ViT"
(2106.10270) and big_vision `configs/vit_i1k.py`, `vit_i21k.py`. Better baseline: "Better plain ViT baselines for
ImageNet-1k" (2205.01580), big_vision `configs/vit_s16_i1k.py`. BiT: "Big Transfer" (1912.11370) section 3.3. ViT_C:
"Early Convolutions Help Transformers See Better" (2106.14881) section 5.4. DeiT III: "Revenge of the ViT" (2204.07118)
and facebookresearch/deit `README_revenge.md`.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from keras_vit import MODELS, ConvStem, ShiftedPatches, UserError, ViTConfig
from keras_vit.errors import check_known
from keras_vit.published import fitting
from training.recipes.finetune import FINETUNE_NAMES, FINETUNE_RECIPES
from training.recipes.recipe import DURATIONS, PretrainRecipe, Recipe, Schedule, Target


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
    # The 7,850-parameter ViT of a well-known MNIST exercise, which reaches about 96% with Adam in 15 epochs.
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
    # The same by prediction of the next patch, from half of the patches on average.
    "mnist-next-patch": PretrainRecipe(
        model=dataclasses.replace(_MNIST, patch_size=4, position_embedding="sincos-2d"), image_size=(28, 28),
        channels=1, target="next-patch", decoder_layers=2, decoder_width=64, epochs=5, batch_size=128,
        learning_rate=2e-3, schedule=Schedule(warmup_steps=468), weight_decay=0.05,
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


# Inception crops of ImageNet at 224 pixels; evaluation crops from 256.
_CROPS: dict[str, Any] = {
    "image_size": (224, 224), "resize": "resize-small", "crop_from": 256, "inception_crop": True, "flip": True,
}  # fmt: skip


def _table_3(name: str, epochs: int, learning_rate: float, *, weight_decay: float, dropout: float) -> PretrainRecipe:
    """A row of Table 3: Adam with weight decay, linear decay to 0, no clipping. The paper does not name the loss."""
    model = MODELS[name]
    if isinstance(model, ViTConfig):  # a head with one hidden layer for pretraining (section 3.1)
        model = dataclasses.replace(model, dropout_rate=dropout, representation_size=model.hidden_size)
    return PretrainRecipe(
        model=model, epochs=epochs, batch_size=4096, learning_rate=learning_rate,
        schedule=Schedule("linear", 10_000, linear_end=0.0), weight_decay=weight_decay, clip_norm=None, **_CROPS,
    )  # fmt: skip


# recipe: (model, epochs, peak learning rate); r* are BiT's ResNets, trained like the ViTs.
_JFT = {
    "vit-b16-jft": ("ViT-B_16", 7, 8e-4),
    "vit-b32-jft": ("ViT-B_32", 7, 8e-4),
    "vit-l32-jft": ("ViT-L_32", 7, 6e-4),
    "vit-l16-jft": ("ViT-L_16", 7, 4e-4),
    "vit-l16-jft-14ep": ("ViT-L_16", 14, 4e-4),
    "vit-h14-jft": ("ViT-H_14", 14, 3e-4),
    "r50x1-jft": ("BiT-R50x1", 7, 1e-3),
    "r50x2-jft": ("BiT-R50x2", 7, 1e-3),
    "r101x1-jft": ("BiT-R101x1", 7, 8e-4),
    "r152x1-jft": ("BiT-R152x1", 7, 6e-4),
    "r152x2-jft": ("BiT-R152x2", 7, 6e-4),
    "r50-vit-b16-jft": ("R50+ViT-B_16", 7, 8e-4),
    "r50-vit-b32-jft": ("R50+ViT-B_32", 7, 8e-4),
    "r50-vit-l32-jft": ("R50+ViT-L_32", 7, 2e-4),
    "r50-vit-l16-jft": ("R50+ViT-L_16", 7, 4e-4),
    "r50-vit-l16-jft-14ep": ("R50+ViT-L_16", 14, 4e-4),
}
_I21K = {
    "vit-b16-i21k": ("ViT-B_16", 90, 1e-3),
    "vit-b32-i21k": ("ViT-B_32", 90, 1e-3),
    "vit-l16-i21k": ("ViT-L_16", 30, 1e-3),
    "vit-l16-i21k-90ep": ("ViT-L_16", 90, 1e-3),
    "vit-l32-i21k": ("ViT-L_32", 30, 1e-3),
    "vit-l32-i21k-90ep": ("ViT-L_32", 90, 1e-3),
}
_I1K = {
    "vit-b16-i1k": ("ViT-B_16", 300, 3e-3),
    "vit-b32-i1k": ("ViT-B_32", 300, 3e-3),
    "vit-l16-i1k": ("ViT-L_16", 300, 3e-3),
    "vit-l32-i1k": ("ViT-L_32", 300, 3e-3),
}
_TABLE_3 = {name: _table_3(*row, weight_decay=0.1, dropout=0.0) for name, row in _JFT.items()}
_TABLE_3 |= {name: _table_3(*row, weight_decay=0.03, dropout=0.1) for name, row in _I21K.items()}
_TABLE_3 |= {  # cosine and clipping, which the caption states only for ImageNet
    name: dataclasses.replace(
        _table_3(*row, weight_decay=0.3, dropout=0.1), schedule=Schedule("cosine", 10_000), clip_norm=1.0
    )
    for name, row in _I1K.items()
}

# augmentation: (RandAugment operations, their magnitude, mixup). light1 changes images even at magnitude 0.
_AUGMENTATIONS = {
    "none": (0, 0.0, 0.0),
    "light1": (2, 0.0, 0.0),
    "light2": (2, 10.0, 0.2),
    "medium1": (2, 15.0, 0.2),
    "medium2": (2, 15.0, 0.5),
    "strong1": (2, 20.0, 0.5),
    "strong2": (2, 20.0, 0.8),
}
# model: (official name, big_vision's augmentation for ImageNet-1k, and for ImageNet-21k)
_AUGREG = {
    "ti16": ("ViT-Ti_16", "light1", "none"),
    "s32": ("ViT-S_32", "medium1", "none"),
    "s16": ("ViT-S_16", "medium2", "light1"),
    "b32": ("ViT-B_32", "medium2", "light2"),
    "b16": ("ViT-B_16", "medium2", "light2"),
    "l16": ("ViT-L_16", "medium2", "medium2"),
}
_AUGREG_NAME = re.compile(
    rf"augreg-(?P<model>{'|'.join(_AUGREG)})-(?P<data>i1k|i21k)"
    rf"(-(?P<augmentation>{'|'.join(_AUGMENTATIONS)}))?(?P<regularized>-reg)?(?P<weak>-wd0\.03)?"
)


def _vit(name: str) -> ViTConfig:
    config = MODELS[name]
    assert isinstance(config, ViTConfig)
    return config


def augreg(
    model: str, data: str, augmentation: str | None = None, *, regularized: bool = False, weight_decay: float = 0.1
) -> PretrainRecipe:
    """Return one of the 28 settings of AugReg for a model and a data set.

    Args:
        model: ti16, s32, s16, b32, b16 or l16.
        data: i1k or i21k, for 300 epochs; the paper also trains 30 epochs on i21k.
        augmentation: none, light1, light2, medium1, medium2, strong1 or strong2; None for big_vision's default.
        regularized: whether to use dropout 0.1 and stochastic depth up to 0.1.
        weight_decay: 0.1 or 0.03, times the learning rate; big_vision's 1e-4 is 0.1 times the peak of 1e-3.
    """
    name, *defaults = _AUGREG[model]
    layers, magnitude, mixup = _AUGMENTATIONS[augmentation or defaults[data == "i21k"]]
    rate = 0.1 if regularized else 0.0
    config = dataclasses.replace(_vit(name), dropout_rate=rate, stochastic_depth_rate=rate)
    if data == "i1k":
        config = dataclasses.replace(config, representation_size=config.hidden_size)
    else:
        config = dataclasses.replace(config, classifier="gap")
    return PretrainRecipe(
        model=config, epochs=300, batch_size=4096, learning_rate=1e-3, schedule=Schedule("cosine", 10_000),
        weight_decay=weight_decay, loss="sigmoid", head_bias=-6.9 if data == "i1k" else -10.0, **_CROPS,
        randaugment_layers=layers, randaugment_magnitude=magnitude, mixup=mixup,
    )  # fmt: skip


def _better_baseline(epochs: int) -> PretrainRecipe:
    """The better baseline ViT-S/16, trained on 99% of the split. Its wd of 1e-4 is not times the learning rate."""
    config = dataclasses.replace(
        _vit("ViT-S_16"), classifier="gap", position_embedding="sincos-2d", representation_size=384
    )
    return PretrainRecipe(
        model=config, epochs=epochs, batch_size=1024, learning_rate=1e-3, schedule=Schedule("cosine", 10_000),
        weight_decay=0.1, **_CROPS, randaugment_layers=2, randaugment_magnitude=10.0, mixup=0.2,
    )  # fmt: skip


# data: (epochs, epochs after which the learning rate is divided by 10)
_BIT_STAIRS = {"s": (90, (30, 60, 80)), "m": (90, (30, 60, 80)), "l": (40, (10, 23, 30, 37))}


def _big_transfer(name: str, data: str) -> PretrainRecipe:
    """BiT-S, -M or -L: ImageNet, ImageNet-21k or JFT. The paper does not say how weight decay and momentum combine."""
    epochs, stairs = _BIT_STAIRS[data]
    return PretrainRecipe(
        model=MODELS[name], epochs=epochs, batch_size=4096, learning_rate=0.03 * 4096 / 256,
        schedule=Schedule("stair", 5000, stairs=tuple(epoch / epochs for epoch in stairs)), optimizer="sgd",
        weight_decay=1e-4, clip_norm=None, **_CROPS,
    )  # fmt: skip


def _early_convolutions(name: str) -> PretrainRecipe:
    """ViT_C. Section 5.4 does not state learning rate, weight decay and epochs: as in the paper's other AdamW runs. The
    warm-up is 5 epochs of ImageNet. Its code (facebookresearch/pycls) does not clip.
    """
    return PretrainRecipe(
        model=MODELS[name], epochs=100, batch_size=2048, learning_rate=1e-3,
        schedule=Schedule("cosine", 5 * (1_281_167 // 2048)), weight_decay=0.24, ema_decay=0.9999, label_smoothing=0.1,
        clip_norm=None, **_CROPS, autoaugment=True, mixup=0.8, cutmix=1.0,
    )  # fmt: skip


def _deit3_like() -> PretrainRecipe:
    """DeiT III's ViT-S/16, 800 epochs of ImageNet-1k, without what is not here.

    AdamW replaces LAMB, with the same decay of 0.05 and the learning rate of DeiT (arXiv 2012.12877), 5e-4 for 512
    images, because LAMB's rate of 4e-3 does not carry over. LAMB's clipping at norm 1 is missing, too: the loss is a
    mean over the classes there, whose gradient is far shorter, and a sum here. LayerScale and repeated augmentation are
    missing; mixed images are labeled by shares, not ones; random windows have 5 to 100% of the area, not 8 to 100%.
    """
    model = _vit("ViT-S_16")
    return PretrainRecipe(
        model=dataclasses.replace(model, gelu="erf", stochastic_depth_rate=0.05), image_size=(224, 224), epochs=800,
        batch_size=2048, learning_rate=5e-4 * 2048 / 512, schedule=Schedule("cosine", 5 * (1_281_167 // 2048)),
        weight_decay=0.05, loss="sigmoid", resize="resize-small", crop_from=224, inception_crop=True, flip=True,
        three_augment=True, color_jitter=0.3, mixup=0.8, mixup_partner="opposite", cutmix=1.0, clip_norm=None,
    )  # fmt: skip


def _masked_patch(target: Target, corruption: float = 0.5) -> PretrainRecipe:
    """Appendix B.1.2; weight decay and crops, which it does not mention, are those of Table 3 for JFT."""
    return PretrainRecipe(
        model=MODELS["ViT-B_16"], target=target, corruption=corruption, steps=1_000_000, batch_size=4096,
        learning_rate=2e-4, schedule=Schedule("cosine", 10_000), weight_decay=0.1, clip_norm=None, **_CROPS,
    )  # fmt: skip


def _masked_autoencoder() -> PretrainRecipe:
    """MAE's ViT-B/16, 800 epochs of ImageNet-1k ("Masked Autoencoders Are Scalable Vision Learners" appendix A.1).

    The paper's beta2 is 0.95, its crops have 20 to 100% of the area; here they are 0.999 and 5 to 100%. The positions
    are big_vision's: their last frequency is 1e-4, in the official code (`util/pos_embed.py`) 1e-4 ** (1 - 4 / width).
    """
    model = _vit("MAE-B_16")
    return PretrainRecipe(
        model=dataclasses.replace(model, position_embedding="sincos-2d"), image_size=(224, 224),
        target="patch-normalized-pixels", corruption=0.75, decoder_layers=8, epochs=800, batch_size=4096,
        learning_rate=1.5e-4 * 4096 / 256, schedule=Schedule("cosine", 40 * (1_281_167 // 4096)), weight_decay=0.05,
        clip_norm=None, resize="resize-small", crop_from=224, inception_crop=True, flip=True,
    )  # fmt: skip


def _aim() -> PretrainRecipe:
    """AIM of a ViT-S/16 ("Scalable Pre-training of Large Autoregressive Image Models", Table 7).

    The paper's models have 0.6 to 7 billion parameters and patches of 14 pixels; its beta2 is 0.95 and its crops have
    40 to 100% of the area, here 0.999 and 5 to 100%.
    """
    model = _vit("ViT-S_16")
    return PretrainRecipe(
        model=dataclasses.replace(model, gelu="erf", classifier="gap", position_embedding="sincos-2d"),
        image_size=(224, 224), target="next-patch", decoder_layers=12, decoder_width=2048, steps=500_000,
        batch_size=4096, learning_rate=1e-3, schedule=Schedule("cosine", 31_250), weight_decay=0.05, clip_norm=1.0,
        resize="resize-small", crop_from=224, inception_crop=True, flip=True,
    )  # fmt: skip


def _dino() -> PretrainRecipe:
    """DINO's ViT-S/16, 300 epochs of ImageNet-1k ("Emerging Properties in Self-Supervised Vision Transformers", 3.2).

    The weight decay of the paper rises from 0.04 to 0.4; here it is 0.1. The changes of colors are DeiT III's, which
    differ from the paper's in strength and in that both large crops have the same. The official code clips the gradient
    of each weight by itself, here all are clipped together.
    """
    model = _vit("ViT-S_16")
    return PretrainRecipe(
        model=dataclasses.replace(model, gelu="erf", stochastic_depth_rate=0.1), image_size=(224, 224),
        target="self-distillation", ema_decay=0.996, epochs=300, batch_size=1024, learning_rate=5e-4 * 1024 / 256,
        schedule=Schedule("cosine", 10 * (1_281_167 // 1024)), weight_decay=0.1, clip_norm=3.0, flip=True,
        three_augment=True, color_jitter=0.4,
    )  # fmt: skip


RECIPES: dict[str, PretrainRecipe] = {
    **SMALL,
    **_TABLE_3,
    **{f"augreg-{model}-{data}": augreg(model, data) for model in _AUGREG for data in ("i1k", "i21k")},
    "vit-s16-i1k-better-plain": _better_baseline(90),
    "vit-s16-i1k-better-plain-150ep": _better_baseline(150),
    "vit-s16-i1k-better-plain-300ep": _better_baseline(300),
    **{
        f"bit-{data}-{depth.lower()}": _big_transfer(f"BiT-{depth}", data)
        for data in _BIT_STAIRS
        for depth in ("R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4")
    },
    "masked-patch": _masked_patch("patch-color"),
    "masked-patch-4x4": _masked_patch("patch-4x4"),
    "masked-patch-pixels": _masked_patch("patch-pixels"),
    "masked-patch-15-percent": _masked_patch("patch-color", 0.15),
    "mae-vit-b16": _masked_autoencoder(),
    "aim-vit-s16": _aim(),
    "dino-vit-s16": _dino(),
    "deit3-like": _deit3_like(),
    **{f"vit-c-{size.lower()}": _early_convolutions(f"ViT_C-{size}") for size in ("1GF", "4GF", "18GF", "36GF")},
}


def find_recipe(name: str, others: Sequence[str] = ()) -> PretrainRecipe:
    """Return a recipe by name; for any AugReg setting, a name such as augreg-b16-i21k-medium2-reg-wd0.03.

    Raises UserError with the nearest names, also among `others`, which the caller knows.
    """
    if name in RECIPES:
        return RECIPES[name]
    if match := _AUGREG_NAME.fullmatch(name):
        return augreg(
            *match.group("model", "data", "augmentation"),
            regularized=bool(match["regularized"]),
            weight_decay=0.03 if match["weak"] else 0.1,
        )
    check_known("recipe", name, RECIPES, others)
    return RECIPES[name]


def recipe_lines(wildcard: str) -> list[str]:
    """Return a line for each recipe whose name fits a wildcard or a part of a name: command, size, duration, batch."""
    lines = {"auto": f"{'auto':32} pretrain, finetune  model, size, epochs and augmentation follow from the data"}
    lines |= {name: _line(name, "pretrain", recipe) for name, recipe in RECIPES.items()}
    for name in FINETUNE_NAMES:
        if name in FINETUNE_RECIPES:
            lines[name] = _line(name, "finetune", FINETUNE_RECIPES[name])
        else:
            lines[name] = f"{name:32} finetune  size and steps follow from the data"
    return [lines[name] for name in fitting(lines, wildcard)]


def _line(name: str, command: str, recipe: Recipe) -> str:
    height, width = recipe.image_size
    unit = next(field for field in DURATIONS if getattr(recipe, field) is not None)
    duration = f"{getattr(recipe, unit):,} {unit}"
    return (
        f"{name:32} {command}  {f'{height}x{width} pixels':14} {duration:18} batch {recipe.batch_size:5,}  "
        f"{recipe.optimizer} {recipe.learning_rate:g}"
    )
