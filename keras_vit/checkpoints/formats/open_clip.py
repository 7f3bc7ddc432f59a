"""OpenCLIP's own files: open_clip_model.safetensors, whose config is open_clip_config.json. Read, not written.

The image tower is that of open_clip's `VisionTransformer` in its default form, or a Vision Transformer of timm, as in
SigLIP's files (open_clip/timm_model.py). Towers with options that change the computation are refused.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_vit.checkpoints.formats import timm, timm_config, timm_eva
from keras_vit.checkpoints.formats.file_config import FileConfig, number, pair
from keras_vit.checkpoints.formats.images import ImageProcessing, value_range_of
from keras_vit.checkpoints.formats.layout import QUERY_BIAS, Layout
from keras_vit.checkpoints.key_mapping import (
    BLOCK,
    CONV,
    LINEAR,
    POSITIONS,
    QKV,
    SAME,
    TABLE,
    TOKEN,
    Rule,
    dense,
    fused,
    norm,
)
from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray

LAYOUT = "open_clip"
CONFIG = "open_clip_config.json"
CONFIG_FILES: tuple[str, ...] = (CONFIG,)
# Defaults of PreprocessCfg.
_MEAN, _STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
# Fields of CLIPVisionCfg and CLIPTextCfg that leave the computation as it is here, whatever their value.
_SIZES = {"layers", "width", "head_width", "heads", "patch_size", "image_size", "context_length", "vocab_size"}
_OF_TRAINING = {"patch_dropout", "output_tokens", "timm_drop", "timm_drop_path", "timm_model_pretrained", "pad_id"}
_OF_TOKENIZER = {"hf_tokenizer_name", "tokenizer_mode", "tokenizer_kwargs", "hf_model_pretrained", "eos_id"}
_FREE = _SIZES | _OF_TRAINING | _OF_TOKENIZER | {"mlp_ratio", "timm_model_name"}
# Of the others, the values that do so.
_DEFAULTS = {"pool_type": ("tok", "argmax"), "pos_embed_type": ("learnable",), "proj_type": ("linear",)}
_DEFAULTS |= {"block_type": ("default",), "timm_pool": ("map", "avg", "token"), "timm_proj": ("none", "linear")}
# Where the keys of an image tower of timm begin.
_TRUNK = "visual.trunk."


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format.

    Raises UserError for an image tower of timm that is no Vision Transformer, or that ends in an MLP.
    """
    if any(key.startswith(_TRUNK) for key in arrays):
        return _layout_of_timm(arrays)
    return _LAYOUT if "visual.conv1.weight" in arrays and "visual.class_embedding" in arrays else None


def _layout_of_timm(arrays: Mapping[str, LazyArray]) -> Layout:
    trunk = {key.removeprefix(_TRUNK): array for key, array in arrays.items() if key.startswith(_TRUNK)}
    is_vit = "patch_embed.proj.weight" in trunk and timm_eva.identify(trunk) is None
    found = timm.identify(trunk) if is_vit else None
    heads = {key for key in arrays if key.startswith("visual.head.")} - {"visual.head.proj.weight"}
    if found is None or heads:
        raise UserError(
            "The file is an OpenCLIP whose image tower is no Vision Transformer of timm, or ends in more than a linear "
            "projection, which is not supported; give the image tower as timm or transformers have it."
        )
    rules = tuple(dataclasses.replace(rule, key=f"{_TRUNK}{rule.key}") for rule in found.rules)
    projection = Rule(("head/kernel",), "visual.head.proj.weight", LINEAR)
    # open_clip averages the patches of a model with a class token, too, unless its config says otherwise.
    pooling = ("classifier",) if "cls_token" in trunk else ()
    return dataclasses.replace(
        found,
        rules=(*rules, projection),
        biases=(),
        ignored=_LAYOUT.ignored,
        ambiguous=(*found.ambiguous, *pooling),
    )


def block_rules(block: str, layer: str) -> tuple[Rule, ...]:
    """Rules of an encoder block of a tower of images or texts; where its weights and the keys of the file begin."""
    attention = f"{block}MultiHeadDotProductAttention_1/"
    return (
        *norm(f"{block}LayerNorm_0", f"{layer}ln_1"),
        *fused(tuple(f"{attention}{part}" for part in QKV), f"{layer}attn.in_proj_weight", f"{layer}attn.in_proj_bias"),
        *dense(f"{attention}out", f"{layer}attn.out_proj"),
        *norm(f"{block}LayerNorm_2", f"{layer}ln_2"),
        *dense(f"{block}MlpBlock_3/Dense_0", f"{layer}mlp.c_fc"),
        *dense(f"{block}MlpBlock_3/Dense_1", f"{layer}mlp.c_proj"),
    )


