"""The page of classified images: a summary, the images with their classes and maps, to be sorted and filtered."""

import collections
import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.image
import numpy as np

from keras_vit.cli.pages import data_address, render
from keras_vit.scores import RankedClasses, Scoring

_LEGEND = {
    "rollout": "Attention rollout: how much each part of the picture reaches the result through all layers. It is the "
    "same for every class.",
    "relevance": "Relevance (Grad-CAM): the parts that speak for the predicted class.",
}
# Longest side of a picture on the page, in pixels.
PICTURE_SIDE = 320
# The color of a map over its picture, RGB, and its opacity where the map is highest.
_COLOR, _OPACITY = (213, 94, 0), 0.85
# Shares of an image that the frame of the model's part leaves out at least, to be shown.
_LEFT_OUT = 0.01


@dataclasses.dataclass(frozen=True)
class PictureCard:
    """An image on the page."""

    name: str
    ranked: RankedClasses
    groups: Sequence[str]
    """Groups of the summary that the image is in."""
    maps: Sequence[tuple[str, np.ndarray]] = ()
    """Titles and maps (h, w), from 0 to 1, of the part of the picture that the model sees."""
    address: str = ""
    """The address of the whole image, inside the page."""
    seen: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)
    """Left, top, right and bottom of the part that the model sees, in shares of the picture; padding is outside."""


def prediction_page(
    model: str, cards: Sequence[PictureCard], problems: Mapping[str, str], scoring: Scoring, explain: str | None
) -> str:
    """Return a page with each picture, its most likely classes and its map as HTML text.

    Args:
        model: its name and what it is.
        cards: one of each picture.
        problems: of each file that is not among them, why it is not.
        scoring: how the classes follow from the logits.
        explain: "rollout" or "relevance", the map of each picture; None without.
    """
    return render(
        "predictions",
        title="Most likely classes" if len(cards) == 1 else f"{len(cards):,} pictures",
        model=model,
        cards=[_card(card) for card in cards],
        counts=collections.Counter(group for card in cards for group in card.groups).most_common(),
        problems=problems,
        scoring=scoring,
        legend=_LEGEND[explain] if explain else "",
        colors=f"rgb{(*_COLOR, 0.0)}, rgb{(*_COLOR, _OPACITY)}",
    )


def groups_of(ranked: RankedClasses, scoring: Scoring) -> list[str]:
    """Return what an image counts as: its class, of several all that it has, or why it has none."""
    if ranked.is_unknown:
        return ["(unknown)"]
    if ranked.is_rejected:
        return ["(rejected)"]
    return [name for name, _ in (ranked.chosen if scoring.is_multi_label else ranked.chosen[:1])]


def _card(card: PictureCard) -> dict[str, Any]:
    left, top, right, bottom = (100.0 * edge for edge in card.seen)
    return {
        "name": card.name,
        "ranked": card.ranked,
        "groups": card.groups,
        "address": card.address,
        "maps": [
            {"title": title, "address": _overlay_address(values), "is_empty": values.max() <= 0.0}
            for title, values in card.maps
        ],
        "place": f"left: {left:.2f}%; top: {top:.2f}%; width: {right - left:.2f}%; height: {bottom - top:.2f}%",
        "is_cropped": max(card.seen[:2]) > _LEFT_OUT or min(card.seen[2:]) < 1.0 - _LEFT_OUT,
    }


def _overlay_address(values: np.ndarray) -> str:
    """Return a map that covers the image: the higher, the less of the image shows through."""
    colors = np.empty((*values.shape, 4), np.uint8)
    colors[..., :3], colors[..., 3] = _COLOR, np.round(255.0 * _OPACITY * values)
    stream = io.BytesIO()
    matplotlib.image.imsave(stream, colors, format="png")
    return data_address(stream.getvalue())
