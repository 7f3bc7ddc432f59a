"""Writes files of kmodels (zeromodels 1.3): all kinds that are read, but for SigLIP 2.

Keras names an array by the class of its layer, which it numbers in the order of the model, and by those around it.
"""

import collections
import dataclasses
import pathlib
import re
import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_vit.checkpoints import key_mapping as keys
from keras_vit.checkpoints.formats import kmodels
from keras_vit.checkpoints.formats.file_config import mean_and_std
from keras_vit.checkpoints.formats.layout import DEFAULTS, Format, Layout, check_square, inexpressible
from keras_vit.files.hdf5 import write_hdf5
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import DetectionConfig, LinearSegmentationConfig, ViTConfig

if TYPE_CHECKING:
    from keras_vit.images.preprocessing import Preprocessing

_EPSILON = 1e-6
# The name of a layer -> the classes of it and of those around it, in the order of the layers of a model.
_VIT_CLASSES = {
    "conv1": "conv2d",
    "cls_token": "vi_t_class_dist_token",
    "pos_embed": "vi_t_add_position_embs",
    r"blocks_(\d+)_layernorm_1": "layer_normalization",
    r"blocks_(\d+)_attn_(qkv|proj)": r"vi_t_multi_head_self_attention/\2",
    r"blocks_(\d+)_layerscale_1": "vi_t_layer_scale",
    r"blocks_(\d+)_layernorm_2": "layer_normalization",
    r"blocks_(\d+)_(?:dense_1|weights_in)": "dense",
    r"blocks_(\d+)_(?:dense_2|weights_out)": "dense",
    r"blocks_(\d+)_layerscale_2": "vi_t_layer_scale",
    "final_layernorm": "layer_normalization",
    "predictions": "dense",
    "predictions_dist": "dense",
}
_DINOV3_CLASSES = {
    "patch_embed": "conv2d",
    "cls_token": "dino_v3cls_token",
    "register_tokens": "dino_v3_register_tokens",
    r"blocks_(\d+)_layernorm_1": "layer_normalization",
    r"blocks_(\d+)_attn_(\w*proj)": r"dino_v3_attention/\2",
    r"blocks_(\d+)_layerscale_1": "dino_v3_layer_scale",
    r"blocks_(\d+)_layernorm_2": "layer_normalization",
    r"blocks_(\d+)_(?:dense_1|swiglu_gate)": "dense",
    r"blocks_(\d+)_(?:dense_2|swiglu_up)": "dense",
    r"blocks_(\d+)_swiglu_down": "dense",
    r"blocks_(\d+)_layerscale_2": "dino_v3_layer_scale",
    "final_layernorm": "layer_normalization",
}
_EOMT_CLASSES = {
    "embeddings/projection": "eo_mt_embeddings/patch_embeddings/projection",
    "embeddings": "eo_mt_embeddings",
    "query": "eo_mt_query_injection",
    r"layers_(\d+)_norm1": "layer_normalization",
    r"layers_(\d+)_attention/(\w+)": r"eo_mt_attention/\2",
    r"layers_(\d+)_layer_scale1": "eo_mt_layer_scale",
    r"layers_(\d+)_norm2": "layer_normalization",
    r"layers_(\d+)_mlp_(?:fc1|weights_in)": "dense",
    r"layers_(\d+)_mlp_(?:fc2|weights_out)": "dense",
    r"layers_(\d+)_layer_scale2": "eo_mt_layer_scale",
    "layernorm": "layer_normalization",
    r"mask_head_fc\d": "dense",
    "class_predictor": "dense",
    r"upscale_block_\d+_conv1": "conv2d_transpose",
    r"upscale_block_\d+_conv2": "depthwise_conv2d",
    r"upscale_block_\d+_layernorm": "layer_normalization",
}
# The module and class of a family, and the type in its config.
_FAMILIES = {
    "vit": ("vit", "ViTImageClassify", "vit"),
    "deit": ("deit", "DeiTImageClassify", "deit"),
    "dino": ("dino", "DinoViTModel", "dino_vit"),
    "dinov2": ("dino_v2", "DinoV2Model", "dinov2"),
    "dinov3": ("dino_v3", "DinoV3ViTModel", "dinov3_vit"),
    "eomt": ("eomt", "EoMTUniversalSegment", "eomt"),
}


def _family(model: Blueprint) -> str | None:
    """The family of a model; None if there is none."""
    config = model.config
    if not isinstance(config, ViTConfig) or isinstance(model.task, DetectionConfig | LinearSegmentationConfig):
        return None
    if model.task is not None:
        return "eomt"
    if config.position_embedding == "rotary":
        return "dinov3"
    if model.num_classes:
        deit = config.distillation != "none" or config.layer_scale is not None or not config.prefix_positions
        return "deit" if deit else "vit"
    return "dino" if config.layer_scale is None else "dinov2"


