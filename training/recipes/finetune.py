"""Named recipes for fine-tuning: those of the papers, and small ones; the tasks of VTAB. The model is a checkpoint's.

Vision Transformer: "An Image is Worth 16x16 Words" (arXiv 2010.11929) Table 4, and vision_transformer's
`vit_jax/configs`. AugReg: "How to train your ViT" (2106.10270) Table 4. big_vision: `configs/transfer.py`. BiT: "Big
Transfer" (1912.11370) section 3.3, and big_transfer `bit_hyperrule.py`.
"""

import dataclasses
from typing import Literal

from keras_vit.errors import check_known
from training.recipes.recipe import Recipe, Schedule

HyperRule = Literal["paper", "code"]


def _transfer(steps: int, learning_rate: float, warmup_steps: int = 0) -> Recipe:
    """Return SGD with momentum, batch size 512, cosine, no weight decay, gradient clipping at 1, 384 pixels."""
    return Recipe(
        image_size=(384, 384), batch_size=512, learning_rate=learning_rate, steps=steps,
        schedule=Schedule("cosine", warmup_steps), optimizer="sgd", inception_crop=True, flip=True,
    )  # fmt: skip


# The paper chooses the learning rate on a part of the training set: 0.003, 0.01, 0.03 or 0.06 for ImageNet, and 0.001,
# 0.003, 0.01 or 0.03 for the others; for VTAB it is fixed.
_TABLE_4 = {
    "vit-finetune-imagenet": _transfer(20_000, 0.03),
    "vit-finetune-cifar100": _transfer(10_000, 0.01),
    "vit-finetune-cifar10": _transfer(10_000, 0.01),
    "vit-finetune-pets": _transfer(500, 0.01),
    "vit-finetune-flowers": _transfer(500, 0.01),
    "vit-finetune-vtab": _transfer(2500, 0.01),
}
# ImageNet in Table 2: ViT-L/16 at 512 pixels, ViT-H/14 at 518, with averaged weights.
for _side in (512, 518):
    _TABLE_4[f"vit-finetune-imagenet-{_side}"] = dataclasses.replace(
        _TABLE_4["vit-finetune-imagenet"], image_size=(_side, _side), ema_decay=0.9999
    )

_VIT_JAX = {  # for CIFAR, with 0.01 for B/16; for ImageNet; the default of the AugReg checkpoints
    "vit-jax-finetune": dataclasses.replace(_transfer(10_000, 0.03, 500), accumulation=8),
    "vit-jax-finetune-imagenet": dataclasses.replace(_transfer(20_000, 0.03, 500), accumulation=8),
    "vit-jax-finetune-augreg": dataclasses.replace(_transfer(500, 0.03, 100), accumulation=8),
}
# The paper tries learning rates 0.01 and 0.03 for ImageNet, 0.001, 0.003 and 0.01 for the others; also 224 pixels.
_AUGREG = {
    "augreg-finetune-imagenet": _transfer(20_000, 0.01, 500),
    "augreg-finetune-pets": _transfer(500, 0.003, 100),
    "augreg-finetune-pets-2500": _transfer(2500, 0.003, 200),
    "augreg-finetune-cifar100": _transfer(2500, 0.003, 200),
    "augreg-finetune-cifar100-10k": _transfer(10_000, 0.003, 500),
}
_BIG_VISION = {
    name: dataclasses.replace(
        _transfer(steps, 0.01, warmup_steps), inception_crop=False, resize="resize-small", crop_from=448
    )
    for name, steps, warmup_steps in (
        ("big-vision-finetune-cifar", 10_000, 500),
        ("big-vision-finetune-imagenet", 20_000, 500),
        ("big-vision-finetune-pets", 500, 100),
    )
}
_SMALL = {
    # A `mnist-small` pretrained on other grayscale images, fine-tuned on a thousand images at twice the resolution.
    "mnist-finetune": Recipe(
        image_size=(56, 56), batch_size=50, learning_rate=1e-3, epochs=20, schedule=Schedule("cosine", 40),
        weight_decay=0.05, label_smoothing=0.1, shift=2,
    ),
    # An official checkpoint on a folder of your photos.
    "photos-finetune": Recipe(
        image_size=(224, 224), batch_size=32, learning_rate=0.003, steps=500, schedule=Schedule("cosine", 50),
        optimizer="sgd", resize="resize-small", crop_from=256, inception_crop=True, flip=True,
    ),
}  # fmt: skip

_HYPERRULES: dict[str, HyperRule] = {"bit-hyperrule-paper": "paper", "bit-hyperrule-code": "code"}


