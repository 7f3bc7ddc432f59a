"""Fixtures of the checkpoints."""

import pathlib
import shutil
from collections.abc import Callable

import pytest

import keras_vit
from tests.checkpoints.keras_libraries import FILES


@pytest.fixture(name="official_file", scope="session")
def _official_file(tmp_path_factory) -> pathlib.Path:
    """A file of timm with the arrays of ViT-Ti_16 for 224 pixels and 5 classes."""
    file = tmp_path_factory.mktemp("official") / "x.safetensors"
    keras_vit.save_checkpoint(keras_vit.build("ViT-Ti_16", num_classes=5), file, layout="timm")
    return file


@pytest.fixture(name="unpacked", scope="session")
def _unpacked(tmp_path_factory) -> Callable[[str], pathlib.Path]:
    """Unpack the folder of a Keras library by its name, which may be that of a file."""
    folder = tmp_path_factory.mktemp("unpacked")

    def unpacked(name: str) -> pathlib.Path:
        if name.endswith(".h5"):
            return FILES / name
        if not (folder / name).exists():
            shutil.unpack_archive(FILES / f"{name}.zip", folder / name)
        return folder / name

    return unpacked
