"""OpenCLIP's own files: open_clip_model.safetensors, whose config is open_clip_config.json. Read, not written.

The image tower is that of open_clip's `VisionTransformer` in its default form, or a Vision Transformer of timm, as in
SigLIP's files (open_clip/timm_model.py). Towers with options that change the computation are refused.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from keras_vit.checkpoints import key_mapping as keys
from keras_vit.checkpoints.formats import timm, timm_config
from keras_vit.checkpoints.formats.file_config import (
    CLIP_MEAN,
    CLIP_STD,
    FileConfig,
    ImageProcessing,
    check_supported,
    number,
    pair,
    part,
    value_range_of,
)
from keras_vit.checkpoints.formats.layout import QUERY_BIAS, Format, Layout, unsupported
from keras_vit.files.lazy_array import LazyArray

CONFIG = "open_clip_config.json"
# Fields of CLIPVisionCfg and CLIPTextCfg that leave the computation as it is here, whatever their value.
_SIZES = {"layers", "width", "head_width", "heads", "patch_size", "image_size", "context_length", "vocab_size"}
_OF_TRAINING = {"patch_dropout", "output_tokens", "timm_drop", "timm_drop_path", "timm_model_pretrained", "pad_id"}
_OF_TOKENIZER = {"hf_tokenizer_name", "tokenizer_mode", "tokenizer_kwargs", "hf_model_pretrained", "eos_id"}
_FREE = _SIZES | _OF_TRAINING | _OF_TOKENIZER | {"mlp_ratio", "timm_model_name"}
# Those of the text tower that models here have, too.
_OF_TEXT = {"no_causal_mask", "proj_bias", "pool_type", "act_kwargs", "norm_kwargs"}
# Of the others, the values that do so.
_DEFAULTS: dict[str, tuple[str, ...]] = {
    "pool_type": ("tok",),
    "pos_embed_type": ("learnable",),
    "proj_type": ("linear",),
    "block_type": ("default",),
    "timm_pool": ("map", "avg", "token"),
    "timm_proj": ("none", "linear"),
}
# Where the keys of an image tower of timm begin.
TRUNK = "visual.trunk."


def _identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    if any(key.startswith(TRUNK) for key in arrays):
        return _layout_of_timm(arrays)
    return _LAYOUT if "visual.conv1.weight" in arrays and "visual.class_embedding" in arrays else None


def _layout_of_timm(arrays: Mapping[str, LazyArray]) -> Layout:
    trunk = {key.removeprefix(TRUNK): array for key, array in arrays.items() if key.startswith(TRUNK)}
    is_vit = "patch_embed.proj.weight" in trunk and "blocks.0.gamma_1" not in trunk
    layout = timm.identify(trunk) if is_vit else None
    heads = {key for key in arrays if key.startswith("visual.head.")} - {"visual.head.proj.weight"}
    if layout is None or heads:
        raise unsupported(
            "an OpenCLIP whose image tower is no Vision Transformer of timm, or ends in more than a linear projection",
            "give the image tower as timm or transformers have it",
        )
    rules = tuple(dataclasses.replace(rule, key=f"{TRUNK}{rule.key}") for rule in layout.rules)
    projection = keys.Rule(("head/kernel",), "visual.head.proj.weight", keys.LINEAR)
    # open_clip averages the patches of a model with a class token, too, unless its config says otherwise.
    pooling = ("classifier",) if "cls_token" in trunk else ()
    return dataclasses.replace(
        layout, rules=(*rules, projection), biases=(), ignored=_LAYOUT.ignored, ambiguous=(*layout.ambiguous, *pooling)
    )


def tower_block(layer: str, to: str = keys.BLOCK) -> tuple[keys.Rule, ...]:
    """The rules of an encoder block of a tower of images or texts, see `block_rules`."""
    return keys.block_rules(
        layer, ("ln_1", "ln_2"), ("attn.in_proj_", "attn.out_proj"), ("mlp.c_fc", "mlp.c_proj"), to=to
    )


_LAYOUT = Layout(
    (
        keys.Rule(("cls",), "visual.class_embedding", keys.TOKEN),
        keys.Rule((keys.POSITIONS,), "visual.positional_embedding", keys.TABLE),
        *keys.dense("embedding", "visual.conv1", keys.CONV),
        *keys.norm("Transformer/pre_norm", "visual.ln_pre"),
        *tower_block("visual.transformer.resblocks.{i}."),
        *keys.norm("Transformer/encoder_norm", "visual.ln_post"),
        keys.Rule(("head/kernel",), "visual.proj"),
    ),
    gelu="erf",
    layer_norm_epsilon=1e-5,
    biases=(QUERY_BIAS,),
    resampler="bicubic",
    torch=True,
    ambiguous=("gelu",),
    ignored=(
        *("transformer.", "token_embedding.", "positional_embedding", "ln_final.", "text_projection"),
        *("logit_scale", "logit_bias", "attn_mask", "text."),
        *("input_resolution", "context_length", "vocab_size"),  # of OpenAI's own files
    ),
)


def _read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    config = files[CONFIG]
    model = part(config, "model_cfg", CONFIG)
    tower = _tower(model, "vision_cfg")
    images = _images(part(config, "preprocess_cfg", CONFIG))
    if "timm_model_name" in tower:
        return _config_of_timm(tower, images, layout)
    width = number(tower, "width") or 768
    return FileConfig(
        num_heads=max(width // (number(tower, "head_width") or 64), 1),
        gelu=_gelu(model),
        layer_norm_epsilon=1e-5,
        image_size=pair(tower, "image_size") or (224, 224),
        images=images,
        sizes={"hidden_size": ("width", width), "num_layers": ("layers", number(tower, "layers") or 12)},
        heads=("head",),
    )


def _config_of_timm(tower: dict, images: ImageProcessing, layout: Layout) -> FileConfig:
    """Return what timm's config.json would say of an image tower; the defaults are those of CLIPVisionCfg."""
    pool = tower.get("timm_pool", "avg")
    arguments: dict[str, Any] = {"global_pool": pool} if pool else {}
    if pool == "avg":
        arguments["fc_norm"] = any(rule.key.endswith("fc_norm.weight") for rule in layout.rules)
    own = {"architecture": tower["timm_model_name"], "model_args": arguments}
    return dataclasses.replace(
        timm_config.read_config({timm_config.CONFIG: own}, layout),
        image_size=pair(tower, "image_size") or (224, 224),
        images=images,
        heads=() if tower.get("timm_proj", "linear") == "none" else ("head",),
    )


