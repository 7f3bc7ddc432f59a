"""Sample images of a run: image files and their labels in one .npz file."""

import dataclasses
import os

import numpy as np

from keras_vit.errors import UserError
from keras_vit.files.npz import read_npz, write_npz


@dataclasses.dataclass(frozen=True)
class Samples:
    """Encoded images with their labels, stored beside a model to check its exports."""

    encoded: tuple[bytes, ...]
    """Contents of image files."""
    labels: np.ndarray
    """(N,) int64 class indices."""
    names: tuple[str, ...] = ()
    """What to call each image, such as its class folder and file; empty where it is not known."""

    def some(self, most: int) -> "Samples":
        """Return at most so many of the images, evenly spaced."""
        if len(self.encoded) <= most:
            return self
        rows = np.linspace(0, len(self.encoded) - 1, most).astype(int)
        return Samples(tuple(self.encoded[row] for row in rows), self.labels[rows])

    def save(self, path: str | os.PathLike) -> None:
        """Write an .npz file of numeric arrays."""
        ends = np.cumsum([len(image) for image in self.encoded], dtype=np.int64)
        data = np.frombuffer(b"".join(self.encoded), np.uint8)
        labels = np.asarray(self.labels, np.int64)
        arrays: dict[str, np.ndarray] = {"data": data, "ends": ends, "labels": labels}
        if self.names:  # as bytes, since all arrays are numeric
            arrays["names"] = np.frombuffer("\n".join(self.names).encode("utf-8", "replace"), np.uint8)
        write_npz(path, arrays)

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> "Samples":
        """Read a file written by `save`."""
        arrays = read_npz(path)
        if not _are_samples(arrays):
            raise UserError(f"{path} has no sample images; train again to write them.")
        starts = [0, *arrays["ends"][:-1]]
        data = arrays["data"].tobytes()
        spans = zip(starts, arrays["ends"], strict=True)
        names = arrays["names"].tobytes().decode("utf-8", "replace").split("\n") if "names" in arrays else ()
        known = names if len(names) == len(arrays["labels"]) else ()
        return cls(tuple(data[start:end] for start, end in spans), arrays["labels"], tuple(known))


def _are_samples(arrays: dict[str, np.ndarray]) -> bool:
    """Return whether the ends split the data into at least one image, each with a label."""
    if arrays.keys() - {"names"} != {"data", "ends", "labels"}:
        return False
    data, ends, labels = arrays["data"], arrays["ends"], arrays["labels"]
    integers = ends.dtype == labels.dtype == np.int64 and data.dtype == np.uint8
    one_each = data.ndim == ends.ndim == 1 and ends.shape == labels.shape and ends.size > 0
    return integers and one_each and bool(np.all(np.diff(ends, prepend=0) > 0)) and ends[-1] == data.size
