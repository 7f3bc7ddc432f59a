"""A page with pictures and boxes on them, in one file."""

import base64
import dataclasses
import html
import io
from collections.abc import Sequence

import numpy as np
import PIL.Image

from keras_vit.images.preprocessing import to_channels
from keras_vit.inspection.html_page import document

# Longest side of a picture on the page, in pixels.
_LONGEST = 800
# Distinct to any color vision (Okabe and Ito), dark enough for white letters.
COLORS = ("#0072b2", "#c44e00", "#00734f", "#a0457a", "#5c4d00", "#444444")


@dataclasses.dataclass(frozen=True)
class DrawnBox:
    """A box and what stands beside it."""

    corners: Sequence[float]
    """Left, top, right, bottom in pixels of the picture."""
    text: str
    color: str
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class DrawnPicture:
    """A picture with its boxes."""

    name: str
    pixels: np.ndarray
    """(h, w, C) uint8, upright."""
    boxes: Sequence[DrawnBox]


def boxes_page(title: str, pictures: Sequence[DrawnPicture], sections: Sequence[str] = ()) -> str:
    """HTML text of a page with the pictures, and sections of HTML behind them."""
    cards = "".join(map(_card, pictures))
    return document(title, [f"<h1>{html.escape(title)}</h1>", f'<div class="cards">{cards}</div>', *sections])


def _card(picture: DrawnPicture) -> str:
    listed = "".join(f"<li>{html.escape(box.text)}</li>" for box in picture.boxes) or "<li>nothing found</li>"
    return f"<article><h2>{html.escape(picture.name)}</h2>{_drawing(picture)}<ul>{listed}</ul></article>"


def _drawing(picture: DrawnPicture) -> str:
    height, width = picture.pixels.shape[:2]
    image = PIL.Image.fromarray(np.asarray(to_channels(picture.pixels, 3, "white")))
    image.thumbnail((_LONGEST, _LONGEST))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=85)
    address = f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
    size = max(width, height) / 28  # of the letters, in pixels of the picture
    shapes = []
    for box in picture.boxes:
        left, top, right, bottom = (float(edge) for edge in box.corners)
        dash = ' stroke-dasharray="6 4"' if box.dashed else ""
        shapes.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" fill="none" '
            f'stroke="{box.color}" stroke-width="3" vector-effect="non-scaling-stroke"{dash}/>'
            f'<text x="{left + size / 5:.1f}" y="{min(max(top, 0) + size, height):.1f}" font-size="{size:.1f}" '
            f'fill="#fff" stroke="{box.color}" stroke-width="{size / 4:.1f}" paint-order="stroke">'
            f"{html.escape(box.text)}</text>"
        )
    words = html.escape(f"{picture.name}: {', '.join(box.text for box in picture.boxes) or 'nothing found'}")
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{words}" style="display:block;width:100%;'
        f'height:auto;overflow:hidden"><image href="{address}" width="{width}" height="{height}" '
        f'preserveAspectRatio="none"/>{"".join(shapes)}</svg>'
    )
