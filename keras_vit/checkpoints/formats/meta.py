"""Meta's own files of DINOv2 and DINOv3, with registers or without. Read, not written.

The keys are those of facebookresearch/dinov2 and facebookresearch/dinov3, `models/vision_transformer.py`, and much like
those of timm; what tells them apart is the mask token.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.checkpoints.formats.file_config import FileConfig
from keras_vit.checkpoints.formats.images import IMAGENET_MEAN, IMAGENET_STD, ImageProcessing, value_range_of
from keras_vit.checkpoints.formats.layout import Layout
from keras_vit.checkpoints.key_mapping import (
    ATTENTION,
    BLOCK,
    CONV,
    POSITIONS,
    PROJECTIONS,
    Rule,
    dense,
    fused,
    fused_kernels,
    norm,
)
from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray

LAYOUT = "meta"
CONFIG_FILES: tuple[str, ...] = ()
_MLP = f"{BLOCK}MlpBlock_3/"
# make_classification_eval_transform.
_IMAGES = ImageProcessing(
    {"library": "timm", "background": None, "resize": "resize-small", "interpolation": "bicubic", "crop_from": 256},
    size=(224, 224),
    value_range=value_range_of(IMAGENET_MEAN, IMAGENET_STD),
)


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format.

    Raises UserError for other rotary positions than those of the released models.
    """
    # Training divides the blocks into chunks: blocks.1.3 is block 3, in the second of them (block_chunks).
    first, block = (
        ("blocks.0.0.", "blocks.{c}.{i}.") if "blocks.0.0.ls1.gamma" in arrays else ("blocks.0.", "blocks.{i}.")
    )
    if not {"patch_embed.proj.weight", f"{first}ls1.gamma", "mask_token"} <= arrays.keys():
        return None
    # The bias of the key is multiplied by a mask of zeros.
    masked = f"{first}attn.qkv.bias_mask" in arrays
    _refuse_other_buffers(arrays)
    query, key, value = (f"{name}/bias" for name in PROJECTIONS)
    rotary = "pos_embed" not in arrays
    gated = bool(arrays.keys() & {f"{first}mlp.w12.weight", f"{first}mlp.w1.weight"})
    rules = (
        Rule(("cls",), "cls_token"),
        Rule(("registers/tokens",), "storage_tokens" if rotary else "register_tokens"),
        Rule((POSITIONS,), "pos_embed"),
        *dense("embedding", "patch_embed.proj", CONV),
        *norm(f"{BLOCK}LayerNorm_0", f"{block}norm1"),
        fused_kernels(PROJECTIONS, f"{block}attn.qkv.weight"),
        Rule((query, "" if masked else key, value), f"{block}attn.qkv.bias"),
        Rule((), f"{block}attn.qkv.bias_mask"),
        *dense(f"{ATTENTION}out", f"{block}attn.proj"),
        *(Rule((f"{BLOCK}LayerScale_{n}/scale",), f"{block}ls{n + 1}.gamma") for n in (0, 1)),
        *norm(f"{BLOCK}LayerNorm_2", f"{block}norm2"),
        *fused((f"{_MLP}gate", f"{_MLP}Dense_0"), f"{block}mlp.w12.weight", f"{block}mlp.w12.bias"),
        *dense(f"{_MLP}gate", f"{block}mlp.w1"),
        *dense(f"{_MLP}Dense_0", f"{block}mlp.{'w2' if gated else 'fc1'}"),
        *dense(f"{_MLP}Dense_1", f"{block}mlp.{'w3' if gated else 'fc2'}"),
        *norm("Transformer/encoder_norm", "norm"),
    )
    settings: dict[str, Any] = {"position_embedding": "rotary"} if rotary else {}
    if num_heads := _num_heads(arrays):
        settings["num_heads"] = num_heads
    return Layout(
        rules,
        gelu="silu" if gated else "erf",
        layer_norm_epsilon=1e-5 if rotary else 1e-6,
        resampler="bicubic-antialias" if "register_tokens" in arrays else "bicubic-offset",
        square_positions=True,
        images=_IMAGES,
        settings=settings,
        torch=True,
        # local_cls_norm is of small crops in training.
        ignored=("mask_token", "rope_embed.periods", "local_cls_norm."),
    )


def _refuse_other_buffers(arrays: Mapping[str, LazyArray]) -> None:
    """Raise UserError for buffers with other values than models here compute with."""
    for key, array in arrays.items():
        if key == "rope_embed.periods":  # sometimes rounded to bfloat16, by at most one part in 512
            expected, what = 100.0 ** (np.arange(math.prod(array.shape)) / math.prod(array.shape)), "of the base 100"
        elif key.endswith(".attn.qkv.bias_mask"):
            expected, what = np.repeat([1.0, 0.0, 1.0], math.prod(array.shape) // 3), "without a bias of the key"
        else:
            continue
        values = array.read().reshape(-1)
        if values.shape != expected.shape or not np.allclose(values, expected, rtol=1 / 512, atol=0.0):
            raise UserError(f"The array {key!r} has other values than DINOv3 {what}, which alone is supported.")


def _num_heads(arrays: Mapping[str, LazyArray]) -> int | None:
    """The number of heads: there is a period of the rotary positions for every four channels of a head."""
    periods, kernel = arrays.get("rope_embed.periods"), arrays["patch_embed.proj.weight"]
    if periods is None or len(periods.shape) != 1 or not periods.shape[0] or not kernel.shape:
        return None
    heads, rest = divmod(kernel.shape[0], 4 * periods.shape[0])
    return None if rest else heads


def read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    """Read the number of heads from the arrays; there are no configs."""
    return FileConfig(num_heads=layout.settings.get("num_heads"))
