"""Arrays in files that come from strangers: what a file holds is known before a number of it is read."""

import concurrent.futures
import dataclasses
import math
import os
import threading
from collections.abc import Callable, Iterable

import numpy as np

from keras_vit.errors import UserError

# Bytes that a scratch must be larger than the array, for alignment.
SCRATCH_MARGIN = 64


@dataclasses.dataclass(frozen=True)
class Stored:
    """One array of a file: key, shape and type are known from the file's headers, the numbers are read on demand."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    fetch: Callable[[np.ndarray | None], np.ndarray]
    """The whole array as stored, checked by the file's own checksum; into the given bytes if they are enough."""

    part: int | None = None
    """If a row of a stacked array is meant, its index; `shape` is the row's, `fetch` and `read` give the whole."""

    @property
    def is_float(self) -> bool:
        """Whether the array holds floating-point numbers; bfloat16 is two opaque bytes to NumPy."""
        return self.dtype.kind == "f" or self.dtype == np.dtype("V2")

    @property
    def num_bytes(self) -> int:
        """Bytes of the numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, scratch: np.ndarray | None = None) -> np.ndarray:
        """The numbers, floating-point ones as float32. Raises UserError if they are not all finite.

        `scratch` (bytes) may be used for them: the result is then valid until the next use of it.
        """
        array = self.fetch(scratch)
        if self.dtype == np.dtype("V2"):  # the upper half of a float32
            array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if self.is_float:
            with np.errstate(over="ignore"):  # what is too large for a weight is not finite then
                array = array.astype(np.float32, copy=False)
        if self.is_float and array.size and not np.isfinite([array.min(), array.max()]).all():
            raise UserError(f"The array {self.key!r} holds numbers that are not finite; the file is damaged.")
        return array


def check_all(arrays: Iterable[Stored]) -> None:
    """Read every array once for its checks alone, on all cores, in memory for one array each."""
    arrays = sorted(arrays, key=lambda stored: -stored.num_bytes)
    if not arrays:
        return
    local = threading.local()

    def check(stored: Stored) -> None:
        if not hasattr(local, "scratch"):  # fresh memory for each array would cost as much time as reading it
            local.scratch = np.empty(arrays[0].num_bytes + SCRATCH_MARGIN, np.uint8)
        stored.read(local.scratch)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(check, arrays):
            pass
