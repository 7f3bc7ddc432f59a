"""Open the text side of a two-tower checkpoint: its config, its weights, and the scale of the logits.

Only the headers of the file are read here, and two numbers.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from keras_vit.checkpoints.checkpoint import folder_of, join_keys, open_arrays, unstack_scan
from keras_vit.checkpoints.fetch.find import find_checkpoint
from keras_vit.checkpoints.key_mapping import Weight, heads_in, translate
from keras_vit.checkpoints.load import assign, weights_by_key
from keras_vit.errors import UserError
from keras_vit.files.keras_model import is_keras_model
from keras_vit.files.lazy_array import LazyArray, check_all
from keras_vit.files.safetensors import read_json
from keras_vit.text.config import TextConfig
from keras_vit.text.layouts import UNREAD, TextLayout, identify_text, sizes_of

# Logits are multiplied by exp of at most this; training clips CLIP's at log(100).
_LARGEST_LOG_SCALE = 10.0


@dataclasses.dataclass(frozen=True)
class TextCheckpoint:
    """The text tower of a checkpoint whose headers have been read."""

    path: pathlib.Path
    """The file or folder, on this machine."""
    layout: TextLayout
    config: TextConfig
    weights: Mapping[str, Weight]
    scale: float
    """Factor of the cosine of an image and a text in the logits: exp(logit_scale)."""
    bias: float | None
    """Added to the logits (SigLIP, OpenCLIP with its loss); None for CLIP."""

    @property
    def folder(self) -> pathlib.Path:
        """Where the tokenizer lies."""
        return folder_of(self.path)

    def load_into(self, model: keras.Model) -> None:
        """Assign the weights to the model of this config. Raises UserError for missing and for other arrays."""
        expected = {name: tuple(weight.shape) for name, weight in weights_by_key(model).items()}
        stored = {name: weight.shape for name, weight in self.weights.items()}
        if missing := sorted(expected.keys() - stored.keys()):
            raise UserError(f"The text tower is incomplete; missing keys: {join_keys(missing)}.")
        _refuse_unexpected(sorted(self.weights[name].source.key for name in stored.keys() - expected.keys()))
        for name, shape in expected.items():
            if stored[name] != shape:
                key = self.weights[name].source.key
                raise UserError(f"The array {key!r} is read as {stored[name]}, but the text tower needs {shape}.")
        check_all({weight.source.key: weight.source for weight in self.weights.values()}.values())
        assign(model, self.weights)


def open_text(path: str | os.PathLike) -> TextCheckpoint:
    """Read the headers of the text side of a checkpoint. Raises UserError if it has none of a known kind.

    path: as `keras_vit.from_checkpoint` takes it.
    """
    file = find_checkpoint(path)
    arrays = {} if is_keras_model(file) else _by_usual_keys(open_arrays(file))
    layout = identify_text(arrays)
    if layout is None:
        unread = (kind for part, kind in UNREAD.items() if any(part in key for key in arrays))
        what = next((f"{kind}, which is not read" for kind in unread), "no text tower of CLIP or SigLIP")
        raise UserError(
            f"{os.fspath(path)} has {what}; give a two-tower checkpoint, such as hf:openai/clip-vit-base-patch32 or "
            "hf:google/siglip2-base-patch16-224."
        )
    weights, unused = translate(arrays, layout.rules)
    _refuse_unexpected([key for key in unused if key.startswith(layout.prefix) and not key.endswith("position_ids")])
    sizes = sizes_of(weights)
    if layout.config_file is None:
        first = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
        sizes["num_heads"] = heads_in(first, weights[first.removeprefix("Transformer/")]) or 1
        config = layout.read_config({}, sizes)
    else:
        place = folder_of(file) / layout.config_file
        if not place.is_file():
            raise UserError(
                f"The text tower of {os.fspath(path)} needs {layout.config_file} beside the weights, which says the "
                "number of heads and the activation; put it there."
            )
        config = layout.read_config(read_json(place), sizes)
    log_scale = _number(arrays, layout.scale)
    if log_scale is None or not -_LARGEST_LOG_SCALE < log_scale < _LARGEST_LOG_SCALE:
        raise UserError(
            f"The array {layout.scale!r} should be one number below {_LARGEST_LOG_SCALE}; use the original."
        )
    bias = None if layout.bias is None else _number(arrays, layout.bias)
    return TextCheckpoint(file, layout, config, weights, math.exp(log_scale), bias)


def _refuse_unexpected(keys: Sequence[str]) -> None:
    if keys:
        raise UserError(f"The text tower is of an unsupported kind; unexpected keys: {join_keys(keys)}.")


def has_text_tower(path: str | os.PathLike) -> bool:
    """Whether a checkpoint has a text tower that is known; reads its headers. `path` as in `open_text`."""
    file = find_checkpoint(path)
    return not is_keras_model(file) and identify_text(_by_usual_keys(open_arrays(file))) is not None


def _by_usual_keys(arrays: dict[str, LazyArray]) -> dict[str, LazyArray]:
    """The arrays by the keys that the layouts know.

    OWL-ViT and OWLv2 have the two towers of CLIP under their own names, OpenCLIP's CustomTextCLIP puts text. before the
    keys of its text tower, and big_vision's scan stacks the blocks.
    """
    if "params/txt/Encoder_0/encoderblock/LayerNorm_0/scale" in arrays:
        stacked = {key for key in arrays if key.startswith("params/txt/Encoder_0/encoderblock/")}
        blocks = {name: block for key in stacked for name, block in unstack_scan(key, arrays[key]).items()}
        return {key: array for key, array in arrays.items() if key not in stacked} | blocks
    if "text.token_embedding.weight" in arrays:
        return {key.removeprefix("text."): array for key, array in arrays.items()}
    for prefix in ("owlvit.", "owlv2."):
        if f"{prefix}text_projection.weight" in arrays:
            return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
    return arrays


def _number(arrays: Mapping[str, LazyArray], key: str) -> float | None:
    """The only number of an array, stored with or without an axis; None if there is no such array."""
    array = arrays.get(key)
    if array is None:
        return None
    if math.prod(array.shape) != 1 or not array.is_float:
        raise UserError(f"The array {key!r} should be one number, but has shape {array.shape}.")
    return float(np.asarray(array.read(), np.float32).reshape(()))
