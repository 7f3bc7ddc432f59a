"""The architectures of timm 1.0.31 whose arrays are those of a supported model, and what their names say."""

import dataclasses
import re
from collections.abc import Mapping

from keras_vit.errors import UserError
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

ACTIVATIONS: Mapping[str, Gelu] = {"gelu": "erf", "gelu_tanh": "tanh", "quick_gelu": "quick", "silu": "silu"}
# Arguments that follow from keys and shapes of the arrays, and arguments that do not affect the outputs.
# fmt: off
_IN_ARRAYS = (
    "img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth",
    "num_heads", "mlp_ratio", "qkv_bias", "init_values", "class_token", "pos_embed", "reg_tokens", "pre_norm",
    "fc_norm", "global_pool", "layers", "channels", "width_factor", "stem_chs", "no_embed_class",
)
# fmt: on
# fmt: off
WITHOUT_EFFECT = (
    "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "weight_init", "fix_init", "zero_init_last",
    "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate",
)
# fmt: on
# Arguments that are supported with one value only.
_FIXED = {"pool_include_prefix": False, "use_naflex": False, "output_stride": 32}
_FIXED |= {"qk_norm": False, "scale_attn_norm": False, "scale_mlp_norm": False, "proj_bias": True, "final_norm": True}
# Arguments for which null is what the architectures have anyway, or what shows in the arrays.
_NULLABLE = ("fc_norm", "init_values", "norm_layer", "embed_norm_layer", *WITHOUT_EFFECT)
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


def timm_model(architecture: object, arguments: Mapping[str, object]) -> TimmModel:
    """The settings of an architecture with these `model_args`.

    Raises UserError for an unsupported architecture or argument.
    """
    if not isinstance(architecture, str) or architecture.partition(".")[0] not in TIMM_MODELS:
        raise UserError(
            f"config.json has the unsupported architecture={architecture!r:.80}; give a checkpoint of one of the "
            f"{len(TIMM_MODELS)} supported models of timm."
        )
    model = TIMM_MODELS[architecture.partition(".")[0]]
    # Without its own norm_layer, CLIP would have timm's epsilon of 1e-6.
    nullable = _NULLABLE if model.layer_norm_epsilon == 1e-6 else tuple(n for n in _NULLABLE if n != "norm_layer")
    known = {name: value for name, value in arguments.items() if value is not None or name not in nullable}
    if "act_layer" in known:
        activation = known.pop("act_layer")
        activation = "gelu" if activation is None else activation  # which replaces that of the architecture
        if model.gelu is None or not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise UserError(
                f"config.json has the unsupported act_layer={activation!r:.80}; give a checkpoint of a model with "
                f"{' or '.join(ACTIVATIONS)}."
            )
        model = dataclasses.replace(model, gelu=ACTIVATIONS[activation])
    for name, value in known.items():
        fixed = name in _FIXED and type(value) is type(_FIXED[name]) and value == _FIXED[name]
        is_known = value is not None and (name in (*_IN_ARRAYS, *WITHOUT_EFFECT) or fixed)
        check_argument(name, value, is_known=is_known)
    return model


def check_argument(name: str, value: object, *, is_known: bool) -> None:
    """Raise UserError for one of the `model_args` that is not known."""
    if not is_known:
        raise UserError(
            f"config.json has the unsupported {name:.80}={value!r:.80} in model_args; give a checkpoint of a model "
            "without it."
        )
