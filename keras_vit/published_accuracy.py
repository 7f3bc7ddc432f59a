"""Published top-1 accuracies on ImageNet's validation images, and the preprocessing that they were measured with."""

import dataclasses
import types
from collections.abc import Mapping

from keras_vit.images.resizing import Resize


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


def _of_timm() -> dict[str, PublishedAccuracy]:
    rows = (line.split() for line in _TIMM.split("\n") if line)
    return {
        f"hf:timm/{name}": PublishedAccuracy(float(top1), "results-imagenet.csv of timm", int(pixels), None)
        for name, pixels, top1 in rows
    }


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
    | _of_timm()
)
