"""Save the weights of a model in the layout of another library."""

import errno
import os
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_vit.checkpoints.huggingface.config_json import TRANSFORMERS_GELU, family_fields
from keras_vit.checkpoints.huggingface.image_processor import preprocessor_config
from keras_vit.checkpoints.huggingface.layouts import family_of, unused_mask_token
from keras_vit.checkpoints.key_mapping import POSITIONS, untranslate
from keras_vit.checkpoints.layouts import check_target, is_folder, layout_of, num_classes_of
from keras_vit.checkpoints.load import check_unchanged, values_by_key
from keras_vit.checkpoints.timm_models import timm_config
from keras_vit.errors import UserError
from keras_vit.files.atomic import atomic_folder
from keras_vit.files.npz import write_npz
from keras_vit.files.remote import to_path
from keras_vit.files.safetensors import write_json, write_safetensors
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.build import config_of, preprocessing_of
from keras_vit.models.config import ModelConfig, ResNetConfig, ViTConfig


def save_checkpoint(model: keras.Model, path: str | os.PathLike, *, layout: str, labels: Sequence[str] = ()) -> None:
    """Save the weights of a model in the layout of another library.

    Args:
        model: built by `keras_vit.build`, with the layers that it gave; a Dense of another name may be the head.
        path: file, written atomically; for "huggingface" a new folder. For "timm" a .safetensors file, or a new folder
            with the config.json that `timm.create_model("local-dir:…", pretrained=True)` reads.
        layout: "npz" (vit_jax, big_transfer), "npz-linen", "big_vision", "huggingface", "timm" or "torchvision".
            For big_vision, the position embedding of the class token is added to the token.
        labels: class names, for the config.json of "huggingface" and "timm".

    Raises UserError for a model that the layout cannot express, and for one with other layers than its config says.
    Warns of a GELU and an epsilon other than torchvision's, which have to be set there.
    """
    path, config = to_path(path), config_of(model)
    check_target(path, layout)
    check_unchanged(model, "save it with model.save, or give the model from before the change")
    weights = {key: keras.ops.convert_to_numpy(value) for key, value in values_by_key(model).items()}
    num_classes = num_classes_of(weights)
    if labels and len(labels) != num_classes:
        raise UserError(f"The model has {num_classes} classes, but labels names {len(labels)}; name each class once.")
    if isinstance(config, ViTConfig):
        weights = _with_positions_of(layout, weights, config)
    num_heads = config.num_heads if isinstance(config, ViTConfig) else 1
    rules = layout_of(config, layout, num_classes).rules
    for sentence in settings_to_set(config, layout, num_classes, has_config=False) if layout == "torchvision" else ():
        warnings.warn(sentence, stacklevel=2)
    as_folder = is_folder(path, layout)
    arrays = untranslate(weights, rules, num_heads)
    if layout == "torchvision":
        norms = [key for key in arrays if key.endswith(".running_var")]
        arrays |= {key.replace("running_var", "num_batches_tracked"): np.zeros((), np.int64) for key in norms}
    if layout == "huggingface" and isinstance(config, ViTConfig):
        arrays |= unused_mask_token(config, num_classes)
    preprocessing = preprocessing_of(model)
    if layout == "huggingface":
        fields = _huggingface_config(config, preprocessing, num_classes, labels)
        _write_folder(
            path, arrays, {"config.json": fields, "preprocessor_config.json": preprocessor_config(preprocessing)}
        )
    elif as_folder:
        named = {"label_names": list(labels)} if labels else {}
        _write_folder(path, arrays, {"config.json": timm_config(config, preprocessing, num_classes) | named})
    elif layout in ("timm", "torchvision"):
        # Without a config.json the arrays alone would not tell the grid of the positions.
        write_safetensors(path, arrays, image_size=preprocessing.image_size)
    else:
        write_npz(path, arrays)


_SETTINGS = {"gelu": "GELU", "layer_norm_epsilon": "epsilon"}
_RESNET_SETTINGS = {
    "group_norm_epsilon": "GroupNorm epsilon",
    "variance_epsilon": "epsilon of the kernels' variance",
    "deviation_epsilon": "epsilon of the kernels' deviation",
}


