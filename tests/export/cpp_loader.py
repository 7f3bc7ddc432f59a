"""Asks a SavedModel in the C++ loader of TensorFlow, as TF Serving does, in a process of its own: kernels may abort it.

    python cpp_loader.py DIRECTORY REQUESTS.pickle ANSWERS.json

REQUESTS is a list of (feed, output, array), with tensor names; arrays are float32, uint8 or objects that are bytes.
Several threads send them at once. Each answer is a line of JSON, in the order of the requests, with the output or the
code and message of the error. The process has no TensorFlow of Python.
"""

import concurrent.futures
import contextlib
import ctypes
import importlib.util
import json
import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np

# Values of TF_DataType.
_DATA_TYPES = {np.dtype(np.float32): 1, np.dtype(np.uint8): 4, np.dtype(object): 7}
_STRING_BYTES = 24  # sizeof(TF_TString)
_THREADS = 4


def ask(
    directory: pathlib.Path, requests: Sequence[tuple[str, np.ndarray]], output: str | None = None
) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """Return the answers to arrays for signatures, up to an abort, of an output or the first one in float32."""
    from export.saved_model.export import signature_definitions

    definitions, asked = signature_definitions(directory), []
    for signature, value in requests:
        [given], outputs = definitions[signature].inputs.values(), definitions[signature].outputs
        name = output or min(name for name, info in outputs.items() if info.dtype == 1)
        asked.append((given.name, outputs[name].name, value))
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder) / name for name in ("requests", "answers")]
        files[0].write_bytes(pickle.dumps(asked))
        command = [sys.executable, __file__, directory, *files]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        return done, [json.loads(line) for line in files[1].read_text().splitlines()]


def run(directory: pathlib.Path, signature: str, output: str, inputs: np.ndarray) -> np.ndarray:
    """Return an output of a signature."""
    _, [answer] = ask(directory, [(signature, inputs)], output)
    return np.array(answer["output"], np.float32)


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
        package = importlib.util.find_spec("tensorflow")
        assert package is not None
        self._tf = library = ctypes.CDLL(str(pathlib.Path(str(package.origin)).parent / "libtensorflow_cc.so.2"))
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


def main(directory: str, requests: str, answers: str) -> None:
    """Run the command of the module docstring."""
    session = Session(directory, 2)

    def answer(request) -> dict:
        try:
            return {"output": session.run(*request).tolist()}
        except SessionError as error:
            return {"code": error.code, "error": str(error)}

    with open(answers, "w", encoding="utf-8") as stream, concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(answer, pickle.loads(pathlib.Path(requests).read_bytes())):
            print(json.dumps(found), file=stream, flush=True)
    assert not {"tensorflow", "keras"} & set(sys.modules)


if __name__ == "__main__":
    main(*sys.argv[1:])
