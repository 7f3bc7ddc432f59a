"""What a run promises of its answers: which images it answers, and which classes it lists; every export decides alike.

Both are comparisons of the probabilities (B, K) with thresholds that `keras-vit evaluate` fits to images that the model
was not trained on, see `training.evaluation.promises`.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.errors import reading
from keras_vit.files.atomic import write_text
from keras_vit.files.documents import read_bytes
from keras_vit.files.remote import to_path

PROMISE = "promise.json"
# The outputs of exported files.
ANSWERED, LABEL_SET = "answered", "label_set"
OUTPUTS = frozenset({ANSWERED, LABEL_SET})


@dataclasses.dataclass(frozen=True)
class Promise:
    """Thresholds of the probabilities of a model, and what holds with them."""

    max_error: float | None = None
    """Largest share of wrong answers among the answered images, 0 to 1; None for no such promise."""
    answer_from: float = 0.0
    """An image is answered if its likeliest class has at least this probability, and else goes to a person."""
    coverage: float | None = None
    """Share of images whose class is in the list, 0 to 1; where an image may have several classes, the mean share of
    them that is. None for no such promise."""
    by_class: bool = False
    """Whether that holds for the images of each class, and not only for all together."""
    listed_from: tuple[float, ...] = ()
    """A class is listed if it has at least this probability (K,); so is the likeliest where an image has one class."""
    confidence: float = 0.95
    """Probability, over the images of the fit, that the share of wrong answers is kept."""
    num_examples: int = 0
    """Images of the fit."""
    measured: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """On these images: answered, the share that is answered; error, that of wrong ones among them; set_size, the mean
    number of listed classes."""
    temperature: float = 1.0
    """The temperature that divides the logits."""
    multi_label: bool = False
    """Whether an image may have several classes."""
    model_checksum: int = 0
    """CRC-32 of the file of the model."""

    def decide(self, probabilities) -> dict[str, Any]:
        """Return tensors by output: answered (B,) and label_set (B, K) bool, of probabilities (B, K)."""
        from keras import ops  # lazy: importing Keras takes seconds

        probabilities = ops.cast(probabilities, "float32")
        highest = ops.max(probabilities, axis=-1, keepdims=True)
        decisions = {}
        if self.max_error is not None:
            decisions[ANSWERED] = highest[:, 0] >= np.float32(self.answer_from)
        if self.coverage is not None:
            listed = probabilities >= np.asarray(self.listed_from, np.float32)
            decisions[LABEL_SET] = listed if self.multi_label else ops.logical_or(listed, probabilities >= highest)
        return decisions

    def sentences(self) -> list[str]:
        """Return the promises in words."""
        words = []
        if self.max_error is not None:
            words.append(
                f"Answers {self.measured['answered']:.0%} of the images with at most {self.max_error:.1%} errors "
                f"({self.confidence:.0%} confidence), and hands the rest to a person."
            )
        if self.coverage is not None:
            whose = "of the classes of a new image are" if self.multi_label else "of new images have their true class"
            words.append(
                f"{self.coverage:.1%} {whose} in the list{', in each class' if self.by_class else ''}, which has "
                f"{self.measured['set_size']:.2f} classes on average."
            )
        return words

    def save(self, path: str | os.PathLike) -> None:
        """Write a JSON file."""
        write_text(to_path(path), json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def read_promise(path: str | os.PathLike) -> Promise:
    """Read the file that `Promise.save` writes. Raises UserError for any other."""
    with reading(
        path, "a promise", KeyError, TypeError, AttributeError, advice="repeat keras-vit evaluate --max-error"
    ):
        fields = json.loads(read_bytes(to_path(path)))
        promise = Promise(**{**fields, "listed_from": tuple(map(float, fields["listed_from"]))})
        thresholds = (promise.answer_from, promise.temperature, *promise.listed_from)
        if not all(isinstance(value, int | float) and np.isfinite(value) for value in thresholds):
            raise ValueError(f"its thresholds are {thresholds}")
        return promise