def bit_hyperrule(numbers: HyperRule, num_examples: int, image_size: tuple[int, int]) -> Recipe:
    """Return the BiT-HyperRule for a training set of `num_examples` images of a typical (height, width) in pixels.

    The paper and its code differ in the stairs of small data sets, in the warm-up, which the paper does not mention,
    and in the resolution: the paper uses 480, cropped from 512, only for its largest model, R152x4. The TensorFlow and
    JAX code flips every image; the PyTorch code flips at random, as this recipe does.
    """
    small = num_examples < 20_000
    steps = 500 if small else 10_000 if num_examples < 500_000 else 20_000
    stairs, warmup_steps = (0.3, 0.6, 0.9), 0
    resize_to, side = (448, 384)
    if numbers == "code":
        stairs, warmup_steps = ((0.4, 0.6, 0.8), 100) if small else (stairs, 500)
        resize_to, side = (512, 480)
    if image_size[0] * image_size[1] < 96 * 96:
        resize_to, side = (160, 128)
    return Recipe(
        image_size=(side, side), batch_size=512, learning_rate=0.003, steps=steps,
        schedule=Schedule("stair", warmup_steps, stairs=stairs), optimizer="sgd", clip_norm=None, crop_from=resize_to,
        flip=True, mixup=0.0 if small else 0.1, mixup_partner="opposite",
    )  # fmt: skip


FINETUNE_RECIPES: dict[str, Recipe] = {**_SMALL, **_TABLE_4, **_VIT_JAX, **_AUGREG, **_BIG_VISION}
FINETUNE_NAMES = (*FINETUNE_RECIPES, *_HYPERRULES)


def find_finetune_recipe(name: str, num_examples: int, image_size: tuple[int, int]) -> Recipe:
    """Return a recipe by name, for a training set of `num_examples` images of a typical (height, width) in pixels.

    Only the HyperRules depend on the training set. Raises UserError with the nearest names.
    """
    if name in _HYPERRULES:
        return bit_hyperrule(_HYPERRULES[name], num_examples, image_size)
    check_known("recipe", name, FINETUNE_RECIPES, ("auto", *_HYPERRULES))
    return FINETUNE_RECIPES[name]


Group = Literal["natural", "specialized", "structured"]
Part = Literal["train800", "val200", "train800val200", "test"]

# The 19 tasks of VTAB-1k: "A Large-scale Study of Representation Learning with the Visual Task Adaptation Benchmark"
# (arXiv 1910.04867); splits of its code, google-research/task_adaptation `data/`. Which tasks exclude an augmentation:
# "Big Transfer" appendix F. The recipe is that of Table 4.
RECIPE_NAME = "vit-finetune-vtab"
# Images of train800 and val200.
NUM_TRAIN, NUM_VAL = 800, 200


@dataclasses.dataclass(frozen=True)
class VtabTask:
    """One task."""

    name: str
    group: Group
    dataset: str
    """TFDS name: NAME or NAME/CONFIG."""
    validation: str | int
    """The split whose first 200 images are val200; or the percentage of train where they begin."""
    test: str = "test"
    """TFDS split."""
    binary: bool = False
    """Whether pixels are 0 and 1 instead of 0 to 255."""
    flip: bool = True
    """False where mirroring changes the class."""
    crop: bool = True
    """False where a random window changes the class."""

    def split(self, part: Part, num_train: int) -> str:
        """Return the TFDS split of a part, for a training split of `num_train` images."""
        train, validation = f"train[:{NUM_TRAIN}]", f"{self.validation}[:{NUM_VAL}]"
        if isinstance(self.validation, int):
            begin = self.validation * num_train // 100
            validation = f"train[{begin}:{begin + NUM_VAL}]"
        parts = {"train800": train, "val200": validation, "train800val200": f"{train}+{validation}", "test": self.test}
        return parts[part]


TASKS = (
    VtabTask("caltech101", "natural", "caltech101", 90),
    VtabTask("cifar100", "natural", "cifar100", 90),
    VtabTask("dtd", "natural", "dtd", "validation"),
    VtabTask("oxford_flowers102", "natural", "oxford_flowers102", "validation"),
    VtabTask("oxford_iiit_pet", "natural", "oxford_iiit_pet", 80),
    VtabTask("sun397", "natural", "sun397/tfds", "validation"),
    VtabTask("svhn", "natural", "svhn_cropped", 90),
    VtabTask("patch_camelyon", "specialized", "patch_camelyon", "validation"),
    VtabTask("eurosat", "specialized", "eurosat/rgb", 60, "train[80%:]"),
    VtabTask("resisc45", "specialized", "resisc45", 60, "train[80%:]"),
    VtabTask("diabetic_retinopathy", "specialized", "diabetic_retinopathy_detection/btgraham-300", "validation"),
    VtabTask("clevr-count", "structured", "clevr", 90, "validation", crop=False),
    VtabTask("clevr-distance", "structured", "clevr", 90, "validation", crop=False),
    VtabTask("dmlab", "structured", "dmlab", "validation", crop=False),
    VtabTask("dsprites-location", "structured", "dsprites", 80, "train[90%:]", binary=True, flip=False, crop=False),
    VtabTask("dsprites-orientation", "structured", "dsprites", 80, "train[90%:]", binary=True, flip=False),
    VtabTask("kitti-distance", "structured", "kitti", "validation", crop=False),
    VtabTask("smallnorb-azimuth", "structured", "smallnorb", "test", "test[50%:]", flip=False),
    VtabTask("smallnorb-elevation", "structured", "smallnorb", "test", "test[50%:]"),
)
