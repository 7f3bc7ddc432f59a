"""Weights of kmodels (zeromodels 1.3): ViT, DeiT, DINO, DINOv2, DINOv3, EoMT, and the image tower of SigLIP 2.

A model is model.weights.h5 with zm_config.json and zm_preprocessor.json. The key of an array is the name of its layer
and its index, or the name of a number that the layer stores, such as the grid of its positions. Written by
`kmodels_writing.py`.
"""

import dataclasses
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from keras_vit.checkpoints import key_mapping as keys
from keras_vit.checkpoints.formats.file_config import (
    FileConfig,
    ImageProcessing,
    Sizes,
    check_field,
    check_supported,
    number,
    pair,
    part,
    value_range_of,
)
from keras_vit.checkpoints.formats.layout import Layout, unsupported
from keras_vit.files.hdf5 import open_hdf5, weights_file
from keras_vit.files.lazy_array import LazyArray
from keras_vit.files.safetensors import json_files
from keras_vit.models.config import Gelu

CONFIG, PREPROCESSOR = "zm_config.json", "zm_preprocessor.json"
_FIRST = ("blocks_0_layernorm_1/0", "vision_model_encoder_layers_0_layernorm_1/0", "layers_0_norm1/0")
BLOCK, _TOWER_BLOCK, _EOMT_BLOCK = "blocks_{i}_", "vision_model_encoder_layers_{i}_", "layers_{i}_"
_VISION, _TEXT = "vision_model_", "text_model_"
_GELU: dict[str, Gelu] = {"gelu": "erf", "silu": "silu", "swish": "silu"}
# Whose number of heads and other settings are in zm_config.json.
_MODEL_TYPES = ("vit", "deit", "dino_vit", "dino", "dinov2", "dinov3_vit", "siglip", "siglip2", "flexivit", "eomt")


def open_model(path: pathlib.Path) -> dict[str, LazyArray] | None:
    """The arrays of an HDF5 file, without the numbers beside them; None without the blocks of kmodels."""
    arrays = open_hdf5(path, named=True)
    if not any(key in arrays for key in _FIRST):
        return None
    # Keras numbers a layer without a name of its own by how many there were before.
    renamed = {re.sub(r"^(sig_lip_logit_scale_bias)_\d+", r"\1", key): array for key, array in arrays.items()}
    return {key: dataclasses.replace(array, key=key) for key, array in renamed.items() if array.is_float}


def open_configs(path: pathlib.Path) -> dict[str, dict]:
    """The configs of a file or folder, and in zm_config.json under "grid" the grid of its positions."""
    files, arrays = json_files(path, (CONFIG, PREPROCESSOR)), open_hdf5(weights_file(path), named=True)
    sides = [
        arrays.get(f"{layer}/grid_{axis}")
        for layer in ("pos_embed", f"{_VISION}embeddings_position_ids", "embeddings")
        for axis in "hw"
    ]
    grid = [int(side.fetch()) for side in sides if side is not None and side.dtype.kind == "i" and side.shape == ()]
    return {**files, CONFIG: {**files.get(CONFIG, {}), "grid": grid}}


def _block(
    layer: str,
    attention: Mapping[str, str],
    mlp: Mapping[str, str],
    to: str = keys.BLOCK,
    *,
    norm: str = "layernorm_",
    scale: str = "layerscale_",
) -> tuple[keys.Rule, ...]:
    norms, scales = (f"{norm}1", f"{norm}2"), f"{scale}{{n}}/0"
    return keys.block_rules(layer, norms, attention, mlp, scales, to, dense=keys.indexed, norm=keys.indexed_norm)


_MLP = {"Dense_0": "dense_1", "Dense_1": "dense_2"}
_SEPARATE = {"query": "attn_q_proj", "key": "attn_k_proj", "value": "attn_v_proj", "out": "attn_proj"}
_OF_TOWER = {name: f"self_attn_{name[0]}_proj" for name in keys.QKV} | {"out": "self_attn_out_proj"}


def vit_layout(arrays: Collection[str]) -> Layout:
    gated, mlp = f"{BLOCK}weights_in/0".format(i=0) in arrays, f"{keys.BLOCK}MlpBlock_3/"
    packed = keys.indexed_parts((f"{mlp}gate", f"{mlp}Dense_0"), f"{BLOCK}weights_in") if gated else ()
    rules = (
        keys.Rule(("cls",), "cls_token/0"),
        keys.Rule(("distillation/tokens",), "cls_token/1"),
        keys.Rule((keys.POSITIONS,), "pos_embed/0"),
        *keys.indexed("embedding", "conv1"),
        *packed,
        *keys.indexed_parts(keys.PROJECTIONS, f"{BLOCK}attn_qkv"),
        *_block(BLOCK, {"out": "attn_proj"}, {"Dense_1": "weights_out"} if gated else _MLP),
        *keys.indexed_norm("Transformer/encoder_norm", "final_layernorm"),
        *keys.indexed("head", "predictions"),
        *keys.indexed("head_distillation", "predictions_dist"),
    )
    # Of a table without a row of the class token, that number alone is the number of patches.
    return Layout(rules, gelu="silu" if gated else "erf", resampler="bilinear-keras", prefix_positions=None)


