"""Scenes of 16 classes with exact truth, to measure training: shapes, plain or striped, on photographs.

python -m tests.segmentation.proof FOLDER TRAIN TEST SIDE

writes FOLDER/train and FOLDER/test with images/, masks/ of objects (16 bits; the ground is class 0), labels/ of boxes,
labels.txt, and data.yaml as Ultralytics'. The colors are random, so that only shape and stripes tell the class.
"""

import pathlib
import sys

import numpy as np
import PIL.Image
import sklearn.datasets
import yaml

SHAPES = ("square", "disc", "cross", "triangle", "ring", "bar", "diamond", "star")
LABELS = ("ground", *SHAPES, *(f"striped {name}" for name in SHAPES))
_MOST = 5


def _inside(kind: str, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Whether places relative to the centre, in radii, are in a shape."""
    distance, angle = np.hypot(y, x), np.arctan2(y, x)
    far, near = np.maximum(abs(y), abs(x)), np.minimum(abs(y), abs(x))
    return {
        "square": far < 0.8,
        "disc": distance < 1.0,
        "cross": (far < 1.0) & (near < 0.3),
        "triangle": (y < 0.8) & (y > 2 * abs(x) - 1.0),
        "ring": (distance < 1.0) & (distance > 0.55),
        "bar": (abs(y) < 0.3) & (abs(x) < 1.0),
        "diamond": abs(y) + abs(x) < 1.0,
        "star": distance < 0.65 + 0.35 * np.cos(5 * angle),
    }[kind]


def scene(rng: np.random.Generator, photographs: list[np.ndarray], side: int) -> tuple[np.ndarray, np.ndarray]:
    """A picture (side, side, 3) uint8 and its mask of objects (side, side) uint16."""
    photograph = photographs[rng.integers(len(photographs))]
    top, left = (rng.integers(0, length - side) for length in photograph.shape[:2])
    image = photograph[top : top + side, left : left + side].astype(np.float32)
    mask = np.zeros((side, side), np.uint16)
    rows, columns = np.mgrid[:side, :side]
    for number in range(int(rng.integers(1, _MOST + 1))):
        label, radius = int(rng.integers(1, len(LABELS))), float(rng.uniform(side / 9, side / 4))
        y, x = rng.uniform(radius, side - radius, 2)
        turn = rng.uniform(-0.4, 0.4)
        down, across = (rows - y) / radius, (columns - x) / radius
        down, across = np.cos(turn) * down - np.sin(turn) * across, np.sin(turn) * down + np.cos(turn) * across
        inside = _inside(SHAPES[(label - 1) % len(SHAPES)], down, across)
        colors = rng.uniform(0, 255, (2, 3))
        striped = (np.floor(4 * down) % 2 == 0) & (label > len(SHAPES))
        image[inside] = np.where(striped[..., None], colors[1], colors[0])[inside]
        mask[inside] = 1000 * label + number
    return np.clip(image + rng.normal(0, 6, image.shape), 0, 255).astype(np.uint8), mask


def boxes_of(mask: np.ndarray) -> np.ndarray:
    """The boxes (n, 5) of a mask of objects: class without the ground, center x and y, width, height as shares."""
    rows = []
    for value in np.unique(mask[mask > 0]):
        y, x = np.nonzero(mask == value)
        left, top, right, bottom = x.min(), y.min(), x.max() + 1, y.max() + 1
        rows.append([value // 1000 - 1, (left + right) / 2, (top + bottom) / 2, right - left, bottom - top])
    height, width = mask.shape
    return np.array(rows, np.float64).reshape(-1, 5) / [1, width, height, width, height]


def write(root: pathlib.Path, train: int, test: int, side: int) -> None:
    photographs, rng = sklearn.datasets.load_sample_images().images, np.random.default_rng(0)
    for name, count in (("train", train), ("test", test)):
        for part in ("images", "masks", "labels"):
            (root / name / part).mkdir(parents=True)
        for number in range(count):
            image, mask = scene(rng, photographs, side)
            PIL.Image.fromarray(image).save(root / name / "images" / f"{number:04d}.png")
            PIL.Image.fromarray(mask).save(root / name / "masks" / f"{number:04d}.png")
            np.savetxt(root / name / "labels" / f"{number:04d}.txt", boxes_of(mask), "%d %.6f %.6f %.6f %.6f")
    (root / "labels.txt").write_text("".join(f"{label}\n" for label in LABELS))
    fields = {"train": "train/images", "val": "test/images", "names": list(LABELS[1:])}
    (root / "data.yaml").write_text(yaml.safe_dump(fields))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
