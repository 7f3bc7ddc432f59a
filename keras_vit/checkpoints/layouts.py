"""The layouts of checkpoint files: their keys, and the settings of the code that wrote them.

Weights have the keys of the released files: those of vit_jax, which are older than flax's Linen, for ViT and hybrids,
those of big_transfer for BiT. A layout is identified by a key that only it has, after `normalize_keys` has removed
prefixes.
"""

import dataclasses
import pathlib
from collections.abc import Mapping

from keras_vit.checkpoints.huggingface.layouts import (
    VIT_TYPES,
    bit_layout,
    bottleneck_layout,
    expressible_fields,
    family_layout,
    family_of,
    layout_to_write,
    vit_layout,
)
from keras_vit.checkpoints.key_mapping import (
    ATTENTION,
    BIT_UNIT,
    BLOCK,
    CHANNELS,
    CONV,
    FROM_HEADS,
    POINTWISE,
    POINTWISE_TORCH,
    POSITIONS,
    QKV,
    SAME,
    TO_HEADS,
    UNIT,
    Layout,
    Rule,
    Transform,
    bit_norm,
    bit_units,
    bottlenecks,
    dense,
    fused,
    norm,
)
from keras_vit.errors import UserError
from keras_vit.files.kinds import MODEL_SUFFIXES
from keras_vit.files.lazy_array import LazyArray
from keras_vit.files.remote import is_remote
from keras_vit.models.config import ConvStem, Distillation, ModelConfig, ResNetConfig, ViTConfig

FLAX = ("npz", "npz-linen", "big_vision")
TORCH = ("huggingface", "timm", "torchvision")
LAYOUTS = (*FLAX, *TORCH)
# ResNets of timm and transformers have an output stride of at most 32: they dilate later stages, ResNets here do not.
TORCH_STAGES = 4
# Groups of GroupNorm in all codes; only config.json of transformers has others.
NUM_GROUPS = 32
# File suffixes; huggingface is a folder.
SUFFIXES = dict.fromkeys(FLAX, ".npz") | {"timm": ".safetensors", "torchvision": ".safetensors"}


HEADS = ("head/", "head_distillation/", "resnet/head/")
_PROJECTIONS = tuple(f"{ATTENTION}{part}" for part in QKV)


def check_target(path: pathlib.Path, layout: str) -> None:
    """Raise UserError for an unknown layout, and for a file with another suffix or in a missing folder."""
    if layout not in LAYOUTS:
        raise UserError(f"The layout must be one of {', '.join(LAYOUTS)}, but is {layout!r}.")
    if not is_remote(path) and not path.parent.is_dir():
        raise UserError(f"There is no folder {str(path.parent)!r} to write {path.name} into.")
    suffix = SUFFIXES.get(layout)
    if not is_folder(path, layout) and path.suffix != suffix:
        raise UserError(f"A file of the layout {layout} should end in {suffix}, but is {path.name!r}; name it so.")


def check_new(path: pathlib.Path, layout: str) -> None:
    """As `check_target`, for what must not be there yet."""
    if path.exists():
        raise UserError(f"{path} already exists; give the name of a new file.")
    check_target(path, layout)


def is_folder(path: pathlib.Path, layout: str) -> bool:
    """Whether the layout is written as a folder with a config.json."""
    return layout == "huggingface" or (layout == "timm" and path.suffix not in MODEL_SUFFIXES)


def num_classes_of(weights: Mapping) -> int:
    """Width of the head among weights (anything with a shape) by name; 0 without a head."""
    leaves = ("head/bias", "resnet/head/conv2d/bias", "head/kernel")  # a projection has no bias
    found = next((weights[key] for key in leaves if key in weights), None)
    return 0 if found is None else found.shape[-1] if found.shape else 1


def _unchanged(*keys: str, transform: Transform = SAME) -> tuple[Rule, ...]:
    """Rules for keys that equal the names of the weights."""
    return tuple(Rule((key,), key, transform) for key in keys)


def _both(*layers: str, leaves: tuple[str, str] = ("kernel", "bias")) -> tuple[str, ...]:
    return tuple(f"{layer}/{leaf}" for layer in layers for leaf in leaves)


def _flax_attention(name: str, key: str) -> tuple[Rule, ...]:
    projections = _both(*QKV)
    return (
        *(Rule((f"{name}{leaf}",), f"{key}{leaf}", TO_HEADS) for leaf in projections),
        Rule((f"{name}out/kernel",), f"{key}out/kernel", FROM_HEADS),
        Rule((f"{name}out/bias",), f"{key}out/bias"),
    )


