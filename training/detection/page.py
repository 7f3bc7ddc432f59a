"""A page with pictures and boxes on them, in one file."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_vit.cli.pages import render, thumbnail_address

# Longest side of a picture on the page, in pixels.
_LONGEST = 800
# Distinct to any color vision (Okabe and Ito), dark enough for white letters.
COLORS = ("#0072b2", "#c44e00", "#00734f", "#a0457a", "#5c4d00", "#444444")


class DrawnBox(NamedTuple):
    """A box and what stands beside it."""

    corners: Sequence[float]
    """Left, top, right, bottom in pixels of the picture."""
    text: str
    color: str
    dashed: bool = False


class DrawnPicture(NamedTuple):
    """A picture with its boxes."""

    name: str
    pixels: np.ndarray
    """(h, w, C) uint8, upright."""
    boxes: Sequence[DrawnBox]


def boxes_page(title: str, pictures: Sequence[DrawnPicture], words: Sequence[str]) -> str:
    """Return HTML text of a page with paragraphs, and the images."""
    return render("boxes", title=title, words=words, cards=[_card(picture) for picture in pictures])


def _card(picture: DrawnPicture) -> dict[str, Any]:
    height, width = picture.pixels.shape[:2]
    letters = max(width, height) / 28  # their height, in pixels of the image
    return {
        "name": picture.name,
        "width": width,
        "height": height,
        "letters": letters,
        "address": thumbnail_address(picture.pixels, _LONGEST),
        "texts": [box.text for box in picture.boxes] or ["nothing found"],
        "boxes": [_shape(box, letters, height) for box in picture.boxes],
    }


def _shape(box: DrawnBox, letters: float, height: int) -> dict[str, Any]:
    left, top, right, bottom = (float(edge) for edge in box.corners)
    baseline = min(max(top, 0) + letters, height)
    place = {"left": left, "top": top, "width": right - left, "height": bottom - top, "baseline": baseline}
    return {**place, "text": box.text, "color": box.color, "dashed": box.dashed}
