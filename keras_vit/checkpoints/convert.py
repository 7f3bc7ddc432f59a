"""Convert a checkpoint to another layout, verify the written file and print a report key by key."""

import dataclasses
import os
import pathlib
import warnings
from typing import Any

import keras
import numpy as np

from keras_vit import run_directory
from keras_vit.checkpoints.checkpoint import Checkpoint, open_checkpoint
from keras_vit.checkpoints.describe import class_names_of
from keras_vit.checkpoints.download import find_checkpoint
from keras_vit.checkpoints.from_checkpoint import from_checkpoint
from keras_vit.checkpoints.huggingface.layouts import VIT_TYPES
from keras_vit.checkpoints.infer_config import original_preprocessing
from keras_vit.checkpoints.layouts import HEADS, check_new, num_classes_of
from keras_vit.checkpoints.load import weights_by_key
from keras_vit.checkpoints.save import save_checkpoint, settings_to_set
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.build import config_of, preprocessing_of
from keras_vit.models.config import Gelu
from keras_vit.run_directory import is_keras_model


def convert(
    source: str | os.PathLike,
    target: pathlib.Path,
    layout: str,
    *,
    image_size: tuple[int, int] | None = None,
    num_classes: int | None = None,
    num_heads: int | None = None,
    gelu: Gelu | None = None,
    num_groups: int | None = None,
) -> None:
    """Convert a checkpoint, read the new file, compare, and print the report.

    Args:
        source: checkpoint file or folder, address, official name, .keras file or run directory.
        target: file to write, or new folder.
        layout: one of LAYOUTS.
        image_size: height and width in pixels to resize position embeddings to; None keeps their size.
        num_classes: width of a new head of zeros, 0 for none; None keeps the head as stored.
        num_heads, gelu, num_groups: if they are not in the file.

    Raises:
        UserError: for an unknown layout, an existing target, and a source that cannot be read or converted.
    """
    check_new(target, layout)
    model, checkpoint = _read(
        source, image_size, num_classes, {"num_heads": num_heads, "gelu": gelu, "num_groups": num_groups}
    )
    labels = _labels(source) if num_classes is None else ()
    with warnings.catch_warnings(action="ignore"):  # reported below
        save_checkpoint(model, target, layout=layout, labels=labels if len(labels) == model.output_shape[-1] else ())
    written = open_checkpoint(target)
    old_weights = {} if checkpoint is None else checkpoint.weights
    changed = []
    for key, weight in written.weights.items():
        variable = weights_by_key(model)[key]
        is_equal = np.array_equal(weight.convert(weight.source.read()), keras.ops.convert_to_numpy(variable))
        changed += [] if is_equal else [key]
        notes = [] if is_equal else ["changed"]
        if key.startswith(HEADS) and num_classes is not None:
            notes.append("new, of zeros")
        elif key in old_weights and old_weights[key].shape != tuple(variable.shape):
            notes.append("resized")
        name = old_weights[key].source.key if key in old_weights else key
        print(f"{name}  ->  {weight.source.key}  {weight.source.shape}  {', '.join(notes)}".rstrip())
    for name in [] if checkpoint is None else _dropped(checkpoint, written):
        print(f"{name}  ->  dropped")
    print(f"{len(written.weights)} weights, {model.count_params():,} parameters, in {target}", end="")
    print("; verified, all are equal bit for bit." if not changed else f"; changed: {', '.join(changed)}.")
    for sentence in settings_to_set(config_of(model), layout, num_classes_of(weights_by_key(model)), target.is_dir()):
        print(sentence)
    _report_preprocessing(model, written)
    if set(written.layout.model_types) == set(VIT_TYPES) and "pre_logits/kernel" not in written.weights:
        print("ViTModel of transformers adds a pooler, unless from_pretrained gets add_pooling_layer=False.")
    if layout == "huggingface" and preprocessing_of(model).interpolation in ("area", "box"):
        print(
            "preprocessor_config.json asks for the interpolation box, which transformers has in one backend: load it "
            "by AutoImageProcessor.from_pretrained(…, backend='pil')."
        )


def _labels(source: str | os.PathLike) -> tuple[str, ...]:
    """The class names of a run directory or of the config.json of a checkpoint."""
    path = find_checkpoint(source)
    if not is_keras_model(path):
        return class_names_of(path)
    folder = path if path.is_dir() else path.parent
    return run_directory.load_labels(folder) if (folder / run_directory.LABELS).is_file() else ()


def _read(
    source: str | os.PathLike,
    image_size: tuple[int, int] | None,
    num_classes: int | None,
    settings: dict[str, Any],
) -> tuple[keras.Model, Checkpoint | None]:
    """The model and its checkpoint; None for a Keras model."""
    path = find_checkpoint(source)
    model = from_checkpoint(path, image_size=image_size, num_classes=num_classes, **settings)
    return model, None if is_keras_model(path) else open_checkpoint(path)


def _dropped(source: Checkpoint, written: Checkpoint) -> list[str]:
    """Keys of the source whose arrays were not written."""
    missing = {weight.source.key for key, weight in source.weights.items() if key not in written.weights}
    kept = {weight.source.key for key, weight in source.weights.items() if key in written.weights}
    return sorted({*missing - kept, *source.unused})


def _report_preprocessing(model: keras.Model, written: Checkpoint) -> None:
    """Print how the model's images are resized and normalized where the file is read with something else."""
    own = preprocessing_of(model)
    read = original_preprocessing(written, own.image_size, own.channels)
    if own.summary() != dataclasses.replace(read, value_range=_as_stored(read, own)).summary():
        print(f"Images of this model: {own.summary()}.")
        print(f"Images as the file is read: {read.summary()}; set it there.")


def _as_stored(read: Preprocessing, own: Preprocessing) -> tuple:
    """The value range that is read, in the model's own numbers where it is the same."""
    return own.value_range if np.allclose(read.channel_ranges(), own.channel_ranges(), atol=1e-6) else read.value_range
