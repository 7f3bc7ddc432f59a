"""Presets of keras-hub 0.32: ViT, DeiT, DINOv2, DINOv3, and the image towers of CLIP and SigLIP.

A preset is a folder with config.json, model.weights.h5 and, of a classifier, task.json and task.weights.h5. The key of
an array is its path in these files, but with a number also for the first block, with names for the tokens of DINOv2 and
DINOv3, and with "task/" before those of task.weights.h5. How it makes its images: `keras_hub_images.py`.
"""

import dataclasses
import io
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_vit.checkpoints import key_mapping as keys
from keras_vit.checkpoints.formats import keras_hub_images as images
from keras_vit.checkpoints.formats.file_config import (
    FileConfig,
    Sizes,
    check_field,
    check_supported,
    number,
    pair,
    part,
)
from keras_vit.checkpoints.formats.layout import DEFAULTS, QUERY_BIAS, Format, Layout, check_square, inexpressible
from keras_vit.files.hdf5 import WEIGHTS, open_hdf5, write_hdf5
from keras_vit.files.lazy_array import LazyArray, in_memory
from keras_vit.files.safetensors import read_json
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import Gelu, ViTConfig

CONFIG, TASK = "config.json", "task.json"
TASK_WEIGHTS = "task.weights.h5"
_OF_TASK = "task/"
_TEXT_TOWERS = ("layers/clip_text_encoder/", "layers/sig_lip_text_encoder/")
_HEADS = ("layers/clip_head/", "layers/sig_lip_head/", f"{_OF_TASK}optimizer/")
# The lists of blocks, of which the files number all but the first.
_BLOCKS = r"((?:vi_t|dei_t)_encoder_block|dinov[23]_layer|(?:clip|sig_lip)_encoder_layer)"
# The variables of an embedding in their order; config.json says which of them a model has.
_VARIABLES = {
    "layers/dinov2_embedding/": ("cls_token", "mask_token", "register_tokens", "interpolated", "position_embeddings"),
    "layers/dinov3_embedding/": ("cls_token", "mask_token", "register_tokens"),
}
# The positions that a model looks up in its table, by the key of the table.
_POSITION_IDS = {
    "clip_vision_embedding/position_embedding/vars/0": "clip_vision_embedding/vars/1",
    "sig_lip_vision_embedding/position_embedding/vars/0": "sig_lip_vision_embedding/vars/0",
    "sig_lip_text_embedding/position_embedding/vars/0": "sig_lip_text_embedding/vars/0",
}
_GELU: dict[str, Gelu] = {"gelu": "erf", "gelu_approximate": "tanh", "quick_gelu": "quick", "silu": "silu"}
ACTIVATIONS = {gelu: name for name, gelu in _GELU.items()}
_CLASSES = {
    "ViTBackbone": "vit.vit_backbone",
    "ViTImageClassifier": "vit.vit_image_classifier",
    "DeiTBackbone": "deit.deit_backbone",
    "DeiTImageClassifier": "deit.deit_image_classifier",
    "DINOV2Backbone": "dinov2.dinov2_backbone",
    "DINOV3Backbone": "dinov3.dinov3_backbone",
    "SigLIPVisionEncoder": "siglip.siglip_vision_encoder",
    "CLIPVisionEncoder": "clip.clip_vision_encoder",
}
_TWO_TOWERS = {"SigLIPBackbone": "SigLIPVisionEncoder", "CLIPBackbone": "CLIPVisionEncoder"}


# The arrays


def is_preset(folder: pathlib.Path) -> bool:
    """Whether a folder has the files of a preset."""
    return (folder / WEIGHTS).is_file() and (folder / CONFIG).is_file()


def open_preset(folder: pathlib.Path) -> dict[str, LazyArray]:
    """The arrays of a preset, by the keys that the rules below have. Raises UserError for damaged files."""
    arrays = open_hdf5(folder / WEIGHTS)
    if (folder / TASK_WEIGHTS).is_file():
        arrays |= {f"{_OF_TASK}{key}": array for key, array in open_hdf5(folder / TASK_WEIGHTS).items()}
    config = part(read_json(folder / CONFIG), "config", CONFIG)
    arrays = {_named(key, config): array for key, array in arrays.items()}
    for table, positions in _POSITION_IDS.items():
        for key in [key for key in arrays if key.endswith(table)]:
            arrays[key] = _looked_up(arrays[key], arrays.get(key.removesuffix(table) + positions))
    arrays = {key: dataclasses.replace(array, key=key) for key, array in arrays.items() if array.is_float}
    return arrays | _zero_biases(arrays)


