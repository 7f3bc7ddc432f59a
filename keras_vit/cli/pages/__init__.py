"""HTML pages from jinja2 templates and one stylesheet. A page is one file, needs no network, and is for phones too."""

import base64
import functools
import io
import math
import pathlib
from typing import Any

import jinja2
import numpy as np
import PIL.Image

_TEMPLATES = pathlib.Path(__file__).parent / "templates"


def render(template: str, **report: Any) -> str:
    """Return a page as text. All values are escaped.

    Args:
        template: its file name without .html.
        report: the values that the template names.
    """
    return _environment().get_template(f"{template}.html").render(report)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters["thousands"] = "{:,}".format
    environment.filters["number"] = lambda value, form: "" if math.isnan(value) else form.format(value)
    return environment


def data_address(image: bytes, subtype: str = "png") -> str:
    """Return the address of an image in the page itself; `subtype` is png or jpeg."""
    return f"data:image/{subtype};base64,{base64.b64encode(image).decode()}"


def thumbnail_address(pixels: np.ndarray, side: int) -> str:
    """Return the address of an image (h, w, C) uint8, 1 to 4 channels, as a JPEG on white of at most `side` pixels."""
    if pixels.shape[-1] % 2 == 0:
        alpha = pixels[..., -1:].astype(np.float32) / 255.0
        pixels = np.round(pixels[..., :-1] * alpha + 255.0 * (1.0 - alpha)).astype(np.uint8)
    image = PIL.Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    image.thumbnail((side, side))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=85)
    return data_address(stream.getvalue(), "jpeg")
