"""The boxes of the scenes of `tests.segmentation.proof`, to measure the training of detectors.

python -m tests.detection.proof FOLDER

writes labels/ beside images/ and masks/ of FOLDER/train and FOLDER/test, and FOLDER/data.yaml, as Ultralytics' files.
"""

import pathlib
import sys

import numpy as np
import PIL.Image
import yaml

from tests.segmentation.proof import LABELS


def boxes_of(mask: np.ndarray) -> np.ndarray:
    """A mask of objects (h, w) -> (n, 5): class without the ground, centre x and y, width, height as shares."""
    rows = []
    for value in np.unique(mask[mask > 0]):
        y, x = np.nonzero(mask == value)
        left, top, right, bottom = x.min(), y.min(), x.max() + 1, y.max() + 1
        rows.append([value // 1000 - 1, (left + right) / 2, (top + bottom) / 2, right - left, bottom - top])
    height, width = mask.shape
    return np.array(rows, np.float64).reshape(-1, 5) / [1, width, height, width, height]


def write(root: pathlib.Path) -> None:
    for file in root.glob("*/masks/*.png"):
        labels = file.parents[1] / "labels"
        labels.mkdir(exist_ok=True)
        np.savetxt(labels / f"{file.stem}.txt", boxes_of(np.asarray(PIL.Image.open(file))), "%d %.6f %.6f %.6f %.6f")
    fields = {"train": "train/images", "val": "test/images", "names": list(LABELS[1:])}
    (root / "data.yaml").write_text(yaml.safe_dump(fields))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
