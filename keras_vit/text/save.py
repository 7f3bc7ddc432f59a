"""Write both towers of a checkpoint as a preset of keras-hub (0.32): CLIPBackbone or SigLIPBackbone.

The text tower, the scale of the logits and the tokenizer are those of a file in any layout that is read.
"""

import json
import math
import os
import pathlib
import shutil
import warnings
from typing import Any

import keras
import numpy as np

from keras_vit.checkpoints.checkpoint import LoadOptions, open_checkpoint
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.checkpoints.formats import keras_hub
from keras_vit.checkpoints.formats.keras_hub_images import CONVERTER, PREPROCESSOR, serialized
from keras_vit.checkpoints.from_checkpoint import build_checkpoint
from keras_vit.checkpoints.key_mapping import untranslate
from keras_vit.checkpoints.layouts import check_target, format_for
from keras_vit.checkpoints.load import check_unchanged, values_by_key
from keras_vit.checkpoints.save import image_tower
from keras_vit.errors import refuse_first
from keras_vit.files.atomic import atomic_folder
from keras_vit.files.lazy_array import check_all
from keras_vit.files.remote import to_path
from keras_vit.files.safetensors import read_json, write_json
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.build import config_of, preprocessing_of
from keras_vit.models.config import ViTConfig
from keras_vit.text.checkpoint import HUB_CLIP_LAYOUT, HUB_SIGLIP_LAYOUT, TextCheckpoint, open_text
from keras_vit.text.tower import TextConfig
from keras_vit.text.vocabulary import ASSETS, FILE, MERGES, PIECES, VOCABULARY, read_settings
from keras_vit.text.vocabulary_process import CLIP_END, CLIP_START

# Epsilon of the LayerNorms of the text tower in keras-hub, and of the last one.
_EPSILONS = {"CLIP": (1e-5, 1e-6), "SigLIP": (1e-6, 1e-6)}


def save_two_towers(model: keras.Model, path: str | os.PathLike, source: str | os.PathLike) -> None:
    """Save an image tower and the text tower of a checkpoint as a preset of keras-hub.

    Args:
        model: the image tower of the source, perhaps trained on, of `from_checkpoint` or `zero_shot`.
        path: a new folder, written atomically.
        source: file, folder, address or name of the checkpoint with both towers: CLIP or SigLIP in any layout whose
            texts are read. Its tokenizer is written, too, if keras-hub has one of its kind.

    Raises UserError for a source without text tower, and for towers that keras-hub cannot express. Warns of what
    keras-hub computes otherwise.
    """
    path = to_path(path)
    check_target(path, "keras_hub", is_new=True)
    check_unchanged(model, "save it with model.save, or give the model from before the change")
    values = {key: keras.ops.convert_to_numpy(value) for key, value in values_by_key(model).items()}
    config, weights = image_tower(config_of(model), values)
    text = open_text(source)
    is_clip = isinstance(config, ViTConfig) and config.pre_norm
    name = "CLIP" if is_clip else "SigLIP"
    written = Blueprint(config, preprocessing_of(model))
    module = format_for(written, "keras_hub")[0]
    width = weights["head/kernel"].shape[1] if "head/kernel" in weights else written.vit.hidden_size
    _check(text, name, width, written.vit)
    files = module.write_config(written)
    layout = keras_hub.tower_layout(name, written.vit.grid(written.preprocessing.image_size))
    of_images = untranslate(weights, layout.rules, written.vit.num_heads)
    arrays = {**of_images, **layout.constants, **_text_arrays(text, name)}
    files[keras_hub.CONFIG] = _backbone(name, files[keras_hub.CONFIG], text.config)
    with atomic_folder(path) as folder:
        module.write_weights(folder, arrays)
        if (tokenizer := _write_tokenizer(text, name, folder)) is not None:
            files |= _preprocessor(name, files[CONVERTER], tokenizer, text)
        for file, content in files.items():
            write_json(folder / file, content)


def convert_two_towers(source: str, target: pathlib.Path, options: LoadOptions) -> None:
    """Convert a checkpoint to a preset of keras-hub with both towers, read the new one, and compare the texts.

    options: what the file does not say, and what is changed on the way. Raises UserError for an existing target, too.
    """
    model = build_checkpoint(open_checkpoint(find_checkpoint(source), options.stored_grid), source, options)
    save_two_towers(model, target, source)
    before, after = (
        {key: weight.convert(weight.source.read()) for key, weight in open_text(each).weights.items()}
        for each in (source, target)
    )
    changed = [key for key in before if not np.array_equal(before[key], after[key])]
    print(
        f"{model.count_params():,} parameters of the image tower and {len(after)} weights of the text tower, in", end=""
    )
    print(f" {target}; {'verified' if not changed else 'changed: ' + ', '.join(changed)}.")


