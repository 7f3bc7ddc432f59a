"""transformers' Bit: BiT, and the ResNets of the hybrids (layer_type "bottleneck")."""

from collections.abc import Mapping
from typing import Any

from keras_vit.checkpoints.formats.file_config import FileConfig, is_side, named_number, number, pair
from keras_vit.checkpoints.formats.layout import Layout, WrittenModel
from keras_vit.checkpoints.formats.transformers.config_json import (
    CONFIG,
    FILES,
    completed,
    num_labels,
    refuse_other_values,
    written,
)
from keras_vit.checkpoints.formats.transformers.image_processor import has_processor, read_processor
from keras_vit.checkpoints.key_mapping import CONV, Rule, bit_norm, bit_units, bottlenecks, dense, norm
from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.config import ResNetConfig

LAYOUT = "huggingface"
SUFFIXES: tuple[str, ...] = ("",)
CONFIG_FILES: tuple[str, ...] = FILES
# Of transformers' BitConfig, for fields missing in config.json.
_DEFAULTS: dict[str, Any] = {
    "layer_type": "preactivation",
    "global_padding": None,
    "num_groups": 32,
    "hidden_act": "relu",
    "output_stride": 32,
    "embedding_dynamic_padding": False,
    "depths": [3, 4, 6, 3],
}


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format."""
    for prefix in ("bit.", ""):
        if f"{prefix}embedder.convolution.weight" in arrays:
            return _layout(prefix, preactivation=f"{prefix}embedder.norm.weight" not in arrays)
    return None


def expressible(model: WrittenModel) -> dict[str, tuple | None] | None:
    """Every ResNet, but no Vision Transformer."""
    return {} if isinstance(model.config, ResNetConfig) else None


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    assert isinstance(model.config, ResNetConfig)
    return _layout("bit.", preactivation=model.config.preactivation)


def _layout(prefix: str, *, preactivation: bool) -> Layout:
    if preactivation:
        rules = (
            Rule(("resnet/root_block/standardized_conv2d/kernel",), f"{prefix}embedder.convolution.weight", CONV),
            *bit_units(f"{prefix}encoder.stages.{{s-1}}.layers.{{u-1}}"),
            *bit_norm("resnet", f"{prefix}norm"),
            *dense("resnet/head/conv2d", "classifier.1"),
        )
    else:
        rules = (*resnet_rules(prefix), *dense("head", "classifier.1"))
    return Layout(rules, torch=True, stores_groups=True, model_types=("bit",))


def resnet_rules(prefix: str) -> tuple[Rule, ...]:
    """The rules of a post-activation ResNet."""
    return (
        Rule(("conv_root/kernel",), f"{prefix}embedder.convolution.weight", CONV),
        *norm("gn_root", f"{prefix}embedder.norm"),
        *bottlenecks(f"{prefix}encoder.stages.{{s-1}}.layers.{{u-1}}"),
    )


def read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    """Read config.json. Raises UserError for unsupported values."""
    if CONFIG not in files:
        if any(name.startswith("conv_root") for rule in layout.rules for name in rule.names):
            raise UserError(
                "The arrays of a Bit of layer_type 'bottleneck' do not tell its global_padding, which changes the "
                "outputs; put its config.json beside them."
            )
        return FileConfig()
    fields = files[CONFIG]
    config = completed({**fields, "model_type": fields.get("model_type") or "bit"}, layout, {"bit": _DEFAULTS})
    size = pair(config, "image_size")
    images = read_processor(files, "bit", size)
    if size is None and images is not None and has_processor(files):  # the model accepts any size
        size = images.size
    return FileConfig(
        image_size=size,
        images=images,
        channels=named_number(config, "num_channels"),
        num_classes=num_labels(fields),
        **settings(config),
    )


def settings(backbone: dict) -> dict[str, Any]:
    """The fields of FileConfig for a Bit. Raises UserError for one that has other operators than the models here."""
    backbone = _DEFAULTS | backbone
    _refuse_other_operators(backbone)
    depths = backbone["depths"]
    if not isinstance(depths, list | tuple) or not all(is_side(depth) for depth in depths):
        raise UserError(f"config.json should give 'depths' as a list of positive numbers, but gives {depths!r:.80}.")
    sizes = {
        "block_units": ("depths", tuple(depths)),
        "preactivation": ("layer_type == 'preactivation'", backbone["layer_type"] == "preactivation"),
    }
    return {"num_groups": number(backbone, "num_groups"), "resnet_sizes": sizes}


def _refuse_other_operators(backbone: dict) -> None:
    """Raise UserError for a Bit other than BiT and the stem of the hybrids, which no published weights use."""
    layer_type, padding = backbone.get("layer_type"), backbone.get("global_padding")
    same = isinstance(padding, str) and padding.upper() == "SAME"
    if (layer_type, same) not in (("preactivation", False), ("bottleneck", True)) or (padding and not same):
        raise UserError(
            "config.json should describe a Bit of layer_type 'preactivation' with global_padding null, or "
            f"'bottleneck' with 'same', but says {layer_type!r} with {padding!r}."
        )
    refuse_other_values(backbone, {"hidden_act": "relu", "output_stride": 32, "embedding_dynamic_padding": same})


def write_config(model: WrittenModel) -> dict[str, dict]:
    """config.json and preprocessor_config.json."""
    assert isinstance(model.config, ResNetConfig)
    architecture = "BitForImageClassification" if model.num_classes else "BitModel"
    return written(model, {**config_fields(model.config), "architectures": [architecture]})


def config_fields(config: ResNetConfig) -> dict:
    """The fields of a ResNet, of its own or as the backbone of a hybrid."""
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
