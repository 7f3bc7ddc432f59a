"""Arrays in files that come from strangers: what a file holds is known before a number of it is read.

Numbers are read block by block into their place, so that a file and what becomes of it are never in memory together.
"""

import concurrent.futures
import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from keras_vit.errors import UserError

_BLOCK = 2**20  # bytes, which stay in the processor's cache while they are checked and converted
_ALIGNMENT = 64  # bytes; TensorFlow and JAX take over memory so aligned without a copy
_BFLOAT16 = np.dtype("V2")  # two opaque bytes to NumPy


class ByteStream(Protocol):
    """What an array is read from."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the buffer, or the beginning of it; say with how many bytes."""


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """One array of a file: key, shape and type are known from the file's headers, the numbers are read on demand."""

    key: str
    whole: tuple[int, ...]
    """Shape in the file."""
    dtype: np.dtype
    open: Callable[[], contextlib.AbstractContextManager[ByteStream]]
    """The bytes of the numbers; to leave it after the last of them raises UserError if the file's checksum differs."""
    by_columns: bool = False
    """Whether the first axis varies fastest (Fortran's order)."""
    part: int | None = None
    """If a row of a stacked array is meant, its index; only `shape` is the row's."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Axes of the array that is meant."""
        return self.whole if self.part is None else self.whole[1:]

    @property
    def is_float(self) -> bool:
        """Whether the array holds floating-point numbers."""
        return self.dtype.kind == "f" or self.dtype == _BFLOAT16

    @property
    def num_bytes(self) -> int:
        """Bytes of the numbers in the file."""
        return math.prod(self.whole) * self.dtype.itemsize

    def fetch(self) -> np.ndarray:
        """The whole array as stored, whatever its type."""
        array = np.empty(self.whole, self.dtype)
        self._read(array, lambda block: block)
        return array

    def read(self) -> np.ndarray:
        """The whole array as float32."""
        array = empty(self.whole)
        self.fill(array)
        return array

    def fill(self, target: np.ndarray) -> None:
        """Write the whole array into `target`, float32 of its shape in any order of memory.

        Raises UserError if the numbers are not all finite.
        """
        self._read(target, self._checked)

    def check(self) -> None:
        """Read every number for its checks alone. Raises UserError as `fill`."""
        for _, block in self._blocks():
            self._checked(block)

    def _read(self, target: np.ndarray, convert: Callable[[np.ndarray], np.ndarray]) -> None:
        target = np.atleast_1d(target.T if self.by_columns else target)  # a view
        for place, block in self._blocks():
            target[place] = convert(block)

    def _blocks(self) -> Iterator[tuple[tuple, np.ndarray]]:
        """(place, numbers as stored) in the order of the file; the numbers are valid until the next.

        Places are those of the transposed array if the array is stored by columns.
        """
        shape = (self.whole[::-1] if self.by_columns else self.whole) or (1,)
        buffer = np.empty(min(self.num_bytes, _BLOCK), np.uint8)
        with self.open() as stream:
            for place, size in _places(shape, max(_BLOCK // self.dtype.itemsize, 1)):
                raw = buffer[: math.prod(size) * self.dtype.itemsize]
                read_exactly(stream, memoryview(raw))
                yield place, raw.view(self.dtype).reshape(size)

    def _checked(self, block: np.ndarray) -> np.ndarray:
        """Numbers of the file as float32."""
        if self.dtype == _BFLOAT16:  # the upper half of a float32
            block = (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):  # what is too large for a weight is not finite then
            block = block.astype(np.float32, copy=False)
        if not np.isfinite([block.min(), block.max()]).all():
            raise UserError(f"The array {self.key!r} holds numbers that are not finite; the file is damaged.")
        return block


def empty(shape: tuple[int, ...]) -> np.ndarray:
    """A float32 array to be filled, in memory that a backend can take over."""
    return _aligned(np.empty, shape)


def zeros(shape: tuple[int, ...]) -> np.ndarray:
    """As `empty`, of zeros; the system gives it no memory before something else is written into it."""
    return _aligned(np.zeros, shape)


def _aligned(make: Callable, shape: tuple[int, ...]) -> np.ndarray:
    size = 4 * math.prod(shape)
    memory = make(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(np.float32).reshape(shape)


def _places(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple, tuple[int, ...]]]:
    """Cut an array into pieces that follow each other in memory: (index, shape) of each, at most `most` numbers."""
    if 0 in shape:
        return
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= most)
    rest = shape[axis + 1 :]
    step = most // math.prod(rest)
    for leading in np.ndindex(shape[:axis]):
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            yield (*leading, slice(start, stop)), (stop - start, *rest)


def read_exactly(stream: ByteStream, buffer: memoryview) -> None:
    """Fill the buffer. Raises EOFError if the stream ends before."""
    done = 0
    while done < len(buffer):
        count = stream.readinto(buffer[done:])
        if not count:
            raise EOFError("the file ends too early")
        done += count


def check_all(arrays: Iterable[LazyArray]) -> None:
    """Read every array once for its checks alone, on all cores."""
    largest_first = sorted(arrays, key=lambda stored: -stored.num_bytes)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(LazyArray.check, largest_first):
            pass
