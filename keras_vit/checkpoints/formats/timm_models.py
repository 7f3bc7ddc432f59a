"""The architectures of timm 1.0.31 whose arrays are those of a supported model, and what their names say."""

import dataclasses
import re
from collections.abc import Mapping

from keras_vit.models.config import Classifier, Gelu


@dataclasses.dataclass(frozen=True)
class TimmModel:
    """One architecture of timm; fields are None without attention."""

    num_heads: int | None
    gelu: Gelu | None
    layer_norm_epsilon: float = 1e-6


def _models(
    names: str, num_heads: int | None, gelu: Gelu | None = "erf", epsilon: float = 1e-6
) -> dict[str, TimmModel]:
    return dict.fromkeys(names.split(), TimmModel(num_heads, gelu, epsilon))


TIMM_MODELS: Mapping[str, TimmModel] = {
    **_models("test_vit", 2),
    **_models("deit_tiny_patch16_224 vit_tiny_patch16_224 vit_tiny_patch16_384", 3),
    **_models("vit_tiny_r_s16_p8_224 vit_tiny_r_s16_p8_384", 3),
    **_models("deit_small_patch16_224 vit_small_patch8_224 vit_small_patch16_224 vit_small_patch16_384", 6),
    **_models("vit_small_patch32_224 vit_small_patch32_384 vit_small_r26_s32_224 vit_small_r26_s32_384", 6),
    **_models("deit_base_patch16_224 deit_base_patch16_384 vit_base_patch8_224 vit_base_patch16_224", 12),
    **_models("vit_base_patch16_224_miil vit_base_patch16_384 vit_base_patch32_224 vit_base_patch32_384", 12),
    **_models("vit_base_r26_s32_224 vit_base_r50_s16_224 vit_base_r50_s16_384", 12),
    **_models("vit_base_patch16_siglip_gap_224 vit_base_patch16_siglip_gap_256", 12),
    **_models("vit_base_patch16_siglip_gap_384 vit_base_patch16_siglip_gap_512", 12),
    **_models("vit_base_patch32_siglip_gap_256", 12, "tanh"),
    **_models("vit_base_patch16_gap_224", 16),
    **_models("vit_large_patch14_224 vit_large_patch16_224 vit_large_patch16_384", 16),
    **_models("vit_large_patch32_224 vit_large_patch32_384 vit_large_r50_s32_224 vit_large_r50_s32_384", 16),
    **_models("vit_large_patch16_siglip_gap_256 vit_large_patch16_siglip_gap_384", 16),
    **_models("vit_large_patch16_siglip_gap_512", 16, "tanh"),
    **_models("vit_so400m_patch14_siglip_gap_224 vit_so400m_patch14_siglip_gap_378", 16),
    **_models("vit_so400m_patch14_siglip_gap_384 vit_so400m_patch14_siglip_gap_448", 16),
    **_models("vit_so400m_patch14_siglip_gap_896", 16),
    **_models("vit_so400m_patch16_siglip_gap_256 vit_so400m_patch16_siglip_gap_384", 16, "tanh"),
    **_models("vit_so400m_patch16_siglip_gap_512", 16, "tanh"),
    **_models("vit_giantopt_patch16_siglip_gap_256 vit_giantopt_patch16_siglip_gap_384", 16, "tanh"),
    **_models("vit_huge_patch14_224 vit_huge_patch14_gap_224 vit_huge_patch16_gap_448", 16),
    **_models("vit_giant_patch14_224 vit_giant_patch16_gap_224 vit_gigantic_patch14_224", 16),
    **_models("deit_tiny_distilled_patch16_224", 3),
    **_models("vit_wee_patch16_reg1_gap_256", 4),
    **_models("vit_xsmall_patch16_clip_224", 4, "erf", 1e-5),
    **_models("vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256", 5),
    **_models("deit3_small_patch16_224 deit3_small_patch16_384 deit_small_distilled_patch16_224 flexivit_small", 6),
    **_models("vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2 vit_small_patch16_36x1_224", 6),
    **_models("deit3_medium_patch16_224 vit_medium_patch16_gap_240 vit_medium_patch16_gap_256", 8),
    **_models("vit_medium_patch16_gap_384 vit_medium_patch16_reg1_gap_256 vit_medium_patch16_reg4_gap_256", 8),
    **_models("vit_mediumd_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_384", 8),
    **_models("vit_medium_patch16_clip_224 vit_medium_patch32_clip_224", 8, "erf", 1e-5),
    **_models("vit_betwixt_patch16_gap_256 vit_betwixt_patch16_reg1_gap_256 vit_betwixt_patch16_reg4_gap_256", 10),
    **_models("vit_betwixt_patch16_reg4_gap_384", 10),
    **_models("vit_betwixt_patch32_clip_224", 10, "erf", 1e-5),
    **_models("deit3_base_patch16_224 deit3_base_patch16_384 deit_base_distilled_patch16_224", 12),
    **_models("deit_base_distilled_patch16_384 flexivit_base vit_base_patch14_dinov2", 12),
    **_models("vit_base_patch14_reg1_tipsv2 vit_base_patch14_reg4_dinov2 vit_base_patch16_reg4_gap_256", 12),
    **_models("vit_base_patch16_siglip_224 vit_base_patch16_siglip_256 vit_base_patch16_siglip_384", 12),
    **_models("vit_base_patch16_siglip_512", 12),
    **_models("vit_base_patch16_clip_224 vit_base_patch16_clip_384 vit_base_patch32_clip_224", 12, "erf", 1e-5),
    **_models("vit_base_patch32_clip_256 vit_base_patch32_clip_384 vit_base_patch32_clip_448", 12, "erf", 1e-5),
    **_models("vit_base_patch16_clip_quickgelu_224 vit_base_patch32_clip_quickgelu_224", 12, "quick", 1e-5),
    **_models("vit_base_patch32_siglip_256", 12, "tanh"),
    **_models("vit_base_patch16_plus_240 vit_base_patch32_plus_256", 14),
    **_models("vit_base_patch16_plus_clip_240", 14, "erf", 1e-5),
    **_models("deit3_huge_patch14_224 deit3_large_patch16_224 deit3_large_patch16_384 flexivit_large", 16),
    **_models("vit_large_patch14_dinov2 vit_large_patch14_reg1_tipsv2 vit_large_patch14_reg4_dinov2", 16),
    **_models("vit_large_patch16_siglip_256 vit_large_patch16_siglip_384 vit_so400m_patch14_reg1_tipsv2", 16),
    **_models("vit_so400m_patch14_siglip_224 vit_so400m_patch14_siglip_378 vit_so400m_patch14_siglip_384", 16),
    **_models("vit_giant_patch14_clip_224 vit_gigantic_patch14_clip_224", 16, "erf", 1e-5),
    **_models("vit_gigantic_patch14_clip_378 vit_huge_patch14_clip_224 vit_huge_patch14_clip_336", 16, "erf", 1e-5),
    **_models("vit_huge_patch14_clip_378 vit_large_patch14_clip_224 vit_large_patch14_clip_336", 16, "erf", 1e-5),
    **_models("vit_gigantic_patch14_clip_quickgelu_224 vit_huge_patch14_clip_quickgelu_224", 16, "quick", 1e-5),
    **_models("vit_huge_patch14_clip_quickgelu_378 vit_large_patch14_clip_quickgelu_224", 16, "quick", 1e-5),
    **_models("vit_large_patch14_clip_quickgelu_336", 16, "quick", 1e-5),
    **_models("vit_giantopt_patch16_siglip_256 vit_giantopt_patch16_siglip_384", 16, "tanh"),
    **_models("vit_large_patch16_siglip_512 vit_so400m_patch16_siglip_256 vit_so400m_patch16_siglip_384", 16, "tanh"),
    **_models("vit_so400m_patch16_siglip_512", 16, "tanh"),
    **_models("vit_giant_patch14_dinov2 vit_giant_patch14_reg1_tipsv2 vit_giant_patch14_reg4_dinov2", 24, "silu"),
    **_models("vit_so150m2_patch16_reg1_gap_256 vit_so150m2_patch16_reg1_gap_384", 13),
    **_models("vit_so150m2_patch16_reg1_gap_448", 13),
    **_models("vit_so150m_patch16_reg4_gap_256 vit_so150m_patch16_reg4_gap_384", 14),
    **_models("eva_large_patch14_196 eva_large_patch14_336", 16),
    **_models("resnetv2_50x1_bit resnetv2_50x3_bit resnetv2_101x1_bit resnetv2_101x3_bit", None, None),
    **_models("resnetv2_152x2_bit resnetv2_152x4_bit", None, None),
}


