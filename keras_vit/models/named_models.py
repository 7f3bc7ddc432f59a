"""The table of the official names of models.

Sizes: paper "An Image is Worth 16x16 Words" (arXiv 2010.11929) Table 1, "How to train your ViT" (2106.10270) Table 1,
and big_vision `models/vit.py` for M, So400m, g and G. Patch sizes, classifiers and dropout rates of the entries that
vision_transformer publishes: `vit_jax/configs/models.py`. BiT: big_transfer `bit_jax/models.py`; the further ResNets
and hybrids are those of the first paper's experiments (section 4.1 and Table 6). DeiT to FlexiViT: timm 1.0.31 and
transformers 5.23.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from keras_vit.errors import check_known
from keras_vit.models.config import Classifier, ConvStem, ModelConfig, ResNetConfig, ViTConfig, hybrid_resnet


def _vit(size: str, patch_size: int, classifier: Classifier = "token", dropout_rate: float = 0.0) -> ViTConfig:
    hidden_size, mlp_dim, num_layers, num_heads = _SIZES[size]
    sizes = (patch_size, hidden_size, num_layers, num_heads, mlp_dim)
    return ViTConfig(*sizes, classifier=classifier, dropout_rate=dropout_rate)


# size: (hidden_size, mlp_dim, num_layers, num_heads)
_SIZES = {
    "testing": (10, 10, 1, 2),
    "Ti": (192, 768, 12, 3),
    "S": (384, 1536, 12, 6),
    "M": (512, 2048, 12, 8),
    "B": (768, 3072, 12, 12),
    "L": (1024, 4096, 24, 16),
    "So400m": (1152, 4304, 27, 16),
    "H": (1280, 5120, 32, 16),
    "g": (1408, 6144, 40, 16),
    "G": (1664, 8192, 48, 16),
}

_RESNET_UNITS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
# ResNet-50 without its last stage, whose three units are added to the third: half the stride, four times the tokens.
_RESNET50_STAGE3 = (3, 4, 9)


def _hybrid(size: str, block_units: tuple[int, ...], patch_size: int = 1, dropout_rate: float = 0.0) -> ViTConfig:
    return dataclasses.replace(_vit(size, patch_size, dropout_rate=dropout_rate), stem=hybrid_resnet(block_units))


def _early_convolutions(hidden_size: int, layers: int, heads: int, mlp_dim: int, channels: tuple) -> ViTConfig:
    """3x3 convolutions; those that increase the channels have stride 2. The published code uses the exact GELU."""
    strides = tuple(1 if wide == before else 2 for before, wide in zip((0, *channels), channels, strict=False))
    stem = ConvStem(channels, (3,) * len(channels), strides)
    return ViTConfig(1, hidden_size, layers, heads, mlp_dim, gelu="erf", stem=stem)


def _bit(depth: int, width_factor: int) -> ResNetConfig:
    return ResNetConfig(_RESNET_UNITS[depth], 64 * width_factor)


def _axial(size: str, patch_size: int) -> ViTConfig:
    return dataclasses.replace(_vit(size, patch_size, classifier="gap"), axial=True)


_MODELS: dict[str, ModelConfig] = {
    "testing": _vit("testing", 16, dropout_rate=0.1),
    "testing-unpooled": _vit("testing", 16, classifier="unpooled", dropout_rate=0.1),
    "ViT-Ti_16": _vit("Ti", 16),
    "ViT-S_16": _vit("S", 16),
    "ViT-S_32": _vit("S", 32),
    "ViT-S_16-gap-norep": _vit("S", 16, classifier="gap"),
    "ViT-S_32-gap-norep": _vit("S", 32, classifier="gap"),
    "ViT-M_16": _vit("M", 16),
    "ViT-M_32": _vit("M", 32),
    "ViT-B_8": _vit("B", 8),
    "ViT-B_16": _vit("B", 16),
    "ViT-B_32": _vit("B", 32),
    "ViT-B_16-gap-norep": _vit("B", 16, classifier="gap"),
    "ViT-B_32-gap-norep": _vit("B", 32, classifier="gap"),
    "ViT-L_16": _vit("L", 16, dropout_rate=0.1),
    "ViT-L_32": _vit("L", 32),
    "ViT-So400m_14": _vit("So400m", 14),
    "ViT-H_14": _vit("H", 14, dropout_rate=0.1),
    "ViT-g_14": _vit("g", 14),
    "ViT-G_14": _vit("G", 14),
}
# The number after a hybrid's name is its total stride, not its patch; R+ViT-Ti_16 is an exception: 4 * 8 = 32.
_MODELS |= {
    "R+ViT-Ti_16": _hybrid("Ti", (), patch_size=8),
    "R26+ViT-S_32": _hybrid("S", _RESNET_UNITS[26]),
    "R26+ViT-B_32": _hybrid("B", _RESNET_UNITS[26]),
    "R50+ViT-B_16": _hybrid("B", _RESNET50_STAGE3, dropout_rate=0.1),
    "R50+ViT-B_32": _hybrid("B", _RESNET_UNITS[50]),
    "R50+ViT-L_16": _hybrid("L", _RESNET50_STAGE3),
    "R50+ViT-L_32": _hybrid("L", _RESNET_UNITS[50], dropout_rate=0.1),
    "ViT_C-1GF": _early_convolutions(192, 11, 3, 576, (24, 48, 96, 192)),
    "ViT_C-4GF": _early_convolutions(384, 11, 6, 1152, (48, 96, 192, 384)),
    "ViT_C-18GF": _early_convolutions(768, 11, 12, 3072, (64, 128, 128, 256, 256, 512)),
    "ViT_C-36GF": _early_convolutions(1024, 13, 16, 4096, (64, 128, 128, 256, 256, 512)),
    "Axial-ViT-B_16": _axial("B", 16),
    "Axial-ViT-B_32": _axial("B", 32),
    "AxialResNet50": dataclasses.replace(hybrid_resnet(_RESNET_UNITS[50]), axial_heads=8),
    "BiT-R26x1": _bit(26, 1),
    "BiT-R50x1": _bit(50, 1),
    "BiT-R50x2": _bit(50, 2),
    "BiT-R50x3": _bit(50, 3),
    "BiT-R101x1": _bit(101, 1),
    "BiT-R101x3": _bit(101, 3),
    "BiT-R152x1": _bit(152, 1),
    "BiT-R152x2": _bit(152, 2),
    "BiT-R152x4": _bit(152, 4),
    "BiT-R200x3": _bit(200, 3),
}


def _erf(size: str, patch_size: int, **fields: Any) -> ViTConfig:
    return dataclasses.replace(_vit(size, patch_size), **{"gelu": "erf", **fields})


_GATED = {"gated_mlp": True, "gelu": "silu"}
_CLIP = {"pre_norm": True, "patch_bias": False, "head_bias": False, "layer_norm_epsilon": 1e-5}
_DINOV3 = {"position_embedding": "rotary", "key_bias": False, "num_registers": 4, "layer_scale": 1.0}
_DINOV3 |= {"layer_norm_epsilon": 1e-5}
_DINOV2_SIZES = {"S": {}, "B": {}, "L": {}, "g": {"hidden_size": 1536, "num_heads": 24, "mlp_dim": 4096, **_GATED}}
_MODELS |= {f"DeiT-{size}_16-distilled": _erf(size, 16, distillation="head") for size in ("Ti", "S", "B")}
_MODELS |= {
    f"DeiT3-{size}": _erf(size[:-3], int(size[-2:]), prefix_positions=False, layer_scale=1e-6)
    for size in ("S_16", "M_16", "B_16", "L_16", "H_14")
}
_MODELS |= {f"DINOv2-{size}_14": _erf(size, 14, layer_scale=1e-5, **more) for size, more in _DINOV2_SIZES.items()}
_MODELS |= {
    f"DINOv2-{size}_14-reg4": _erf(size, 14, layer_scale=1e-5, num_registers=4, **more)
    for size, more in _DINOV2_SIZES.items()
}
_MODELS |= {f"DINOv3-{size}_16": _erf(size, 16, **_DINOV3) for size in ("S", "B", "L")}
_MODELS |= {
    "DINOv3-S+_16": _erf("S", 16, **_DINOV3, **_GATED),
    "DINOv3-H+_16": _erf("H", 16, **_DINOV3, **_GATED, num_heads=20),
}
_MODELS |= {f"CLIP-{size}": _erf(size[:-3], int(size[-2:]), **_CLIP, gelu="quick") for size in ("B_32", "B_16", "L_14")}
_MODELS |= {
    f"OpenCLIP-{size}": _erf(size[:-3], int(size[-2:]), **_CLIP)
    for size in ("B_32", "B_16", "L_14", "H_14", "g_14", "G_14")
}
_MODELS |= {f"SigLIP-{size}": _vit(size[:-3], int(size[-2:]), "map") for size in ("B_16", "L_16", "So400m_14")}
_MODELS |= {
    f"MAE-{size}": _erf(size[:-3], int(size[-2:]), layer_norm_epsilon=1e-12) for size in ("B_16", "L_16", "H_14")
}
_MODELS |= {f"FlexiViT-{size}_16": _erf(size, 16, prefix_positions=False) for size in ("S", "B", "L")}
MODELS: Mapping[str, ModelConfig] = types.MappingProxyType(_MODELS)


def model_config(model: str | ModelConfig) -> ModelConfig:
    """Return the configuration named `model`, or `model` if it is one. Raises UserError for an unknown name."""
    if isinstance(model, ModelConfig):
        return model
    check_known("model", model, MODELS)
    return MODELS[model]
