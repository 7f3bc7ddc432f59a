"""Parameters, operations and activations of a model: those worked out from its config, and those of the papers."""

import dataclasses

import pytest

from keras_vit import MODELS, ConvStem, ResNetConfig
from keras_vit.models.complexity import Costs, costs
from tests.support import TINY, TINY_IMAGE, TINY_STEM, others_slow

CONFIGS = {
    "token": TINY,
    "gap with pre_logits": dataclasses.replace(TINY, classifier="gap", representation_size=7),
    "map": dataclasses.replace(TINY, classifier="map"),
    "unpooled": dataclasses.replace(TINY, classifier="unpooled"),
    "features": dataclasses.replace(TINY, classifier="none"),
    "dropout": dataclasses.replace(TINY, dropout_rate=0.1, stochastic_depth_rate=0.2),
    "no bias": dataclasses.replace(TINY, qkv_bias=False),
    "norm after pooling": dataclasses.replace(TINY, classifier="gap", norm_after_pooling=True),
    "two-dimensional": dataclasses.replace(TINY, position_embedding="learned-2d", position_injection="every-layer"),
    "shared": dataclasses.replace(TINY, position_injection="shared"),
    "fixed": dataclasses.replace(TINY, position_embedding="sincos-2d"),
    "relative": dataclasses.replace(TINY, position_embedding="relative"),
    "axial": dataclasses.replace(TINY, axial=True, classifier="gap", position_embedding="relative"),
    "hybrid": dataclasses.replace(TINY, patch_size=1, stem=TINY_STEM),
    "conv stem": dataclasses.replace(TINY, patch_size=1, stem=ConvStem((4, 5, 8), (3, 3, 5), (2, 1, 2))),
    "BiT": ResNetConfig((2, 1, 2), 8, num_groups=2),
    "AxialResNet": ResNetConfig((1, 2), 8, preactivation=False, num_groups=2, axial_heads=2),
}


# Parameters, multiply-adds, activations and operations of norms, as worked out from the configurations alone.
COUNTED = {
    "token": (3511, 59076, 9987, 4800), "gap with pre_logits": (3563, 55545, 9112, 4500),
    "map": (4659, 60924, 9714, 4560), "unpooled": (3487, 55980, 9135, 4500), "features": (3448, 55440, 9090, 4500),
    "dropout": (3511, 59076, 11971, 4800), "no bias": (3439, 59076, 9987, 4800),
    "norm after pooling": (3487, 55476, 8937, 3660), "two-dimensional": (3439, 59076, 10179, 4800),
    "shared": (3511, 59076, 10179, 4800), "fixed": (3319, 59076, 9987, 4800), "relative": (3567, 70980, 11331, 4800),
    "axial": (5787, 87156, 17655, 8100), "hybrid": (4443, 339732, 33561, 39180),
    "conv stem": (5071, 872340, 130117, 50220), "BiT": (51819, 1127808, 83311, 282656),
    "AxialResNet": (13795, 1168320, 109315, 119776),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", others_slow(CONFIGS, "token", "map", "relative", "axial", "hybrid", "conv stem", "BiT", "AxialResNet")
)
def test_costs_are_those_worked_out_from_the_configuration(name):
    image = (32, 48) if isinstance(CONFIGS[name], ResNetConfig) or CONFIGS[name].stem else TINY_IMAGE
    classes = 0 if name == "features" else 3
    assert costs(CONFIGS[name], image, num_classes=classes) == Costs(*COUNTED[name])


# Thousand millions of multiply-adds, as torchvision, timm and the papers print them.
PUBLISHED = {
    ("ViT-Ti_16", 224): 1.26, ("ViT-Ti_16", 384): 4.70, ("ViT-S_32", 224): 1.15, ("ViT-S_32", 384): 3.45,
    ("ViT-S_16", 224): 4.61, ("ViT-S_16", 384): 15.52, ("ViT-B_32", 224): 4.41, ("ViT-B_32", 384): 13.06,
    ("ViT-B_16", 224): 17.58, ("ViT-B_16", 384): 55.54, ("ViT-B_8", 224): 78.22, ("ViT-L_32", 224): 15.39,
    ("ViT-L_32", 384): 45.31, ("ViT-L_16", 224): 61.6, ("ViT-L_16", 384): 191.21, ("ViT-L_16", 512): 362.0,
    ("ViT-H_14", 224): 167.4, ("ViT-H_14", 518): 1016.7, ("ViT-g_14", 224): 267.18, ("ViT-G_14", 224): 483.95,
    ("R+ViT-Ti_16", 224): 0.44, ("R+ViT-Ti_16", 384): 1.34, ("R26+ViT-S_32", 224): 3.56,
    ("R26+ViT-S_32", 384): 10.43, ("R26+ViT-B_32", 224): 6.81, ("R50+ViT-B_16", 224): 21.66,
    ("R50+ViT-B_16", 384): 67.43, ("R50+ViT-L_32", 224): 19.58, ("R50+ViT-L_32", 384): 57.43,
    ("BiT-R50x1", 224): 4.23, ("BiT-R50x3", 224): 37.06, ("BiT-R101x1", 224): 8.04, ("BiT-R101x3", 224): 71.23,
    ("BiT-R152x2", 224): 46.95, ("BiT-R152x4", 224): 186.9, ("BiT-R50x3", 448): 145.7, ("BiT-R152x4", 480): 844.84,
}  # fmt: skip


@pytest.mark.parametrize(("name", "side"), others_slow(PUBLISHED, ("R+ViT-Ti_16", 384)))
def test_operations_are_those_published(name, side):
    found = costs(MODELS[name], (side, side))
    tables = (found.multiply_adds + found.normalization) / 1e9
    assert tables == pytest.approx(PUBLISHED[name, side], rel=0.01)
