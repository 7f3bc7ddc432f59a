"""Shared by the tests: golden data, tiny configs, random weights. The fixtures are in `conftest.py`."""

import contextlib
import functools
import http.server
import io
import json
import os
import pathlib
import pty
import resource
import shutil
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import PIL.Image
import pytest
import safetensors.numpy

import keras_vit
from keras_vit import ResNetConfig, ViTConfig
from keras_vit.cli import parser
from keras_vit.files import remote, transfer
from keras_vit.files.lazy_array import LazyArray

FIXTURES = pathlib.Path(__file__).parent / "fixtures"

TFDS = pathlib.Path(__file__).parents[2] / "shared" / "data" / "tfds"
needs_mnist = pytest.mark.skipif(not (TFDS / "mnist").is_dir(), reason="no prepared MNIST beside the checkout")

GOLDEN = json.loads((FIXTURES / "index.json").read_text())["fixtures"]


# All sizes are distinct, so that swapped axes cannot go unnoticed.
TINY = ViTConfig(patch_size=(4, 6), hidden_size=12, num_layers=2, num_heads=3, mlp_dim=20)


TINY_IMAGE = (12, 30)  # 3 rows and 5 columns of patches


TINY_STEM = ResNetConfig((1, 2), 4, (8, 16), preactivation=False, num_groups=2)


# For a separate process: `watched` returns the result of an action, and by how many bytes the process grew during it.
WATCHED = """
import threading, time

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def watched(action):
    before, peak, done = resident(), [0], threading.Event()
    def watch():
        while not done.wait(0.001):
            peak[0] = max(peak[0], resident())
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = action()
    finally:
        done.set()
        watcher.join()
    return result, peak[0] - before
"""


def others_slow(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Return the values of a parameter; those but some fast ones are for the slow tests."""
    slow = pytest.mark.slow
    return [
        value if value in fast else pytest.param(*value if isinstance(value, tuple) else (value,), marks=slow)
        for value in values
    ]


def replaced(command: Sequence[str], *options: str) -> list[str]:
    """A command with other options, in the place of those of its own that have their names."""
    kept: list[str] = []
    is_kept = True
    for argument in command:
        is_kept = argument not in options if argument.startswith("--") else is_kept
        kept += [argument] if is_kept else []
    return [*kept, *options]


@contextlib.contextmanager
def running(server: http.server.HTTPServer) -> Iterator[Any]:
    """Run a server in a thread, and close it."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def serving(folder: pathlib.Path) -> Iterator[str]:
    """The address of a server of this machine for the files in a folder."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@contextlib.contextmanager
def answering(server) -> Iterator[str]:
    """The address of a server of `training.prediction.server` while it runs in a thread."""
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}/"
    finally:
        with contextlib.suppress(OSError):  # where an answer wakes the server first, it is closed before it is woken
            server.trigger.pull_trigger(lambda: server.asyncore.close_all(server._map))
        thread.join()
        server.task_dispatcher.shutdown()


class Terminal(io.StringIO):
    """A stream that says of itself that it is a terminal."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def full_disk(limit: int = 4096) -> Iterator[None]:
    """No file can become larger than so many bytes: the system refuses to write more, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def without_pauses(monkeypatch) -> None:
    """What fails is tried as often as ever, but at once."""
    for module in (remote, transfer):
        monkeypatch.setattr(module, "PAUSES", (0.0,) * len(module.PAUSES))


def on_a_terminal(code: str, columns: int) -> str:
    """What a process of this code writes on a terminal of so many columns."""
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, columns))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    written = b""
    with subprocess.Popen([sys.executable, "-c", code], stdout=terminal, env=environment) as process:
        os.close(terminal)
        with contextlib.suppress(OSError):  # the other end was closed
            while part := os.read(controller, 2**16):
                written += part
        assert process.wait() == 0
    os.close(controller)
    return written.decode()


class _Parsed(Exception):
    """A command has parsed its options."""


def options_of(main: Callable[[Sequence[str]], object], words: Sequence[str]) -> Any:
    """The options that a command makes of its command line; it does nothing else."""
    parse = parser.options_from

    def parse_and_stop(*arguments, **others):
        raise _Parsed(parse(*arguments, **others))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Parsed) as stopped:
        patch.setattr(parser, "options_from", parse_and_stop)
        main(words)
    return stopped.value.args[0]


@functools.cache
def loaded(path: pathlib.Path, **options) -> keras.Model:
    """The model of a golden file, built once for all tests that change nothing of it."""
    return keras_vit.from_checkpoint(path, **options)


def randomize(model: keras.Model) -> keras.Model:
    """Give every weight of a model random values; with the official initial head of zeros all logits would be equal."""
    rng = np.random.default_rng(11)
    values = [rng.normal(0.0, 0.3, weight.shape) for weight in model.weights]
    model.set_weights([abs(v) if "variance" in w.path else v for w, v in zip(model.weights, values, strict=True)])
    return model


def assert_equal_weights(one, other) -> None:
    """Two models or layers, or lists of their weights, are equal bit for bit."""
    both = (each.get_weights() if isinstance(each, keras.layers.Layer) else each for each in (one, other))
    for here, there in zip(*both, strict=True):
        np.testing.assert_array_equal(here, there)


def assert_equal_arrays(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Two dicts have the same keys, and arrays that are equal bit for bit."""
    assert one.keys() == other.keys()
    for key, array in other.items():
        np.testing.assert_array_equal(one[key], array, err_msg=key)


def changed_folder(
    source: pathlib.Path,
    target: pathlib.Path,
    without: str = "",
    file: str = "config.json",
    drop: Sequence[str] = (),
    **fields,
) -> pathlib.Path:
    """A copy of a checkpoint folder with other fields in a config, or without some of them, or without an array."""
    shutil.copytree(source, target)
    config = json.loads((target / file).read_text()) if (target / file).is_file() else {}
    kept = {name: value for name, value in (config | fields).items() if name not in drop}
    (target / file).write_text(json.dumps(kept))
    if without:
        arrays = safetensors.numpy.load_file(target / "model.safetensors")
        del arrays[without]
        safetensors.numpy.save_file(arrays, target / "model.safetensors")
    return target


def encoded(image: np.ndarray | PIL.Image.Image, form: str = "PNG", **options) -> bytes:
    """The content of an image file."""
    stream = io.BytesIO()
    image = PIL.Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(stream, form, **options)
    return stream.getvalue()


def fetched(arrays: dict[str, LazyArray]) -> dict[str, np.ndarray]:
    """Read the arrays of a checkpoint."""
    return {name: array.fetch() for name, array in arrays.items()}


def official(name: str) -> type:
    """A message class of TF Serving, from the descriptors of tensorflow-serving-api 2.21.0."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from tensorflow.core.protobuf import named_tensor_pb2  # noqa: F401  (registers the messages that they use)

    pool = descriptor_pool.Default()
    files = descriptor_pb2.FileDescriptorSet.FromString((FIXTURES / "tensorflow_serving_2.21.0.binpb").read_bytes())
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tensorflow.serving.{name}"))
