"""Decode one image file: by TensorFlow, whatever the backend, so that all commands read and refuse the same files."""

import contextlib
import functools
import importlib
import itertools
import sys
import threading

import numpy as np

from keras_vit.cli.native_stderr import native_stderr_silenced
from keras_vit.errors import UserError
from keras_vit.images import pillow
from keras_vit.images.formats import LARGEST_IMAGE, format_problem


def decode_file(data: bytes, name: str, *, accurate: bool, upright: bool) -> np.ndarray:
    """The bytes of an image file (of a GIF the first frame) -> (h, w, C) uint8, C 1 to 4, alpha kept.

    Args:
        data: the file.
        name: what a message calls it.
        accurate: see `keras_vit.images.graph.decode_image`. Pillow's transform is always accurate: its JPEGs differ
            from those of the fast one by a few levels of 255, in noisy pictures by up to a dozen.
        upright: whether the image is turned by its EXIF orientation.

    Raises UserError for a file that is no whole image of a supported format, or has more than LARGEST_IMAGE pixels.
    """
    problem = format_problem(data)
    if problem is None:
        if (pixels := pillow.header_pixels(data)) > LARGEST_IMAGE:
            raise UserError(
                f"{name} is too large: it has {pixels:,} pixels, and at most {LARGEST_IMAGE:,} are read; make it "
                "smaller."
            )
        try:
            if _has_tensorflow():
                return _by_tensorflow(data, accurate=accurate, upright=upright)
            return pillow.decode(data, upright=upright)
        except Exception as error:  # decoders raise many types for damaged files
            problem = " ".join(str(getattr(error, "message", error)).split("}} ")[-1].split("\n")[0].split())
            problem = problem.split(" [Op:")[0].removeprefix("assertion failed: ").strip("[]")[:120]
            problem = problem or type(error).__name__
    advice = "" if ";" in problem else "; repair or remove it"  # the format may have its own: save it as PNG
    raise UserError(f"{name} is not a readable picture: {problem}{advice}.")


# A graph is traced in about a second, in which a hundred pictures are decoded without one.
_WITHOUT_GRAPH = 64
_pictures = itertools.count()
# One graph for all threads, each of which would make its own.
_making = threading.Lock()


@functools.cache
def _has_tensorflow() -> bool:
    if "tensorflow" not in sys.modules:
        try:
            tf = importlib.import_module("tensorflow")
        except ImportError:
            return False
        import keras  # imported here: it takes seconds, and finding mistakes in names needs none

        if keras.backend.backend() != "tensorflow":
            with contextlib.suppress(RuntimeError):  # another thread already uses it
                tf.config.set_visible_devices([], "GPU")  # it only decodes, and would take their memory
    return sys.modules["tensorflow"] is not None


def _by_tensorflow(data: bytes, *, accurate: bool, upright: bool) -> np.ndarray:
    tf, graph = importlib.import_module("tensorflow"), importlib.import_module("keras_vit.images.graph")
    with native_stderr_silenced():  # what libjpeg prints of broken files
        if next(_pictures) < _WITHOUT_GRAPH:
            with contextlib.suppress(tf.errors.OpError):  # then the graph tells in better words what is wrong
                return np.asarray(graph.decode_image(tf.constant(data), accurate=accurate, upright=upright))
        with _making:
            decoder = _decoder(accurate, upright)
        return np.asarray(decoder(data))


@functools.lru_cache(maxsize=4)
def _decoder(accurate: bool, upright: bool):
    tf, graph = importlib.import_module("tensorflow"), importlib.import_module("keras_vit.images.graph")
    return tf.function(
        lambda data: graph.decode_image(data, accurate=accurate, upright=upright),
        input_signature=[tf.TensorSpec((), tf.string)],
        autograph=False,
    )
