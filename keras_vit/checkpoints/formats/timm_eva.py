"""timm's `Eva` with rotary positions: DINOv3, EUPE and LingBot-Vision as timm stores them.

The class Eva of timm 1.0.31. Of its other models of this class, none has the blocks of this package.
"""

import dataclasses
from collections.abc import Mapping

from keras_vit.checkpoints.formats import timm_config
from keras_vit.checkpoints.formats.file_config import FileConfig, Sizes, number
from keras_vit.checkpoints.formats.layout import DEFAULTS, Layout, WrittenModel
from keras_vit.checkpoints.formats.timm_models import WITHOUT_EFFECT, check_argument
from keras_vit.checkpoints.key_mapping import (
    ATTENTION,
    BLOCK,
    CONV,
    PROJECTIONS,
    Rule,
    dense,
    fused,
    fused_kernels,
    norm,
)
from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.config import Classifier, ViTConfig

LAYOUT = "timm"
SUFFIXES: tuple[str, ...] = (".safetensors", "")
CONFIG_FILES: tuple[str, ...] = (timm_config.CONFIG,)
_MLP = f"{BLOCK}MlpBlock_3/"
# Arrays by which timm's other models are known, and their names; the first that matches.
_OTHERS = (
    ("blocks.0.attn.relative_position_bias_table", "BEiT"),
    ("rel_pos_bias.relative_position_bias_table", "BEiT"),
    ("embeds.proj.weight", "NaFlex ViT"),
    ("layers.0.blocks.0.norm1.weight", "Swin Transformer"),
    ("patch_embed.norm.weight", "AIMv2"),
    ("blocks_token_only.0.gamma_1", "CaiT"),
    ("blocks.0.mlp.norm.weight", "EVA-02 or BEiT-3"),
    ("blocks.0.attn.q_proj.weight", "EVA-02 or Sapiens2"),
)


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """The fields of `ViTConfig` that the name of an architecture decides."""

    num_heads: int
    qkv_bias: bool
    gated_mlp: bool = False
    classifier: Classifier = "gap"
    align: int = 8
    """The hidden width of a gated MLP is a multiple of this."""


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "vit_tiny_patch16_dinov3_qkvb": _Architecture(3, True),
    "vit_small_patch16_dinov3": _Architecture(6, False),
    "vit_small_patch16_dinov3_qkvb": _Architecture(6, True),
    "vit_small_plus_patch16_dinov3": _Architecture(6, False, gated_mlp=True),
    "vit_small_plus_patch16_dinov3_qkvb": _Architecture(6, True, gated_mlp=True),
    "vit_base_patch16_dinov3": _Architecture(12, False),
    "vit_base_patch16_dinov3_qkvb": _Architecture(12, True),
    "vit_large_patch16_dinov3": _Architecture(16, False),
    "vit_large_patch16_dinov3_qkvb": _Architecture(16, True),
    "vit_huge_plus_patch16_dinov3": _Architecture(20, False, gated_mlp=True),
    "vit_huge_plus_patch16_dinov3_qkvb": _Architecture(20, True, gated_mlp=True),
    "vit_7b_patch16_dinov3": _Architecture(32, False, gated_mlp=True, align=64),
    "vit_small_patch16_lingbot": _Architecture(6, True, classifier="token"),
    "vit_base_patch16_lingbot": _Architecture(12, True, classifier="token"),
    "vit_large_patch16_lingbot": _Architecture(16, True, classifier="token"),
    "vit_giant_patch16_lingbot": _Architecture(24, False, gated_mlp=True, classifier="token"),
}
# What model_args may say, with the only value that these architectures have; None: it is in the arrays.
_FIXED = {"rope_type": "dinov3", "rope_temperature": 100, "rope_rotate_half": True, "use_rot_pos_emb": True}
_FIXED |= {"use_abs_pos_emb": False, "use_fc_norm": False, "class_token": True, "qkv_fused": True, "attn_type": "eva"}
_FIXED |= {"scale_mlp": False, "scale_attn_inner": False, "use_post_norm": False, "qk_norm": False}
_FIXED |= {"use_pre_transformer_norm": False, "attn_only_layer_scale": False, "rope_grid_offset": 0}
_IN_ARRAYS = {"img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio"}
_IN_ARRAYS |= {"num_reg_tokens", "init_values", "global_pool", "qkv_bias", "swiglu_mlp", "swiglu_align_to"}
_IN_ARRAYS |= {"no_embed_class"}  # which is about learned positions


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format.

    Raises UserError for other models of timm that are no Vision Transformers of this package.
    """
    if "patch_embed.proj.weight" not in arrays and "embeds.proj.weight" not in arrays:
        return None
    for key, name in _OTHERS:
        if key in arrays:
            _refuse(name)
    if "norm_pre.weight" in arrays and not arrays.keys().isdisjoint(("blocks.0.gamma_1", "attn_pool.latent")):
        _refuse("Perception Encoder")
    if "blocks.0.attn.q_bias" in arrays and "pos_embed" in arrays:
        _refuse("EVA or EVA-02")
    if "blocks.0.gamma_1" not in arrays:
        return None
    if "blocks.0.attn.qkv.bias" in arrays or "fc_norm.weight" in arrays:
        _refuse("ViT with another kind of rotary positions (RoPE-ViT)")
    hidden, output = (arrays.get(f"blocks.0.mlp.{part}.weight") for part in ("fc1", "fc2"))
    packed = hidden is not None and output is not None and hidden.shape[:1] == (2 * output.shape[-1],)
    return _layout(gated=packed or "blocks.0.mlp.fc1_g.weight" in arrays, packed=packed)


def _refuse(name: str) -> None:
    raise UserError(
        f"The file is of timm's {name}, which is not supported; give a checkpoint of a ViT, DINOv2 or DINOv3 instead."
    )


def expressible(model: WrittenModel) -> dict[str, tuple | None] | None:
    """The fields that it has; None for models without rotary positions."""
    config = model.config
    if not isinstance(config, ViTConfig) or config.position_embedding != "rotary":
        return None
    return {
        **DEFAULTS,
        **dict.fromkeys(("gated_mlp", "num_registers", "with_class_token"), None),
        "gelu": ("silu",) if config.gated_mlp else ("erf",),
        "qkv_bias": None,
        "key_bias": (not config.qkv_bias,),  # that of the key is always 0
        "layer_scale": () if config.layer_scale is None else None,
        "position_embedding": ("rotary",),
        "classifier": ("token", "gap") if config.has_class_token else ("token",),
    }


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    return _layout(gated=model.vit.gated_mlp)


def _layout(*, gated: bool, packed: bool = False) -> Layout:
    """`packed`: gate and value are one array, as timm stores them with swiglu_align_to=0."""
    block = "blocks.{i}."
    hidden = (("gate", "fc1_g"), ("Dense_0", "fc1_x")) if gated else (("Dense_0", "fc1"),)
    both = (f"{_MLP}gate", f"{_MLP}Dense_0")
    rules = (
        Rule(("cls",), "cls_token"),
        Rule(("registers/tokens",), "reg_token"),
        *dense("embedding", "patch_embed.proj", CONV),
        *norm(f"{BLOCK}LayerNorm_0", f"{block}norm1"),
        fused_kernels(PROJECTIONS, f"{block}attn.qkv.weight"),
        *(Rule((f"{ATTENTION}{part}/bias",), f"{block}attn.{part[0]}_bias") for part in ("query", "value")),
        *dense(f"{ATTENTION}out", f"{block}attn.proj"),
        *(Rule((f"{BLOCK}LayerScale_{n}/scale",), f"{block}gamma_{n + 1}") for n in (0, 1)),
        *norm(f"{BLOCK}LayerNorm_2", f"{block}norm2"),
        *(
            fused(both, f"{block}mlp.fc1.weight", f"{block}mlp.fc1.bias")
            if packed
            else (rule for part, key in hidden for rule in dense(f"{_MLP}{part}", f"{block}mlp.{key}"))
        ),
        *dense(f"{_MLP}Dense_1", f"{block}mlp.fc2"),
        *norm("Transformer/encoder_norm", "norm"),
        *dense("head", "head"),
    )
    return Layout(
        rules,
        gelu="silu" if gated else "erf",
        layer_norm_epsilon=1e-5,
        images=timm_config.images("bicubic", {None: 1.0}),
        settings={"position_embedding": "rotary"},
        ambiguous=("classifier",),  # DINOv3 of timm averages the patches, that of its authors reads the class token
        torch=True,
    )


def read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    """Read config.json. Raises UserError for an architecture or argument that is not supported."""
    config = files.get(timm_config.CONFIG)
    if config is None:
        return FileConfig()
    name, arguments = timm_config.architecture_of(config)
    model = _ARCHITECTURES.get(name.partition(".")[0])
    if model is None:
        raise UserError(
            f"config.json has the unsupported architecture={name!r:.80}; give a checkpoint of one of the "
            f"{len(_ARCHITECTURES)} supported models of timm with rotary positions."
        )
    for field, value in arguments.items():
        fixed = field in _FIXED and value == _FIXED[field]
        is_known = value is None or fixed or field in (*_IN_ARRAYS, *WITHOUT_EFFECT)
        check_argument(field, value, is_known=is_known)
    sizes: Sizes = {
        "qkv_bias": ("qkv_bias", arguments.get("qkv_bias", model.qkv_bias)),
        "gated_mlp": ("swiglu_mlp", arguments.get("swiglu_mlp", model.gated_mlp)),
        "num_registers": ("num_reg_tokens", arguments.get("num_reg_tokens", 4)),
        "has_class_token": ("class_token", True),
    }
    default_align = model.align if model.gated_mlp else 1
    sizes |= _mlp_dim(arguments, default_align if sizes["gated_mlp"][1] else None)
    found = timm_config.common_fields(config, arguments)
    return dataclasses.replace(
        found,
        classifier=found.classifier or model.classifier,
        num_heads=found.num_heads or model.num_heads,
        gelu=layout.gelu,
        layer_norm_epsilon=1e-5,
        layer_scale=number(arguments, "init_values", float) or 1e-5,
        sizes={**found.sizes, **sizes},
    )


def _mlp_dim(arguments: dict, default_align: int | None) -> Sizes:
    """The width of the MLP, if the arguments tell; None for an MLP without gate, whose width is not aligned."""
    ratio, width = number(arguments, "mlp_ratio", float), number(arguments, "embed_dim")
    given = arguments.get("swiglu_align_to")
    align = 1 if default_align is None else default_align if given is None else given or 1
    if ratio is None or width is None or not isinstance(align, int):
        return {}
    return {"mlp_dim": ("mlp_ratio and thus", -(-int(width * ratio) // align) * align)}


def write_config(model: WrittenModel) -> dict[str, dict]:
    """The config.json that `timm.create_model("local-dir:FOLDER", pretrained=True)` reads."""
    config = model.vit
    if config.layer_norm_epsilon != 1e-5:
        raise timm_config.needs_file(
            "timm's models with rotary positions have LayerNorm's epsilon 1e-5, but this one has "
            f"{config.layer_norm_epsilon}"
        )
    architecture = f"vit_small{'_plus' * config.gated_mlp}_patch16_dinov3{'_qkvb' * config.qkv_bias}"
    arguments = timm_config.size_arguments(model, hidden=config.mlp_dim) | {
        "num_reg_tokens": config.num_registers,
        "global_pool": "avg" if config.classifier == "gap" else "token",
    }
    if config.gated_mlp:
        arguments["swiglu_align_to"] = 1
    return timm_config.written(model, architecture, arguments)
