"""Convert a checkpoint to another layout, verify the written file and print a report key by key."""

import dataclasses
import os
import pathlib
import warnings

import keras
import numpy as np

from keras_vit.checkpoints.checkpoint import Checkpoint, open_checkpoint
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.checkpoints.from_checkpoint import build_source
from keras_vit.checkpoints.infer_config import original_preprocessing
from keras_vit.checkpoints.layouts import HEADS, check_target, format_for
from keras_vit.checkpoints.load import weights_by_key
from keras_vit.checkpoints.options import LoadOptions
from keras_vit.checkpoints.save import save_checkpoint, settings_to_set, written_model
from keras_vit.files.keras_model import is_keras_model
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.build import preprocessing_of

_UNCHANGED = LoadOptions()


def convert(source: str | os.PathLike, target: pathlib.Path, layout: str, options: LoadOptions = _UNCHANGED) -> None:
    """Convert a checkpoint, read the new file, compare, and print the report.

    Args:
        source: checkpoint file or folder, address, official name, .keras file or run directory.
        target: file to write, or new folder.
        layout: one of LAYOUTS.
        options: what the file does not say, and what is changed on the way.

    Raises:
        UserError: for an unknown layout, an existing target, and a source that cannot be read or converted.
    """
    check_target(target, layout, is_new=True)
    source = find_checkpoint(source)
    model = build_source(source, options)
    checkpoint = None if is_keras_model(source) else open_checkpoint(source, options.stored_grid)
    with warnings.catch_warnings(record=True) as caught:  # printed below
        warnings.simplefilter("always")
        save_checkpoint(model, target, layout=layout)
    written = open_checkpoint(target)
    changed = _report_weights(model, checkpoint, written, options)
    print(f"{len(written.weights)} weights, {model.count_params():,} parameters, in {target}", end="")
    print("; verified, all are equal bit for bit." if not changed else f"; changed: {', '.join(changed)}.")
    saved = written_model(model)
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
    if own.summary() != dataclasses.replace(read, value_range=_as_stored(read, own)).summary():
        print(f"Images of this model: {own.summary()}.")
        print(f"Images as the file is read: {read.summary()}; set it there.")


def _as_stored(read: Preprocessing, own: Preprocessing) -> tuple:
    """The value range that is read, in the model's own numbers where it is the same."""
    return own.value_range if np.allclose(read.channel_ranges(), own.channel_ranges(), atol=1e-6) else read.value_range
