"""The text side of a two-tower checkpoint: its keys in each library, its config, its weights, the scale of the logits.

transformers: `CLIPModel` and `SiglipModel`. open_clip: `CLIP`, whose config is open_clip_config.json. big_vision:
`models/proj/image_text/two_towers`, under params/txt/. keras-hub: `CLIPBackbone` and `SigLIPBackbone`. Only headers are
read to open one, and two numbers.
"""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from keras_vit.checkpoints.checkpoint import open_arrays, unstack_scan
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.checkpoints.formats import jax, keras_hub, kmodels, open_clip
from keras_vit.checkpoints.formats.file_config import Sizes, check_field, number, part
from keras_vit.checkpoints.formats.transformers import clip
from keras_vit.checkpoints.formats.transformers.config_json import gelu_of
from keras_vit.checkpoints.infer_config import count, refuse_contradictions
from keras_vit.checkpoints.key_mapping import Rule, Transform, Weight, dense, heads_in, norm, shape_of, translate
from keras_vit.checkpoints.load import assign, check_keys, check_shapes, weights_by_key
from keras_vit.errors import UserError
from keras_vit.files.keras_model import is_keras_model
from keras_vit.files.lazy_array import LazyArray, check_all
from keras_vit.files.safetensors import folder_of, read_json
from keras_vit.models.layers import no_init_weights
from keras_vit.text.tower import TextConfig, build_text_tower