def settings_to_set(config: ModelConfig, layout: str, num_classes: int, has_config: bool) -> list[str]:
    """A sentence for each setting that differs from the other code's default and that the written file lacks."""
    compared: list[tuple[ModelConfig, str, str]] = []
    defaults = layout_of(config, layout, num_classes)
    if isinstance(config, ViTConfig) and not has_config:  # config.json contains them
        compared += [(config, field, name) for field, name in _SETTINGS.items()]
    resnet = config if isinstance(config, ResNetConfig) else config.stem
    if isinstance(resnet, ResNetConfig):
        compared += [(resnet, field, name) for field, name in _RESNET_SETTINGS.items()]
    return [
        f"{name}: {getattr(owner, field)} in this model, {getattr(defaults, field)} in the code of {layout} files; "
        "set it there."
        for owner, field, name in compared
        if getattr(owner, field) != getattr(defaults, field)
    ]


def _write_folder(folder: pathlib.Path, arrays: dict, settings: dict[str, dict]) -> None:
    """Write model.safetensors and JSON files by name, all or none."""
    exists = UserError(f"{folder.name} already exists; give the name of a new folder.")
    if folder.exists():
        raise exists
    try:
        with atomic_folder(folder) as temporary:
            write_safetensors(temporary / "model.safetensors", arrays)
            for name, fields in settings.items():
                write_json(temporary / name, fields)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # written by another process in the meantime
            raise exists from error
        raise


def _with_positions_of(layout: str, weights: dict[str, np.ndarray], config: ViTConfig) -> dict[str, np.ndarray]:
    """Add the position of the class token to the token, or a position of zeros, as the layout has it.

    The outputs stay the same. Timm has positions of the patches alone where there are registers.
    """
    if "cls" not in weights or POSITIONS not in weights:
        return weights
    table = weights[POSITIONS]
    if layout == "huggingface" and not config.prefix_positions:
        return weights | {POSITIONS: np.pad(table, ((0, 0), (config.num_class_tokens, 0), (0, 0)))}
    without = layout == "big_vision" or (layout == "timm" and config.num_registers)
    if not without or not config.prefix_positions:
        return weights
    return weights | {"cls": weights["cls"] + table[:, :1], POSITIONS: table[:, 1:]}


def _huggingface_config(
    config: ModelConfig, preprocessing: Preprocessing, num_classes: int, labels: Sequence[str]
) -> dict:
    """The content of config.json for transformers."""
    fields: dict[str, Any] = {"dtype": "float32", "num_channels": preprocessing.channels}
    if num_classes:
        names = labels or [f"LABEL_{index}" for index in range(num_classes)]
        fields["id2label"] = {str(index): name for index, name in enumerate(names)}
        fields["label2id"] = {label: int(index) for index, label in fields["id2label"].items()}
    if isinstance(config, ResNetConfig):
        return {
            **fields,
            **_bit_fields(config),
            "architectures": ["BitForImageClassification" if num_classes else "BitModel"],
        }
    if (family := family_of(config)) != "vit":
        return fields | family_fields(config, family, preprocessing.image_size, num_classes)
    fields |= {
        "model_type": "vit" if config.stem is None else "vit-hybrid",
        "architectures": [
            ("ViT" if config.stem is None else "ViTHybrid") + ("ForImageClassification" if num_classes else "Model")
        ],
        "image_size": list(preprocessing.image_size),
        "patch_size": config.patch_size if isinstance(config.patch_size, int) else list(config.patch_size),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "hidden_act": TRANSFORMERS_GELU[config.gelu],
        "layer_norm_eps": config.layer_norm_epsilon,
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout_rate,
        "qkv_bias": config.qkv_bias,
        "pooler_act": "tanh",
        "pooler_output_size": config.representation_size or config.hidden_size,
    }
    if len(set(fields["image_size"])) == 1:
        fields["image_size"] = fields["image_size"][0]
    if isinstance(config.stem, ResNetConfig):
        fields["backbone_config"] = _bit_fields(config.stem)
    return fields


def _bit_fields(config: ResNetConfig) -> dict:
    assert config.stage_channels is not None
    stages = [f"stage{stage + 1}" for stage in range(len(config.block_units))]
    return {
        "model_type": "bit",
        "layer_type": "preactivation" if config.preactivation else "bottleneck",
        "global_padding": None if config.preactivation else "SAME",
        "embedding_dynamic_padding": not config.preactivation,
        "depths": list(config.block_units),
        "embedding_size": config.root_channels,
        "hidden_sizes": list(config.stage_channels),
        "num_groups": config.num_groups,
        "hidden_act": "relu",
        "width_factor": 1,
        "out_features": stages[-1:],
        "out_indices": [len(stages)],
        "stage_names": ["stem", *stages],
    }
