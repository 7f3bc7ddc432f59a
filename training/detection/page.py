"""A page with images and boxes on them, in one file."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_vit.cli.pages import render, thumbnail_address

# Longest side of an image on the page, in pixels.
_LONGEST = 800
# Distinct to any color vision (Okabe and Ito), dark enough for white letters.
COLORS = ("#0072b2", "#c44e00", "#00734f", "#a0457a", "#5c4d00", "#444444")


class DrawnBox(NamedTuple):
    """A box and what stands beside it."""

    corners: Sequence[float]
    """Left, top, right, bottom in pixels of the image."""
    text: str
    color: str
    dashed: bool = False


def boxes_page(
    title: str, images: Sequence[tuple[str, np.ndarray, Sequence[DrawnBox]]], paragraphs: Sequence[str]
) -> str:
    """Return HTML text of a page: the paragraphs, and of each image its name, pixels (h, w, C) uint8 and boxes."""
    return render("boxes", title=title, words=paragraphs, cards=[_card(*image) for image in images])


def _card(name: str, pixels: np.ndarray, boxes: Sequence[DrawnBox]) -> dict[str, Any]:
    height, width = pixels.shape[:2]
    letters = max(width, height) / 28  # their height, in pixels of the image
    shapes = []
    for corners, text, color, dashed in boxes:
        left, top, right, bottom = map(float, corners)
        place = {"left": left, "top": top, "width": right - left, "height": bottom - top}
        baseline = min(max(top, 0) + letters, height)
        shapes.append({**place, "baseline": baseline, "text": text, "color": color, "dashed": dashed})
    return {
        "name": name,
        "width": width,
        "height": height,
        "letters": letters,
        "address": thumbnail_address(pixels, _LONGEST),
        "texts": [box.text for box in boxes] or ["nothing found"],
        "boxes": shapes,
    }