def _check(text: TextCheckpoint, name: str, width: int, image: ViTConfig) -> None:
    """Raise UserError for towers that keras-hub does not have. Warns of another epsilon.

    width: of the embeddings of images.
    """
    config, is_clip = text.config, name == "CLIP"
    pools_end = config.pooling == "largest" or config.end_token == config.vocab_size - 1
    is_like = (config.causal and not config.head_bias and pools_end) if is_clip else config.pooling == "last"
    epsilon, last_epsilon = _EPSILONS[name]
    rules = [
        (
            not is_like or config.layer_norm_epsilon != epsilon or is_clip == (text.bias is not None),
            f"The text tower and its logits are not those of {name} in keras-hub; choose the layout huggingface.",
        ),
        (
            width != config.output_size or (not is_clip and image.classifier != "map"),
            f"Images have embeddings of {width} numbers, texts of {config.output_size}; give the image tower of the "
            "source, without a head of other classes.",
        ),
    ]
    refuse_first(rules)
    own = config.layer_norm_epsilon if config.last_norm_epsilon is None else config.last_norm_epsilon
    if own != last_epsilon:
        warnings.warn(
            f"The last LayerNorm of the text tower has the epsilon {own}, in keras-hub {last_epsilon}; its embeddings "
            "differ there in the last digits.",
            stacklevel=3,
        )


def _text_arrays(text: TextCheckpoint, name: str) -> dict[str, np.ndarray]:
    """The arrays of the text tower, of its positions and of the scale."""
    layout = HUB_CLIP_LAYOUT if name == "CLIP" else HUB_SIGLIP_LAYOUT
    check_all(weight.source for weight in text.weights.values())
    weights = {key: weight.convert(weight.source.read()) for key, weight in text.weights.items()}
    arrays = untranslate(weights, layout.rules, text.config.num_heads)
    arrays[layout.scale] = np.array(math.log(text.scale), np.float32)
    if layout.bias is not None:
        arrays[layout.bias] = np.array(text.bias, np.float32)
        arrays[f"{layout.prefix}sig_lip_text_embedding/vars/0"] = np.arange(text.config.length)[None]
    return arrays


def _backbone(name: str, image: dict, text: TextConfig) -> dict:
    """config.json of both towers."""
    fields: dict[str, Any] = {
        "vocabulary_size": text.vocab_size,
        "embedding_dim": text.hidden_size,
        "hidden_dim": text.hidden_size,
        "num_layers": text.num_layers,
        "num_heads": text.num_heads,
        "intermediate_dim": text.mlp_dim,
        "intermediate_activation": keras_hub.ACTIVATIONS[text.gelu],
        "max_sequence_length": text.length,
    }
    fields |= {} if name == "CLIP" else {"projection_dim": text.output_size}
    lower = name.lower()
    towers = {
        "vision_encoder": image,
        "text_encoder": serialized(f"{name}TextEncoder", f"{lower}.{lower}_text_encoder", fields),
        **({"projection_dim": text.output_size} if name == "CLIP" else {}),
    }
    return serialized(f"{name}Backbone", f"{lower}.{lower}_backbone", towers)


# The tokenizer


def _write_tokenizer(text: TextCheckpoint, name: str, folder: pathlib.Path) -> dict | None:
    """Write the files of the tokenizer, and return its config. Warns and returns None without one for keras-hub."""
    assets, lower = folder / ASSETS, name.lower()
    assets.mkdir(parents=True)
    config: dict | None = None
    if (text.folder / ASSETS).is_dir():
        for file in (text.folder / ASSETS).iterdir():
            shutil.copyfile(file, assets / file.name)
        config = read_json(text.folder / FILE)
    elif name == "CLIP" and (parts := _clip_parts(text.folder)) is not None:
        vocabulary, merges = parts
        (assets / "vocabulary.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
        (assets / MERGES).write_text("\n".join(merges) + "\n", encoding="utf-8")
    elif name == "SigLIP" and (text.folder / PIECES).is_file():
        shutil.copyfile(text.folder / PIECES, assets / "vocabulary.spm")
    else:
        warnings.warn(
            f"{text.folder.name} has no tokenizer of which keras-hub has the kind ({VOCABULARY} and {MERGES} of CLIP, "
            f"{PIECES} of SigLIP); the preset is written without it.",
            stacklevel=4,
        )
        shutil.rmtree(folder / ASSETS.partition("/")[0])
        return None
    config = config or serialized(f"{name}Tokenizer", f"{lower}.{lower}_tokenizer", {"config_file": FILE})
    write_json(folder / FILE, config)
    return config


def _clip_parts(folder: pathlib.Path) -> tuple[dict[str, int], list[str]] | None:
    """(vocabulary, merges) of CLIP in the files of transformers; None without them."""
    if (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        vocabulary: Any = read_settings(folder / VOCABULARY)
        lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()
        merges = [line for line in lines if line.strip() and not line.startswith("#version")]
    elif (folder / FILE).is_file():
        model = read_settings(folder / FILE).get("model")
        model = model if isinstance(model, dict) else {}
        vocabulary, pairs = model.get("vocab"), model.get("merges", [])
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    else:
        return None
    is_clip = isinstance(vocabulary, dict) and {CLIP_START, CLIP_END} <= vocabulary.keys() and merges
    return (vocabulary, merges) if is_clip else None


def _preprocessor(name: str, converter: dict, tokenizer: dict, text: TextCheckpoint) -> dict[str, dict]:
    """preprocessor.json, which makes the images and the ids of the texts."""
    lower, before = name.lower(), text.folder / PREPROCESSOR
    own = {"sequence_length": text.config.length, "config_file": PREPROCESSOR}
    if (text.folder / ASSETS).is_dir() and before.is_file():
        content = read_json(before)
        content["config"] = {**content["config"], **own, "image_converter": converter}
        return {PREPROCESSOR: content}
    fields = {"tokenizer": tokenizer, "image_converter": converter, **own}
    return {PREPROCESSOR: serialized(f"{name}Preprocessor", f"{lower}.{lower}_preprocessor", fields)}