def text_settings(config: dict) -> dict[str, Any]:
    """The fields of TextConfig that the arrays do not tell."""
    model = part(config, "model_cfg", CONFIG)
    tower = _tower(model, "text_cfg", _OF_TEXT)
    act, norm = (part(tower, name, CONFIG) for name in ("act_kwargs", "norm_kwargs"))
    pool = tower.get("pool_type", "argmax")
    check_supported("pool_type", pool, ("argmax", "last"), CONFIG)
    check_supported("act_kwargs", act, ({}, {"approximate": "tanh"}, {"approximate": "none"}), CONFIG)
    check_supported("norm_kwargs", [*norm], ([], ["eps"]), CONFIG)
    return {
        "num_heads": number(tower, "heads") or 8,
        "gelu": "tanh" if act.get("approximate") == "tanh" else _gelu(model),
        "layer_norm_epsilon": number(norm, "eps", float) or 1e-5,
        "pooling": "last" if pool == "last" else "largest",
        "causal": not tower.get("no_causal_mask"),
        "head_bias": bool(tower.get("proj_bias")),
    }


def canonicalizes(config: dict) -> bool:
    """Whether a tokenizer removes the punctuation, as that of SigLIP."""
    tower = part(part(config, "model_cfg", CONFIG), "text_cfg", CONFIG)
    return part(tower, "tokenizer_kwargs", CONFIG).get("clean") == "canonicalize"


def _tower(model: dict, name: str, own: Collection[str] = ()) -> dict:
    """The settings of a tower. Raises UserError for those that change what it computes, but for its own."""
    tower = part(model, name, CONFIG)
    for field, value in tower.items():
        if field not in _FREE and field not in own and value:
            check_supported(field, value, _DEFAULTS.get(field, ()), CONFIG)
    return tower


def _gelu(model: dict) -> Any:
    return "quick" if model.get("quick_gelu") else "erf"


def _images(fields: dict) -> ImageProcessing:
    """The images of open_clip's evaluation transform, which Pillow makes."""
    mode, filter_ = fields.get("resize_mode", "shortest"), fields.get("interpolation", "bicubic")
    check_supported("resize_mode", mode, ("shortest", "squash"), CONFIG)
    check_supported("interpolation", filter_, ("bicubic", "bilinear"), CONFIG)
    value_range = value_range_of(fields.get("mean", CLIP_MEAN), fields.get("std", CLIP_STD))
    return timm_config.images(filter_, {None: 1.0}, "resize-small" if mode == "shortest" else "stretch", value_range)


OPEN_CLIP = Format("open_clip", _identify, config_files=(CONFIG,), read_config=_read_config)
