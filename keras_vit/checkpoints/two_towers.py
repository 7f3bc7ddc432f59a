"""Write an image tower back into the folder of its two towers; all other bytes of the weights stay as they are."""

import dataclasses
import pathlib
import shutil
import warnings
from collections.abc import Mapping

import numpy as np

from keras_vit.checkpoints.checkpoint import join_keys, open_checkpoint
from keras_vit.checkpoints.fetch.find import find_checkpoint
from keras_vit.checkpoints.key_mapping import untranslate
from keras_vit.checkpoints.layouts import check_new
from keras_vit.errors import UserError
from keras_vit.files.atomic import atomic_folder
from keras_vit.files.lazy_array import LazyArray
from keras_vit.files.safetensors import overwrite
from keras_vit.models.config import ModelConfig, ViTConfig

# What a folder of transformers has beside the weights, but not older forms of the weights.
_COPIED = (".json", ".txt", ".model", ".md", ".safetensors")


def image_tower(config: ModelConfig, weights: Mapping[str, np.ndarray]) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """(config, weights) without a head of texts, whose projection is then the head, as in the files of CLIP."""
    if not isinstance(config, ViTConfig) or not config.normalized:
        return config, dict(weights)
    kept = {key: value for key, value in weights.items() if not key.startswith("head/")}
    if "pre_logits/kernel" in kept:
        kept["head/kernel"] = kept.pop("pre_logits/kernel")
    tower = dataclasses.replace(
        config, representation_size=None, representation="tanh", normalized=False, head_bias="head/kernel" not in kept
    )
    return tower, kept


def write_image_tower(
    folder: pathlib.Path, source: str, config: ModelConfig, weights: Mapping[str, np.ndarray]
) -> None:
    """Write a copy of the folder of two towers with the weights of another image tower of the same sizes.

    Args:
        folder: that is not there yet.
        source: the two towers, as `find_checkpoint` takes them.
        config: of the image tower.
        weights: by their names, see `image_tower`.

    Raises UserError for a source that is no folder of two towers, or of another image tower.
    """
    origin = find_checkpoint(source)
    if not origin.is_dir():
        raise UserError(f"{source} should be the folder of a model with two towers, but is a file; give its folder.")
    checkpoint = open_checkpoint(origin)
    if not any("text_model." in key for key in checkpoint.unused):
        raise UserError(f"{source} has no text tower; leave two_towers out, or give the checkpoint that has both.")
    heads = config.num_heads if isinstance(config, ViTConfig) else 1
    arrays = untranslate(weights, checkpoint.layout.rules, heads)
    stored = {weight.source.key: weight.source for weight in checkpoint.weights.values()}
    _check_arrays(source, arrays, stored)
    if rounded := sorted({array.dtype.str for array in stored.values() if array.dtype.itemsize < 4}):
        warnings.warn(f"The weights of {source} have 16 bits ({', '.join(rounded)}), so the new ones do.", stacklevel=3)
    check_new(folder, "huggingface")
    with atomic_folder(folder) as temporary:
        for file in sorted(origin.iterdir()):
            if file.is_file() and file.suffix in _COPIED:
                shutil.copyfile(file, temporary / file.name)
        written = [key for file in temporary.glob("*.safetensors") for key in overwrite(file, arrays)]
        if missing := sorted(arrays.keys() - set(written)):
            raise UserError(f"{source} has no .safetensors file with {join_keys(missing)}; download it again.")


def _check_arrays(source: str, arrays: Mapping[str, np.ndarray], stored: Mapping[str, LazyArray]) -> None:
    """Raise UserError unless the arrays have the keys and shapes of the stored ones."""
    if different := sorted(arrays.keys() ^ stored.keys()):
        raise UserError(
            f"The model is another image tower than that of {source}; one of both lacks {join_keys(different)}. A head "
            "that is none of texts dropped the projection: fine-tune a model of keras_vit.zero_shot."
        )
    for key, array in arrays.items():
        if array.shape != stored[key].shape:
            raise UserError(
                f"{key!r} of {source} has shape {stored[key].shape}, but that of the model {array.shape}; adapt the "
                "model to the image size of the checkpoint first."
            )
