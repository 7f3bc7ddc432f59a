"""What both clients share: which version is asked, what an answer is, what can go wrong, how often to try again."""

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sized
from typing import TypeVar

import numpy as np

Answer = TypeVar("Answer")
# Seconds before the second attempt; doubled for each further one, and spread so that many clients do not meet again.
_FIRST_PAUSE = 0.1
# Bytes of one message; eight float images of 224 pixels already take more than the 4 MB that gRPC allows by default.
LARGEST_MESSAGE = 256 * 2**20


class ServingError(RuntimeError):
    """No answer; the text says why, in the server's words where it had any."""


class InvalidRequestError(ServingError):
    """The server refuses this request and always will: an image that is none, a wrong shape, an unknown signature."""


class NoSuchModelError(ServingError):
    """The server has no model, version or label of this name."""


class UnavailableError(ServingError):
    """No server answered, or it was overloaded, at every attempt."""


class DeadlineExceededError(ServingError):
    """The time that was given is over."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One of the likeliest classes of an image."""

    label: str
    class_index: int
    score: float
    """Probability, 0 to 1."""


@dataclasses.dataclass(frozen=True)
class Version:
    """Which version of a model is asked: the newest, or that of a number, or that which bears a label."""

    number: int | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if self.number is not None and self.label is not None:
            raise ValueError(f"A version has a number or a label, but {self.number} and {self.label!r} are given.")


def rankings(outputs: Mapping[str, np.ndarray], count: int) -> list[list[Prediction]]:
    """The outputs of `serving_default` for `count` images as the likeliest classes of each, likeliest first.

    Raises ServingError unless there are labels, classes and scores of each image.
    """
    missing = {"labels", "classes", "scores"} - set(outputs)
    if missing:
        raise ServingError(f"The server's answer has no {', '.join(sorted(missing))}; it serves another kind of model.")
    labels, classes, scores = (outputs[name] for name in ("labels", "classes", "scores"))
    shapes = [array.shape for array in (labels, classes, scores)]
    if len(shapes[0]) != 2 or shapes.count(shapes[0]) != 3:
        raise ServingError(f"The server's labels, classes and scores should agree in shape (B, k), but have {shapes}.")
    check_count(labels, count)
    if labels.dtype.kind not in "OU" or classes.dtype.kind not in "iu" or scores.dtype.kind not in "fiu":
        raise ServingError(
            "The server should answer with labels that are text, classes that are integers and scores that are "
            f"numbers, but they are {labels.dtype}, {classes.dtype} and {scores.dtype}."
        )
    if not np.isfinite(scores).all():
        raise ServingError("The server answered with scores that are not finite; its model is broken.")
    return [
        [Prediction(_text(label), int(index), float(score)) for label, index, score in zip(*row, strict=True)]
        for row in zip(labels, classes, scores, strict=True)
    ]


def features(outputs: Mapping[str, np.ndarray], count: int) -> np.ndarray:
    """The (count, D) output of the signature `features`. Raises ServingError unless it is there for each image."""
    found = outputs.get("features")
    if found is None or found.ndim != 2 or found.dtype.kind not in "fiu":
        raise ServingError("The server's answer has no features of shape (B, D); it serves another kind of model.")
    check_count(found, count)
    return found


def check_count(rows: Sized, count: int) -> None:
    """Raise ServingError unless there is one row for each of `count` images."""
    if len(rows) != count:
        raise ServingError(f"The server was given {count} images, but answered for {len(rows)}.")


def _text(label: bytes | str) -> str:
    try:
        return label.decode() if isinstance(label, bytes) else str(label)
    except UnicodeDecodeError as error:
        raise ServingError(f"The server answered with a label that is no UTF-8 text ({error}).") from error


def with_retries(attempt: Callable[[float], Answer], timeout: float, attempts: int) -> Answer:
    """Call until it succeeds; UnavailableError is tried again, as long as attempts and time are left.

    Args:
        attempt: takes the seconds that are left.
        timeout: seconds for all attempts together.
        attempts: at most.
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


def check_limits(timeout: float, attempts: int) -> None:
    """Raise ValueError for a client that could never be answered."""
    if not timeout > 0 or attempts < 1:
        raise ValueError(f"timeout must be positive and attempts at least 1, but are {timeout} and {attempts}.")
