"""A page with pictures and boxes on them, in one file."""

import html
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_vit.inspection.html_page import document, thumbnail_address

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
    """HTML text of a page with paragraphs, and the pictures."""
    cards = "".join(map(_card, pictures))
    paragraphs = [f"<p>{html.escape(text)}</p>" for text in words]
    return document(title, [f"<h1>{html.escape(title)}</h1>", *paragraphs, f'<div class="cards">{cards}</div>'])


def _card(picture: DrawnPicture) -> str:
    height, width = picture.pixels.shape[:2]
    size = max(width, height) / 28  # of the letters, in pixels of the picture
    texts = [box.text for box in picture.boxes] or ["nothing found"]
    listed = "".join(f"<li>{html.escape(text)}</li>" for text in texts)
    words = html.escape(f"{picture.name}: {', '.join(texts)}")
    return (
        f'<article><h2>{html.escape(picture.name)}</h2><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{words}" style="display:block;width:100%;height:auto;overflow:hidden">'
        f'<image href="{thumbnail_address(picture.pixels, _LONGEST)}" width="{width}" height="{height}" '
        f'preserveAspectRatio="none"/>{"".join(_shape(box, size, height) for box in picture.boxes)}</svg>'
        f"<ul>{listed}</ul></article>"
    )


def _shape(box: DrawnBox, size: float, height: int) -> str:
    left, top, right, bottom = (float(edge) for edge in box.corners)
    dash = ' stroke-dasharray="6 4"' if box.dashed else ""
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" fill="none" '
        f'stroke="{box.color}" stroke-width="3" vector-effect="non-scaling-stroke"{dash}/>'
        f'<text x="{left + size / 5:.1f}" y="{min(max(top, 0) + size, height):.1f}" font-size="{size:.1f}" '
        f'fill="#fff" stroke="{box.color}" stroke-width="{size / 4:.1f}" paint-order="stroke">'
        f"{html.escape(box.text)}</text>"
    )
