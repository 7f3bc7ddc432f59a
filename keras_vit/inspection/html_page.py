"""The frame of every HTML page: one file with embedded images, no network access, readable on a phone."""

import base64
import html
import io
from collections.abc import Sequence

import numpy as np
import PIL.Image


def document(title: str, sections: Sequence[str], *, style: str = "", script: str = "") -> str:
    """Return a page as text, from its sections as HTML; empty ones are left out.

    Args:
        title: plain text.
        sections: HTML, in which all text from outside is escaped.
        style: CSS beside that of all pages.
        script: JavaScript that runs when the page is there.
    """
    body = "\n".join(filter(None, [*sections, script and f"<script>{script}</script>"]))
    return _DOCUMENT.format(title=html.escape(title), style=_STYLE + style, body=body)


def data_address(image: bytes, kind: str = "png") -> str:
    """The address of an image in the page itself; `kind` is png or jpeg."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def thumbnail_address(pixels: np.ndarray, side: int) -> str:
    """An image (h, w, C) uint8 of 1 to 4 channels as a JPEG on white, at most `side` pixels long."""
    if pixels.shape[-1] % 2 == 0:
        alpha = pixels[..., -1:].astype(np.float32) / 255.0
        pixels = np.round(pixels[..., :-1] * alpha + 255.0 * (1.0 - alpha)).astype(np.uint8)
    image = PIL.Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    image.thumbnail((side, side))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=85)
    return data_address(stream.getvalue(), "jpeg")


_STYLE = """
:root { color-scheme: light; font: 16px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { max-width: 76rem; margin: 0 auto; padding: 0.75rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0.25rem 0; } h2 { font-size: 1.15rem; margin: 1.5rem 0 0.25rem; }
h3, article h2 { font-size: 1rem; margin: 0 0 0.5rem; } small { font-weight: normal; color: #444; }
figure { margin: 0; } img, canvas { width: 100%; height: auto; display: block; }
figcaption { font-size: 0.8rem; color: #333; }
.controls { display: flex; flex-wrap: wrap; gap: 0.5rem 1rem; align-items: center; margin: 0.5rem 0; }
.controls select { font: inherit; max-width: 14rem; }
.cards { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); }
article { border: 1px solid #ccc; border-radius: 0.5rem; padding: 0.75rem; min-width: 0; }
article[hidden] { display: none; }
.scale { display: flex; align-items: center; gap: 0.5rem; margin: 0.5rem 0; font-size: 0.8rem; color: #333; }
.scale .bar { flex: 1; max-width: 12rem; height: 0.6rem; border-radius: 0.15rem; }
.guesses { list-style: none; margin: 0.75rem 0 0; padding: 0; font-size: 0.9rem; }
.guesses li { display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr) 4rem; gap: 0.5rem; }
.guesses li span:last-child { text-align: right; } meter { width: 100%; }
"""

_DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