_SCALE_BIAS = ("scale", "bias")
_MAP_HEAD = (
    *_unchanged("MAPHead_0/probe", *_both("MAPHead_0/LayerNorm_0", leaves=_SCALE_BIAS)),
    *_unchanged(*_both("MAPHead_0/MlpBlock_0/Dense_0", "MAPHead_0/MlpBlock_0/Dense_1")),
    *_flax_attention("MAPHead_0/MultiHeadDotProductAttention_0/", "MAPHead_0/MultiHeadDotProductAttention_0/"),
)
_FLAX_OUTSIDE_BLOCKS = (
    *_unchanged(
        "cls", *_both("embedding", "pre_logits", "head"), *_both("Transformer/encoder_norm", leaves=_SCALE_BIAS)
    ),
    *_MAP_HEAD,
)
_FLAX_RESNET = (
    *_unchanged("conv_root/kernel", *(f"{UNIT}{conv}/kernel" for conv in ("conv1", "conv2", "conv3", "conv_proj"))),
    *_unchanged(*_both("gn_root", leaves=_SCALE_BIAS), transform=CHANNELS),
    *_unchanged(
        *_both(*(f"{UNIT}{gn}" for gn in ("gn1", "gn2", "gn3", "gn_proj")), leaves=_SCALE_BIAS), transform=CHANNELS
    ),
)


def _flax_block(attention: str, second_norm: str, mlp: str) -> tuple[Rule, ...]:
    rules = []
    for name, key in (("LayerNorm_0", "LayerNorm_0"), ("LayerNorm_2", second_norm)):
        rules += [Rule((f"{BLOCK}{name}/{leaf}",), f"{BLOCK}{key}/{leaf}") for leaf in _SCALE_BIAS]
    for leaf in _both("Dense_0", "Dense_1"):
        rules.append(Rule((f"{BLOCK}MlpBlock_3/{leaf}",), f"{BLOCK}{mlp}/{leaf}"))
    return *rules, *_flax_attention(ATTENTION, f"{BLOCK}{attention}/")


def _vit_jax(rules: tuple[Rule, ...]) -> Layout:
    """vit_jax divides kernels by their standard deviation; flax's GroupNorm has the epsilon 1e-6."""
    return Layout(rules, group_norm_epsilon=1e-6, variance_epsilon=0.0, deviation_epsilon=1e-5, qkv_bias=True)


