"""Python code that prepares a picture for files that take pixels, such as ONNX and TFLite, for their reports.

Where a model resizes in Pillow's arithmetic, Pillow and NumPy are enough.
"""

import dataclasses

import numpy as np

from keras_vit import Preprocessing

_MODES = {1: "L", 3: "RGB"}


def preprocessing_section(preprocessing: Preprocessing, *, raw_pixels: bool) -> list[str]:
    """Return what the caller of a file does to an image, as lines of Markdown.

    raw_pixels: whether the file takes pixels 0..255, uint8, and normalizes them itself.
    """
    then = "; the file itself does the last step, from pixels 0..255" if raw_pixels else ""
    lines = ["## Preprocessing", "", f"A picture is prepared by the caller: {preprocessing.summary()}{then}.", ""]
    if preprocessing.channels in _MODES:
        lines += ["```python", *preprocessing_code(preprocessing, raw_pixels=raw_pixels), "```", ""]
    return lines


def preprocessing_code(preprocessing: Preprocessing, *, raw_pixels: bool = False) -> list[str]:
    """Lines of a function `prepare`: path of an image file -> (1, height, width, channels), channels 1 or 3."""
    with_pillow = preprocessing.dtype == "uint8"
    opened = ["    image = Image.open(path)"]
    if preprocessing.exif_orientation:
        opened = ["    image = ImageOps.exif_transpose(Image.open(path))"]
    if not with_pillow and not raw_pixels:
        opened = ["    image = Image.open(path)"]  # which the call turns
    modules = "Image, ImageOps" if "ImageOps" in opened[0] else "Image"
    imports = ["import numpy as np", f"from PIL import {modules}", *([] if with_pillow else ["import keras_vit"])]
    fields = [f"    {name}={value!r}," for name, value in dataclasses.asdict(preprocessing).items()]
    settings = [] if with_pillow else ["preprocessing = keras_vit.Preprocessing(", *fields, ")", "", ""]
    rest = _with_pillow(preprocessing, raw_pixels) if with_pillow else _with_keras_vit(raw_pixels)
    return [*imports, "", *([""] if with_pillow else []), *settings, "def prepare(path):", *opened, *rest]


def _with_keras_vit(raw_pixels: bool) -> list[str]:
    if not raw_pixels:
        return ["    return np.asarray(preprocessing(image))[None]"]
    return [
        '    pixels = np.asarray(preprocessing.resized(np.asarray(image.convert("RGBA"))))',
        "    return np.round(pixels).astype(np.uint8)[None]",
    ]


def _with_pillow(preprocessing: Preprocessing, raw_pixels: bool) -> list[str]:
    (height, width), full = preprocessing.image_size, preprocessing.crop_from
    mode, pixels = _MODES[preprocessing.channels], f"reshape(1, {height}, {width}, {preprocessing.channels})"
    lines = [f'    image = image.convert("{mode}")']
    if preprocessing.background == "white":
        lines = [
            '    image = image.convert("RGBA")',
            f'    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("{mode}")',
        ]
    lines += _resized(preprocessing)
    if preprocessing.resize == "pad":
        lines += _padded(preprocessing, mode)
    elif full is not None:
        lines += [
            f"    left, top = {_begin(preprocessing, 'image.width', width)}, "
            f"{_begin(preprocessing, 'image.height', height)}",
            f"    image = image.crop((left, top, left + {width}, top + {height}))",
        ]
    if raw_pixels:
        return [*lines, f"    return np.asarray(image).{pixels}"]
    lows, highs = (np.asarray(end) for end in preprocessing.value_range)
    scale = 255.0 / (highs - lows)
    zero, scale = (_numbers(values) for values in (-lows * scale, scale + 0.0 * lows))
    return [*lines, f"    pixels = np.asarray(image, np.float32).{pixels}", f"    return (pixels - {zero}) / {scale}"]


def _resized(preprocessing: Preprocessing) -> list[str]:
    """Lines that cut the window and resize it."""
    (height, width), full = preprocessing.image_size, preprocessing.crop_from
    target_height, target_width = (full or (height, width)) if not isinstance(full, int) else (full, full)
    interpolation = "LANCZOS" if preprocessing.interpolation == "lanczos3" else str(preprocessing.interpolation).upper()
    size, before = "(width, height)", []
    if preprocessing.resize == "stretch":
        size = f"({target_width}, {target_height})"
    elif preprocessing.resize == "crop":
        size = f"({width}, {height})"
        before = [
            f"    width = min(image.width, max(image.height * {width} // {height}, 1))",
            f"    height = min(image.height, max(image.width * {height} // {width}, 1))",
            "    left, top = (image.width - width) // 2, (image.height - height) // 2",
            "    image = image.crop((left, top, left + width, top + height))",
        ]
    elif preprocessing.resize == "resize-small" and isinstance(full, int):
        whole = "round" if preprocessing.library == "tensorflow" else "int"
        before = [f"    width, height = ({whole}({full} * side / min(image.size)) for side in image.size)"]
    else:
        of = "max" if preprocessing.resize == "pad" else "min"
        before = [
            f"    ratio = {of}(image.width / {target_width}, image.height / {target_height})",
            "    width, height = (max(round(side / ratio), 1) for side in image.size)",
        ]
    return [*before, f"    image = image.resize({size}, Image.Resampling.{interpolation})"]


def _padded(preprocessing: Preprocessing, mode: str) -> list[str]:
    (height, width), fill = preprocessing.image_size, tuple(int(value) for value in preprocessing.fill())
    places = []
    for side, length in (("image.width", width), ("image.height", height)):
        place = f"({length} - {side}) // 2" if preprocessing.padding == "around" else "0"
        if preprocessing.crop_from is not None:
            place = f"{place} if {side} < {length} else -({_begin(preprocessing, side, length)})"
        places.append(place)
    return [
        f'    padded = Image.new("{mode}", ({width}, {height}), {fill if len(fill) > 1 else fill[0]})',
        f"    left = {places[0]}",
        f"    top = {places[1]}",
        "    padded.paste(image, (left, top))",
        "    image = padded",
    ]


def _begin(preprocessing: Preprocessing, side: str, length: int) -> str:
    """The first pixel of a center crop, as code."""
    return f"round(({side} - {length}) / 2)" if preprocessing.library == "timm" else f"({side} - {length}) // 2"


def _numbers(values: np.ndarray) -> str:
    """One number or one for each channel, as code."""
    numbers = [float(f"{value:.9g}") for value in values.flat]
    return str(numbers[0]) if len(numbers) == 1 else f"np.float32({numbers})"
