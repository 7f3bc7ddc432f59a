"""labels.txt: class names, one per line, in the order of the logits."""

import collections
import os
import unicodedata
from collections.abc import Sequence

from keras_vit.errors import UserError, reading
from keras_vit.files.documents import read_bytes
from keras_vit.files.remote import to_path

# Name of the file in run directories, SavedModels and TFLite files.
LABELS = "labels.txt"
_KIND, _ADVICE = "UTF-8 text with a class in each line", "save it as such"


def read_labels(path: str | os.PathLike) -> tuple[str, ...]:
    """Read the class names of a text file."""
    with reading(path, _KIND, advice=_ADVICE):
        return parse_labels(read_bytes(to_path(path)), path)


def parse_labels(data: bytes, path: str | os.PathLike) -> tuple[str, ...]:
    """Return the class names in the content of a text file; the last line may end without a line break.

    Lines end with a line feed, optionally preceded by a carriage return (Windows). Everything else belongs to the name.
    `path` is for the error message.
    """
    with reading(path, _KIND, advice=_ADVICE):
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
    """Return the names of classes. Raises UserError for an empty one, one that is there twice or has a line break."""
    for name, count in collections.Counter(names).items():
        if count > 1 or not name.strip() or {"\n", "\r"} & {*name}:
            problem = f"the class {name!r:.80} {'twice' if count > 1 else 'with a line break'}"
            problem = problem if name.strip() else "a class by an empty line"
            raise UserError(f"{path} names {problem}; give each class a name of its own.")
    return tuple(names)


def labels_text(labels: Sequence[str]) -> str:
    """Return the content of labels.txt; `parse_labels` reads it."""
    return "".join(f"{label}\n" for label in labels)


def composed(name: str) -> str:
    """Return a class name in Unicode's composed form (NFC), for macOS stores the names of files decomposed."""
    return unicodedata.normalize("NFC", name)


def check_classes(
    of_model: Sequence[str], of_data: Sequence[str], model="The run", advice="evaluate on data with the same classes"
) -> None:
    """Raise UserError unless a model, as a sentence begins with it, and the data have the same classes in one order."""
    of_model, of_data = (tuple(map(composed, names)) for names in (of_model, of_data))
    if of_model == of_data:
        return
    both = (f"{model[0].lower()}{model[1:]} has", of_model, of_data), ("the data have", of_data, of_model)
    different = [(where, sorted({*own} - {*others})) for where, own, others in both]
    only = [f"only {where} {', '.join(names[:5])}{' …' if names[5:] else ''}" for where, names in different if names]
    raise UserError(
        f"{model} has {len(of_model)} classes and the data have {len(of_data)}: "
        f"{' and '.join(only) or 'the same in another order'}; {advice}."
    )
