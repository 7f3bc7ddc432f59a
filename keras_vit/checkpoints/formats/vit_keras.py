"""Files of vit-keras 0.1 (Keras 2) and 0.2: .h5 files of whole models and of weights, with people's own heads.

A whole model describes its layers; those behind the class token become the head here: Dropout and Flatten, which change
nothing, BatchNormalization, which becomes a part of the Dense after it, one Dense with tanh, and the last Dense.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_vit.checkpoints import key_mapping as keys
from keras_vit.checkpoints.formats.file_config import FileConfig, ImageProcessing, check_field, check_supported, number
from keras_vit.checkpoints.formats.layout import DEFAULTS, HEAD_BIASES, QUERY_BIAS, Format, Layout, unsupported
from keras_vit.errors import reading
from keras_vit.files.hdf5 import open_hdf5, read_model_config, write_hdf5
from keras_vit.files.lazy_array import LazyArray, in_memory
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import ViTConfig

# The description of the model in its file, as another file beside it.
MODEL_CONFIG = "model_config"
_BLOCK = re.compile(r"Transformer[/_]encoderblock_(\d+)/(?:MlpBlock_3/)?(?:Transformer_encoderblock_\d+_)?(.*)")
_OUTSIDE = re.compile(
    r"(?:.*/)?(?:(embedding|pre_logits|head)/(kernel|bias)|class_token/(cls)|Transformer[/_](posembed_input|encoder_norm)"
    r"/(\w+)):?0?"
)
_LEAVES = {"gamma": "scale", "beta": "bias"}
_TOWER = {"InputLayer", "Conv2D", "Reshape", "ClassToken", "AddPositionEmbs", "TransformerBlock"}
# Layers of the small ViTs of Keras' examples, and how their computation differs.
_EXAMPLES = {"Patches", "PatchEncoder", "ShiftedPatchTokenization", "MultiHeadAttentionLSA", "CCTTokenizer"}


def open_model(path: pathlib.Path) -> dict[str, LazyArray] | None:
    """The arrays of an HDF5 file by their names in vit-keras, with ":0" as in Keras 2, and "head"; None for another.

    Raises UserError for what is no model here, with its reason.
    """
    stored, description = open_hdf5(path), read_model_config(path)
    arrays, others = dict[str, LazyArray](), dict[str, LazyArray]()
    if examples := sorted(_EXAMPLES & {_class(layer) for layer in _layers(description)}):
        raise unsupported(
            f"a Vision Transformer of Keras' examples (its layer {examples[0]})",
            "each of its heads is as wide as the model, its MLPs end in a GELU and its head reads all tokens; train a "
            "model of keras_vit, such as ViT-Ti_16, on the same data instead",
        )
    if not any(_BLOCK.search(key) for key in stored):
        return None
    for key, array in stored.items():
        if not array.is_float or key.startswith("optimizer_weights/"):
            continue
        name = _name(key)
        (others if name is None else arrays)[name or key] = array
    if description:
        head = {name: array for name, array in arrays.items() if name.startswith(("head/", "pre_logits/"))}
        arrays = {name: array for name, array in arrays.items() if name not in head}
        with reading(path.name, "a model of vit-keras", TypeError, advice="give the file that vit-keras wrote"):
            arrays |= _head(_behind_tower(description), {**others, **head})
    else:
        arrays |= others
    return {key: dataclasses.replace(array, key=key) for key, array in arrays.items()}


def _name(key: str) -> str | None:
    """The name of an array of vit-keras by its path in the file; None for that of another layer."""
    if match := re.search(rf".*{_BLOCK.pattern}", key):
        name = re.sub(r":0$", "", match[2])
        part, _, leaf = name.rpartition("/")
        part = f"MlpBlock_3/{part}" if part.startswith("Dense_") else part
        return f"Transformer/encoderblock_{match[1]}/{part}/{_LEAVES.get(leaf, leaf)}:0"
    if match := _OUTSIDE.fullmatch(key):
        if match[1]:
            return f"{match[1]}/{match[2]}:0"
        return "cls:0" if match[3] else f"Transformer/{match[4]}/{_LEAVES.get(match[5], match[5])}:0"
    return None


# The layers of a description


def _class(layer: dict) -> str:
    return str(layer.get("class_name")).rpartition(">")[2]


def _layers(description: dict) -> list[dict]:
    """The layers of a model in their order, those of models among them in their place. Raises UserError for others."""
    config = description.get("config")
    layers = config.get("layers") if isinstance(config, dict) else config
    flat = list[dict]()
    for layer in layers if isinstance(layers, list) else []:
        is_right = isinstance(layer, dict) and isinstance(layer.get("config"), dict)
        check_field(is_right, "layers", "a list of objects with a config", layer, MODEL_CONFIG)
        nested = _class(layer) in ("Functional", "Model", "Sequential")
        flat += _layers(layer) if nested else [layer]
    return flat


def _behind_tower(description: dict) -> list[dict]:
    """The layers behind the class token. Raises UserError for a tower that is not that of vit-keras."""
    layers = _layers(description)
    names = [_class(layer) for layer in layers]
    last = max(place for place, name in enumerate(names) if name == "TransformerBlock")
    unknown = ["branches"] if _branches(description) else [name for name in names[:last] if name not in _TOWER]
    if unknown or names[last + 1 : last + 3] != ["LayerNormalization", "Lambda"]:
        what = unknown[0] if unknown else "layers behind its blocks"
        raise unsupported(f"a model of vit-keras with other layers ({what})", "give the model that vit-keras built")
    name = layers[last + 2]["config"].get("name")
    check_supported("Lambda", name, ["ExtractToken"], MODEL_CONFIG)  # its code is not run, and vit-keras has one alone
    return layers[last + 3 :]


def _branches(description: dict) -> bool:
    """Whether a layer of a functional model has another input than the layer before it."""
    config = description.get("config")
    layers = config.get("layers", []) if isinstance(config, dict) else []
    before = None
    for layer in layers:
        nodes = layer.get("inbound_nodes")
        inputs = re.findall(r"\['?([^\[\]',]+)', \d+, \d+", str(nodes)) if nodes else []
        inputs = inputs or re.findall(r"keras_history': \['([^']+)'", str(nodes))
        if inputs and inputs != [before]:
            return True
        if _class(layer) in ("Functional", "Model", "Sequential") and _branches(layer):
            return True
        before = layer["config"].get("name")
    return False


def _head(layers: Sequence[dict], arrays: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """The arrays of the head here. Raises UserError for a chain of layers that is no head here."""
    dense = [layer["config"] for layer in layers if _class(layer) == "Dense"]
    unknown = {_class(layer) for layer in layers} - {"Dense", "Dropout", "Flatten", "BatchNormalization", "Activation"}
    hidden = [layer.get("activation") for layer in dense[:-1]]
    activations = [layer for layer in layers if _class(layer) == "Activation"]
    if unknown or hidden not in ([], ["tanh"]) or activations not in ([], list(layers[-1:])):
        what = sorted(unknown)[0] if unknown else f"a Dense with the activation {hidden[0]}" if hidden else "Activation"
        raise unsupported(
            f"a model of vit-keras whose head has {what}",
            "heads here are a Dense, or one with tanh before it; give the file of the model without the head, and "
            "train a new one",
        )
    head: dict[str, LazyArray] = {}
    scale: np.ndarray | float = 1.0
    shift: np.ndarray | float = 0.0
    for layer in layers:
        config, name = layer["config"], str(layer["config"].get("name"))
        if _class(layer) == "BatchNormalization":
            own = {leaf: _variable(arrays, name, leaf) for leaf in ("gamma", "beta", "moving_mean", "moving_variance")}
            deviation = np.sqrt(own["moving_variance"] + (number(config, "epsilon", float) or 1e-3))
            factor = (1.0 if own["gamma"] is None else own["gamma"]) / deviation
            scale = scale * factor
            shift = (shift - own["moving_mean"]) * factor + (0.0 if own["beta"] is None else own["beta"])
        if _class(layer) == "Dense":
            to = "head" if config is dense[-1] else "pre_logits"
            kernel, bias = _variable(arrays, name, "kernel"), _variable(arrays, name, "bias")
            bias = (0.0 if bias is None else bias) + shift @ kernel if np.ndim(shift) else bias
            kernel = kernel * (scale[:, None] if isinstance(scale, np.ndarray) else scale)
            for leaf, value in (("kernel", kernel), ("bias", bias)):
                if value is not None:
                    head[f"{to}/{leaf}:0"] = in_memory(f"{to}/{leaf}:0", value)
            scale, shift = 1.0, 0.0
    if np.ndim(scale):
        raise unsupported("a model of vit-keras that ends in a BatchNormalization", "heads here end in a Dense")
    return head


def _variable(arrays: Mapping[str, LazyArray], layer: str, leaf: str) -> Any:
    """A variable of a layer; None if it has none. Raises UserError for a missing one that it always has."""
    key = next((key for key in arrays if re.search(rf"(^|/){re.escape(layer)}/{leaf}(:0)?$", key)), None)
    if key is None and leaf in ("kernel", "moving_mean", "moving_variance"):
        keys.refuse_keys("is incomplete", [f"{layer}/{leaf}"])
    return None if key is None else arrays[key].read().astype(np.float64)


# The rules


def _identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    return _LAYOUT if "class_token/cls:0" in arrays or "cls:0" in arrays else None


def _rules() -> tuple[keys.Rule, ...]:
    norms = (f"{keys.BLOCK}LayerNorm_0", f"{keys.BLOCK}LayerNorm_2", "Transformer/encoder_norm")
    layers = (*keys.PROJECTIONS, f"{keys.ATTENTION}out", *(f"{keys.BLOCK}MlpBlock_3/Dense_{n}" for n in (0, 1)))
    names = ["cls", keys.POSITIONS]
    names += [f"{layer}/{leaf}" for layer in norms for leaf in ("scale", "bias")]
    layers = (*layers, "embedding", "pre_logits", "head")
    names += [f"{layer}/{leaf}" for layer in layers for leaf in ("kernel", "bias")]
    return tuple(keys.Rule((name,), f"{name}:0") for name in names)


_LAYOUT = Layout(_rules(), gelu="erf", biases=(*HEAD_BIASES, QUERY_BIAS))


def _read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    layers = _layers(files[MODEL_CONFIG])
    blocks = [layer["config"] for layer in layers if _class(layer) == "TransformerBlock"]
    shape: Any = next(
        (layer["config"].get("batch_input_shape") or layer["config"].get("batch_shape") for layer in layers), None
    )
    size = shape[1:3] if isinstance(shape, list) and len(shape) == 4 else None
    activations = [layer["config"].get("activation") for layer in layers if _class(layer) in ("Dense", "Activation")]
    last = activations[-1] if activations else None
    heads = {number(block, "num_heads") for block in blocks}
    check_field(len(heads) == 1, "num_heads", "one number for all blocks", sorted(map(str, heads)), MODEL_CONFIG)
    return FileConfig(
        num_heads=heads.pop(),
        gelu="erf",
        layer_norm_epsilon=1e-6,
        image_size=(size[0], size[1]) if size and all(isinstance(side, int) for side in size) else None,
        images=ImageProcessing(),  # preprocess_inputs
        classifier_activation=last if isinstance(last, str) and last != "linear" else None,
    )


# Writing


def _expressible(model: Blueprint) -> dict[str, tuple | None] | None:
    if not isinstance(model.config, ViTConfig) or model.task is not None:
        return None
    exact = {"gelu": ("erf",), "layer_norm_epsilon": (1e-6,), "stem": (None,)}
    return {**DEFAULTS, **exact, "representation_size": None}


def _write_weights(file: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a file of weights as Keras 2 does: each layer has its arrays in their order, and names them."""
    layers: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        name = f"class_token/{key}" if key.startswith("cls") else key.replace("/MlpBlock_3/", "/")
        part, _, leaf = name.removesuffix(":0").rpartition("/")
        is_norm = part.rpartition("/")[2].startswith(("LayerNorm_", "encoder_norm"))
        leaf = _NORM_LEAVES[leaf] if is_norm else leaf
        block = re.match(r"Transformer/encoderblock_\d+", part)
        layers.setdefault(block[0] if block else part, {})[f"{part}/{leaf}:0"] = array
    names = sorted(layers, key=_place)
    stored = {f"{layer}/{key}": array for layer in names for key, array in layers[layer].items()}
    attributes: dict[str, dict] = {layer: {"weight_names": sorted(layers[layer], key=_place)} for layer in names}
    write_hdf5(file, stored, attributes | {"/": {"layer_names": names, "backend": "tensorflow"}})


