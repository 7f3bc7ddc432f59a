"""Save the weights of a model in the layout of another library, and convert checkpoints to it."""

import dataclasses
import os
import pathlib
import shutil
import warnings
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from keras_vit.checkpoints.checkpoint import Checkpoint, LoadOptions, open_checkpoint
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.checkpoints.formats.layout import Layout
from keras_vit.checkpoints.from_checkpoint import build_checkpoint, from_keras_model, load_named_model
from keras_vit.checkpoints.infer_config import original_preprocessing
from keras_vit.checkpoints.key_mapping import POSITIONS, in_pairs, join_keys, untranslate
from keras_vit.checkpoints.layouts import HEADS, check_target, format_for, is_folder
from keras_vit.checkpoints.load import check_unchanged, values_by_key, weights_by_key
from keras_vit.errors import UserError
from keras_vit.files.atomic import atomic_folder, atomic_write
from keras_vit.files.keras_model import is_keras_model
from keras_vit.files.labels import check_number
from keras_vit.files.npz import write_npz
from keras_vit.files.remote import to_path
from keras_vit.files.safetensors import overwrite, write_json, write_safetensors
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.build import config_of, preprocessing_of
from keras_vit.models.config import Classes, ModelConfig, ResNetConfig, ViTConfig

_UNCHANGED = LoadOptions()


def save_checkpoint(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    layout: str,
    labels: Sequence[str] = (),
    two_towers: str | os.PathLike | None = None,
) -> None:
    """Save the weights of a model in the layout of another library.

    Args:
        model: built by `keras_vit.build`, with the layers that it gave; a Dense of another name may be the head.
        path: file, written atomically; for "huggingface", "keras_hub" and "kmodels" a new folder. For "timm" a
            .safetensors file, or a new folder with the config.json that
            `timm.create_model("local-dir:…", pretrained=True)` reads.
        layout: "npz" (vit_jax, big_transfer), "npz-linen", "big_vision", "huggingface", "timm", "torchvision",
            "keras_hub", "vit_keras" (.h5, of weights) or "kmodels".
            For big_vision, the position embedding of the class token is added to the token.
        labels: class names, for the config.json of "huggingface" and "timm". Default: those that the model knows.
        two_towers: for "huggingface", the folder or name of a CLIP, SigLIP, OWL-ViT or OWLv2 with both towers: the new
            folder is a copy of it with the image tower of the model, which may have a head of texts
            (`keras_vit.zero_shot`). The text tower stays bit for bit.

    Raises UserError for a model that the layout cannot express, and for one with other layers than its config says.
    Warns of a GELU and of epsilons other than those with which the file is read, which have to be set there.
    """
    path = to_path(path)
    check_target(path, layout)
    if two_towers is None:
        written = Blueprint.of(model)
        written = dataclasses.replace(written, classes=Classes(tuple(labels))) if labels else written
        _write(path, layout, written, model)
    elif layout != "huggingface" or labels:
        raise UserError("two_towers is for the layout huggingface, without labels; give that, or leave it out.")
    else:
        _write_image_tower(path, os.fspath(two_towers), *image_tower(config_of(model), _unchanged_weights(model)))


def _unchanged_weights(model: keras.Model) -> dict[str, np.ndarray]:
    """The weights by key of a model that is as its config says."""
    check_unchanged(model, "save it with model.save, or give the model from before the change")
    return {key: keras.ops.convert_to_numpy(value) for key, value in values_by_key(model).items()}


def _write(path: pathlib.Path, layout: str, written: Blueprint, model: keras.Model) -> None:
    if written.labels:
        check_number(written.labels, "labels", written.num_classes, model.name)
    module, own = format_for(written, layout)
    configs = module.write_config(written) if is_folder(path, layout) else {}
    weights = _unchanged_weights(model)  # last, because the model is built again for it
    for sentence in settings_to_set(written, layout, has_config=is_folder(path, layout)):
        warnings.warn(sentence, stacklevel=3)
    num_heads = 1
    if isinstance(written.config, ViTConfig):
        weights, num_heads = _with_positions_of(own, weights, written.config), written.config.num_heads
    weights = in_pairs(weights, num_heads) if own.rotates_pairs else weights
    arrays = {**untranslate(weights, own.rules, num_heads), **own.constants}
    if is_folder(path, layout):
        with atomic_folder(path) as temporary:
            module.write_weights(temporary, arrays)
            for name, fields in configs.items():
                write_json(temporary / name, fields)
    elif path.suffix == ".npz":
        write_npz(path, arrays)
    elif path.suffix == ".h5":
        with atomic_write(path) as temporary:
            module.write_weights(temporary, arrays)
    else:  # without a config.json the arrays alone would not tell the grid of the positions
        write_safetensors(path, arrays, image_size=written.preprocessing.image_size)


_SETTINGS = {"gelu": "GELU", "layer_norm_epsilon": "epsilon"}
_RESNET_SETTINGS = {
    "group_norm_epsilon": "GroupNorm epsilon",
    "variance_epsilon": "epsilon of the kernels' variance",
    "deviation_epsilon": "epsilon of the kernels' deviation",
}


def settings_to_set(model: Blueprint, layout: str, has_config: bool) -> list[str]:
    """A sentence for each setting that differs from the other code's default and that the written file lacks."""
    compared: list[tuple[ModelConfig, str, str]] = []
    config, defaults = model.config, format_for(model, layout)[1]
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