_RELEASED_BLOCK = _flax_block("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
_LINEN_BLOCK = _flax_block("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
_NPZ = _vit_jax((*_FLAX_OUTSIDE_BLOCKS, *_unchanged(POSITIONS), *_RELEASED_BLOCK, *_FLAX_RESNET))
_LINEN = _vit_jax((*_FLAX_OUTSIDE_BLOCKS, *_unchanged(POSITIONS), *_LINEN_BLOCK, *_FLAX_RESNET))
# The position embeddings have no row for the class token, which is prepended after they are added.
_BIG_VISION = _vit_jax((*_FLAX_OUTSIDE_BLOCKS, Rule((POSITIONS,), "pos_embedding"), *_LINEN_BLOCK))

_BIT = Layout(
    (
        *_unchanged("resnet/root_block/standardized_conv2d/kernel", f"{BIT_UNIT}a/proj/standardized_conv2d/kernel"),
        *_unchanged(*(f"{BIT_UNIT}{letter}/standardized_conv2d/kernel" for letter in "abc")),
        *_unchanged(*(f"{BIT_UNIT}{letter}/group_norm/{leaf}" for letter in "abc" for leaf in ("gamma", "beta"))),
        *_unchanged("resnet/group_norm/gamma", "resnet/group_norm/beta"),
        *_unchanged("resnet/head/conv2d/kernel", transform=POINTWISE),
        *_unchanged("resnet/head/conv2d/bias"),
    ),
    variance_epsilon=1e-10,
)


def _timm(
    *, root_only: bool, after_pooling: bool, gated: bool, pre_norm: bool, distillation: Distillation = "none"
) -> Layout:
    """Timm's ViT and hybrids; a backbone without stages has no "stem" in its keys; fc_norm follows the pooling."""
    block, root = "blocks.{i}.", "patch_embed.backbone." if root_only else "patch_embed.backbone.stem."
    mlp = f"{BLOCK}MlpBlock_3/"
    pooling, attention = "MAPHead_0/", "MAPHead_0/MultiHeadDotProductAttention_0/"
    hidden = tuple(f"{mlp}{part}" for part in (("gate", "Dense_0") if gated else ("Dense_0",)))
    rules = (
        Rule(("cls",), "cls_token"),
        Rule(("distillation/tokens",), "dist_token"),
        Rule(("registers/tokens",), "reg_token"),
        Rule((POSITIONS,), "pos_embed"),
        *dense("embedding", "patch_embed.proj", CONV),
        *norm(f"{BLOCK}LayerNorm_0", f"{block}norm1"),
        *fused(_PROJECTIONS, f"{block}attn.qkv.weight", f"{block}attn.qkv.bias"),
        *dense(f"{ATTENTION}out", f"{block}attn.proj"),
        *norm(f"{BLOCK}LayerNorm_2", f"{block}norm2"),
        *fused(hidden, f"{block}mlp.fc1.weight", f"{block}mlp.fc1.bias"),
        *dense(f"{mlp}Dense_1", f"{block}mlp.fc2"),
        *(Rule((f"{BLOCK}LayerScale_{n}/scale",), f"{block}ls{n + 1}.gamma") for n in (0, 1)),
        *norm("Transformer/pre_norm", "norm_pre"),
        *norm("Transformer/encoder_norm", "fc_norm" if after_pooling else "norm"),
        Rule((f"{pooling}probe",), "attn_pool.latent"),
        *dense(f"{attention}query", "attn_pool.q"),
        *fused((f"{attention}key", f"{attention}value"), "attn_pool.kv.weight", "attn_pool.kv.bias"),
        *dense(f"{attention}out", "attn_pool.proj"),
        *norm(f"{pooling}LayerNorm_0", "attn_pool.norm"),
        *dense(f"{pooling}MlpBlock_0/Dense_0", "attn_pool.mlp.fc1"),
        *dense(f"{pooling}MlpBlock_0/Dense_1", "attn_pool.mlp.fc2"),
        *dense("pre_logits", "pre_logits.fc"),
        *dense("head", "head"),
        *dense("head_distillation", "head_dist"),
        Rule(("conv_root/kernel",), f"{root}conv.weight", CONV),
        *norm("gn_root", f"{root}norm"),
        *bottlenecks("patch_embed.backbone.stages.{s-1}.blocks.{u-1}"),
    )
    return Layout(
        rules,
        gelu="silu" if gated else "erf",
        layer_norm_epsilon=1e-5 if pre_norm else 1e-6,
        resampler="bicubic-antialias",
        settings={"distillation": distillation},
    )


def _timm_of(arrays: Mapping[str, LazyArray]) -> Layout:
    hidden, output = (arrays.get(f"blocks.0.mlp.{part}.weight") for part in ("fc1", "fc2"))
    gated = False
    if hidden is not None and output is not None and len(hidden.shape) == len(output.shape) == 2:
        gated = hidden.shape[0] == 2 * output.shape[1]
    return _timm(
        root_only="patch_embed.backbone.conv.weight" in arrays,
        after_pooling="fc_norm.weight" in arrays,
        gated=gated,
        pre_norm="norm_pre.weight" in arrays,
        distillation="head" if "dist_token" in arrays else "none",  # without heads, features are the tokens' mean
    )


_TIMM_BIT = Layout(
    (
        Rule(("resnet/root_block/standardized_conv2d/kernel",), "stem.conv.weight", CONV),
        *bit_units("stages.{s-1}.blocks.{u-1}"),
        *bit_norm("resnet", "norm"),
        Rule(("resnet/head/conv2d/kernel",), "head.fc.weight", POINTWISE_TORCH),
        Rule(("resnet/head/conv2d/bias",), "head.fc.bias"),
    )
)


def _torchvision(conv_stem: bool, old: bool = False) -> Layout:
    """Torchvision's ViT with patches or early convolutions; `old` files, before 0.12, have other keys for the MLP."""
    projection = "conv_proj.conv_last" if conv_stem else "conv_proj"
    mlp = ("mlp.linear_1", "mlp.linear_2") if old else ("mlp.0", "mlp.3")
    layer = "encoder.layers.encoder_layer_{i}."
    stem = "conv_proj.conv_bn_relu_{i}"
    batch_norm = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
    rules = (
        Rule(("cls",), "class_token"),
        Rule((POSITIONS,), "encoder.pos_embedding"),
        *dense("embedding", projection, CONV),
        Rule(("conv_stem/{i}/conv/kernel",), f"{stem}.0.weight", CONV),
        *(Rule((f"conv_stem/{{i}}/batch_norm/{name}",), f"{stem}.1.{key}") for name, key in batch_norm.items()),
        Rule((), f"{stem}.1.num_batches_tracked"),
        *norm(f"{BLOCK}LayerNorm_0", f"{layer}ln_1"),
        *fused(_PROJECTIONS, f"{layer}self_attention.in_proj_weight", f"{layer}self_attention.in_proj_bias"),
        *dense(f"{ATTENTION}out", f"{layer}self_attention.out_proj"),
        *norm(f"{BLOCK}LayerNorm_2", f"{layer}ln_2"),
        *dense(f"{BLOCK}MlpBlock_3/Dense_0", f"{layer}{mlp[0]}"),
        *dense(f"{BLOCK}MlpBlock_3/Dense_1", f"{layer}{mlp[1]}"),
        *norm("Transformer/encoder_norm", "encoder.ln"),
        *dense("pre_logits", "heads.pre_logits"),
        *dense("head", "heads.head"),
    )
    return Layout(rules, gelu="erf", resampler="bicubic-aligned", qkv_bias=True)


def identify_layout(arrays: Mapping[str, LazyArray]) -> tuple[str, Layout]:
    """(name, layout) of the file with these arrays, whose keys have been normalized."""
    keys = arrays.keys()
    if "embedding/kernel" in keys:
        if any("/MultiHeadDotProductAttention_1/" in key for key in keys):
            return "npz", _NPZ
        return ("npz-linen", _LINEN) if POSITIONS in keys else ("big_vision", _BIG_VISION)
    if "resnet/root_block/standardized_conv2d/kernel" in keys:
        return "npz", _BIT
    if "patch_embed.proj.weight" in keys:
        return "timm", _timm_of(arrays)
    if "stem.conv.weight" in keys:
        return "timm", _TIMM_BIT
    if "class_token" in keys and "encoder.pos_embedding" in keys:
        old = any(".mlp.linear_1." in key for key in keys)
        return "torchvision", _torchvision("conv_proj.conv_last.weight" in keys, old)
    if (family := family_layout(arrays)) is not None:
        return "huggingface", family
    for prefix in ("vit.", "deit.", ""):
        if f"{prefix}embeddings.patch_embeddings.projection.weight" in keys:
            if prefix and "encoder.layer.0.layernorm_before.weight" in keys:  # a classifier of transformers 5.23
                return "huggingface", vit_layout(prefix, ("vit_msn",), has_bare_layers=True, layer_norm_epsilon=1e-6)
            distilled = f"{prefix}embeddings.distillation_token" in keys
            ends = f"{prefix}pooler.dense.weight" in keys or "classifier.weight" in keys  # which MAE has not
            types = ("deit",) if distilled else VIT_TYPES[: -1 if ends else None]
            return "huggingface", vit_layout(prefix, types, two_heads="cls_classifier.weight" in keys)
    for prefix in ("bit.", ""):
        if f"{prefix}embedder.convolution.weight" in keys:
            preactivation = f"{prefix}embedder.norm.weight" not in keys
            return "huggingface", bit_layout(prefix) if preactivation else bottleneck_layout(prefix)
    raise UserError(
        f"The file is not a Vision Transformer, hybrid or BiT of a known layout: its {len(keys)} arrays begin with "
        f"{', '.join(sorted(keys)[:3]) or 'nothing'}."
    )


def layout_of(config: ModelConfig, layout: str, num_classes: int) -> Layout:
    """The layout for saving a model. Raises UserError for settings that the layout cannot express."""
    found = (
        _resnet_layout(config, layout) if isinstance(config, ResNetConfig) else _vit_layout(config, layout, num_classes)
    )
    resnet = config if isinstance(config, ResNetConfig) else config.stem
    if layout in TORCH and isinstance(resnet, ResNetConfig) and len(resnet.block_units) > TORCH_STAGES:
        raise UserError(
            f"The layout {layout} cannot express a ResNet of {len(resnet.block_units)} stages, only of up to "
            f"{TORCH_STAGES}; choose another."
        )
    if layout != "huggingface" and isinstance(resnet, ResNetConfig) and resnet.num_groups != NUM_GROUPS:
        raise UserError(
            f"The layout {layout} cannot express GroupNorm with {resnet.num_groups} groups, because its files are read "
            f"with {NUM_GROUPS}; choose huggingface."
        )
    return found


def _vit_layout(config: ViTConfig, layout: str, num_classes: int) -> Layout:
    expressible = _EXPRESSIBLE[layout]
    if layout == "huggingface":
        expressible = {**expressible, **expressible_fields(config, family_of(config), num_classes)}
    _refuse_inexpressible(config, layout, expressible)
    if layout == "timm" and config.pre_norm == config.patch_bias:
        raise UserError(
            "In the layout timm, the patch embedding has a bias if and only if pre_norm is False; choose another "
            "layout."
        )
    if layout == "timm" and (
        config.distillation == "token" or (config.distillation != "none" and config.num_registers)
    ):
        raise UserError("The layout timm has two heads for a distillation token, and no registers; choose another.")
    stem = config.stem
    if (stem is not None and not isinstance(stem, _STEMS[layout])) or getattr(stem, "axial_heads", None):
        raise UserError(f"The layout {layout} cannot store the model's stem; choose another.")
    if config.representation_size is not None and (layout == "timm" or (layout == "huggingface" and num_classes)):
        raise UserError(
            f"The layout {layout} has no pre_logits layer before a head; choose another, or load with num_classes."
        )
    if layout == "huggingface":
        return _huggingface_layout(config, num_classes)
    if layout == "timm":
        return _timm(
            root_only=isinstance(stem, ResNetConfig) and not stem.block_units,
            after_pooling=config.norm_after_pooling,
            gated=config.gated_mlp,
            pre_norm=config.pre_norm,
        )
    if layout == "torchvision":
        return _torchvision(stem is not None)
    return {"npz": _NPZ, "npz-linen": _LINEN, "big_vision": _BIG_VISION}[layout]


def _refuse_inexpressible(config: ViTConfig, layout: str, expressible: Mapping[str, tuple | None]) -> None:
    for field, values in expressible.items():
        if values is not None and getattr(config, field) not in values:
            and_head = " and a head" if field == "classifier" and not values else ""
            raise UserError(
                f"The layout {layout} cannot express {field}={getattr(config, field)!r}{and_head}; choose another."
            )


def _huggingface_layout(config: ViTConfig, num_classes: int) -> Layout:
    """The layout of the family that has these fields."""
    family = family_of(config)
    if family == "vit":
        return vit_layout("vit." if num_classes else "")
    if family == "deit":
        return vit_layout("deit." if num_classes else "", ("deit",), two_heads=config.distillation == "head")
    return layout_to_write(config, family, num_classes)


def _resnet_layout(config: ResNetConfig, layout: str) -> Layout:
    layouts = {"npz": _BIT, "huggingface": bit_layout("bit."), "timm": _TIMM_BIT} if config.preactivation else {}
    if not config.preactivation and config.axial_heads is None:
        layouts = {"huggingface": bottleneck_layout("bit.")}
    if layout not in layouts:
        raise UserError(f"The layout {layout} cannot express this ResNet; {' or '.join(layouts) or 'only .keras'} can.")
    return layouts[layout]


# Fields that no table restricts.
_UNRESTRICTED = {
    *("patch_size", "hidden_size", "num_layers", "mlp_dim"),  # in the shapes
    *("num_heads", "layer_norm_epsilon"),  # in the shapes, config.json or an option of from_checkpoint
    *("dropout_rate", "attention_dropout_rate", "stochastic_depth_rate"),  # of training alone
    *("stem", "representation_size"),  # which layout_of checks
}
# Values by field; None for any. A layout takes only the default of every other field, a new one too, unless its table
# has more values.
_DEFAULTS: dict[str, tuple | None] = {
    field.name: (field.default,) for field in dataclasses.fields(ViTConfig) if field.name not in _UNRESTRICTED
}
_DEFAULTS["gelu"] = ("tanh", "erf")
_ANY_HEAD = ("token", "gap", "map", "unpooled", "none")
_EXPRESSIBLE: Mapping[str, Mapping[str, tuple | None]] = {
    "npz": {**_DEFAULTS, "classifier": _ANY_HEAD},
    "npz-linen": {**_DEFAULTS, "classifier": _ANY_HEAD},
    "big_vision": {**_DEFAULTS, "classifier": _ANY_HEAD, "position_embedding": ("learned", "sincos-2d")},
    "huggingface": {**_DEFAULTS, "gelu": None, "qkv_bias": None},  # more by family, see expressible_fields
    "timm": {
        **_DEFAULTS,
        **dict.fromkeys(("gated_mlp", "layer_scale", "num_registers", "distillation", "prefix_positions"), None),
        **dict.fromkeys(("gelu", "pre_norm", "patch_bias", "qkv_bias", "norm_after_pooling"), None),
        "classifier": ("token", "gap", "map"),
    },
    "torchvision": _DEFAULTS,
}
_STEMS: dict[str, type | tuple] = {
    "npz": ResNetConfig,
    "npz-linen": ResNetConfig,
    "big_vision": (),
    "huggingface": ResNetConfig,
}
_STEMS |= {"timm": ResNetConfig, "torchvision": ConvStem}
