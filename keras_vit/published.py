"""The named models with what has been published of them: parameters, checkpoints, their license and accuracy.

Licenses: those of the repositories and model cards. Accuracies: top-1 on ImageNet's validation images, with the
preprocessing that they were measured with.
"""

import dataclasses
import fnmatch
import re
import types
from collections.abc import Iterable, Mapping

from keras_vit.checkpoints.find import official_names
from keras_vit.errors import UserError, nearest
from keras_vit.images.resizing import Resize
from keras_vit.models.named_models import MODELS


@dataclasses.dataclass(frozen=True)
class PublishedAccuracy:
    """A published accuracy of a checkpoint."""

    top1: float
    """Percent of ImageNet's validation images."""
    source: str
    """Where the figure stands."""
    pixels: int
    """Height and width of the model's input."""
    resize: Resize | None = "stretch"
    """None: as the checkpoint's own files say, which timm measures with."""
    crop_from: int | None = None
    """Pixels of the smaller side before the center crop, for resize-small."""


_VIT = "README of vision_transformer"
_AUGREG = f"{_VIT}, How to train your ViT"
_BIT = "README of big_transfer"
_PLAIN = "arXiv 2205.01580, Table 1"


def _augreg(top1: float, file: str) -> dict[str, PublishedAccuracy]:
    """The recommended ImageNet-21k file of a model, fine-tuned to ImageNet with 384 pixels."""
    model, upstream, rate = file.split()
    name = f"augreg:{model}-i21k-300ep-lr_0.001-{upstream}--imagenet2012-steps_20k-lr_{rate}-res_384"
    return {name: PublishedAccuracy(top1, _AUGREG, 384)}


# timm's results/results-imagenet.csv: the image size and the top-1 accuracy of each model.
_TIMM = """
vit_tiny_patch16_224.augreg_in21k_ft_in1k 224 75.452
vit_tiny_patch16_384.augreg_in21k_ft_in1k 384 78.438
vit_small_patch32_224.augreg_in21k_ft_in1k 224 76.010
vit_small_patch32_384.augreg_in21k_ft_in1k 384 80.476
vit_small_patch16_224.augreg_in21k_ft_in1k 224 81.402
vit_small_patch16_384.augreg_in21k_ft_in1k 384 83.814
vit_base_patch32_224.augreg_in21k_ft_in1k 224 80.732
vit_base_patch32_384.augreg_in21k_ft_in1k 384 83.358
vit_base_patch16_224.augreg_in21k_ft_in1k 224 84.534
vit_base_patch16_384.augreg_in21k_ft_in1k 384 86.010
vit_base_patch8_224.augreg_in21k_ft_in1k 224 85.838
vit_large_patch16_224.augreg_in21k_ft_in1k 224 85.856
vit_large_patch16_384.augreg_in21k_ft_in1k 384 87.096
vit_small_r26_s32_224.augreg_in21k_ft_in1k 224 81.856
vit_small_r26_s32_384.augreg_in21k_ft_in1k 384 84.066
vit_large_r50_s32_224.augreg_in21k_ft_in1k 224 84.434
vit_large_r50_s32_384.augreg_in21k_ft_in1k 384 86.188
vit_base_patch16_224.orig_in21k_ft_in1k 224 81.782
vit_base_patch16_384.orig_in21k_ft_in1k 384 84.212
vit_small_patch16_224.augreg_in1k 224 78.842
vit_small_patch16_384.augreg_in1k 384 81.130
vit_base_patch32_224.augreg_in1k 224 74.908
vit_base_patch32_384.augreg_in1k 384 78.750
vit_base_patch16_224.augreg_in1k 224 79.154
vit_base_patch16_384.augreg_in1k 384 81.102
resnetv2_50x1_bit.goog_in21k_ft_in1k 448 80.386
resnetv2_101x1_bit.goog_in21k_ft_in1k 448 82.332
resnetv2_50x1_bit.goog_distilled_in1k 224 82.820
"""


