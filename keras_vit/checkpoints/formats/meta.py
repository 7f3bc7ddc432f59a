"""Meta's own files of DINOv2 and DINOv3, with registers or without. Read, not written.

The keys are those of facebookresearch/dinov2 and facebookresearch/dinov3, `models/vision_transformer.py`, and much like
those of timm; what tells them apart is the mask token.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.checkpoints import key_mapping as keys
from keras_vit.checkpoints.formats.file_config import FileConfig, torch_images
from keras_vit.checkpoints.formats.layout import Format, Layout
from keras_vit.checkpoints.key_mapping import check_array
from keras_vit.files.lazy_array import LazyArray


def _identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    # Training divides the blocks into chunks: blocks.1.3 is block 3, in the second of them (block_chunks).
    first, block = (
        ("blocks.0.0.", "blocks.{c}.{i}.") if "blocks.0.0.ls1.gamma" in arrays else ("blocks.0.", "blocks.{i}.")
    )
    if not {"patch_embed.proj.weight", f"{first}ls1.gamma", "mask_token"} <= arrays.keys():
        return None
    _check_buffers(arrays)
    query, key, value = (f"{name}/bias" for name in keys.PROJECTIONS)
    rotary = "pos_embed" not in arrays
    # Gate and value are one array, or two.
    is_packed, is_gated = (f"{first}mlp.{key}.weight" in arrays for key in ("w12", "w1"))
    mlp = ("w12", "w3") if is_packed else ("w2", "w3", "w1") if is_gated else ("fc1", "fc2")
    rules = (
        keys.Rule(("cls",), "cls_token"),
        keys.Rule(("registers/tokens",), "storage_tokens" if rotary else "register_tokens"),
        keys.Rule((keys.POSITIONS,), "pos_embed"),
        *keys.dense("embedding", "patch_embed.proj", keys.CONV),
        # The bias of the key is multiplied by a mask of zeros.
        keys.Rule((query, "" if f"{first}attn.qkv.bias_mask" in arrays else key, value), f"{block}attn.qkv.bias"),
        keys.Rule((), f"{block}attn.qkv.bias_mask"),
        *keys.packed_mlp(block, "mlp.w12"),
        *keys.block_rules(
            block,
            ("norm1", "norm2"),
            ("attn.qkv.", "attn.proj"),
            tuple(f"mlp.{part}" for part in mlp),
            scales="ls{n}.gamma",
        ),
        *keys.norm("Transformer/encoder_norm", "norm"),
    )
    settings: dict[str, Any] = {"position_embedding": "rotary"} if rotary else {}
    return Layout(
        rules,
        gelu="silu" if is_packed or is_gated else "erf",
        layer_norm_epsilon=1e-5 if rotary else 1e-6,
        resampler="bicubic-antialias" if "register_tokens" in arrays else "bicubic-offset",
        square_positions=True,
        images=torch_images("bicubic"),
        settings={**settings, "num_heads": _num_heads(arrays)},
        torch=True,
        # local_cls_norm is of small crops in training.
        ignored=("mask_token", "rope_embed.periods", "local_cls_norm."),
    )


def _check_buffers(arrays: Mapping[str, LazyArray]) -> None:
    """Raise UserError for buffers with other values than models here compute with."""
    for key, array in arrays.items():
        if key == "rope_embed.periods":  # sometimes rounded to bfloat16, by at most one part in 512
            expected, what = 100.0 ** (np.arange(math.prod(array.shape)) / math.prod(array.shape)), "of the base 100"
        elif key.endswith(".attn.qkv.bias_mask"):
            expected, what = np.repeat([1.0, 0.0, 1.0], math.prod(array.shape) // 3), "without a bias of the key"
        else:
            continue
        values = array.read().reshape(-1)
        is_right = values.shape == expected.shape and np.allclose(values, expected, rtol=1 / 512, atol=0.0)
        check_array(is_right, key, f"be that of DINOv3 {what}, which alone is supported", "has other values")


def _num_heads(arrays: Mapping[str, LazyArray]) -> int | None:
    """The number of heads: there is a period of the rotary positions for every four channels of a head."""
    periods, kernel = arrays.get("rope_embed.periods"), arrays["patch_embed.proj.weight"]
    if periods is None or len(periods.shape) != 1 or not periods.shape[0] or not kernel.shape:
        return None
    heads, rest = divmod(kernel.shape[0], 4 * periods.shape[0])
    return None if rest else heads


META = Format("meta", _identify, read_config=lambda files, layout: FileConfig(num_heads=layout.settings["num_heads"]))
