"""Arrays in untrusted files: keys, shapes and dtypes are known before any array is read.

Arrays are read block by block into their destination, so that memory never holds both file and weights.
"""

import concurrent.futures
import contextlib
import dataclasses
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from keras_vit.errors import UserError

_BLOCK = 2**20  # bytes; fits in the processor's cache
_ALIGNMENT = 64  # bytes; TensorFlow and JAX use memory with this alignment without a copy
_BFLOAT16 = np.dtype("V2")  # two opaque bytes to NumPy


class ByteStream(Protocol):
    """A binary stream."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read into the beginning of the buffer; returns the number of bytes, 0 at the end."""


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array of a file: key, shape and dtype come from the headers, the values are read on demand."""

    key: str
    file_shape: tuple[int, ...]  # shape in the file; `shape` is that of the part
    dtype: np.dtype
    open: Callable[[], contextlib.AbstractContextManager[ByteStream]]
    """Opens a stream of the values. On exit, after all have been read, it raises UserError for a wrong checksum."""
    fortran_order: bool = False  # whether the first axis varies fastest
    part: int | None = None  # index along the first axis if this is one part of a stacked array; affects only `shape`

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array, or of its part."""
        return self.file_shape if self.part is None else self.file_shape[1:]

    @property
    def is_float(self) -> bool:
        """Return whether the dtype is a floating-point type."""
        return self.dtype.kind == "f" or self.dtype == _BFLOAT16

    @property
    def num_bytes(self) -> int:
        """Return bytes of the values in the file."""
        return math.prod(self.file_shape) * self.dtype.itemsize

    def fetch(self) -> np.ndarray:
        """Read the complete array with the dtype of the file."""
        array = np.empty(self.file_shape, self.dtype)
        self._read(array, lambda block: block)
        return array

    def read(self) -> np.ndarray:
        """Read the complete array as float32."""
        array = empty(self.file_shape)
        self.fill(array)
        return array

    def fill(self, target: np.ndarray) -> None:
        """Read the array into a float32 array of its shape with any strides. Raises UserError for values not finite."""
        self._read(target, self._as_float32)

    def check(self) -> None:
        """Read and check all values without keeping them. Raises UserError like `fill`."""
        for _, block in self._blocks():
            self._as_float32(block)

    def _read(self, target: np.ndarray, convert: Callable[[np.ndarray], np.ndarray]) -> None:
        target = np.atleast_1d(target.T if self.fortran_order else target)  # a view
        for index, block in self._blocks():
            target[index] = convert(block)

    def _blocks(self) -> Iterator[tuple[tuple, np.ndarray]]:
        """(index, values until the next block) in the order of the file; in Fortran order, of the transposed array."""
        shape = (self.file_shape[::-1] if self.fortran_order else self.file_shape) or (1,)
        buffer = np.empty(min(self.num_bytes, _BLOCK), np.uint8)
        with self.open() as stream:
            for index, shape_of_block in _block_indices(shape, max(_BLOCK // self.dtype.itemsize, 1)):
                raw = buffer[: math.prod(shape_of_block) * self.dtype.itemsize]
                read_exactly(stream, raw.data)
                yield index, raw.view(self.dtype).reshape(shape_of_block)

    def _as_float32(self, block: np.ndarray) -> np.ndarray:
        """Return the values as float32; raises UserError for values that are not finite."""
        if self.dtype == _BFLOAT16:  # the upper half of a float32
            block = (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):  # overflow gives infinity
            block = block.astype(np.float32, copy=False)
        if not np.isfinite([block.min(), block.max()]).all():
            raise UserError(f"The array {self.key!r} has values that are not finite; the file is damaged.")
        return block


def in_memory(key: str, values: Any) -> LazyArray:
    """An array that is no array of a file; its values are converted to float32 when they are read."""
    return LazyArray(
        key, tuple(values.shape), np.dtype(np.float32), lambda: io.BytesIO(np.array(values, np.float32).tobytes())
    )


def empty(shape: tuple[int, ...]) -> np.ndarray:
    """Return an uninitialized float32 array with the alignment for zero-copy."""
    return _aligned(np.empty, shape)


def zeros(shape: tuple[int, ...]) -> np.ndarray:
    """A float32 array of zeros with the alignment for zero-copy; the system allocates its memory on first write."""
    return _aligned(np.zeros, shape)


def _aligned(allocate: Callable, shape: tuple[int, ...]) -> np.ndarray:
    size = 4 * math.prod(shape)
    memory = allocate(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(np.float32).reshape(shape)


def _block_indices(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple, tuple[int, ...]]]:
    """(index, shape) of contiguous blocks of at most `most` values, in the order of memory."""
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
    """Fill the buffer. Raises EOFError if the stream ends early."""
    done = 0
    while done < len(buffer):
        count = stream.readinto(buffer[done:])
        if not count:
            raise EOFError("the file ends too early")
        done += count


def check_all(arrays: Iterable[LazyArray]) -> None:
    """Read and check all arrays without keeping them; uses all cores."""
    largest_first = sorted(arrays, key=lambda array: -array.num_bytes)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(LazyArray.check, largest_first):
            pass
