"""The keys and configs of the text towers that each library writes, beside the image towers in `checkpoints/formats`.

transformers: `CLIPModel` and `SiglipModel`. open_clip: `CLIP`, whose config is open_clip_config.json. big_vision:
`models/proj/image_text/text_transformer` as `models/proj/image_text/two_towers` stores it, under params/txt/.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keras_vit.checkpoints.formats import open_clip
from keras_vit.checkpoints.formats.file_config import number
from keras_vit.checkpoints.formats.transformers import clip
from keras_vit.checkpoints.formats.transformers.config_json import gelu_of
from keras_vit.checkpoints.infer_config import check_numbered
from keras_vit.checkpoints.key_mapping import (
    FROM_HEADS,
    QKV,
    SAME,
    TO_HEADS,
    Rule,
    Transform,
    dense,
    norm,
)
from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray
from keras_vit.text.config import TextConfig

Arrays = Mapping[str, LazyArray]

_BLOCK = "encoderblock_{i}/"
_ATTENTION = f"{_BLOCK}MultiHeadDotProductAttention_1/"
# (1, T, D) of flax.
_LIKE_IMAGES = Transform((3,), lambda s: s[1:] if s[0] == 1 else s, lambda a: a[0], lambda w, heads: w[None])
# Towers of kinds that are not read, by a part of a key that only they have.
UNREAD = {
    "visual.trunk.": "a tower of timm for its images, inside OpenCLIP",
    "visual.attnpool.": "a ResNet for its images",
    "text.transformer.embeddings.": "a text tower of another library, inside OpenCLIP",
    "text_model.embeddings.word_embeddings.": "a text tower of another kind, such as BERT",
}
# Defaults of CLIPTextConfig and SiglipTextConfig in transformers 5.23, for fields missing in config.json.
_CLIP: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "eos_token_id": 49407,
}
_SIGLIP: Mapping[str, Any] = {"num_attention_heads": 12, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
# Of CLIP's first files, whose config.json has this id, which is not that of the token: the largest id is pooled.
_LEGACY_END = 2
# Whose token it is.
_METACLIP_2 = "metaclip_2"
# Sizes that both config.json and the arrays have: TextConfig field -> name in transformers.
_SIZES = {
    "vocab_size": "vocab_size",
    "length": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "mlp_dim": "intermediate_size",
}


@dataclasses.dataclass(frozen=True)
class TextLayout:
    """How a library stores two towers with their scale."""

    name: str
    """Of the family, for messages and the tokenizer."""
    rules: tuple[Rule, ...]
    config_file: str | None
    """Name of the config beside the weights; None if the layout has none."""
    read_config: Callable[[dict, dict[str, Any]], TextConfig]
    """(content of the config, sizes by field of TextConfig that the arrays tell) -> the config."""
    scale: str
    """Key of the logarithm of the factor of the logits."""
    bias: str | None = None
    """Key of the number that is added to the logits, where a file has one; None for CLIP."""
    prefix: str = ""
    """Beginning of the keys of the text tower alone, for those that must all be used; "" if the rules tell."""


def identify_text(arrays: Arrays) -> TextLayout | None:
    """The layout of the text tower among the arrays of a whole file; None for a file without one."""
    if "text_model.embeddings.token_embedding.weight" in arrays:
        return _SIGLIP_LAYOUT if "text_model.head.weight" in arrays else _CLIP_LAYOUT
    if "token_embedding.weight" in arrays and "visual.class_embedding" in arrays:
        return _OPEN_CLIP_LAYOUT
    return _BIG_VISION_LAYOUT if "params/txt/Embed_0/embedding" in arrays else None


def _transformers_rules(head: Iterable[Rule]) -> tuple[Rule, ...]:
    return (
        Rule(("embedding/tokens",), "text_model.embeddings.token_embedding.weight"),
        Rule(("embedding/positions",), "text_model.embeddings.position_embedding.weight"),
        Rule((), "text_model.embeddings.position_ids"),
        *clip.block_rules(_BLOCK, "text_model.encoder.layers.{i}."),
        *norm("encoder_norm", "text_model.final_layer_norm"),
        *head,
    )


def _text_fields(config: dict) -> dict:
    """The fields of the text tower; those of old versions of transformers go first."""
    older = config.get("text_config_dict")
    return clip.tower_config(config, "text_config") | (older if isinstance(older, dict) else {})


def _of_clip(config: dict, sizes: dict[str, Any]) -> TextConfig:
    fields = dict(_CLIP) | _text_fields(config)
    end = fields["eos_token_id"]
    if not isinstance(end, int) or isinstance(end, bool):
        raise UserError(f"config.json should give one eos_token_id in text_config, but gives {end!r:.80}.")
    legacy = end == _LEGACY_END and config.get("model_type") != _METACLIP_2
    return _of_transformers(
        fields, sizes, pooling="largest" if legacy else "first-end", end_token=None if legacy else end
    )


def _of_siglip(config: dict, sizes: dict[str, Any]) -> TextConfig:
    fields = dict(_SIGLIP) | _text_fields(config)
    return _of_transformers(fields, sizes, pooling="last", causal=False, head_bias=True)


def _of_transformers(fields: dict, sizes: dict[str, Any], **own: Any) -> TextConfig:
    for field, name in _SIZES.items():
        value = number(fields, name)
        if value is not None and value != sizes[field]:
            raise UserError(
                f"config.json says {name}={value} in text_config, but the arrays of the text tower have "
                f"{sizes[field]}; replace it by the one that belongs to them."
            )
    return TextConfig(
        **sizes,
        num_heads=number(fields, "num_attention_heads"),
        gelu=gelu_of(fields["hidden_act"]),
        layer_norm_epsilon=number(fields, "layer_norm_eps", float),
        **own,
    )


def _open_clip_rules() -> tuple[Rule, ...]:
    return (
        Rule(("embedding/tokens",), "token_embedding.weight"),
        Rule(("embedding/positions",), "positional_embedding"),
        Rule((), "attn_mask"),
        *open_clip.block_rules(_BLOCK, "transformer.resblocks.{i}."),
        *norm("encoder_norm", "ln_final"),
        Rule(("head/kernel",), "text_projection", SAME),
    )


def _of_open_clip(config: dict, sizes: dict[str, Any]) -> TextConfig:
    settings = open_clip.text_settings(config)
    return TextConfig(**sizes, **settings, layer_norm_epsilon=1e-5, pooling="largest")


def _big_vision_rules() -> tuple[Rule, ...]:
    text = "params/txt/"
    block = f"{text}Encoder_0/encoderblock_{{i}}/"
    rules = [
        Rule(("embedding/tokens",), f"{text}Embed_0/embedding"),
        Rule(("embedding/positions",), f"{text}pos_embedding", _LIKE_IMAGES),
        *(
            Rule((f"{name}/{leaf}",), f"{key}/{leaf}")
            for name, key in (
                (f"{_BLOCK}LayerNorm_0", f"{block}LayerNorm_0"),
                (f"{_BLOCK}LayerNorm_2", f"{block}LayerNorm_1"),
                ("encoder_norm", f"{text}Encoder_0/encoder_norm"),
            )
            for leaf in ("scale", "bias")
        ),
    ]
    for leaf, transform in (("kernel", FROM_HEADS), ("bias", SAME)):
        attention = f"{block}MultiHeadDotProductAttention_0/"
        rules += [Rule((f"{_ATTENTION}{part}/{leaf}",), f"{attention}{part}/{leaf}", TO_HEADS) for part in QKV]
        rules.append(Rule((f"{_ATTENTION}out/{leaf}",), f"{attention}out/{leaf}", transform))
        for layer in ("Dense_0", "Dense_1"):
            rules.append(Rule((f"{_BLOCK}MlpBlock_3/{layer}/{leaf}",), f"{block}MlpBlock_0/{layer}/{leaf}"))
        rules.append(Rule((f"head/{leaf}",), f"{text}head/{leaf}"))
    return tuple(rules)


def _of_big_vision(config: dict, sizes: dict[str, Any]) -> TextConfig:
    """SigLIP's; the number of heads is in the shapes."""
    return TextConfig(**sizes, gelu="tanh", layer_norm_epsilon=1e-6, pooling="last", causal=False, head_bias=True)


