"""torchvision's Vision Transformers, with patches or early convolutions."""

from collections.abc import Mapping

import numpy as np

from keras_vit.checkpoints.formats.images import IMAGENET_MEAN, IMAGENET_STD, ImageProcessing, value_range_of
from keras_vit.checkpoints.formats.layout import (
    DEFAULTS,
    HEAD_BIASES,
    QUERY_BIAS,
    Layout,
    WrittenModel,
    no_files,
    no_settings,
)
from keras_vit.checkpoints.key_mapping import ATTENTION, BLOCK, CONV, POSITIONS, PROJECTIONS, Rule, dense, fused, norm
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.config import ConvStem, ViTConfig

LAYOUT = "torchvision"
SUFFIXES: tuple[str, ...] = (".safetensors",)
CONFIG_FILES: tuple[str, ...] = ()
_STEM = "conv_proj.conv_bn_relu_{i}"
_BATCH_NORM = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
# ImageClassification, the preprocessing of its weights.
_IMAGES = ImageProcessing(
    {"library": "timm", "background": None, "resize": "resize-small", "interpolation": "bilinear", "crop_from": 256},
    size=(224, 224),
    value_range=value_range_of(IMAGENET_MEAN, IMAGENET_STD),
)


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format."""
    if "class_token" not in arrays or "encoder.pos_embedding" not in arrays:
        return None
    before_0_12 = any(".mlp.linear_1." in key for key in arrays)
    return _layout(conv_stem="conv_proj.conv_last.weight" in arrays, before_0_12=before_0_12)


def expressible(model: WrittenModel) -> dict[str, tuple | None] | None:
    """The fields that it has; None for a ResNet."""
    stems = {"stem": (None, ConvStem), "representation_size": None}
    return {**DEFAULTS, **stems} if isinstance(model.config, ViTConfig) else None


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    stem = model.vit.stem
    return _layout(conv_stem=stem is not None, num_convolutions=len(stem.channels) if isinstance(stem, ConvStem) else 0)


def _layout(*, conv_stem: bool, before_0_12: bool = False, num_convolutions: int = 0) -> Layout:
    projection = "conv_proj.conv_last" if conv_stem else "conv_proj"
    mlp = ("mlp.linear_1", "mlp.linear_2") if before_0_12 else ("mlp.0", "mlp.3")
    layer, counter = "encoder.layers.encoder_layer_{i}.", f"{_STEM}.1.num_batches_tracked"
    rules = (
        Rule(("cls",), "class_token"),
        Rule((POSITIONS,), "encoder.pos_embedding"),
        *dense("embedding", projection, CONV),
        Rule(("conv_stem/{i}/conv/kernel",), f"{_STEM}.0.weight", CONV),
        *(Rule((f"conv_stem/{{i}}/batch_norm/{name}",), f"{_STEM}.1.{key}") for name, key in _BATCH_NORM.items()),
        Rule((), counter),
        *norm(f"{BLOCK}LayerNorm_0", f"{layer}ln_1"),
        *fused(PROJECTIONS, f"{layer}self_attention.in_proj_weight", f"{layer}self_attention.in_proj_bias"),
        *dense(f"{ATTENTION}out", f"{layer}self_attention.out_proj"),
        *norm(f"{BLOCK}LayerNorm_2", f"{layer}ln_2"),
        *dense(f"{BLOCK}MlpBlock_3/Dense_0", f"{layer}{mlp[0]}"),
        *dense(f"{BLOCK}MlpBlock_3/Dense_1", f"{layer}{mlp[1]}"),
        *norm("Transformer/encoder_norm", "encoder.ln"),
        *dense("pre_logits", "heads.pre_logits"),
        *dense("head", "heads.head"),
    )
    return Layout(
        rules,
        gelu="erf",
        resampler="bicubic-aligned",
        images=_IMAGES,
        biases=(*HEAD_BIASES, QUERY_BIAS),
        torch=True,
        constants={counter.replace("{i}", str(i)): np.zeros((), np.int64) for i in range(num_convolutions)},
    )


read_config, write_config = no_settings, no_files
