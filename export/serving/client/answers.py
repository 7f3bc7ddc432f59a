"""Versions, predictions, errors, and retries of both clients."""

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sized
from typing import TypeVar

import numpy as np

Answer = TypeVar("Answer")
# Seconds before the second attempt, doubled for each further one, with random jitter.
_FIRST_PAUSE = 0.1
# Largest message in bytes. The gRPC default of 4 MB is too small for eight float images of 224 pixels.
LARGEST_MESSAGE = 256 * 2**20


class ServingError(RuntimeError):
    """The call failed; the message contains that of the server, if any."""


class InvalidRequestError(ServingError):
    """The request is invalid: an image that cannot be decoded, a wrong shape, an unknown signature."""


class NoSuchModelError(ServingError):
    """The server does not have this model, version or label."""


class UnavailableError(ServingError):
    """The server was unreachable or overloaded in each attempt."""


class DeadlineExceededError(ServingError):
    """The timeout expired."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One of the top classes of an image."""

    label: str
    class_index: int
    score: float
    """Probability, 0 to 1."""


@dataclasses.dataclass(frozen=True)
class Version:
    """A version of a model, by number or by label. Default: the newest one."""

    number: int | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if self.number is not None and self.label is not None:
            raise ValueError(f"A version takes a number or a label, but got {self.number} and {self.label!r}.")


def rankings(outputs: Mapping[str, np.ndarray], count: int) -> list[list[Prediction]]:
    """Convert the outputs of `serving_default` for `count` images to the top classes of each image.

    Raises ServingError unless there are labels, classes and scores for each image.
    """
    missing = {"labels", "classes", "scores"} - set(outputs)
    if missing:
        raise ServingError(f"The response has no {', '.join(sorted(missing))}; the server has another kind of model.")
    labels, classes, scores = arrays = tuple(outputs[name] for name in ("labels", "classes", "scores"))
    found = ", ".join(f"{array.dtype} {array.shape}" for array in arrays)
    kinds = (array.dtype.kind in allowed for array, allowed in zip(arrays, ("OU", "iu", "fiu"), strict=True))
    if labels.ndim != 2 or len({array.shape for array in arrays}) > 1 or not all(kinds):
        raise ServingError(
            "The response should have labels that are strings, classes that are integers and scores that are numbers, "
            f"of the same shape (B, k), but has {found}."
        )
    check_count(labels, count)
    if not np.isfinite(scores).all():
        raise ServingError("The response has scores that are not finite; the model is broken.")
    return [
        [Prediction(_text(label), int(index), float(score)) for label, index, score in zip(*row, strict=True)]
        for row in zip(labels, classes, scores, strict=True)
    ]


def features(outputs: Mapping[str, np.ndarray], count: int) -> np.ndarray:
    """The output (count, D) of the signature `features`. Raises ServingError unless there is one row per image."""
    found = outputs.get("features")
    if found is None or found.ndim != 2 or found.dtype.kind not in "fiu":
        raise ServingError("The response has no features of shape (B, D); the server has another kind of model.")
    check_count(found, count)
    return found


def check_count(rows: Sized, count: int) -> None:
    """Raise ServingError unless there is one row per image."""
    if len(rows) != count:
        raise ServingError(f"The request has {count} images, but the response has {len(rows)}.")


def _text(label: bytes | str) -> str:
    try:
        return label.decode() if isinstance(label, bytes) else str(label)
    except UnicodeDecodeError as error:
        raise ServingError(f"The response has a label that is not UTF-8 ({error}).") from error


def with_retries(attempt: Callable[[float], Answer], timeout: float, attempts: int) -> Answer:
    """Call a function, and call it again after UnavailableError.

    Args:
        attempt: function of the remaining seconds.
        timeout: seconds for all attempts.
        attempts: largest number of calls.
    """
    deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
    for number in range(1, attempts + 1):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            return attempt(left)
        except UnavailableError:
            wait = pause * random.uniform(0.5, 1.5)
            if number == attempts:
                raise
            if time.monotonic() + wait >= deadline:
                break
            time.sleep(wait)
            pause *= 2
    raise DeadlineExceededError(f"The server did not answer within {timeout:g} seconds.")