@dataclasses.dataclass(frozen=True)
class EvaModel:
    """One architecture of timm's `Eva` with rotary positions: the fields of `ViTConfig` that its name decides."""

    num_heads: int
    qkv_bias: bool
    gated_mlp: bool = False
    classifier: Classifier = "gap"
    align: int = 8
    """The hidden width of a gated MLP is a multiple of this."""


EVA_MODELS: Mapping[str, EvaModel] = {
    "vit_tiny_patch16_dinov3_qkvb": EvaModel(3, True),
    "vit_small_patch16_dinov3": EvaModel(6, False),
    "vit_small_patch16_dinov3_qkvb": EvaModel(6, True),
    "vit_small_plus_patch16_dinov3": EvaModel(6, False, gated_mlp=True),
    "vit_small_plus_patch16_dinov3_qkvb": EvaModel(6, True, gated_mlp=True),
    "vit_base_patch16_dinov3": EvaModel(12, False),
    "vit_base_patch16_dinov3_qkvb": EvaModel(12, True),
    "vit_large_patch16_dinov3": EvaModel(16, False),
    "vit_large_patch16_dinov3_qkvb": EvaModel(16, True),
    "vit_huge_plus_patch16_dinov3": EvaModel(20, False, gated_mlp=True),
    "vit_huge_plus_patch16_dinov3_qkvb": EvaModel(20, True, gated_mlp=True),
    "vit_7b_patch16_dinov3": EvaModel(32, False, gated_mlp=True, align=64),
    "vit_small_patch16_lingbot": EvaModel(6, True, classifier="token"),
    "vit_base_patch16_lingbot": EvaModel(12, True, classifier="token"),
    "vit_large_patch16_lingbot": EvaModel(16, True, classifier="token"),
    "vit_giant_patch16_lingbot": EvaModel(24, False, gated_mlp=True, classifier="token"),
}
ACTIVATIONS: Mapping[str, Gelu] = {"gelu": "erf", "gelu_tanh": "tanh", "quick_gelu": "quick", "silu": "silu"}
# Architectures that timm 1.0.31 builds with qkv_bias=False, of all that are supported.
_WITHOUT_QKV_BIAS = (
    *("vit_base_patch16_224_miil", "vit_medium_patch16_gap_240", "vit_medium_patch16_gap_256"),
    *("vit_medium_patch16_gap_384", "vit_betwixt_patch16_gap_256", "vit_so150m2_patch16_reg1_gap_256"),
    *("vit_so150m2_patch16_reg1_gap_384", "vit_so150m2_patch16_reg1_gap_448"),
)
# Ends of deprecated names, which named the training, and other parts of them, with what replaced them in timm 0.8.
_DEPRECATED = (
    (r"_(in21k|in21ft1k|sam|dino)$", ""),
    (r"_bitm$", "_bit"),
    (r"_bit_(distilled|teacher|teacher_384)$", "_bit"),
    (r"_(\d+)_clip_laion2b$", r"_clip_\1"),
    (r"^vit_base_resnet50_", "vit_base_r50_s16_"),
)