def dinov3_layout(*, gated: bool) -> Layout:
    mlp = {"Dense_0": "swiglu_up", "Dense_1": "swiglu_down", "gate": "swiglu_gate"} if gated else _MLP
    rules = (
        keys.Rule(("cls",), "cls_token/0"),
        keys.Rule(("registers/tokens",), "register_tokens/0"),
        *keys.indexed("embedding", "patch_embed"),
        *_block(BLOCK, _SEPARATE, mlp),
        *keys.indexed_norm("Transformer/encoder_norm", "final_layernorm"),
    )
    return Layout(rules, gelu="erf", layer_norm_epsilon=1e-5, settings={"position_embedding": "rotary"})


def _siglip_layout() -> Layout:
    head = f"{_VISION}head_"
    pooling = "MAPHead_0/MultiHeadDotProductAttention_0/"
    rules = (
        keys.Rule((keys.POSITIONS,), f"{_VISION}embeddings_position_embedding/0", keys.TABLE),
        *keys.indexed("embedding", f"{_VISION}embeddings_patch_embedding_conv"),
        *_block(_TOWER_BLOCK, _OF_TOWER, _MLP),
        *keys.indexed_norm("Transformer/encoder_norm", f"{_VISION}final_layernorm"),
        keys.Rule(("MAPHead_0/probe",), f"{head}probe/0"),
        *keys.indexed_parts(tuple(f"{pooling}{name}" for name in keys.QKV), f"{head}attention_in_proj"),
        *keys.indexed(f"{pooling}out", f"{head}attention_out_proj"),
        *keys.indexed_norm("MAPHead_0/LayerNorm_0", f"{head}layernorm"),
        *keys.indexed("MAPHead_0/MlpBlock_0/Dense_0", f"{head}dense_1"),
        *keys.indexed("MAPHead_0/MlpBlock_0/Dense_1", f"{head}dense_2"),
    )
    return Layout(rules, resampler="bilinear-keras", ignored=(_TEXT, "sig_lip_logit_scale_bias"))


def eomt_layout(*, gated: bool) -> Layout:
    mlp, upscale = f"{keys.BLOCK}MlpBlock_3/", "upscale_block_{i}_"
    packed = keys.indexed_parts((f"{mlp}gate", f"{mlp}Dense_0"), f"{_EOMT_BLOCK}mlp_weights_in") if gated else ()
    rules = (
        keys.Rule(("cls",), "embeddings/0"),
        keys.Rule(("registers/tokens",), "embeddings/1"),
        keys.Rule((keys.POSITIONS,), "embeddings/2"),
        *keys.indexed("embedding", "embeddings/projection"),
        *packed,
        *_block(
            _EOMT_BLOCK,
            {name: f"attention/{name[0]}_proj" for name in keys.QKV} | {"out": "attention/out_proj"},
            {"Dense_1": "mlp_weights_out"} if gated else {"Dense_0": "mlp_fc1", "Dense_1": "mlp_fc2"},
            norm="norm",
            scale="layer_scale",
        ),
        *keys.indexed_norm("Transformer/encoder_norm", "layernorm"),
        keys.Rule(("queries/tokens",), "query/0", keys.TABLE),
        *keys.indexed("class_head", "class_predictor"),
        *(rule for n in range(3) for rule in keys.indexed(f"mask_head/Dense_{n}", f"mask_head_fc{n + 1}")),
        *keys.indexed("upscale_{i}/transposed", f"{upscale}conv1"),
        keys.Rule(("upscale_{i}/depthwise/kernel",), f"{upscale}conv2/0"),
        *keys.indexed_norm("upscale_{i}/norm", f"{upscale}layernorm"),
    )
    return Layout(
        rules,
        gelu="silu" if gated else "erf",
        resampler="bilinear-keras",
        settings={"classifier": "none"},
        prefix_positions=False,
        task="segmentation",
    )


def text_rules(block: str) -> tuple[keys.Rule, ...]:
    """The rules of the text tower, whose blocks here are called `block`."""
    return (
        keys.Rule(("embedding/tokens",), f"{_TEXT}embeddings_token_embedding/0"),
        keys.Rule(("embedding/positions",), f"{_TEXT}embeddings_position_embedding/0"),
        *_block(f"{_TEXT}encoder_layers_{{i}}_", _OF_TOWER, _MLP, block),
        *keys.indexed_norm("encoder_norm", f"{_TEXT}final_layernorm"),
        *keys.indexed("head", f"{_TEXT}head"),
    )


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    if _FIRST[1] in arrays:
        return _siglip_layout()
    if _FIRST[2] in arrays and "query/0" in arrays:
        if "class_predictor/0" not in arrays:
            raise unsupported(
                "an EoMTModel of kmodels", "give the file of its EoMTUniversalSegment, which has the heads"
            )
        return eomt_layout(gated="layers_0_mlp_weights_in/0" in arrays)
    if _FIRST[0] not in arrays:
        return None
    if "patch_embed/0" in arrays:
        return dinov3_layout(gated="blocks_0_swiglu_gate/0" in arrays)
    return vit_layout(arrays)