def _rules() -> tuple[Rule, ...]:
    return (
        Rule(("cls",), "visual.class_embedding", TOKEN),
        Rule((POSITIONS,), "visual.positional_embedding", TABLE),
        *dense("embedding", "visual.conv1", CONV),
        *norm("Transformer/pre_norm", "visual.ln_pre"),
        *block_rules(BLOCK, "visual.transformer.resblocks.{i}."),
        *norm("Transformer/encoder_norm", "visual.ln_post"),
        Rule(("head/kernel",), "visual.proj", SAME),
    )


_LAYOUT = Layout(
    _rules(),
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


def read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    """Read open_clip_config.json. Raises UserError for unsupported values."""
    if CONFIG not in files:
        return FileConfig()
    model = _part(files[CONFIG], "model_cfg")
    tower = _tower(model, "vision_cfg")
    if "timm_model_name" in tower:
        return _config_of_timm(tower, files[CONFIG], layout)
    width = number(tower, "width") or 768
    sizes = {"hidden_size": ("width", width), "num_layers": ("layers", number(tower, "layers") or 12)}
    return FileConfig(
        num_heads=max(width // (number(tower, "head_width") or 64), 1),
        gelu=_gelu(model),
        layer_norm_epsilon=1e-5,
        image_size=pair(tower, "image_size") or (224, 224),
        images=_images(files[CONFIG].get("preprocess_cfg") or {}),
        sizes=sizes,
        heads=("head",),
    )


def _config_of_timm(tower: dict, config: dict, layout: Layout) -> FileConfig:
    """Return what timm's config.json would say of an image tower.

    The defaults are those of CLIPVisionCfg (open_clip/model.py). Pooling that is changed after the model of timm was
    made leaves the last norm where it is (TimmModel), so the arrays say whether it is behind the mean.
    """
    pool, projection = tower.get("timm_pool", "avg"), tower.get("timm_proj", "linear")
    arguments: dict[str, Any] = {"global_pool": pool} if pool else {}
    if pool == "avg":
        arguments["fc_norm"] = any(rule.key.endswith("fc_norm.weight") for rule in layout.rules)
    own = {"architecture": tower["timm_model_name"], "model_args": arguments}
    return dataclasses.replace(
        timm_config.read_config({timm_config.CONFIG: own}, layout),
        image_size=pair(tower, "image_size") or (224, 224),
        images=_images(config.get("preprocess_cfg") or {}),
        heads=() if projection == "none" else ("head",),
    )


def text_settings(config: dict) -> dict[str, Any]:
    """The number of heads and the activation of the text tower, by field of TextConfig."""
    model = _part(config, "model_cfg")
    return {"num_heads": number(_tower(model, "text_cfg"), "heads") or 8, "gelu": _gelu(model)}


def _part(fields: dict, name: str) -> dict:
    part = fields.get(name)
    if not isinstance(part, dict):
        raise UserError(f"{CONFIG} should give {name} as an object, but gives {part!r:.80}.")
    return part


def _tower(model: dict, name: str) -> dict:
    """The settings of a tower. Raises UserError for those that change what it computes."""
    tower = _part(model, name)
    for field, value in tower.items():
        if field not in _FREE and value and value not in _DEFAULTS.get(field, ()):
            raise UserError(f"{CONFIG} has the unsupported {field}={value!r:.80} in {name}; give another checkpoint.")
    return tower


def _gelu(model: dict) -> Any:
    return "quick" if model.get("quick_gelu") else "erf"


def _images(fields: dict) -> ImageProcessing:
    """The images of open_clip's evaluation transform, which Pillow makes."""
    mode, filter_ = fields.get("resize_mode", "shortest"), fields.get("interpolation", "bicubic")
    if mode not in ("shortest", "squash") or filter_ not in ("bicubic", "bilinear"):
        raise UserError(
            f"{CONFIG} has the unsupported resize_mode={mode!r:.80} or interpolation={filter_!r:.80}; supported are "
            "shortest and squash, bicubic and bilinear."
        )
    resize = {"resize": "resize-small"} if mode == "shortest" else {"resize": "stretch"}
    made = {"library": "timm", "background": None, "interpolation": filter_, **resize}  # Resize of torchvision
    value_range = value_range_of(fields.get("mean", _MEAN), fields.get("std", _STD))
    return ImageProcessing(made, crop_shares={None: 1.0}, value_range=value_range)