def current_name(architecture: str) -> str:
    """The name that timm 1.0.31 has for an architecture; another one for those that it deprecates."""
    if architecture.partition(".")[0] in TIMM_MODELS:
        return architecture
    for old, new in _DEPRECATED:
        architecture = re.sub(old, new, architecture)
    return architecture


def components_of(architecture: str) -> dict[str, tuple[str, object]]:
    """Components that an architecture always has: ViTConfig field -> (argument of timm, value)."""
    name = architecture.partition(".")[0]
    if TIMM_MODELS[name].num_heads is None:
        return {}
    found: dict[str, tuple[str, object]] = {"position_embedding": ("pos_embed", "learned")}
    if name not in _WITHOUT_QKV_BIAS:
        found["qkv_bias"] = "qkv_bias", True
    if "_clip_" in architecture:
        found["pre_norm"] = "pre_norm", True
    if registers := re.search(r"_reg(\d+)_", architecture):
        found["num_registers"] = "reg_tokens", int(registers[1])
    if architecture.startswith("deit3_"):
        found["has_class_token"] = "class_token", True
    return found


def layer_scale_of(architecture: str) -> float | None:
    """An initial layer scale for an architecture that has one, else None; the stored factors are read in any case."""
    return 1e-5 if architecture.startswith(("deit3_", "vit_so150m2_")) or "dinov2" in architecture else None


def is_gated(architecture: str) -> bool:
    """Whether an architecture has DINOv2's SwiGLU, of which mlp_ratio counts gate and value."""
    return TIMM_MODELS[architecture.partition(".")[0]].gelu == "silu"


def default_pooling(architecture: str) -> Classifier | None:
    """How an architecture pools where its config.json does not say how; None where the arrays tell it."""
    if "_gap_" in architecture or architecture.startswith("eva_large_"):
        return "gap"
    return "map" if "_siglip_" in architecture else None


def has_class_token(architecture: str) -> bool:
    """Whether an architecture has a class token where its config.json does not say it."""
    return "_gap_" not in architecture and "_siglip_" not in architecture
