"""A page that classifies pictures in the browser: ONNX Runtime Web runs model.onnx, no server computes anything."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from export.source import Provenance
from keras_vit import Preprocessing, UserError
from keras_vit.files.tables import short_name

# The page, and what it needs to know of the model.
PAGE, FACTS = "classify.html", "classify.json"


def check_page(preprocessing: Preprocessing) -> None:
    """Raise UserError if a picture in a browser cannot have the model's channels."""
    if preprocessing.channels not in (1, 3):
        raise UserError(
            f"In a browser a picture has 1 or 3 channels, but this model takes {preprocessing.channels}; leave --web "
            "out."
        )


def write_page(
    directory: pathlib.Path, preprocessing: Preprocessing, labels: Sequence[str], origin: Provenance
) -> None:
    """Write the page and its facts beside model.onnx."""
    page = pathlib.Path(__file__).with_name(PAGE).read_text(encoding="utf-8")
    (directory / PAGE).write_text(page, encoding="utf-8")
    facts = {
        "model": short_name(origin.name),
        "weights": origin.weights,
        "license": origin.license_text,
        "labels": list(labels),
        "preprocessing": dataclasses.asdict(preprocessing),
        "temperature": origin.temperature,
        "multi_label": origin.multi_label,
    }
    (directory / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
