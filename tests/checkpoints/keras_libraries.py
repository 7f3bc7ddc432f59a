"""Shared by the tests of Keras libraries: what they computed with their files."""

import keras
import numpy as np

from tests.support import FIXTURES

FILES = FIXTURES / "keras_libraries"


def golden(name: str) -> dict[str, np.ndarray]:
    """The inputs and outputs of the library."""
    with np.load(FILES / f"{name.removesuffix('.h5')}.io.npz") as recorded:
        return dict(recorded)


def outputs(model: keras.Model, images: np.ndarray) -> np.ndarray:
    return keras.ops.convert_to_numpy(model(images, training=False))