ACCURACY: Mapping[str, PublishedAccuracy] = types.MappingProxyType(
    {
        "imagenet21k+imagenet2012/ViT-B_16": PublishedAccuracy(84.6, _VIT, 384),
        "imagenet21k+imagenet2012/ViT-B_16-224": PublishedAccuracy(81.2, _VIT, 224),
        "imagenet21k+imagenet2012/ViT-B_32": PublishedAccuracy(81.8, _VIT, 384),
        "imagenet21k+imagenet2012/ViT-L_16": PublishedAccuracy(85.1, _VIT, 384),
        "imagenet21k+imagenet2012/ViT-L_16-224": PublishedAccuracy(82.7, _VIT, 224),
        "imagenet21k+imagenet2012/ViT-L_32": PublishedAccuracy(81.8, _VIT, 384),
        "bit:BiT-M-R50x1-ILSVRC2012": PublishedAccuracy(80.7, _BIT, 480),
        "bit:BiT-M-R152x2-ILSVRC2012": PublishedAccuracy(85.2, _BIT, 480),
        "bit:distill/R50x1_224": PublishedAccuracy(82.8, _BIT, 224, "resize-small", 256),
        "bit:distill/R50x1_160": PublishedAccuracy(80.5, _BIT, 160, "resize-small", 176),
        "big_vision:vit_s16_i1k_90ep": PublishedAccuracy(76.5, _PLAIN, 224, "resize-small", 256),
        "big_vision:vit_s16_i1k_150ep": PublishedAccuracy(78.5, _PLAIN, 224, "resize-small", 256),
        "big_vision:vit_s16_i1k_300ep": PublishedAccuracy(80.0, _PLAIN, 224, "resize-small", 256),
    }
    | _augreg(85.59, "L_16 aug_strong1-wd_0.1-do_0.0-sd_0.0 0.01")
    | _augreg(85.49, "B_16 aug_medium1-wd_0.1-do_0.0-sd_0.0 0.03")
    | _augreg(83.73, "S_16 aug_light1-wd_0.03-do_0.0-sd_0.0 0.03")
    | _augreg(85.99, "R50_L_32 aug_medium1-wd_0.1-do_0.1-sd_0.1 0.01")
    | _augreg(83.85, "R26_S_32 aug_light1-wd_0.1-do_0.0-sd_0.0 0.01")
    | _augreg(78.22, "Ti_16 aug_none-wd_0.03-do_0.0-sd_0.0 0.03")
    | _augreg(83.59, "B_32 aug_light1-wd_0.1-do_0.0-sd_0.0 0.01")
    | _augreg(79.58, "S_32 aug_none-wd_0.1-do_0.0-sd_0.0 0.01")
    | _augreg(75.40, "R_Ti_16 aug_none-wd_0.03-do_0.0-sd_0.0 0.03")
    | {
        f"hf:timm/{name}": PublishedAccuracy(float(top1), "results-imagenet.csv of timm", int(pixels), None)
        for name, pixels, top1 in map(str.split, _TIMM.strip().splitlines())
    }
)

