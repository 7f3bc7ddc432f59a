"""Fixtures of the checkpoints."""

import pathlib
import shutil
from collections.abc import Callable

import pytest

from tests.checkpoints.keras_libraries import FILES


@pytest.fixture(name="unpacked", scope="session")
def _unpacked(tmp_path_factory) -> Callable[[str], pathlib.Path]:
    """Unpack the folder of a Keras library by its name."""
    folder = tmp_path_factory.mktemp("unpacked")

    def unpacked(name: str) -> pathlib.Path:
        if not (folder / name).exists():
            shutil.unpack_archive(FILES / f"{name}.zip", folder / name)
        return folder / name

    return unpacked