def _with_positions_of(layout: Layout, weights: dict[str, np.ndarray], config: ViTConfig) -> dict[str, np.ndarray]:
    """Add the position of the class token to the token, or a position of zeros, as the layout has it."""
    if layout.prefix_positions in (None, config.prefix_positions) or "cls" not in weights or POSITIONS not in weights:
        return weights
    table = weights[POSITIONS]
    if layout.prefix_positions:
        return weights | {POSITIONS: np.pad(table, ((0, 0), (config.num_class_tokens, 0), (0, 0)))}
    return weights | {"cls": weights["cls"] + table[:, :1], POSITIONS: table[:, 1:]}


# Two towers

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


def _write_image_tower(
    folder: pathlib.Path, source: str, config: ModelConfig, weights: Mapping[str, np.ndarray]
) -> None:
    """Write a copy of the folder of two towers with the weights of another image tower of the same sizes."""
    origin = find_checkpoint(source)
    checkpoint = open_checkpoint(origin)
    if not origin.is_dir() or not any("text_model." in key for key in checkpoint.unused):
        raise UserError(f"{source} should be a folder with two towers, but has no text tower; leave two_towers out.")
    heads = config.num_heads if isinstance(config, ViTConfig) else 1
    arrays = untranslate(weights, checkpoint.layout.rules, heads)
    stored = {weight.source.key: weight.source for weight in checkpoint.weights.values()}
    common = arrays.keys() & stored.keys()
    different = (arrays.keys() ^ stored.keys()) | {key for key in common if arrays[key].shape != stored[key].shape}
    if different:
        raise UserError(
            f"The model is another image tower than that of {source}: it lacks, or has in another shape, "
            f"{join_keys(sorted(different))}. Adapt it to the image size of the checkpoint; a head that is none of "
            "texts dropped the projection: fine-tune a model of keras_vit.zero_shot."
        )
    if rounded := sorted({array.dtype.str for array in stored.values() if array.dtype.itemsize < 4}):
        warnings.warn(f"The weights of {source} have 16 bits ({', '.join(rounded)}), so the new ones do.", stacklevel=3)
    with atomic_folder(folder) as temporary:
        for file in sorted(origin.iterdir()):
            if file.is_file() and file.suffix in _COPIED:
                shutil.copyfile(file, temporary / file.name)
        for file in temporary.glob("*.safetensors"):
            overwrite(file, arrays)


def convert(source: str | os.PathLike, target: pathlib.Path, layout: str, options: LoadOptions = _UNCHANGED) -> None:
    """Convert a checkpoint, .keras file or run to a layout, read the new file, compare, and print the report.

    options: what the file does not say, and what is changed on the way. Raises UserError for an existing target, too.
    """
    check_target(target, layout, is_new=True)
    source = find_checkpoint(source)
    checkpoint = None if is_keras_model(source) else open_checkpoint(source, options.stored_grid)
    if checkpoint is None:
        model = from_keras_model(load_named_model(source), options)
    else:
        model = build_checkpoint(checkpoint, os.fspath(source), options)
    with warnings.catch_warnings(record=True) as caught:  # printed below
        warnings.simplefilter("always")
        save_checkpoint(model, target, layout=layout)
    written = open_checkpoint(target)
    changed = _report_weights(model, checkpoint, written, options)
    print(f"{len(written.weights)} weights, {model.count_params():,} parameters, in {target}", end="")
    print("; verified, all are equal bit for bit." if not changed else f"; changed: {', '.join(changed)}.")
    saved = Blueprint.of(model)
    sentences = settings_to_set(saved, layout, target.is_dir())
    sentences += [str(warning.message) for warning in caught if warning.category is UserWarning]
    for sentence in dict.fromkeys((*sentences, *format_for(saved, layout)[1].notes)):
        print(sentence)
    _report_preprocessing(model, written)


def _report_weights(
    model: keras.Model, checkpoint: Checkpoint | None, written: Checkpoint, options: LoadOptions
) -> list[str]:
    """Print where each array went, and return the keys of those that differ from the model's weights."""
    old_weights = {} if checkpoint is None else checkpoint.weights
    changed: list[str] = []
    variables = weights_by_key(model)
    for key, weight in written.weights.items():
        if key not in variables:  # of training alone
            continue
        variable = variables[key]
        is_equal = np.array_equal(weight.convert(weight.source.read()), keras.ops.convert_to_numpy(variable))
        changed += [] if is_equal else [key]
        notes = [] if is_equal else ["changed"]
        if key.startswith(HEADS) and options.num_classes is not None:
            notes.append("new, of zeros")
        elif key in old_weights and old_weights[key].shape != tuple(variable.shape):
            notes.append("resized")
        name = old_weights[key].source.key if key in old_weights else key
        print(f"{name}  ->  {weight.source.key}  {weight.source.shape}  {', '.join(notes)}".rstrip())
    if checkpoint is not None:
        kept = {old.source.key for key, old in old_weights.items() if key in written.weights}
        for name in sorted({old.source.key for old in old_weights.values()} - kept | set(checkpoint.unused)):
            print(f"{name}  ->  dropped")
    return changed


def _report_preprocessing(model: keras.Model, written: Checkpoint) -> None:
    """Print how the model's images are resized and normalized where the file is read with something else."""
    own = preprocessing_of(model)
    read = original_preprocessing(written, own.image_size, own.channels)
    if np.allclose(read.channel_ranges(), own.channel_ranges(), atol=1e-6):
        read = dataclasses.replace(read, value_range=own.value_range)  # as the numbers of the model are written
    if own.summary() != read.summary():
        print(f"Preprocessing of this model: {own.summary()}.")
        print(f"Preprocessing by readers of the file: {read.summary()}; set it there.")
