"""What both clients share: which version is asked, what an answer is, what can go wrong, how often to try again."""

import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

Answer = TypeVar("Answer")
# Seconds before the second attempt; doubled for each further one, and spread so that many clients do not meet again.
_FIRST_PAUSE = 0.1


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


def rankings(outputs: Mapping[str, np.ndarray]) -> list[list[Prediction]]:
    """The outputs of `serving_default` as the likeliest classes of each image, likeliest first."""
    missing = {"labels", "classes", "scores"} - set(outputs)
    if missing:
        raise ServingError(f"The server's answer has no {', '.join(sorted(missing))}; it serves another kind of model.")
    labels, classes, scores = (outputs[name] for name in ("labels", "classes", "scores"))
    return [
        [
            Prediction(label.decode() if isinstance(label, bytes) else str(label), int(index), float(score))
            for label, index, score in zip(*row, strict=True)
        ]
        for row in zip(labels, classes, scores, strict=True)
    ]


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
