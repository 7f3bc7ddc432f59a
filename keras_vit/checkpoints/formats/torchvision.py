"""torchvision's Vision Transformers, with patches or early convolutions."""

from collections.abc import Mapping

import numpy as np

from keras_vit.checkpoints.formats.file_config import torch_images
from keras_vit.checkpoints.formats.layout import DEFAULTS, HEAD_BIASES, QUERY_BIAS, Format, Layout
from keras_vit.checkpoints.key_mapping import CONV, POSITIONS, Rule, block_rules, dense, norm
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import ConvStem, ViTConfig

_STEM = "conv_proj.conv_bn_relu_{i}"
_BATCH_NORM = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}


def _identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    if "class_token" not in arrays or "encoder.pos_embedding" not in arrays:
        return None
    before_0_12 = any(".mlp.linear_1." in key for key in arrays)
    return _layout(conv_stem="conv_proj.conv_last.weight" in arrays, before_0_12=before_0_12)


def _expressible(model: Blueprint) -> dict[str, tuple | None] | None:
    stems = {"stem": (None, ConvStem), "representation_size": None}
    return {**DEFAULTS, **stems} if isinstance(model.config, ViTConfig) else None


def _layout_for(model: Blueprint) -> Layout:
    stem = model.vit.stem
    return _layout(conv_stem=stem is not None, num_convolutions=len(stem.channels) if isinstance(stem, ConvStem) else 0)


def _layout(*, conv_stem: bool, before_0_12: bool = False, num_convolutions: int = 0) -> Layout:
    counter = f"{_STEM}.1.num_batches_tracked"
    rules = (
        Rule(("cls",), "class_token"),
        Rule((POSITIONS,), "encoder.pos_embedding"),
        *dense("embedding", "conv_proj.conv_last" if conv_stem else "conv_proj", CONV),
        Rule(("conv_stem/{i}/conv/kernel",), f"{_STEM}.0.weight", CONV),
        *(Rule((f"conv_stem/{{i}}/batch_norm/{name}",), f"{_STEM}.1.{key}") for name, key in _BATCH_NORM.items()),
        Rule((), counter),
        *block_rules(
            "encoder.layers.encoder_layer_{i}.",
            ("ln_1", "ln_2"),
            ("self_attention.in_proj_", "self_attention.out_proj"),
            ("mlp.linear_1", "mlp.linear_2") if before_0_12 else ("mlp.0", "mlp.3"),
        ),
        *norm("Transformer/encoder_norm", "encoder.ln"),
        *dense("pre_logits", "heads.pre_logits"),
        *dense("head", "heads.head"),
    )
    return Layout(
        rules,
        gelu="erf",
        resampler="bicubic-aligned",
        images=torch_images("bilinear"),
        biases=(*HEAD_BIASES, QUERY_BIAS),
        torch=True,
        constants={counter.replace("{i}", str(i)): np.zeros((), np.int64) for i in range(num_convolutions)},
    )


TORCHVISION = Format(
    "torchvision", _identify, suffixes=(".safetensors",), expressible=_expressible, layout_for=_layout_for
)
