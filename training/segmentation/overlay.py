"""Images with their segments drawn over them, and pages of them in one file."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_vit.cli.pages import render, thumbnail_address
from keras_vit.images.preprocessing import to_channels

# Okabe and Ito's colors, distinct to any color vision, then lighter ones of the same.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#000000")
_RGB = np.array([[int(color[place : place + 2], 16) for place in (1, 3, 5)] for color in _COLORS], np.float32)
# Longest side of an image on a page, and the share of a segment's color.
_LONGEST, _SHARE = 480, 0.55


@dataclasses.dataclass(frozen=True)
class Panel:
    """An image with segments."""

    title: str
    segments: np.ndarray
    """(h, w) int32: the number of the segment of each pixel, negative for none."""
    names: Sequence[str]
    """Names of the segments, by number."""
    colors: np.ndarray
    """(n,) int: the color of each segment, such as its class."""


def overlay(pixels: np.ndarray, segments: np.ndarray, colors: np.ndarray) -> np.ndarray:
    """Return an image (h, w, C) with its segments in color and with white outlines: (h, w, 3) uint8.

    A segment is gray below its color, so that the color is that of the list beside the image.
    """
    rgb, gray = (np.asarray(to_channels(pixels, channels, "white"), np.float32) for channels in (3, 1))
    inside = segments >= 0
    table = color_of(np.append(colors, 0))
    mixed = np.where(inside[..., None], (1 - _SHARE) * gray + _SHARE * table[np.where(inside, segments, -1)], rgb)
    edges = np.zeros(segments.shape, bool)
    edges[:, 1:] |= segments[:, 1:] != segments[:, :-1]
    edges[1:] |= segments[1:] != segments[:-1]
    mixed[edges] = 255.0
    return np.clip(np.round(mixed), 0, 255).astype(np.uint8)


def color_of(numbers: np.ndarray) -> np.ndarray:
    """Return the colors (n, 3), 0..255, of numbers from 0 on; from the ninth on lighter."""
    numbers = np.asarray(numbers, np.int64)
    lighter = np.minimum(numbers // len(_COLORS), 3)[:, None] * 0.22
    return _RGB[numbers % len(_COLORS)] * (1 - lighter) + 255.0 * lighter


def segments_page(title: str, cards: Sequence[tuple[str, np.ndarray, Sequence[Panel]]], words: str = "") -> str:
    """Return HTML text of a page: for each image its name, pixels (h, w, C) and panels."""
    shown = [
        {"name": name, "figures": [_figure("picture", pixels), *(_panel(pixels, panel) for panel in panels)]}
        for name, pixels, panels in cards
    ]
    return render("segments", title=title, words=words, cards=shown)


def _panel(pixels: np.ndarray, panel: Panel) -> dict[str, Any]:
    numbers, counts = np.unique(panel.segments[panel.segments >= 0], return_counts=True)
    segments = [(panel.names[n], _hex(panel.colors[n])) for n in numbers[np.argsort(-counts, kind="stable")]]
    return _figure(panel.title, overlay(pixels, panel.segments, panel.colors), segments)


def _figure(title: str, pixels: np.ndarray, segments: list[tuple[str, str]] | None = None) -> dict[str, Any]:
    return {"title": title, "address": thumbnail_address(pixels, _LONGEST), "segments": segments}


def _hex(number: int) -> str:
    return "#" + "".join(f"{round(float(value)):02x}" for value in color_of(np.array([number]))[0])