_NORM_LEAVES = {leaf: name for name, leaf in _LEAVES.items()}
# The order of layers, of the parts of a block, and of the arrays of a part.
_ORDER = ("embedding", "class_token", "posembed_input", "encoderblock_", "encoder_norm", "pre_logits", "head")
_PARTS = ("query", "key", "value", "out", "Dense_0", "Dense_1", "LayerNorm_0", "LayerNorm_2")


def _place(name: str) -> tuple[int, int, int, bool]:
    """The place of a layer or array in a file."""
    layer = next(place for place, part in enumerate(_ORDER) if name.removeprefix("Transformer/").startswith(part))
    block = re.match(r"Transformer/encoderblock_(\d+)", name)
    part = next((place for place, part in enumerate(_PARTS) if f"/{part}/" in name), 0)
    return layer, int(block[1]) if block else 0, part, name.endswith(("bias:0", "beta:0"))


_NOTE = "vit-keras reads the file by load_weights of a model of these sizes: vit.build_model(…), or vit.vit_b16(…)."
VIT_KERAS = Format(
    "vit_keras",
    _identify,
    (MODEL_CONFIG,),
    lambda path: {MODEL_CONFIG: description} if (description := read_model_config(path)) else {},
    read_config=_read_config,
    suffixes=(".h5",),
    expressible=_expressible,
    layout_for=lambda model: dataclasses.replace(_LAYOUT, notes=(_NOTE,)),
    write_weights=_write_weights,
)