def _named(key: str, config: dict) -> str:
    for layer, names in _VARIABLES.items():
        if match := re.fullmatch(rf"{layer}vars/(\d+)", key):
            flags = {"mask_token": "use_mask_token", "register_tokens": "num_register_tokens"}
            own = [name for name in names if config.get(flags.get(name, ""), True)]
            return f"{layer}{own[int(match[1])]}" if int(match[1]) < len(own) else key
    return re.sub(rf"{_BLOCKS}(?=/)", r"\1_0", key)


def _looked_up(table: LazyArray, positions: LazyArray | None) -> LazyArray:
    """The rows of a table that the model looks up; those of a new CLIP are all the first one."""
    if positions is None or positions.dtype.kind != "i":
        return table
    ids = positions.fetch().reshape(-1)
    if np.array_equal(ids, np.arange(len(ids))):
        return table
    is_right = len(table.shape) == 2 and len(ids) == table.shape[0] and ids.min() >= 0 and ids.max() < len(ids)
    keys.check_array(is_right, positions.key, "hold rows of the position embeddings", f"holds {ids[:5].tolist()}")
    return dataclasses.replace(
        table, dtype=np.dtype(np.float32), open=lambda: io.BytesIO(np.ascontiguousarray(table.read()[ids]).tobytes())
    )


