"""Runs a SavedModel in the C++ loader of TensorFlow, as TF Serving does, without the TensorFlow of Python.

    python export/saved_model/cpp_loader.py DIRECTORY THREADS REPEATS FEED OUTPUT IMAGES.npy ANSWER.npy

FEED and OUTPUT are tensor names of a signature; IMAGES is float32 (n, h, w, C). The script writes the outputs of all
images to ANSWER, and prints as JSON the seconds of up to REPEATS calls with the first image. `keras-vit saved-model`
runs it. It imports nothing of this project, so that the C++ library is the only part of TensorFlow in the process.
"""

import contextlib
import ctypes
import importlib.util
import json
import pathlib
import sys
import time
from collections.abc import Iterator

import numpy as np

# Values of TF_DataType.
_DATA_TYPES = {np.dtype(np.float32): 1, np.dtype(np.uint8): 4, np.dtype(object): 7}
_STRING_BYTES = 24  # sizeof(TF_TString)
# Largest total of the timed calls, in seconds.
_LONGEST = 3.0


def library_path() -> pathlib.Path | None:
    """The C++ library of TensorFlow; None on other platforms than Linux."""
    package = importlib.util.find_spec("tensorflow")
    if package is None or package.origin is None:
        return None
    path = pathlib.Path(package.origin).parent / "libtensorflow_cc.so.2"
    return path if path.is_file() else None


class _Output(ctypes.Structure):
    _fields_ = [("operation", ctypes.c_void_p), ("index", ctypes.c_int)]


class SessionError(RuntimeError):
    """An error of TensorFlow, with its message and its TF_Code."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


class Session:
    """A SavedModel in a session. Several threads may call `run` at once. Raises SessionError."""

    def __init__(self, directory: str, threads: int):
        self._tf = library = ctypes.CDLL(str(library_path()))
        for name in (
            "TF_NewStatus", "TF_NewSessionOptions", "TF_NewGraph", "TF_LoadSessionFromSavedModel", "TF_TensorData",
            "TF_GraphOperationByName", "TF_AllocateTensor",
        ):  # fmt: skip
            getattr(library, name).restype = ctypes.c_void_p
        library.TF_Message.restype = ctypes.c_char_p
        library.TF_TensorByteSize.restype = ctypes.c_size_t
        library.TF_Dim.restype = ctypes.c_int64
        options = ctypes.c_void_p(library.TF_NewSessionOptions())
        # A ConfigProto: field 2 is intra_op_parallelism_threads, field 5 inter_op_parallelism_threads.
        config = bytes([0x10, threads, 0x28, threads])
        self._graph = ctypes.c_void_p(library.TF_NewGraph())
        tags = (ctypes.c_char_p * 1)(b"serve")
        with self._status() as status:
            library.TF_SetConfig(options, config, ctypes.c_size_t(len(config)), status)
        with self._status() as status:
            self._session = ctypes.c_void_p(
                library.TF_LoadSessionFromSavedModel(
                    options, None, directory.encode(), tags, 1, self._graph, None, status
                )
            )

    def run(self, feed: str, output: str, values: np.ndarray) -> np.ndarray:
        """One call with float32 or uint8 images, or bytes in an array of objects; the output is float32."""
        library, target = self._tf, ctypes.c_void_p()
        with self._copied(values) as source, self._status() as status:
            library.TF_SessionRun(
                self._session, None,
                ctypes.byref(self._tensor(feed)), ctypes.byref(source), 1,
                ctypes.byref(self._tensor(output)), ctypes.byref(target), 1,
                None, 0, None, status,
            )  # fmt: skip
        dimensions = [library.TF_Dim(target, axis) for axis in range(library.TF_NumDims(target))]
        content = ctypes.string_at(library.TF_TensorData(target), library.TF_TensorByteSize(target))
        library.TF_DeleteTensor(target)
        return np.frombuffer(content, np.float32).reshape(dimensions)

    @contextlib.contextmanager
    def _status(self) -> Iterator[ctypes.c_void_p]:
        """A status for one call, each thread its own. Raises SessionError if the call failed."""
        status = ctypes.c_void_p(self._tf.TF_NewStatus())
        try:
            yield status
            if code := self._tf.TF_GetCode(status):
                raise SessionError(self._tf.TF_Message(status).decode(errors="replace"), code)
        finally:
            self._tf.TF_DeleteStatus(status)

    @contextlib.contextmanager
    def _copied(self, values: np.ndarray) -> Iterator[ctypes.c_void_p]:
        """A copy of an array as a TF_Tensor."""
        library, values = self._tf, np.asarray(values, order="C")
        strings = list(values.flat) if values.dtype == object else []
        size = ctypes.c_size_t(_STRING_BYTES * len(strings) if values.dtype == object else values.nbytes)
        shape = (ctypes.c_int64 * values.ndim)(*values.shape)
        tensor = ctypes.c_void_p(library.TF_AllocateTensor(_DATA_TYPES[values.dtype], shape, values.ndim, size))
        data = library.TF_TensorData(tensor)
        places = [ctypes.c_void_p(data + _STRING_BYTES * number) for number in range(len(strings))]
        if values.dtype != object:
            ctypes.memmove(data, values.ctypes.data, values.nbytes)
        for place, content in zip(places, strings, strict=True):
            library.TF_StringInit(place)
            library.TF_StringCopy(place, content, ctypes.c_size_t(len(content)))
        try:
            yield tensor
        finally:
            for place in places:  # deleting a tensor does not free its strings
                library.TF_StringDealloc(place)
            library.TF_DeleteTensor(tensor)

    def _tensor(self, name: str) -> _Output:
        operation, index = name.split(":")
        return _Output(self._tf.TF_GraphOperationByName(self._graph, operation.encode()), int(index))


def main(arguments: list[str]) -> None:
    """Run the command of the module docstring."""
    directory, threads, repeats, feed, output, images_file, answer_file = arguments
    images, session = np.load(images_file), Session(directory, int(threads))
    np.save(answer_file, np.concatenate([session.run(feed, output, image[None]) for image in images]))
    seconds: list[float] = []
    while len(seconds) < int(repeats) and sum(seconds) < _LONGEST:
        start = time.perf_counter()
        session.run(feed, output, images[:1])
        seconds.append(time.perf_counter() - start)
    python_tensorflow = [name for name in sys.modules if name.split(".")[0] in ("tensorflow", "keras")]
    print(json.dumps({"seconds": seconds, "python_modules_of_tensorflow": python_tensorflow}))


if __name__ == "__main__":
    main(sys.argv[1:])