def _expressible(model: Blueprint) -> dict[str, tuple | None] | None:
    family = _family(model)
    if family is None:
        return None
    gelu = ("silu",) if model.vit.gated_mlp else ("erf",)
    common: dict[str, tuple | None] = {**DEFAULTS, "gelu": gelu, "layer_norm_epsilon": (_EPSILON,)}
    scaled = () if model.vit.layer_scale is None else None
    own: dict[str, dict[str, tuple | None]] = {
        "vit": {"qkv_bias": None},
        "deit": {
            **dict.fromkeys(("layer_scale", "prefix_positions"), None),
            "distillation": ("none", "head"),
            "mlp_dim": (4 * model.vit.hidden_size,),
        },
        "dino": {"qkv_bias": None},
        "dinov2": {"gated_mlp": None, "layer_scale": scaled, "qkv_bias": None},
        "dinov3": {
            **dict.fromkeys(("gated_mlp", "num_registers", "key_bias", "qkv_bias", "layer_norm_epsilon"), None),
            "gelu": ("erf", "silu"),
            "layer_scale": scaled,
            "position_embedding": ("rotary",),
        },
        "eomt": {
            **dict.fromkeys(("gated_mlp", "num_registers", "prefix_positions"), None),
            "layer_scale": scaled,
            "classifier": ("none",),
            "with_class_token": (True,),
        },
    }
    return common | own[family]


def _layout_for(model: Blueprint) -> Layout:
    family, gated = _family(model), model.vit.gated_mlp
    if family == "dinov3":
        return kmodels.dinov3_layout(gated=gated)
    rows, columns = (np.array(side, np.int64) for side in model.vit.grid(model.preprocessing.image_size))
    if family == "eomt":
        grid = {"embeddings/grid_h": rows, "embeddings/grid_w": columns}
        if not model.vit.num_registers:
            grid["embeddings/1"] = np.zeros((1, 0, model.vit.hidden_size), np.float32)
        return dataclasses.replace(kmodels.eomt_layout(gated=gated), constants=grid)
    flags = {"no_embed_class": not model.vit.prefix_positions, "use_distillation": model.vit.distillation != "none"}
    constants = {"pos_embed/grid_h": rows, "pos_embed/grid_w": columns}
    constants |= {f"pos_embed/{name}": np.array(value) for name, value in flags.items()}
    layout = kmodels.vit_layout({f"{kmodels.BLOCK}weights_in/0".format(i=0)} if gated else ())
    return dataclasses.replace(layout, constants=constants)


