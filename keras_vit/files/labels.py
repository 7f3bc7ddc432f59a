"""labels.txt: class names, one per line, in the order of the logits."""

import collections
import os
from collections.abc import Sequence

from keras_vit.errors import UserError, reading
from keras_vit.files.remote import to_path

# Name of the file in run directories, SavedModels and TFLite files.
LABELS = "labels.txt"


def read_labels(path: str | os.PathLike) -> tuple[str, ...]:
    """Read the class names of a text file."""
    return parse_labels(to_path(path).read_bytes(), path)


def parse_labels(data: bytes, path: str | os.PathLike) -> tuple[str, ...]:
    """The class names in the content of a text file; the last line may end without a line break.

    Lines end with a line feed, optionally preceded by a carriage return (Windows). Everything else belongs to the name.
    `path` is for the error message.
    """
    with reading(path, "UTF-8 text with a class in each line", advice="save it as such"):
        text = data.decode("utf-8-sig")
    return tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")) if text else ()


def check_number(labels: Sequence[str], path: str | os.PathLike, num_classes: int, model: str) -> None:
    """Raise UserError unless the names of a file are as many as the classes of a model."""
    if len(labels) != num_classes:
        raise UserError(
            f"{path} names {len(labels)} classes, but the model {model} has {num_classes}; give a line for each class "
            "of the model."
        )


def distinct_names(names: Sequence[str], path: str | os.PathLike) -> tuple[str, ...]:
    """The names of classes. Raises UserError if one is empty or there twice, since reports name classes by them."""
    for name, count in collections.Counter(names).items():
        if count > 1 or not name.strip():
            found = f"the class {name!r:.80} twice" if name.strip() else "a class by an empty line"
            raise UserError(f"{path} names {found}; give each class a name of its own.")
    return tuple(names)


def labels_text(labels: Sequence[str]) -> str:
    """The content of labels.txt; `parse_labels` reads it."""
    return "".join(f"{label}\n" for label in labels)