_BLOCK = "encoderblock_{i}/"
_FIRST = "encoderblock_0/"
# (1, T, D) of flax.
_LIKE_IMAGES = Transform((3,), lambda a: np.squeeze(a, 0), lambda w, heads: w[None])
# Towers that are not read, by a part of a key that only they have.
_UNREAD = {
    "visual.attnpool.": "a ResNet for its images",
    "text.transformer.embeddings.": "a text tower of another library, inside OpenCLIP",
    "text_model.embeddings.word_embeddings.": "a text tower of another kind, such as BERT",
}
# Defaults of CLIPTextConfig and SiglipTextConfig in transformers 5.23, for fields missing in config.json.
_CLIP: dict[str, Any] = {
    "num_attention_heads": 8,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "eos_token_id": 49407,
}
_SIGLIP: dict[str, Any] = {"num_attention_heads": 12, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_LAST: dict[str, Any] = {"pooling": "last", "causal": False, "head_bias": True}  # SigLIP
# Of CLIP's first files, whose config.json has this id, which is not that of the token: the largest id is pooled.
_LEGACY_END = 2
# Sizes that both config.json and the arrays have: TextConfig field -> name in transformers.
_SIZES = {
    "vocab_size": "vocab_size",
    "length": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "mlp_dim": "intermediate_size",
}
# Logits are multiplied by exp of at most this; training clips CLIP's at log(100).
_LARGEST_LOG_SCALE = 10.0


@dataclasses.dataclass(frozen=True)
class TextLayout:
    """How a library stores the text tower of two, with their scale."""

    rules: tuple[Rule, ...]
    config_file: str | None
    """Name of the config beside the weights; None if the layout has none."""
    read_config: Callable[[dict], dict[str, Any]]
    """Content of the config -> the fields of TextConfig that the arrays do not tell."""
    prefix: str
    """Beginning of the keys of the text tower alone, which must all be used."""
    scale: str = "logit_scale"
    """Key of the logarithm of the factor of the logits."""
    bias: str | None = "logit_bias"
    """Key of the number that is added to the logits, where a file has one; None for CLIP."""


def _identify(arrays: Mapping[str, LazyArray]) -> TextLayout | None:
    """The layout of the text tower among the arrays of a whole file; None for a file without one."""
    if "text_model.embeddings.token_embedding.weight" in arrays:
        return _SIGLIP_LAYOUT if "text_model.head.weight" in arrays else _CLIP_LAYOUT
    of_open_clip = "visual.class_embedding" in arrays or any(key.startswith(open_clip.TRUNK) for key in arrays)
    if "token_embedding.weight" in arrays and of_open_clip:
        return OPEN_CLIP_LAYOUT
    for layout in (HUB_CLIP_LAYOUT, HUB_SIGLIP_LAYOUT, _KMODELS_LAYOUT):
        if layout.scale in arrays:
            return layout
    return _BIG_VISION_LAYOUT if "params/txt/Embed_0/embedding" in arrays else None


def _transformers_rules(head: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return (
        Rule(("embedding/tokens",), "text_model.embeddings.token_embedding.weight"),
        Rule(("embedding/positions",), "text_model.embeddings.position_embedding.weight"),
        Rule((), "text_model.embeddings.position_ids"),
        *clip.tower_block("text_model.encoder.layers.{i}.", _BLOCK),
        *norm("encoder_norm", "text_model.final_layer_norm"),
        *head,
    )


def _text_fields(config: dict) -> dict:
    """The fields of the text tower; those of old versions of transformers go first."""
    older = config.get("text_config_dict")
    return clip.tower_config(config, "text_config") | (older if isinstance(older, dict) else {})


def _of_clip(config: dict) -> dict[str, Any]:
    fields = _CLIP | _text_fields(config)
    if fields["eos_token_id"] == _LEGACY_END and config.get("model_type") != "metaclip_2":  # whose token it is
        return {**_of_transformers(fields), "pooling": "largest"}
    return {**_of_transformers(fields), "pooling": "first-end", "end_token": fields["eos_token_id"]}


def _of_siglip(config: dict) -> dict[str, Any]:
    return {**_of_transformers(_SIGLIP | _text_fields(config)), **_LAST}


def _of_transformers(fields: dict) -> dict[str, Any]:
    return {
        "num_heads": number(fields, "num_attention_heads"),
        "gelu": gelu_of(fields["hidden_act"]),
        "layer_norm_epsilon": number(fields, "layer_norm_eps", float),
    }


_CLIP_LAYOUT = TextLayout(
    _transformers_rules(dense("head", "text_projection")[:1]), "config.json", _of_clip, "text_model.", bias=None
)
_SIGLIP_LAYOUT = TextLayout(
    _transformers_rules(dense("head", "text_model.head")), "config.json", _of_siglip, "text_model."
)
OPEN_CLIP_LAYOUT = TextLayout(
    (
        Rule(("embedding/tokens",), "token_embedding.weight"),
        Rule(("embedding/positions",), "positional_embedding"),
        Rule((), "attn_mask"),
        *open_clip.tower_block("transformer.resblocks.{i}.", _BLOCK),
        *norm("encoder_norm", "ln_final"),
        Rule(("head/kernel",), "text_projection"),
        *dense("head", "text_projection"),  # with a bias, as in SigLIP
    ),
    open_clip.CONFIG,
    open_clip.text_settings,
    "transformer.",
)


def _of_hub_clip(config: dict) -> dict[str, Any]:
    fields = keras_hub.tower_config(config, "text_encoder")
    gelu = keras_hub.gelu_of(fields.get("intermediate_activation", "quick_gelu"))
    epsilons = {"layer_norm_epsilon": 1e-5, "last_norm_epsilon": 1e-6}
    return {"num_heads": number(fields, "num_heads"), "gelu": gelu, "pooling": "largest", **epsilons}


def _of_hub_siglip(config: dict) -> dict[str, Any]:
    fields = keras_hub.tower_config(config, "text_encoder")
    gelu = keras_hub.gelu_of(fields.get("intermediate_activation", "gelu_approximate"))
    epsilon = number(fields, "layer_norm_epsilon", float) or 1e-6
    return {"num_heads": number(fields, "num_heads"), "gelu": gelu, "layer_norm_epsilon": epsilon, **_LAST}


def _hub_rules(name: str, prefix: str, embedding: str, block: str) -> tuple[Rule, ...]:
    return (
        Rule(("embedding/tokens",), f"{prefix}{embedding}/token_embedding/vars/0"),
        Rule(("embedding/positions",), f"{prefix}{embedding}/position_embedding/vars/0"),
        *keras_hub.text_block(name, f"{prefix}{block}_{{i}}/", _BLOCK),
        *keras_hub.norm("encoder_norm", f"{prefix}layer_normalization"),
    )


_OF_CLIP, _OF_SIGLIP = "layers/clip_text_encoder/layers/", "layers/sig_lip_text_encoder/layers/"
HUB_CLIP_LAYOUT = TextLayout(
    (
        *_hub_rules("CLIP", _OF_CLIP, "token_and_position_embedding", "clip_encoder_layer"),
        Rule(("head/kernel",), "layers/dense_1/vars/0"),
    ),
    keras_hub.CONFIG,
    _of_hub_clip,
    _OF_CLIP,
    "layers/clip_head/vars/0",
    None,
)
HUB_SIGLIP_LAYOUT = TextLayout(
    (
        *_hub_rules("SigLIP", _OF_SIGLIP, "sig_lip_text_embedding", "sig_lip_encoder_layer"),
        *keras_hub.dense("head", f"{_OF_SIGLIP}dense"),
    ),
    keras_hub.CONFIG,
    _of_hub_siglip,
    _OF_SIGLIP,
    "layers/sig_lip_head/vars/0",
    "layers/sig_lip_head/vars/1",
)


def _of_kmodels(config: dict) -> dict[str, Any]:
    heads = number(part(config, "text_config", kmodels.CONFIG), "num_heads")
    return {"num_heads": heads, "gelu": "tanh", "layer_norm_epsilon": 1e-6, **_LAST}


_KMODELS_LAYOUT = TextLayout(
    kmodels.text_rules(_BLOCK),
    kmodels.CONFIG,
    _of_kmodels,
    "text_model_",
    "sig_lip_logit_scale_bias/0",
    "sig_lip_logit_scale_bias/1",
)
_TEXT = "params/txt/"
_BIG_VISION_LAYOUT = TextLayout(
    (
        Rule(("embedding/tokens",), f"{_TEXT}Embed_0/embedding"),
        Rule(("embedding/positions",), f"{_TEXT}pos_embedding", _LIKE_IMAGES),
        *jax.block_rules(f"{_TEXT}Encoder_0/encoderblock_{{i}}/", jax.LINEN, _BLOCK),
        *(Rule((f"encoder_norm/{leaf}",), f"{_TEXT}Encoder_0/encoder_norm/{leaf}") for leaf in ("scale", "bias")),
        *(Rule((f"head/{leaf}",), f"{_TEXT}head/{leaf}") for leaf in ("kernel", "bias")),
    ),
    None,
    lambda config: {"gelu": "tanh", "layer_norm_epsilon": 1e-6, **_LAST},
    _TEXT,
    "params/t",
    "params/b",
)


@dataclasses.dataclass(frozen=True)
class TextCheckpoint:
    """The text tower of a checkpoint whose headers have been read."""

    folder: pathlib.Path
    """Where the tokenizer lies, on this machine."""
    layout: TextLayout
    config: TextConfig
    weights: Mapping[str, Weight]
    unexpected_keys: tuple[str, ...]
    scale: float
    """Factor of the cosine of an image and a text in the logits: exp(logit_scale)."""
    bias: float | None
    """Added to the logits (SigLIP, OpenCLIP with its loss); None for CLIP."""

    def build(self) -> keras.Model:
        """Build the model of the config with the weights. Raises UserError for missing and for other arrays."""
        with no_init_weights():
            model = build_text_tower(self.config)
        variables = weights_by_key(model)
        check_keys(self.weights, variables, self.layout.rules, self.unexpected_keys)
        check_shapes(self.weights, variables, None)
        check_all({weight.source.key: weight.source for weight in self.weights.values()}.values())
        assign(model, self.weights)
        return model


def text_tower(path: str | os.PathLike) -> keras.Model:
    """The text tower of a two-tower checkpoint, with its weights.

    Reads CLIP, SigLIP and SigLIP 2 of fixed size in the layout of transformers, OpenCLIP's own files
    (open_clip_model.safetensors with open_clip_config.json), presets of keras-hub, and big_vision's SigLIP as .npz.

    Args:
        path: file, folder, address or name of the checkpoint, as `keras_vit.from_checkpoint` takes it.

    Returns:
        A functional keras.Model from token ids (B, T) int32, as `keras_vit.tokenizer` makes them, to embeddings (B, D)
        of length 1, as the original compares them. CLIP takes up to T ids, SigLIP exactly T, with its padding.

    Raises:
        UserError: if the checkpoint has no text tower, or one of another kind.
    """
    return open_text(path).build()


def open_text(path: str | os.PathLike) -> TextCheckpoint:
    """Read the headers of the text side of a checkpoint. Raises UserError if it has none of a known kind."""
    file, arrays, layout = _opened(path)
    if layout is None:
        unread = (name for part, name in _UNREAD.items() if any(part in key for key in arrays))
        what = next((f"{name}, which is not read" for name in unread), "no text tower of CLIP or SigLIP")
        raise UserError(
            f"{os.fspath(path)} has {what}; give a two-tower checkpoint, such as hf:openai/clip-vit-base-patch32 or "
            "hf:google/siglip2-base-patch16-224."
        )
    weights, unused = translate(arrays, layout.rules)
    folder = folder_of(file)
    config = {} if layout.config_file is None else read_json(folder / layout.config_file)
    unexpected = (key for key in unused if key.startswith(layout.prefix) and not key.endswith("position_ids"))
    bias = None if layout.bias is None or layout.bias not in arrays else _number(arrays, layout.bias, 1e6)
    text_config = _text_config(weights, layout, config)
    scale = math.exp(_number(arrays, layout.scale, _LARGEST_LOG_SCALE))
    return TextCheckpoint(folder, layout, text_config, weights, tuple(unexpected), scale, bias)


def has_text_tower(path: str | os.PathLike) -> bool:
    """Whether a checkpoint has a text tower that is known; reads its headers. `path` as in `open_text`."""
    return _opened(path)[2] is not None


def _opened(path: str | os.PathLike) -> tuple[pathlib.Path, dict[str, LazyArray], TextLayout | None]:
    """The file, its arrays by the usual keys, and the layout of the text tower among them."""
    file = find_checkpoint(path)
    arrays = {} if is_keras_model(file) else _by_usual_keys(open_arrays(file))
    return file, arrays, _identify(arrays)


def _by_usual_keys(arrays: dict[str, LazyArray]) -> dict[str, LazyArray]:
    """The arrays by the keys that the layouts know.

    OWL-ViT and OWLv2 have the two towers of CLIP under their own names, OpenCLIP's CustomTextCLIP puts text. before the
    keys of its text tower, and big_vision's scan stacks the blocks.
    """
    stack = f"{_TEXT}Encoder_0/encoderblock/"
    if f"{stack}LayerNorm_0/scale" in arrays:
        stacked = {key for key in arrays if key.startswith(stack)}
        blocks = {name: block for key in stacked for name, block in unstack_scan(key, arrays[key]).items()}
        return {key: array for key, array in arrays.items() if key not in stacked} | blocks
    if "text.token_embedding.weight" in arrays:
        return {key.removeprefix("text."): array for key, array in arrays.items()}
    for prefix in ("owlvit.", "owlv2."):
        if f"{prefix}text_projection.weight" in arrays:
            return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
    return arrays


def _number(arrays: Mapping[str, LazyArray], key: str, largest: float) -> float:
    """The only number of an array, stored with or without an axis."""
    array = arrays.get(key)
    is_number = array is not None and array.is_float and math.prod(array.shape) == 1
    number = float(np.asarray(array.read(), np.float32).reshape(())) if array is not None and is_number else math.nan
    if not abs(number) < largest:
        raise UserError(f"The array {key!r} should be one number below {largest:.0f}; use the original.")
    return number


def _text_config(weights: Mapping[str, Weight], layout: TextLayout, content: dict) -> TextConfig:
    """The config of these weights. Raises UserError for missing arrays, and a config.json of other sizes."""
    query = f"{_FIRST}MultiHeadDotProductAttention_1/query/kernel"
    shape = functools.partial(shape_of, weights, layout.rules)
    (vocab_size, hidden_size), _ = shape("embedding/tokens", 2), shape(query, 2)
    settings = layout.read_config(content)
    has_heads = settings.get("num_heads", 1) is not None
    check_field(has_heads, "num_heads", "the number of heads of the text tower", None, str(layout.config_file))
    config = TextConfig(
        **{
            "vocab_size": vocab_size,
            "length": shape("embedding/positions", 2)[0],
            "hidden_size": hidden_size,
            "num_layers": count(weights, layout.rules, r"encoderblock_(\d+)/", "blocks of the text tower"),
            "mlp_dim": shape(f"{_FIRST}MlpBlock_3/Dense_0/kernel", 2)[1],
            "output_size": shape("head/kernel", 2)[1],
            "num_heads": heads_in(query, weights[query]) or 1,  # of flax alone
            **settings,
        }
    )
    fields = _text_fields(content)
    sizes: Sizes = {field: (name, number(fields, name)) for field, name in _SIZES.items() if name in fields}
    refuse_contradictions(config, sizes)
    return config