# Millions of parameters and thousand millions of multiply-adds, at the size of _FAMILIES and with 1,000 classes where
# the checkpoints have a head: `keras_vit.models.complexity.costs`.
# fmt: off
_SIZES: Mapping[str, tuple[float, float]] = {
    "testing": (0.021, 0.0024), "testing-unpooled": (0.021, 0.0044), "ViT-Ti_16": (5.7, 1.3), "ViT-S_16": (22.1, 4.6),
    "ViT-S_32": (22.9, 1.1), "ViT-S_16-gap-norep": (22.0, 4.6), "ViT-S_32-gap-norep": (22.9, 1.1),
    "ViT-M_16": (38.8, 8.0), "ViT-M_32": (39.9, 2.0), "ViT-B_8": (86.6, 78.1), "ViT-B_16": (86.6, 17.6),
    "ViT-B_32": (88.2, 4.4), "ViT-B_16-gap-norep": (86.6, 17.5), "ViT-B_32-gap-norep": (88.2, 4.3),
    "ViT-L_16": (304.3, 61.6), "ViT-L_32": (306.5, 15.4), "ViT-So400m_14": (413.6, 109.9), "ViT-H_14": (632.0, 167.3),
    "ViT-g_14": (1012.6, 267.0), "ViT-G_14": (1844.4, 483.7), "R+ViT-Ti_16": (6.3, 0.4), "R26+ViT-S_32": (36.4, 3.5),
    "R26+ViT-B_32": (101.4, 6.7), "R50+ViT-B_16": (98.7, 21.5), "R50+ViT-B_32": (110.9, 8.5),
    "R50+ViT-L_16": (316.5, 65.5), "R50+ViT-L_32": (329.0, 19.4), "ViT_C-1GF": (4.6, 1.1), "ViT_C-4GF": (17.8, 4.0),
    "ViT_C-18GF": (81.6, 17.7), "ViT_C-36GF": (167.8, 35.0), "Axial-ViT-B_16": (171.6, 33.5),
    "Axial-ViT-B_32": (173.3, 8.5), "AxialResNet50": (24.4, 5.4), "BiT-R26x1": (16.0, 2.3), "BiT-R50x1": (25.5, 4.1),
    "BiT-R50x2": (98.0, 16.1), "BiT-R50x3": (217.3, 36.1), "BiT-R101x1": (44.5, 7.8), "BiT-R101x3": (387.9, 69.5),
    "BiT-R152x1": (60.2, 11.5), "BiT-R152x2": (236.3, 45.8), "BiT-R152x4": (936.5, 182.8),
    "BiT-R200x3": (568.6, 134.3), "DeiT-Ti_16-distilled": (5.9, 1.3), "DeiT-S_16-distilled": (22.4, 4.6),
    "DeiT-B_16-distilled": (87.3, 17.7), "DeiT3-S_16": (22.1, 4.6), "DeiT3-M_16": (38.8, 8.0),
    "DeiT3-B_16": (86.6, 17.6), "DeiT3-L_16": (304.4, 61.6), "DeiT3-H_14": (632.1, 167.3),
    "DINOv2-S_14": (22.1, 46.7), "DINOv2-B_14": (86.6, 151.6), "DINOv2-L_14": (304.4, 506.8),
    "DINOv2-g_14": (1136.5, 1783.3), "DINOv2-S_14-reg4": (22.1, 46.9), "DINOv2-B_14-reg4": (86.6, 152.1),
    "DINOv2-L_14-reg4": (304.4, 508.6), "DINOv2-g_14-reg4": (1136.5, 1789.2), "DINOv3-S_16": (21.6, 4.7),
    "DINOv3-S+_16": (28.7, 6.1), "DINOv3-B_16": (85.7, 17.9), "DINOv3-L_16": (303.1, 62.8),
    "DINOv3-H+_16": (840.6, 172.1), "CLIP-B_32": (87.8, 4.4), "CLIP-B_16": (86.2, 17.6), "CLIP-L_14": (304.0, 81.0),
    "OpenCLIP-B_32": (87.8, 4.4), "OpenCLIP-B_16": (86.2, 17.6), "OpenCLIP-L_14": (304.0, 81.0),
    "OpenCLIP-H_14": (632.1, 167.3), "OpenCLIP-g_14": (1012.6, 267.0), "OpenCLIP-G_14": (1844.9, 483.7),
    "SigLIP-B_16": (92.9, 17.7), "SigLIP-L_16": (315.9, 81.3), "SigLIP-So400m_14": (427.7, 110.2),
    "MAE-B_16": (85.8, 17.6), "MAE-L_16": (303.3, 61.6), "MAE-H_14": (630.8, 167.3), "FlexiViT-S_16": (22.1, 5.3),
    "FlexiViT-B_16": (86.6, 20.3), "FlexiViT-L_16": (304.4, 70.9),
}
# fmt: on
# Pattern of names: (pixels, purpose, license of the checkpoints). The first that matches counts. No pattern matches all
# names, so that a new family cannot get the license of another.
_FAMILIES: Mapping[str, tuple[int, str, str]] = {
    "testing*": (224, "tests", ""),
    "DeiT*": (224, "classification", "Apache-2.0"),
    "DINOv2*": (518, "features", "Apache-2.0"),
    "DINOv3*": (224, "features", "DINOv3 License"),
    "CLIP*": (224, "features beside text", "MIT"),
    "OpenCLIP*": (224, "features beside text", "MIT"),
    "SigLIP-L_16": (256, "features beside text", "Apache-2.0"),
    "SigLIP*": (224, "features beside text", "Apache-2.0"),
    "MAE*": (224, "fine-tuning", "CC-BY-NC-4.0"),
    "FlexiViT*": (240, "any patch size", "Apache-2.0"),
    "ViT*": (224, "classification", "Apache-2.0"),
    "R*+ViT*": (224, "classification", "Apache-2.0"),
    "Axial*": (224, "classification", ""),
    "BiT*": (224, "classification", "Apache-2.0"),
}
# Names of the Hugging Face hub.
_HUB: Mapping[str, str] = {
    "ViT-B_16": "hf:google/vit-base-patch16-224-in21k",
    "ViT-L_16": "hf:google/vit-large-patch16-224-in21k",
    "DeiT-Ti_16-distilled": "hf:facebook/deit-tiny-distilled-patch16-224",
    "DeiT-S_16-distilled": "hf:facebook/deit-small-distilled-patch16-224",
    "DeiT-B_16-distilled": "hf:facebook/deit-base-distilled-patch16-224",
    "DeiT3-S_16": "timm/deit3_small_patch16_224.fb_in1k",
    "DeiT3-M_16": "timm/deit3_medium_patch16_224.fb_in1k",
    "DeiT3-B_16": "timm/deit3_base_patch16_224.fb_in1k",
    "DeiT3-L_16": "timm/deit3_large_patch16_224.fb_in1k",
    "DeiT3-H_14": "timm/deit3_huge_patch14_224.fb_in1k",
    "DINOv2-S_14": "hf:facebook/dinov2-small",
    "DINOv2-B_14": "hf:facebook/dinov2-base",
    "DINOv2-L_14": "hf:facebook/dinov2-large",
    "DINOv2-g_14": "hf:facebook/dinov2-giant",
    "DINOv2-S_14-reg4": "hf:facebook/dinov2-with-registers-small",
    "DINOv2-B_14-reg4": "hf:facebook/dinov2-with-registers-base",
    "DINOv2-L_14-reg4": "hf:facebook/dinov2-with-registers-large",
    "DINOv2-g_14-reg4": "hf:facebook/dinov2-with-registers-giant",
    "DINOv3-S_16": "hf:facebook/dinov3-vits16-pretrain-lvd1689m",
    "DINOv3-S+_16": "hf:facebook/dinov3-vits16plus-pretrain-lvd1689m",
    "DINOv3-B_16": "hf:facebook/dinov3-vitb16-pretrain-lvd1689m",
    "DINOv3-L_16": "hf:facebook/dinov3-vitl16-pretrain-lvd1689m",
    "DINOv3-H+_16": "hf:facebook/dinov3-vith16plus-pretrain-lvd1689m",
    "CLIP-L_14": "hf:openai/clip-vit-large-patch14",
    "SigLIP-B_16": "hf:google/siglip-base-patch16-224",
    "SigLIP-L_16": "hf:google/siglip-large-patch16-256",
    "SigLIP-So400m_14": "hf:google/siglip-so400m-patch14-224",
    "MAE-B_16": "hf:facebook/vit-mae-base",
    "MAE-L_16": "hf:facebook/vit-mae-large",
    "MAE-H_14": "hf:facebook/vit-mae-huge",
    "FlexiViT-S_16": "timm/flexivit_small.1200ep_in1k",
    "FlexiViT-B_16": "timm/flexivit_base.1200ep_in1k",
    "FlexiViT-L_16": "timm/flexivit_large.1200ep_in1k",
}
# The models that most people take, the first ones first.
USUAL = (
    "DINOv2-S_14", "DINOv2-B_14", "ViT-B_16", "ViT-S_16", "CLIP-L_14", "SigLIP-B_16", "DINOv3-S_16", "DeiT3-S_16",
    "BiT-R50x1",
)  # fmt: skip
# Names of ImageNet-21k checkpoints.
_UPSTREAM = re.compile(r"imagenet21k/|augreg:|bit:BiT-M-\w+$")
_AUGREG_HYBRIDS = {"R_Ti_16": "R+ViT-Ti_16", "R26_S_32": "R26+ViT-S_32", "R50_L_32": "R50+ViT-L_32"}


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A model of `keras_vit.MODELS`."""

    name: str
    pixels: int
    """Usual height and width of the image."""
    millions: float
    """Parameters in millions."""
    gmacs: float
    """Multiply-adds for one image in thousand millions."""
    purpose: str
    """Purpose of the checkpoints."""
    checkpoints: tuple[str, ...]
    """Names that `from_checkpoint` takes."""
    license: str
    """License of the checkpoints; empty if there is none."""

    @property
    def accuracy(self) -> float | None:
        """The best published top-1 accuracy of a checkpoint on ImageNet, in percent; None if none is known."""
        return max((ACCURACY[name].top1 for name in self.checkpoints if name in ACCURACY), default=None)


def find_models(wildcard: str = "*", *, pretrained: bool = False) -> list[PublishedModel]:
    """Return the models whose names fit a wildcard, see `fitting`; with `pretrained`, those with checkpoints."""
    by_model: dict[str, list[str]] = {}
    for name, checkpoint in [*((_model_of(each), each) for each in official_names()), *_HUB.items()]:
        by_model.setdefault(name, []).append(checkpoint)
    models = []
    for name in fitting(MODELS, wildcard):
        checkpoints, families = tuple(by_model.get(name, ())), _FAMILIES.items()
        if checkpoints or not pretrained:
            pixels, purpose, terms = next(facts for pattern, facts in families if fnmatch.fnmatchcase(name, pattern))
            terms = terms if checkpoints else ""
            models.append(PublishedModel(name, pixels, *_SIZES[name], purpose, checkpoints, terms))
    return models


def fitting(names: Iterable[str], wildcard: str) -> list[str]:
    """The names that fit a shell wildcard, else those that contain it as a text; in any case."""
    names, wildcard = list(names), wildcard.lower()
    fit = [name for name in names if fnmatch.fnmatchcase(name.lower(), wildcard)]
    return fit or [name for name in names if wildcard in name.lower()]


def list_models(wildcard: str = "*", *, pretrained: bool = False) -> list[str]:
    """Return the names of `keras_vit.MODELS` that fit a wildcard; `keras-vit models` prints more of each.

    Args:
        wildcard: shell pattern such as "vit*_16", or a part of a name, in upper or lower case. Default: all models.
        pretrained: only models with checkpoints that `from_checkpoint` downloads by name.

    Returns:
        Names for `build`, in the order of `MODELS`; empty if none fits.
    """
    return [model.name for model in find_models(wildcard, pretrained=pretrained)]


def upstream_checkpoint(model: str) -> str:
    """The ImageNet-21k checkpoint of a model: of the first paper, else AugReg's. Raises UserError for none."""
    checkpoints_of = {each.name: each.checkpoints for each in find_models()}
    upstream = {
        name: checkpoints[0]
        for name in checkpoints_of
        if (checkpoints := [each for each in checkpoints_of[name] if _UPSTREAM.match(each)])
    }
    if model in upstream:
        return upstream[model]
    advice = f"the nearest models that have one are {nearest(model, upstream)}"
    if checkpoints_of[model]:
        advice = f"give --checkpoint {checkpoints_of[model][0]}, or another model: {advice}"
    raise UserError(f"The official model {model!r} has no published ImageNet-21k checkpoint; {advice}.")


def _model_of(checkpoint: str) -> str:
    family, _, file = checkpoint.rpartition(":")
    if family == "augreg":
        return _AUGREG_HYBRIDS.get(file, f"ViT-{file}")
    if family == "big_vision":
        return "ViT-S_16-gap-norep"
    name = file.rpartition("/")[-1]
    if family == "bit":  # BiT-M-R50x1-ILSVRC2012, R50x1_224
        return f"BiT-{next(part for part in re.split('[_-]', name) if part[0] == 'R')}"
    return name.removesuffix("-224")
