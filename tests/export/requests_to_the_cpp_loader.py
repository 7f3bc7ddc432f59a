"""Sends requests to a SavedModel in the C++ loader of TensorFlow, in a separate process, because kernels may abort it.

    python requests_to_the_cpp_loader.py DIRECTORY REQUESTS.pickle ANSWERS.json

REQUESTS is a list of (feed, output, array), with tensor names; arrays are float32, uint8 or objects that are bytes.
Each answer is a line of JSON with the seconds of the call, and the shape of the output or the code and message of the
error.
"""

import ctypes
import json
import pathlib
import pickle
import sys
import time

import numpy as np

from export.saved_model import cpp_loader

_STRING, _BYTES_OF_A_STRING = 7, 24  # TF_DataType, sizeof(TF_TString)


class Session(cpp_loader.Session):
    """Accepts strings too, and raises RuntimeError with the error code."""

    def _to_tensor(self, values: np.ndarray) -> ctypes.c_void_p:
        if values.dtype != object:
            return super()._to_tensor(values)
        library = self._tf
        shape = (ctypes.c_int64 * values.ndim)(*values.shape)
        size = ctypes.c_size_t(_BYTES_OF_A_STRING * values.size)
        tensor = ctypes.c_void_p(library.TF_AllocateTensor(_STRING, shape, values.ndim, size))
        for number, content in enumerate(values.flat):
            place = ctypes.c_void_p(library.TF_TensorData(tensor) + number * _BYTES_OF_A_STRING)
            library.TF_StringInit(place)
            library.TF_StringCopy(place, content, ctypes.c_size_t(len(content)))
        return tensor

    def _check(self) -> None:
        code = self._tf.TF_GetCode(self._status)
        if code:
            raise RuntimeError(code, self._tf.TF_Message(self._status).decode(errors="replace"))


def main(directory: str, requests: str, answers: str) -> None:
    """Run the command of the module docstring."""
    session = Session(directory, 2)
    with open(answers, "w", encoding="utf-8") as stream:
        for feed, output, value in pickle.loads(pathlib.Path(requests).read_bytes()):
            start = time.perf_counter()
            try:
                answer = {"shape": session.run(feed, output, value).shape}
            except RuntimeError as error:
                answer = {"code": error.args[0], "error": error.args[1]}
            print(json.dumps({**answer, "seconds": time.perf_counter() - start}), file=stream, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