def _write_weights(folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write model.weights.h5, the inverse of `open_model`."""
    classes = next(
        table
        for key, table in (("query/0", _EOMT_CLASSES), ("patch_embed/0", _DINOV3_CLASSES), ("conv1/0", _VIT_CLASSES))
        if key in arrays
    )
    paths = _paths({key.rpartition("/")[0] for key in arrays}, classes)
    stored, names = {}, {}
    for key, array in arrays.items():
        layer, _, leaf = key.rpartition("/")
        path = f"layers/{paths[layer]}/vars"
        stored[f"{path}/{leaf}"] = array
        outer, _, inner = layer.rpartition("/")
        names[path] = {"name": inner}
        if outer:
            names[f"layers/{paths[layer].partition('/')[0]}/vars"] = {"name": outer}
    write_hdf5(folder / "model.weights.h5", stored, names)


def _paths(layers: Collection[str], classes: Mapping[str, str]) -> dict[str, str]:
    """The path of each layer: its class, counted in the order of blocks and layers, and a layer in it."""
    order: list[tuple[int, int, str, str]] = []
    for place, (pattern, class_) in enumerate(classes.items()):
        for layer in layers:
            if match := re.fullmatch(pattern, layer):
                block = int(match[1]) if match.groups() else len(layers)
                order.append((block, place, layer, match.expand(class_)))
    paths, counts = {}, collections.Counter[str]()
    for block, _, layer, class_ in sorted(order):
        outer, slash, inner = class_.partition("/")
        number_ = counts[outer]
        if slash:  # the only layer of its class in a block
            number_ = block if block < len(layers) else 0
        else:
            counts[outer] += 1
        paths[layer] = f"{outer}_{number_}{slash}{inner}" if number_ else f"{outer}{slash}{inner}"
    return paths


def _write_config(model: Blueprint) -> dict[str, dict]:
    config, family = model.vit, str(_family(model))
    if model.classifier_activation is not None:
        raise inexpressible("kmodels has no activation behind the head", model.classifier_activation)
    size = model.preprocessing.image_size
    check_square(f"{family} of kmodels", config.patch, *([size] if family == "eomt" else []))
    fields: dict[str, Any] = {
        "patch_size": config.patch[0],
        "embed_dim": config.hidden_size,
        "depth": config.num_layers,
        "num_heads": config.num_heads,
        "mlp_ratio": _mlp_ratio(config, thirds=config.gated_mlp and family != "dinov3"),
        "image_size": [*size] if model.preprocessing.channels == 3 else [*size, model.preprocessing.channels],
        **_own_fields(family, model),
    }
    if family == "eomt":
        fields |= {
            "hidden_dim": fields.pop("embed_dim"),
            "num_hidden_layers": fields.pop("depth"),
            "image_size": size[0],
        }
    if family == "deit":
        del fields["mlp_ratio"]
    module, class_, type_ = _FAMILIES[family]
    content: dict[str, Any] = {
        "library_name": "zeromodels",
        "model_module": f"zeromodels.models.{module}",
        "model_class": class_,
    }
    content |= {"variant": "own", "weights": "model.weights.h5", "schema_version": 2, "model_type": type_}
    return {
        kmodels.CONFIG: {**content, "vision_config": fields},
        kmodels.PREPROCESSOR: _written_images(model.preprocessing, family),
    }


def _mlp_ratio(config: ViTConfig, *, thirds: bool) -> float:
    """The ratio from which kmodels makes the width of the MLP; of DINOv2's SwiGLU two thirds, up to a multiple of 8."""
    widths = range(config.mlp_dim, 2 * config.mlp_dim) if thirds else [config.mlp_dim]
    hidden = next((n for n in widths if not thirds or (int(n * 2 / 3) + 7) // 8 * 8 == config.mlp_dim), None)
    if hidden is None:
        raise inexpressible("Gated MLPs of kmodels are a multiple of 8 wide", config.mlp_dim)
    whole = hidden / config.hidden_size
    return whole if int(config.hidden_size * whole) == hidden else (hidden + 0.5) / config.hidden_size


def _own_fields(family: str, model: Blueprint) -> dict[str, Any]:
    """The fields of a family beside those of all."""
    config = model.vit
    if family == "eomt":
        task = model.segmentation
        if task.mask_attention or task.gelu != "erf":
            raise inexpressible("EoMT of kmodels has no mask attention, and the exact GELU in its heads", "others")
        counted = {name: getattr(task, name) for name in ("num_queries", "num_classes", "num_upscale_blocks")}
        own = {"depths": task.num_blocks, "num_register_tokens": config.num_registers, **counted}
        return {**own, "layerscale_value": config.layer_scale, "use_swiglu_ffn": config.gated_mlp}
    if family == "dinov3":
        return {
            **{f"{name}_bias": config.qkv_bias for name in keys.QKV},
            "key_bias": config.qkv_bias and config.key_bias,
            "use_swiglu": config.gated_mlp,
            "num_register_tokens": config.num_registers,
            "layer_scale_init": config.layer_scale,
            "hidden_act": "silu" if config.gelu == "silu" else "gelu",
            "layer_norm_eps": config.layer_norm_epsilon,
        }
    if family == "dinov2":
        own = {"layer_scale_init": config.layer_scale, "use_swiglu": config.gated_mlp}
        return {**own, "qkv_bias": config.qkv_bias}
    if family == "deit":
        own = {"use_distillation": config.distillation != "none", "no_embed_class": not config.prefix_positions}
        return {**own, "layer_scale_init": config.layer_scale, "num_classes": model.num_classes}
    return {"qkv_bias": config.qkv_bias, **({"num_classes": model.num_classes} if family == "vit" else {})}


def _written_images(preprocessing: "Preprocessing", family: str) -> dict[str, Any]:
    """zm_preprocessor.json. Warns where no processor makes the images of the model."""
    filter_, pads = preprocessing.interpolation or "bilinear", family == "eomt"
    known = ("bilinear",) if pads else ("nearest", "bilinear", "bicubic", "lanczos3")
    fits = (
        (preprocessing.resize, preprocessing.padding) == ("pad", "after") if pads else preprocessing.resize == "stretch"
    )
    if not fits or filter_ not in known or preprocessing.dtype == "uint8" or (pads and preprocessing.antialias):
        warnings.warn(
            f"The image processors of kmodels cannot make the images of this model ({preprocessing.summary()}); the "
            "written one makes similar ones.",
            stacklevel=5,
        )
    (height, width), crop = preprocessing.image_size, preprocessing.crop_from
    mean, std = mean_and_std(preprocessing)
    module, class_ = ("eomt", "EoMTImageProcessor") if pads else ("vit", "ViTImageProcessor")
    content: dict[str, Any] = {"preprocessor_module": f"zeromodels.models.{module}", "preprocessor_class": class_}
    content = {"library_name": "zeromodels", **content, "image_mean": mean, "image_std": std}
    if pads:
        return {**content, "target_size": height}
    before = (height, width) if crop is None else (crop, crop) if isinstance(crop, int) else crop
    return {
        **content,
        "size": dict(zip(("height", "width"), before, strict=True)),
        "crop_size": {"height": height, "width": width},
        "resample": filter_ if filter_ in known else "bilinear",
        "do_center_crop": crop is not None,
        "antialias": bool(preprocessing.antialias),
    }


KMODELS = Format(
    "kmodels",
    kmodels.identify,
    (kmodels.CONFIG, kmodels.PREPROCESSOR),
    kmodels.open_configs,
    kmodels.read_config,
    suffixes=("",),
    expressible=_expressible,
    layout_for=_layout_for,
    write_config=_write_config,
    write_weights=_write_weights,
)
KMODELS_TASKS = dataclasses.replace(KMODELS, has_task=True)
