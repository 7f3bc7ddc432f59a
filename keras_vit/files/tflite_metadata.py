"""The metadata in a TFLite file: input, classes, and whether images have several.

TFLite Metadata: https://www.tensorflow.org/lite/models/convert/metadata, `metadata_schema.fbs`.
"""

import dataclasses
import io
import json
import re
import struct
import zipfile
from typing import Any

import numpy as np
from flatbuffers import number_types, table

from keras_vit.files.labels import LABELS, parse_labels

ValueRange = tuple[float | tuple[float, ...], float | tuple[float, ...]]

_METADATA, _NORMALIZATION = b"TFLITE_METADATA", 1
_OWN = b"; weights: "  # what `keras-vit tflite` writes into every description
# In the description of a model whose probabilities are the sigmoid of its logits.
SEVERAL_CLASSES = "an image may have several classes: sigmoid(logits)"
# In the description of the model of a calibrated run.
_CALIBRATED = re.compile(rb"; calibrated: softmax\(logits / ([0-9.e+-]{1,20})\)")
_MOST_BYTES = 2**24  # the most bytes of the associated file of the class names that are read
# In the description of the input: what earlier versions wrote, and what `preprocessing_text` writes.
_RESIZE = re.compile(rb"; resize: ([a-z-]+)(?:, crop_from: ([0-9]{1,5}))?$")
_PREPROCESSING = re.compile(rb"; preprocessing: (\{[^{}]{1,2000}\})$")


@dataclasses.dataclass(frozen=True)
class TFLiteMetadata:
    """The parts that evaluation needs."""

    value_range: ValueRange | None
    """Values of the pixels 0 and 255, one for all channels or one for each; None if the file does not say them."""
    preprocessing: dict[str, Any]
    """How images are resized: fields of `Preprocessing`, `value_range` too, which of raw pixels says the color of the
    padding; empty if the file does not say it."""
    multi_label: bool | None
    """Whether an image may have several classes; None in a file of another code, which does not say it."""
    temperature: float | None
    """What divides the logits of a calibrated run before the softmax; None in the file of another run."""


def calibration_text(temperature: float) -> str:
    """Return the part of a model's description that says by what its logits are to be divided."""
    return f"; calibrated: softmax(logits / {temperature:.6g})"


def read_names(content: bytes, path: str) -> tuple[str, ...] | None:
    """Return the class names in a file; None without any. Raises UserError if they are no UTF-8 text."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, archive.open(LABELS) as stream:
            data = stream.read(_MOST_BYTES)
    except Exception:  # a damaged archive raises errors of many types
        return None
    return parse_labels(data, f"{LABELS} in {path}") or None


def preprocessing_text(fields: dict[str, Any]) -> str:
    """The end of the description of a model's input, which says how images are resized: fields of Preprocessing."""
    return f"; preprocessing: {json.dumps(fields)}"


def read_metadata(content: bytes) -> TFLiteMetadata | None:
    """Return the metadata of a file that `keras-vit tflite` wrote; None for another file, and for damaged metadata."""
    try:
        return _read(content)
    except (struct.error, ValueError, IndexError, TypeError, ZeroDivisionError, RecursionError):
        return None


def _read(content: bytes) -> TFLiteMetadata | None:
    model = _root(content)
    buffers = _vector(model, 4)
    for entry in _vector(model, 6):
        if _text(entry, 0) == _METADATA:
            model = _root(_bytes(buffers[_number(entry, 1, number_types.Uint32Flags)], 0))
            description = _text(model, 1)
            several = SEVERAL_CLASSES.encode() in description if _OWN in description else None
            image = _vector(_vector(model, 3)[0], 2)[0]  # of subgraph_metadata, input_tensor_metadata
            temperature = float(match[1]) if (match := _CALIBRATED.search(description)) else None
            return TFLiteMetadata(_value_range(image), _preprocessing(_text(image, 1)), several, temperature)
    return None


def _preprocessing(description: bytes) -> dict[str, Any]:
    if match := _PREPROCESSING.search(description):
        return json.loads(match[1])
    if match := _RESIZE.search(description):  # of an earlier version, which never turned images
        resize, crop_from = match.groups()
        fields = {"resize": resize.decode(), "crop_from": int(crop_from) if crop_from else None}
        return {**fields, "interpolation": None, "antialias": None, "exif_orientation": False}
    return {}


def _value_range(image: table.Table) -> ValueRange | None:
    for unit in _vector(image, 4):  # process_units
        if _number(unit, 0, number_types.Uint8Flags) != _NORMALIZATION:
            continue
        options = table.Table(unit.Bytes, unit.Indirect(unit.Pos + _place(unit, 1)))
        mean, deviation = (np.frombuffer(_bytes(options, field, 4), "<f4").tolist() for field in (0, 1))
        low = tuple(-m / d for m, d in zip(mean, deviation, strict=True))
        high = tuple((255.0 - m) / d for m, d in zip(mean, deviation, strict=True))
        return (low[0], high[0]) if len(set(low)) == len(set(high)) == 1 else (low, high)
    return None


# Fields of flatbuffer tables, by their position in the schema.


def _root(content: bytes) -> table.Table:
    return table.Table(content, struct.unpack_from("<I", content)[0])


def _place(of: table.Table, field: int) -> int:
    """Return where a field is in its table. Raises ValueError without one."""
    if not (place := of.Offset(4 + 2 * field)):
        raise ValueError("no such field")
    return place


def _vector(of: table.Table, field: int) -> list[table.Table]:
    place = of.Offset(4 + 2 * field)
    count, start = (of.VectorLen(place), of.Vector(place)) if place else (0, 0)
    return [table.Table(of.Bytes, of.Indirect(start + 4 * number)) for number in range(count)]


def _text(of: table.Table, field: int) -> bytes:
    place = of.Offset(4 + 2 * field)
    return of.String(of.Pos + place) if place else b""


def _bytes(of: table.Table, field: int, size: int = 1) -> bytes:
    place = _place(of, field)
    start = of.Vector(place)
    return bytes(of.Bytes[start : start + size * of.VectorLen(place)])


def _number(of: table.Table, field: int, flags) -> int:
    place = of.Offset(4 + 2 * field)
    return of.Get(flags, of.Pos + place) if place else 0
