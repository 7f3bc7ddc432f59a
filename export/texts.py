"""Texts that exports write for people and servers, from the jinja2 templates beside this module.

One is Python code that prepares an image for files that take pixels, such as ONNX and TFLite. Where a model resizes in
Pillow's arithmetic, Pillow and NumPy are enough.
"""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

if TYPE_CHECKING:
    from keras_vit import Preprocessing

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_MODES = {1: "L", 3: "RGB"}


def render(template: str, **values: Any) -> str:
    """Return the text of a template by its file name, with the values that it names as they are."""
    return _TEMPLATES.get_template(template).render(values)


def preprocessing_section(preprocessing: "Preprocessing", *, raw_pixels: bool) -> list[str]:
    """Return what the caller of a file does to an image, as lines of Markdown.

    raw_pixels: whether the file takes pixels 0..255, uint8, and normalizes them itself.
    """
    then = "; the file itself does the last step, from pixels 0..255" if raw_pixels else ""
    lines = ["## Preprocessing", "", f"An image is prepared by the caller: {preprocessing.summary()}{then}.", ""]
    if preprocessing.channels in _MODES:
        lines += ["```python", *preprocessing_code(preprocessing, raw_pixels=raw_pixels), "```", ""]
    return lines


def preprocessing_code(preprocessing: "Preprocessing", *, raw_pixels: bool = False) -> list[str]:
    """Return the lines of a function `prepare`: path of an image file -> (1, height, width, channels), 1 or 3 channels.

    The template is `templates/prepare.txt`.
    """
    lows, highs = (np.asarray(end) for end in preprocessing.value_range)
    scale, fill = 255.0 / (highs - lows), tuple(int(value) for value in preprocessing.fill())
    code = render(
        "prepare.txt",
        rule=preprocessing,
        fields=dataclasses.asdict(preprocessing),
        with_pillow=preprocessing.dtype == "uint8",
        raw_pixels=raw_pixels,
        mode=_MODES[preprocessing.channels],
        resampling="LANCZOS" if preprocessing.interpolation == "lanczos3" else str(preprocessing.interpolation).upper(),
        fill=fill if len(fill) > 1 else fill[0],
        zero=_numbers(-lows * scale),
        scale=_numbers(scale + 0.0 * lows),
    )
    return code.splitlines()


def _numbers(values: np.ndarray) -> str:
    numbers = [float(f"{value:.9g}") for value in values.flat]
    return str(numbers[0]) if len(numbers) == 1 else f"np.float32({numbers})"
