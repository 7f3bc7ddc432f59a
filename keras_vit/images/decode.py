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


def decode_file(
    data: bytes, name: str, *, accurate: bool, upright: bool, most_pixels: int = LARGEST_IMAGE
) -> np.ndarray:
    """The bytes of an image file (of a GIF the first frame) -> (h, w, C) uint8, C 1 to 4, alpha kept.

    Args:
        data: the file.
        name: what a message calls it.
        accurate: see `keras_vit.images.graph.decode_image`. Pillow's transform is always accurate: its JPEGs differ
            from those of the fast one by a few levels of 255, in noisy pictures by up to a dozen.
        upright: whether the image is turned by its EXIF orientation.
        most_pixels: maximum of width times height; it is read from the header.

    Raises UserError for a file that is not a complete image of a supported format, or has more pixels.
    """
    problem = format_problem(data)
    if problem is None:
        try:
            _check_size(data, most_pixels)
            if _has_tensorflow():
                return _by_tensorflow(data, accurate=accurate, upright=upright, most_pixels=most_pixels)
            return pillow.decode(data, upright=upright, most_pixels=most_pixels)
        except pillow.TooManyPixels as error:
            raise UserError(f"{name} is too large: {error}.") from error
        except Exception as error:  # decoders raise many types for damaged files
            problem = " ".join(str(getattr(error, "message", error)).split("}} ")[-1].split("\n")[0].split())
            problem = problem.split(" [Op:")[0].removeprefix("assertion failed: ").strip("[]")[:120]
            problem = problem or type(error).__name__
    advice = "" if ";" in problem else "; repair or remove it"  # the format may have its own: save it as PNG
    raise UserError(f"{name} is not a readable picture: {problem}{advice}.")


def _check_size(data: bytes, most_pixels: int) -> None:
    """Raise TooManyPixels by the header alone; a damaged header is left to the decoder."""
    try:
        pillow.open_image(data, most_pixels=most_pixels).close()
    except pillow.TooManyPixels:
        raise
    except Exception:  # which many damaged headers raise
        return


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


def _by_tensorflow(data: bytes, *, accurate: bool, upright: bool, most_pixels: int) -> np.ndarray:
    tf, graph = importlib.import_module("tensorflow"), importlib.import_module("keras_vit.images.graph")
    with native_stderr_silenced():  # what libjpeg prints of broken files
        if next(_pictures) < _WITHOUT_GRAPH:
            with contextlib.suppress(tf.errors.OpError):  # then the graph tells in better words what is wrong
                content = tf.constant(data)
                decoded = graph.decode_image(content, accurate=accurate, upright=upright, most_pixels=most_pixels)
                return np.asarray(decoded)
        with _making:
            decoder = _decoder(accurate, upright, most_pixels)
        return np.asarray(decoder(data))


@functools.lru_cache(maxsize=4)
def _decoder(accurate: bool, upright: bool, most_pixels: int):
    tf, graph = importlib.import_module("tensorflow"), importlib.import_module("keras_vit.images.graph")
    return tf.function(
        lambda data: graph.decode_image(data, accurate=accurate, upright=upright, most_pixels=most_pixels),
        input_signature=[tf.TensorSpec((), tf.string)],
        autograph=False,
    )