def read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    content = files[CONFIG]
    config = {**content, **part(content, "vision_config", CONFIG), "grid": content.get("grid")}
    name = config.get("model_type") or content.get("model_type")
    if "model_type" in content:
        check_supported("model_type", content["model_type"], _MODEL_TYPES, CONFIG)
    rotary = layout.settings.get("position_embedding") == "rotary"
    if rotary:
        check_supported("rope_theta", config.get("rope_theta", 100.0), [100.0], CONFIG)
    fields = {"hidden_size": ("hidden_dim", "embed_dim"), "num_layers": ("num_hidden_layers", "num_layers", "depth")}
    sizes = _stated(config, fields)
    activation = config.get("hidden_act", "gelu") if rotary and name else "gelu"
    check_supported("hidden_act", activation, _GELU, CONFIG)
    return FileConfig(
        num_heads=number(config, "num_heads"),
        gelu=(_GELU[activation] if rotary else layout.gelu) if name else None,
        layer_norm_epsilon=number(config, "layer_norm_eps", float),
        layer_scale=number(config, "layer_scale_init", float),
        image_size=_image_size(config),
        images=_images(files.get(PREPROCESSOR, {})),
        sizes=sizes,
        **(_of_eomt(config) if layout.task else {}),
    )


def _stated(config: dict, fields: Mapping[str, Sequence[str]]) -> Sizes:
    """The numbers of a config by field here: (name, value) of the first name that it has."""
    named = {field: next((name for name in names if name in config), "") for field, names in fields.items()}
    return {field: (name, number(config, name)) for field, name in named.items() if name}


def _of_eomt(config: dict) -> dict[str, Any]:
    """The fields of FileConfig for segmentation."""
    num_blocks = number(config, "depths")
    check_field(num_blocks is not None, "depths", "the number of blocks with queries", num_blocks, CONFIG)
    same = ("num_classes", "num_queries", "num_upscale_blocks")
    return {
        "task_sizes": _stated(config, {field: (field,) for field in same}),
        "task_settings": {"gelu": "erf", "num_blocks": num_blocks},
    }


def _image_size(config: dict) -> tuple[int, int] | None:
    """The size of the images of the grid of the positions, or without positions that in the config."""
    grid, patch = config.get("grid"), number(config, "patch_size")
    if isinstance(grid, list) and len(grid) == 2 and patch is not None:
        return pair({"grid": [side * patch for side in grid]}, "grid")
    size = config.get("image_size")
    return pair({"image_size": size[:2] if isinstance(size, list) else size}, "image_size")


def _images(fields: dict) -> ImageProcessing | None:
    """The images of zm_preprocessor.json: stretched by keras.ops.image.resize, then perhaps cropped; for EoMT padded.

    Of a padded image kmodels truncates the shorter side where that is not whole, here it is rounded.
    """
    if (target := pair(fields, "target_size")) is not None:
        padded = {"resize": "pad", "padding": "after", "background": "black", "antialias": False}
        value_range = value_range_of(fields.get("image_mean"), fields.get("image_std"))
        return ImageProcessing({**padded, "interpolation": "bilinear"}, target, value_range=value_range)
    if not fields.get("size"):
        return None
    check_supported("do_resize", fields.get("do_resize", True), [True], PREPROCESSOR)
    interpolation = fields.get("resample", "bicubic")
    check_supported("resample", interpolation, ("nearest", "bilinear", "bicubic", "lanczos3"), PREPROCESSOR)
    size, crop = (_sides(fields, name) for name in ("size", "crop_size"))
    crops = bool(fields.get("do_center_crop")) and crop is not None
    own: dict[str, Any] = {"resize": "stretch", "interpolation": interpolation, "background": None}
    own |= {"antialias": bool(fields.get("antialias", True)), **({"crop_from": size} if crops else {})}
    white = 255.0 * (number(fields, "rescale_factor", float) or 1 / 255) if fields.get("do_rescale", True) else 255.0
    normalizes = fields.get("do_normalize", True)
    value_range = (
        value_range_of(fields.get("image_mean"), fields.get("image_std"), white) if normalizes else (0.0, white)
    )
    return ImageProcessing(own, crop if crops else size, value_range=value_range)


def _sides(fields: dict, name: str) -> tuple[int, int] | None:
    size = fields.get(name)
    check_field(size is None or isinstance(size, dict), name, "height and width", size, PREPROCESSOR)
    return None if size is None else pair({name: [size.get("height"), size.get("width")]}, name)
