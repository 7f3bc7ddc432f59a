"""Shared by the tests of features: models and folders of images."""

import pathlib

import numpy as np
import PIL.Image
import sklearn.datasets

import keras_vit
from keras_vit import ViTConfig
from tests.support import encoded, randomize

CONFIG = ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
WIDER = ViTConfig(patch_size=4, hidden_size=24, num_layers=1, num_heads=3, mlp_dim=32)


def digit_images(count: int) -> np.ndarray:
    """The first of scikit-learn's handwritten digits, (n, 8, 8, 1) uint8."""
    return np.minimum(sklearn.datasets.load_digits().images[:count, ..., None] * 16, 255).astype(np.uint8)


def write_images(folder: pathlib.Path, images: np.ndarray) -> None:
    """Write images into a new folder, as 000.png and so on."""
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        (folder / f"{number:03}.png").write_bytes(encoded(image.squeeze(-1) if image.shape[-1] == 1 else image))


def image_place(place: pathlib.Path) -> pathlib.Path:
    """Two models, a folder of 24 images in two classes, and the same images in one folder, one of them broken."""
    model = randomize(keras_vit.build(CONFIG, image_size=8, num_classes=2))
    model.save(place / "model.keras")
    model.set_weights([2.0 * weight for weight in model.get_weights()])
    model.save(place / "other.keras")
    rng = np.random.default_rng(0)
    for label in ("ant", "bee"):
        (place / "data" / label).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 256, (9, 9, 3), np.uint8)
            PIL.Image.fromarray(pixels).save(place / "data" / label / f"{number:02d}.png")
    (place / "loose").mkdir()
    for number, file in enumerate(sorted((place / "data").rglob("*.png"))):
        (place / "loose" / f"{number:02d}.png").write_bytes(file.read_bytes())
    (place / "loose" / "05.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    return place