def _zero_biases(arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """The biases that a block of keras-hub may lack where blocks here have one."""
    zeros: dict[str, LazyArray] = {}
    for key, kernel in arrays.items():
        layer, bias = key.removesuffix("vars/0"), key[:-1] + "1"
        if not re.search(rf"/{_BLOCKS}_\d+/", key) or layer == key or len(kernel.shape) < 2 or bias in arrays:
            continue
        attention, _, name = layer[:-1].rpartition("/")
        if name == "key_dense":
            continue
        others = {"query_dense": "value_dense", "value_dense": "query_dense"}
        if name in others and f"{attention}/{others[name]}/vars/1" not in arrays:
            continue
        shape = kernel.shape[1:] if name in others else kernel.shape[-1:]
        zeros[bias] = in_memory(bias, np.broadcast_to(np.float32(0.0), shape))
    return zeros


def _write_weights(folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the files of a preset, the inverse of `open_preset`."""
    named = {re.sub(rf"{_BLOCKS}_0(?=/)", r"\1", key): array for key, array in arrays.items()}
    for layer, names in _VARIABLES.items():
        own = [f"{layer}{name}" for name in names if f"{layer}{name}" in named]
        if f"{layer}position_embeddings" in named:  # of the size of the images, and of that of training
            named[f"{layer}interpolated"] = named[f"{layer}position_embeddings"]
            own.insert(-1, f"{layer}interpolated")
        for number_, name in enumerate(own):
            named[f"{layer}vars/{number_}"] = named.pop(name)
    task = {key.removeprefix(_OF_TASK): array for key, array in named.items() if key.startswith(_OF_TASK)}
    write_hdf5(folder / WEIGHTS, {key: array for key, array in named.items() if not key.startswith(_OF_TASK)})
    if task:  # which has an optimizer
        task |= {"optimizer/vars/0": np.zeros((), np.int32), "optimizer/vars/1": np.full((), 5e-5, np.float32)}
        write_hdf5(folder / TASK_WEIGHTS, task)


# The rules


def dense(name: str, key: str, transform: keys.Transform = keys.SAME) -> tuple[keys.Rule, ...]:
    """The rules of a dense layer or convolution."""
    return keys.indexed(name, f"{key}/vars", transform)


def norm(name: str, key: str) -> tuple[keys.Rule, ...]:
    """The rules of a LayerNorm."""
    return keys.indexed_norm(name, f"{key}/vars")


def _attention(name: str, key: str) -> tuple[keys.Rule, ...]:
    """The rules of Keras' MultiHeadAttention."""
    inputs = (rule for part_ in keys.QKV for rule in dense(f"{name}{part_}", f"{key}/{part_}_dense", keys.TO_HEADS))
    output = f"{key}/output_dense/vars"
    return (
        *inputs,
        keys.Rule((f"{name}out/kernel",), f"{output}/0", keys.FROM_HEADS),
        keys.Rule((f"{name}out/bias",), f"{output}/1"),
    )


class _Parts(NamedTuple):
    """The names of the parts of a block."""

    norms: tuple[str, str]
    attention: str | dict[str, str]
    """Of Keras' MultiHeadAttention, or of dense layers by name."""
    mlp: tuple[str, ...]


_VIT = _Parts(("layer_norm_1", "layer_norm_2"), "mha", ("mlp/dense_1", "mlp/dense_2"))
_DEIT = _VIT._replace(mlp=("mlp/dense", "output_layer/dense"))
_DINOV2 = _Parts(("norm1", "norm2"), "attention/attention", ("mlp/fc1", "mlp/fc2"))
_PLAIN = {part: f"attention/{part}_dense" for part in keys.QKV} | {"out": "attention/output_dense"}
_DINOV3 = _Parts(("norm1", "norm2"), _PLAIN, ("mlp/up_proj", "mlp/down_proj", "mlp/gate_proj"))
_SIGLIP = _Parts(("layer_norm1", "layer_norm2"), "self_attn", ("mlp/fc1", "mlp/fc2"))
_CLIP = _Parts(("layer_norm_1", "layer_norm_2"), "attention", ("dense_1", "dense_2"))


def _block(layer: str, parts: _Parts, to: str = keys.BLOCK) -> tuple[keys.Rule, ...]:
    """The rules of an encoder block, whose keys begin with `layer`."""
    plain, scales = parts.attention if isinstance(parts.attention, dict) else {}, "layer_scale{n}/vars/0"
    rules = keys.block_rules(layer, parts.norms, plain, parts.mlp, scales, to, dense=dense, norm=norm)
    if isinstance(parts.attention, dict):
        return rules
    return *_attention(f"{to}MultiHeadDotProductAttention_1/", layer + parts.attention), *rules


def text_block(name: str, layer: str, to: str) -> tuple[keys.Rule, ...]:
    """The rules of a block of the text tower of "CLIP" or "SigLIP"."""
    return _block(layer, _CLIP if name == "CLIP" else _SIGLIP, to)


def _vit_layout(*, distilled: bool, two_heads: bool) -> Layout:
    name, parts = ("dei_t", _DEIT) if distilled else ("vi_t", _VIT)
    embedding = "layers/dei_t_embeddings" if distilled else "layers/vi_t_patching_and_embedding"
    positions = (f"{embedding}/vars/2",) if distilled else (f"{embedding}/position_embedding/vars/0", keys.TABLE)
    head = f"{_OF_TASK}layers/dense"
    rules = (
        keys.Rule(("cls",), f"{embedding}/vars/0"),
        keys.Rule(("distillation/tokens",), f"{embedding}/vars/1"),
        keys.Rule((keys.POSITIONS,), *positions),
        *dense("embedding", f"{embedding}/patch_embedding"),
        *_block(f"layers/{name}_encoder/encoder_layers/{name}_encoder_block_{{i}}/", parts),
        *norm("Transformer/encoder_norm", f"layers/{name}_encoder/layer_norm"),
        *(dense("pre_logits", head) if two_heads else ()),
        *dense("head", f"{head}_1" if two_heads else head),
    )
    return Layout(rules, gelu="erf", resampler="bicubic", patch_bias=distilled, ignored=_HEADS)


def _dinov2_layout(*, gated: bool) -> Layout:
    embedding, layer = "layers/dinov2_embedding/", "layers/dinov2_encoder/layers/dinov2_layer_{i}/"
    mlp = f"{keys.BLOCK}MlpBlock_3/"
    parts = _DINOV2._replace(mlp=()) if gated else _DINOV2
    packed = keys.indexed_parts((f"{mlp}gate", f"{mlp}Dense_0"), f"{layer}mlp/weights_in/vars")
    rules = (
        keys.Rule(("cls",), f"{embedding}cls_token"),
        keys.Rule(("registers/tokens",), f"{embedding}register_tokens"),
        keys.Rule((keys.POSITIONS,), f"{embedding}position_embeddings"),
        *dense("embedding", f"{embedding}patch_embeddings/projection"),
        *((*packed, *dense(f"{mlp}Dense_1", f"{layer}mlp/weights_out")) if gated else ()),
        *_block(layer, parts),
        *norm("Transformer/encoder_norm", "layers/layer_normalization"),
    )
    return Layout(
        rules,
        gelu="silu" if gated else "erf",
        resampler="bicubic-keras",
        square_positions=True,
        ignored=(f"{embedding}mask_token", f"{embedding}interpolated"),
    )


def _dinov3_layout(*, gated: bool) -> Layout:
    embedding = "layers/dinov3_embedding/"
    rules = (
        keys.Rule(("cls",), f"{embedding}cls_token"),
        keys.Rule(("registers/tokens",), f"{embedding}register_tokens"),
        *dense("embedding", f"{embedding}patch_embeddings/projection"),
        *_block("layers/dinov3_encoder/layers/dinov3_layer_{i}/", _DINOV3),
        *norm("Transformer/encoder_norm", "layers/layer_normalization"),
    )
    return Layout(
        rules,
        gelu="silu" if gated else "erf",
        layer_norm_epsilon=1e-5,
        settings={"position_embedding": "rotary"},
        ignored=(f"{embedding}mask_token",),
    )


def _siglip_layout(tower: str, grid: tuple[int, int] = (0, 0)) -> Layout:
    embedding, pooling = f"{tower}sig_lip_vision_embedding", f"{tower}sig_lip_multi_head_attention_pooling"
    rules = (
        keys.Rule((keys.POSITIONS,), f"{embedding}/position_embedding/vars/0", keys.TABLE),
        *dense("embedding", f"{embedding}/patch_embedding"),
        *_block(f"{tower}sig_lip_encoder_layer_{{i}}/", _SIGLIP),
        *norm("Transformer/encoder_norm", f"{tower}layer_normalization"),
        keys.Rule(("MAPHead_0/probe",), f"{pooling}/vars/0"),
        *_attention("MAPHead_0/MultiHeadDotProductAttention_0/", f"{pooling}/attention"),
        *norm("MAPHead_0/LayerNorm_0", f"{pooling}/layer_norm"),
        *dense("MAPHead_0/MlpBlock_0/Dense_0", f"{pooling}/mlp/fc1"),
        *dense("MAPHead_0/MlpBlock_0/Dense_1", f"{pooling}/mlp/fc2"),
    )
    positions = {f"{embedding}/vars/0": np.arange(math.prod(grid))[None]}
    return Layout(rules, resampler="bicubic", ignored=(*_TEXT_TOWERS, *_HEADS), constants=positions)


def _clip_layout(tower: str, grid: tuple[int, int] = (0, 0)) -> Layout:
    embedding = f"{tower}clip_vision_embedding"
    rules = (
        keys.Rule(("cls",), f"{embedding}/vars/0", keys.TOKEN),
        keys.Rule((keys.POSITIONS,), f"{embedding}/position_embedding/vars/0", keys.TABLE),
        keys.Rule(("embedding/kernel",), f"{embedding}/patch_embedding/vars/0"),
        *norm("Transformer/pre_norm", f"{tower}layer_normalization"),
        *_block(f"{tower}clip_encoder_layer_{{i}}/", _CLIP),
        *norm("Transformer/encoder_norm", f"{tower}layer_normalization_1"),
        *((keys.Rule(("head/kernel",), "layers/dense/vars/0"),) if tower != "layers/" else ()),
    )
    return Layout(
        rules,
        gelu="quick",
        layer_norm_epsilon=1e-5,
        resampler="bicubic",
        biases=(QUERY_BIAS,),
        ignored=(*_TEXT_TOWERS, *_HEADS, "layers/dense_1/"),
        constants={f"{embedding}/vars/1": np.arange(math.prod(grid) + 1)[None]},
    )


def _identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    if "layers/vi_t_patching_and_embedding/patch_embedding/vars/0" in arrays:
        return _vit_layout(distilled=False, two_heads=f"{_OF_TASK}layers/dense_1/vars/0" in arrays)
    if "layers/dei_t_embeddings/patch_embedding/vars/0" in arrays:
        return _vit_layout(distilled=True, two_heads=False)
    if "layers/dinov2_embedding/cls_token" in arrays:
        gated = "layers/dinov2_encoder/layers/dinov2_layer_0/mlp/weights_in/vars/0" in arrays
        return _dinov2_layout(gated=gated)
    if "layers/dinov3_embedding/cls_token" in arrays:
        gated = "layers/dinov3_encoder/layers/dinov3_layer_0/mlp/gate_proj/vars/0" in arrays
        return _dinov3_layout(gated=gated)
    for name, layout in (("sig_lip", _siglip_layout), ("clip", _clip_layout)):
        for tower in (f"layers/{name}_vision_encoder/layers/", "layers/"):
            if f"{tower}{name}_vision_embedding/patch_embedding/vars/0" in arrays:
                return layout(tower)
    return None


def tower_layout(name: str, grid: tuple[int, int]) -> Layout:
    """The layout of the image tower beside a text tower; name: "CLIP" or "SigLIP"."""
    if name == "CLIP":
        return _clip_layout("layers/clip_vision_encoder/layers/", grid)
    return _siglip_layout("layers/sig_lip_vision_encoder/layers/", grid)


# The configs


def gelu_of(activation: object) -> Gelu:
    """The activation of a name in keras-hub, or of a serialized function. Raises UserError for an unsupported one."""
    name = activation.get("config") if isinstance(activation, dict) else activation
    name = "silu" if name == "swish" else name
    check_supported("activation", name, _GELU)
    return _GELU[str(name)]


def tower_config(fields: dict, tower: str) -> dict:
    """The config of a tower, "vision_encoder" or "text_encoder", of two."""
    return part(part(part(fields, "config"), tower), "config")


def _read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    fields = files[CONFIG]
    name, config = fields.get("class_name"), part(fields, "config")
    if name in _TWO_TOWERS:
        name, config = _TWO_TOWERS[name], tower_config(fields, "vision_encoder")
    check_supported("class_name", name, [name for name in _CLASSES if not name.endswith("Classifier")])
    shape: Any = config.get("image_shape")
    is_shape = isinstance(shape, list) and len(shape) == 3
    check_field(is_shape, "image_shape", "height, width and channels", shape)
    settings = _settings(str(name), config)
    hidden = "mlp_dim" if name == "ViTBackbone" else "intermediate_dim"
    sizes: Sizes = {
        "hidden_size": ("hidden_dim", number(config, "hidden_dim")),
        "num_layers": ("num_layers", number(config, "num_layers")),
        "mlp_dim": (hidden, settings.pop("mlp_dim", number(config, hidden))),
        "patch": ("patch_size", pair(config, "patch_size")),
        "patch_bias": ("use_patch_bias", config.get("use_patch_bias")),
    }
    return FileConfig(
        num_heads=number(config, "num_heads"),
        image_size=pair({"image_shape": shape[:2]}, "image_shape"),
        channels=("the channels of image_shape", shape[2]),
        images=images.read_converter(files),
        sizes={field: size for field, size in sizes.items() if size[1] is not None},
        **settings,
        **_head(files, has_class_token=name != "ViTBackbone" or config.get("use_class_token", True)),
    )


def _settings(name: str, config: dict) -> dict[str, Any]:
    """The fields of FileConfig that a family has its own way to tell."""
    if name in ("ViTBackbone", "DeiTBackbone"):
        return {"gelu": "erf", "layer_norm_epsilon": number(config, "layer_norm_epsilon", float) or 1e-6}
    if name == "CLIPVisionEncoder":
        gelu = gelu_of(config.get("intermediate_activation", "quick_gelu"))
        return {"gelu": gelu, "layer_norm_epsilon": 1e-5}
    if name == "SigLIPVisionEncoder":
        check_supported("layer_norm_epsilon", config.get("layer_norm_epsilon", 1e-6), [1e-6])
        gelu = gelu_of(config.get("intermediate_activation", "gelu_approximate"))
        return {"gelu": gelu, "layer_norm_epsilon": 1e-6}
    scale = number(config, "layer_scale_init_value", float) or 1.0
    if name == "DINOV3Backbone":
        check_supported("rope_theta", config.get("rope_theta", 100.0), [100.0])
        gelu, epsilon = gelu_of(config.get("hidden_activation", "gelu")), number(config, "layer_norm_eps", float)
        return {"gelu": gelu, "layer_norm_epsilon": epsilon or 1e-5, "layer_scale": scale}
    gated, hidden = bool(config.get("use_swiglu_ffn")), number(config, "intermediate_dim")
    position_shape: Any = config.get("position_embedding_shape")
    is_shape = isinstance(position_shape, list) and len(position_shape) >= 2
    check_field(is_shape, "position_embedding_shape", "height and width", position_shape)
    return {
        "gelu": "silu" if gated else "erf",
        "layer_norm_epsilon": 1e-6,
        "layer_scale": scale,
        "mlp_dim": (int(hidden * 2 / 3) + 7) // 8 * 8 if gated and hidden else hidden,
        "position_size": pair({"position_embedding_shape": position_shape[:2]}, "position_embedding_shape"),
        "resampler": "bicubic-antialias" if config.get("antialias_in_interpolation") else None,
    }


def _head(files: Mapping[str, dict], *, has_class_token: bool) -> dict[str, Any]:
    """The fields of FileConfig for the head of a classifier."""
    if TASK not in files:
        return {}
    check_supported("class_name", files[TASK].get("class_name"), ("ViTImageClassifier", "DeiTImageClassifier"), TASK)
    config = part(files[TASK], "config", TASK)
    pooling, activation = config.get("pooling", "token"), config.get("activation")
    # The mean of keras-hub is of the class token, too, and without one its "token" is the first patch.
    check_supported("pooling", pooling, ("token" if has_class_token else "gap",), TASK)
    check_field(activation is None or isinstance(activation, str), "activation", "the name of one", activation, TASK)
    return {
        "classifier": pooling,
        "heads": ("head",),
        "num_classes": ("num_classes", number(config, "num_classes")),
        "classifier_activation": None if activation == "linear" else activation,
    }


# Writing


def _family(model: Blueprint) -> str | None:
    """The class of keras-hub for a model; None if there is none."""
    config = model.config
    if not isinstance(config, ViTConfig) or model.task is not None:
        return None
    if config.position_embedding == "rotary":
        return "DINOV3Backbone"
    if config.layer_scale is not None:
        return "DINOV2Backbone"
    if config.pre_norm:
        return "CLIPVisionEncoder"
    if config.classifier == "map":
        return "SigLIPVisionEncoder"
    return "DeiTBackbone" if config.distillation != "none" else "ViTBackbone"


def _expressible(model: Blueprint) -> dict[str, tuple | None] | None:
    family = _family(model)
    if family is None:
        return None
    without_head = () if model.num_classes else ("token",)
    own: dict[str, dict[str, tuple | None]] = {
        "ViTBackbone": {
            "classifier": ("token", "gap"),
            "gelu": ("erf",),
            "patch_bias": None,
            "representation_size": None if model.num_classes else (None,),
        },
        "DeiTBackbone": {"gelu": ("erf",), "distillation": ("token",)},
        "DINOV2Backbone": {
            **dict.fromkeys(("gated_mlp", "layer_scale", "num_registers"), None),
            "gelu": ("silu",) if model.vit.gated_mlp else ("erf",),
            "layer_norm_epsilon": (1e-6,),
            "classifier": without_head,
        },
        "DINOV3Backbone": {
            **dict.fromkeys(("gated_mlp", "num_registers", "key_bias", "qkv_bias", "gelu"), None),
            "layer_scale": () if model.vit.layer_scale is None else None,
            "position_embedding": ("rotary",),
            "classifier": without_head,
        },
        "SigLIPVisionEncoder": {
            "gelu": None,
            "layer_norm_epsilon": (1e-6,),
            "classifier": () if model.num_classes else ("map",),
        },
        "CLIPVisionEncoder": {
            "gelu": None,
            "layer_norm_epsilon": (1e-5,),
            "pre_norm": (True,),
            "patch_bias": (False,),
            "classifier": without_head,
            "head_bias": None,
        },
    }
    return {**DEFAULTS, "prefix_positions": None, **own[family]}


def _layout_for(model: Blueprint) -> Layout:
    config, family = model.vit, _family(model)
    grid = config.grid(model.preprocessing.image_size)
    if family == "DINOV3Backbone":
        return _dinov3_layout(gated=config.gated_mlp)
    if family == "DINOV2Backbone":
        return _dinov2_layout(gated=config.gated_mlp)
    if family == "CLIPVisionEncoder":
        return _clip_layout("layers/", grid)
    if family == "SigLIPVisionEncoder":
        return _siglip_layout("layers/", grid)
    return _vit_layout(distilled=family == "DeiTBackbone", two_heads=config.representation_size is not None)


def _write_config(model: Blueprint) -> dict[str, dict]:
    config, family, channels = model.vit, str(_family(model)), model.preprocessing.channels
    size, is_vit = model.preprocessing.image_size, family in ("ViTBackbone", "DeiTBackbone")
    if not is_vit:
        check_square(f"{family} of keras-hub", *([] if family == "DINOV3Backbone" else [size]), config.patch)
    fields = {
        "image_shape": [*size, channels],
        "patch_size": list(config.patch) if is_vit else config.patch[0],
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "hidden_dim": config.hidden_size,
        "mlp_dim" if family == "ViTBackbone" else "intermediate_dim": config.mlp_dim,
        **_own_fields(family, config, size, channels),
    }
    backbone = _serialized(family, fields)
    files = {CONFIG: backbone, "metadata.json": {"keras_version": "3.15.0", "tasks": []}}
    files |= images.write_converter(model.preprocessing, family, classifies=model.num_classes > 0)
    if model.num_classes:
        head = {
            "backbone": backbone,
            "preprocessor": files[images.PREPROCESSOR],
            "num_classes": model.num_classes,
            "pooling": config.classifier,
            "activation": model.classifier_activation,
        }
        head |= {} if config.representation_size is None else {"intermediate_dim": config.representation_size}
        files[TASK] = _serialized(family.replace("Backbone", "ImageClassifier"), head)
    return files


def _own_fields(family: str, config: ViTConfig, size: tuple[int, int], channels: int) -> dict[str, Any]:
    """The fields of a family beside those of all."""
    epsilon = config.layer_norm_epsilon
    if family == "ViTBackbone":
        own = {"use_class_token": config.has_class_token, "use_patch_bias": config.patch_bias}
        return {"layer_norm_epsilon": epsilon, **own}
    if family == "DeiTBackbone":
        return {"layer_norm_epsilon": epsilon}
    if family in ("CLIPVisionEncoder", "SigLIPVisionEncoder"):
        return {"intermediate_activation": ACTIVATIONS[config.gelu]}
    of_dino: dict[str, Any] = {
        "layer_scale_init_value": config.layer_scale,
        "num_register_tokens": config.num_registers,
        "use_mask_token": False,
    }
    if family == "DINOV2Backbone":
        hidden = next((n for n in range(1, 2 * config.mlp_dim) if (n * 2 // 3 + 7) // 8 * 8 == config.mlp_dim), None)
        if config.gated_mlp and hidden is None:
            raise inexpressible("DINOV2Backbone of keras-hub has MLPs of multiples of 8", f"{config.mlp_dim}")
        of_dino |= {"intermediate_dim": hidden} if config.gated_mlp else {}
        return {**of_dino, "use_swiglu_ffn": config.gated_mlp, "position_embedding_shape": [*size, channels]}
    return of_dino | {
        "layer_norm_eps": epsilon,
        "hidden_activation": ACTIVATIONS[config.gelu],
        "use_gated_mlp": config.gated_mlp,
        "use_query_bias": config.qkv_bias,
        "use_key_bias": config.qkv_bias and config.key_bias,
        "use_value_bias": config.qkv_bias,
    }


def _serialized(name: str, config: dict) -> dict:
    return images.serialized(name, _CLASSES[name], config)


KERAS_HUB = Format(
    "keras_hub",
    _identify,
    config_files=(CONFIG, TASK, images.CONVERTER, images.PREPROCESSOR),
    read_config=_read_config,
    suffixes=("",),
    expressible=_expressible,
    layout_for=_layout_for,
    write_config=_write_config,
    write_weights=_write_weights,
)
