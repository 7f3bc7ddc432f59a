"""Sends requests to a SavedModel in the C++ loader of TensorFlow, in a separate process, because kernels may abort it.

    python requests_to_the_cpp_loader.py DIRECTORY REQUESTS.pickle ANSWERS.json

REQUESTS is a list of (feed, output, array), with tensor names; arrays are float32, uint8 or objects that are bytes.
Several threads send them at once. Each answer is a line of JSON, in the order of the requests, with the seconds of the
call, and the shape of the output or the code and message of the error.
"""

import concurrent.futures
import json
import pathlib
import pickle
import sys
import time

import cpp_loader  # beside this script

_THREADS = 4


def main(directory: str, requests: str, answers: str) -> None:
    """Run the command of the module docstring."""
    session = cpp_loader.Session(directory, 2)

    def answer(request) -> dict:
        start = time.perf_counter()
        try:
            found = {"shape": session.run(*request).shape}
        except cpp_loader.SessionError as error:
            found = {"code": error.code, "error": str(error)}
        return {**found, "seconds": time.perf_counter() - start}

    with open(answers, "w", encoding="utf-8") as stream, concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(answer, pickle.loads(pathlib.Path(requests).read_bytes())):
            print(json.dumps(found), file=stream, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
