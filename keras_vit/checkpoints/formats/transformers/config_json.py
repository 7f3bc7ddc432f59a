"""Fields of config.json that all families of transformers share, read and written."""

import functools
from collections.abc import Mapping
from typing import Any

from keras_vit.checkpoints.formats.file_config import (
    FileConfig,
    Sizes,
    check_field,
    check_supported,
    named_number,
    number,
    pair,
    sizes_in,
)
from keras_vit.checkpoints.formats.layout import Format, Layout
from keras_vit.checkpoints.formats.transformers.image_processor import PROCESSOR_FILES, processor_config, read_processor
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import Gelu

CONFIG = "config.json"
# A family of transformers, whose models are folders.
HuggingFace = functools.partial(Format, "huggingface", config_files=(CONFIG, *PROCESSOR_FILES), suffixes=("",))
# `ViTConfig.gelu` -> name in transformers.
TRANSFORMERS_GELU: dict[Gelu, str] = {"erf": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu", "silu": "silu"}
# All names in transformers -> `ViTConfig.gelu`.
_GELU: dict[str, Gelu] = {name: gelu for gelu, name in TRANSFORMERS_GELU.items()}
_GELU |= {"gelu_new": "tanh", "gelu_fast": "tanh", "gelu_python": "erf"}
# Defaults that most config classes of transformers 5.23 share, for fields missing in config.json.
BASE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
}
# Projections of a block as the modules of transformers 5 name them.
ATTENTION_IN_MEMORY = tuple(f"attention.{part}_proj" for part in "qkvo")
# Required fields that the arrays do not contain; without a model_type they have no defaults.
_NOT_IN_ARRAYS = ("num_attention_heads", "hidden_act", "layer_norm_eps")
# Sizes that are also in the arrays: ViTConfig field -> name in transformers.
_SIZES = {"hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "mlp_dim": "intermediate_size"}


def completed(fields: dict, layout: Layout, defaults: Mapping[str, Mapping[str, Any]]) -> dict:
    """Return config.json with the defaults of its class, by model_type: transformers writes only other values."""
    name = fields.get("model_type")
    if name is None:
        missing = [field for field in _NOT_IN_ARRAYS if fields.get(field) is None]
        check_field(not missing, "model_type", f"a name, or {' and '.join(missing)}, which the arrays lack", name)
        return fields
    check_supported("model_type", name, layout.model_types)
    # transformers accepts null for the backbone only, where it means the default.
    return {**defaults[name], **{field: value for field, value in fields.items() if value is not None}}


def read_vit(files: Mapping[str, dict], config: dict, layout: Layout, sizes: Sizes, **own: Any) -> FileConfig:
    """The settings of a completed config, with the sizes of its family, and its own fields of FileConfig."""
    act, image_size = config.get("hidden_act"), pair(config, "image_size")
    if "qkv_bias" in config:
        sizes = {"qkv_bias": ("qkv_bias", config["qkv_bias"]), **sizes}
    settings: dict[str, Any] = {
        "num_heads": number(config, "num_attention_heads"),
        "gelu": None if act is None else gelu_of(act),
        "layer_norm_epsilon": number(config, "layer_norm_eps", float),
        "layer_scale": number(config, "layerscale_value", float),
        "image_size": image_size,
        "images": read_processor(files, config.get("model_type"), image_size),
        "sizes": sizes_in(config, _SIZES) | sizes,
        "heads": _heads_of(files[CONFIG]),
        "channels": named_number(config, "num_channels"),
        "num_classes": num_labels(files[CONFIG]),
    }
    return FileConfig(**{**settings, **own})


def gelu_of(act: object) -> Gelu:
    """The activation of a name in transformers. Raises UserError for an unsupported one."""
    check_supported("hidden_act", act, _GELU)
    return _GELU[str(act)]


def positions_and_tokens(config: dict, layout: Layout, num_class_tokens: int = 1) -> Sizes:
    """The positions and class tokens that all models of a family have."""
    because = f"model_type={config.get('model_type') or layout.model_types[0]!r} and thus"
    return {
        "position_embedding": (f"{because} positions", "learned"),
        "num_class_tokens": (f"{because} class tokens", num_class_tokens),
    }


def check_values(config: dict, supported: Mapping[str, object]) -> None:
    """Raise UserError for a field with another value than the only supported one."""
    for name, value in supported.items():
        check_supported(name, config.get(name, value), [value])


def num_labels(config: dict) -> tuple[str, int] | None:
    """(name in config.json, width of the head), if it says so."""
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        return "classes in id2label", len(names)
    return named_number(config, "num_labels")


def _heads_of(fields: dict) -> tuple[str, ...]:
    """The heads of the architecture that a config.json names, where another one has the same other arrays."""
    names = fields.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    if any(name.endswith("WithTeacher") for name in names):
        return "head", "head_distillation"
    has_head = ("ForImageClassification", "VisionModelWithProjection", "CLIPModel", "MetaClip2Model")
    return ("head",) if any(name.endswith(has_head) for name in names) else ()


def written(model: Blueprint, own: dict) -> dict[str, dict]:
    """config.json, with the fields of the family, and preprocessor_config.json."""
    fields: dict[str, Any] = {"dtype": "float32", "num_channels": model.preprocessing.channels}
    if model.num_classes:
        names = model.labels or [f"LABEL_{index}" for index in range(model.num_classes)]
        fields["id2label"] = {str(index): name for index, name in enumerate(names)}
        fields["label2id"] = {label: int(index) for index, label in fields["id2label"].items()}
    return {CONFIG: fields | own, PROCESSOR_FILES[1]: processor_config(model.preprocessing, own["model_type"])}


def vit_fields(model: Blueprint, model_type: str, architecture: str) -> dict[str, Any]:
    """The fields of all Vision Transformers."""
    config, (height, width) = model.vit, model.preprocessing.image_size
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "image_size": height if height == width else [height, width],
        "patch_size": config.patch_size if isinstance(config.patch_size, int) else list(config.patch_size),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": TRANSFORMERS_GELU[config.gelu],
        "layer_norm_eps": config.layer_norm_epsilon,
    }