_CLIP_LAYOUT = TextLayout(
    "CLIP",
    _transformers_rules(dense("head", "text_projection")[:1]),
    "config.json",
    _of_clip,
    "logit_scale",
    prefix="text_model.",
)
_SIGLIP_LAYOUT = TextLayout(
    "SigLIP",
    _transformers_rules(dense("head", "text_model.head")),
    "config.json",
    _of_siglip,
    "logit_scale",
    "logit_bias",
    "text_model.",
)
_OPEN_CLIP_LAYOUT = TextLayout(
    "OpenCLIP",
    _open_clip_rules(),
    "open_clip_config.json",
    _of_open_clip,
    "logit_scale",
    "logit_bias",  # of those that were trained with SigLIP's loss
    "transformer.",
)
_BIG_VISION_LAYOUT = TextLayout(
    "big_vision", _big_vision_rules(), None, _of_big_vision, "params/t", "params/b", "params/txt/"
)


def sizes_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a text tower, by field of TextConfig, from its weights by name.

    Raises UserError for a missing array.
    """

    def shape(name: str, rank: int) -> tuple[int, ...]:
        if name not in weights or len(weights[name].shape) != rank or min(weights[name].shape) < 1:
            raise UserError(f"The text tower lacks {name}, or has it in another shape; use the complete file.")
        return weights[name].shape

    blocks = {int(match[1]) for name in weights if (match := re.match(r"encoderblock_(\d+)/", name))}
    check_numbered("blocks of the text tower", blocks)
    (vocab_size, hidden_size), length = shape("embedding/tokens", 2), shape("embedding/positions", 2)[0]
    return {
        "vocab_size": vocab_size,
        "length": length,
        "hidden_size": hidden_size,
        "num_layers": len(blocks),
        "mlp_dim": shape("encoderblock_0/MlpBlock_3/Dense_0/kernel", 2)[1],
        "output_size": shape("head/kernel", 2)[1],
    }
