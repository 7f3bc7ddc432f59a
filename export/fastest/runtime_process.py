"""Runs one exported model in a process of its own, so that its memory can be measured beside its time.

    python export/fastest/runtime_process.py RUNTIME PATH THREADS BATCH IMAGES.npy LOGITS.npy

RUNTIME is saved-model, tflite, onnx or openvino. IMAGES is float32 (n, h, w, C); the script writes the logits of all of
them to LOGITS, BATCH images at a time, and prints a line of JSON. Then it reads a number of calls from each line of the
standard input, and prints the seconds of each call with the first batch, and its memory in bytes. `keras-vit fastest`
runs it. It imports nothing of this project, so that the runtime is all that is in the process.
"""

import json
import math
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable

import numpy as np

Runner = Callable[[np.ndarray], np.ndarray]


def saved_model(path: str, threads: int, _: tuple[int, ...]) -> Runner:
    """The signature "image_tensor", loaded in Python."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    loaded = tf.saved_model.load(path)
    signature = loaded.signatures["image_tensor"]
    signature.loaded = loaded  # whose weights it does not hold itself
    return lambda images: signature(image=tf.constant(images))["logits"].numpy()


def tflite(path: str, threads: int, shape: tuple[int, ...]) -> Runner:
    """By LiteRT, whose floating point operators are those of XNNPACK."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=path, num_threads=threads)
    source = interpreter.get_input_details()[0]["index"]
    target = next(end["index"] for end in interpreter.get_output_details() if len(end["shape"]) == 2)
    interpreter.resize_tensor_input(source, shape)
    interpreter.allocate_tensors()

    def run(images: np.ndarray) -> np.ndarray:
        interpreter.set_tensor(source, images)
        interpreter.invoke()
        return interpreter.get_tensor(target)

    return run


def onnx(path: str, threads: int, _: tuple[int, ...]) -> Runner:
    """By ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(["logits"], {"image": images})[0]


def openvino(path: str, threads: int, _: tuple[int, ...]) -> Runner:
    """By OpenVINO, which reads the ONNX file, in float32; its default is bfloat16 where the processor supports it."""
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # it would report to Google Analytics
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    return lambda images: compiled({"image": images})["logits"]


RUNTIMES = {"saved-model": saved_model, "tflite": tflite, "onnx": onnx, "openvino": openvino}


def memory() -> tuple[int, int]:
    """Bytes of this process now, and at most until now; elsewhere than on Linux, the latter twice."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        now, most = (1024 * int(lines[name].split()[0]) for name in ("VmRSS", "VmHWM"))
        return now, most
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most, most


def main(runtime: str, path: str, threads: str, batch: str, images_file: str, logits_file: str) -> None:
    """See the module."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the runtimes print is no answer
    images, size = np.load(images_file), int(batch)
    run = RUNTIMES[runtime](path, int(threads), (size, *images.shape[1:]))
    rows = np.arange(math.ceil(len(images) / size) * size) % len(images)  # every batch is full
    logits = [run(images[rows[start : start + size]]) for start in range(0, len(rows), size)]
    np.save(logits_file, np.concatenate(logits)[: len(images)])
    first = images[rows[:size]]
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            run(first)
            seconds.append(time.perf_counter() - start)
        now, most = memory()
        print(json.dumps({"seconds": seconds, "memory": now, "peak_memory": most}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
