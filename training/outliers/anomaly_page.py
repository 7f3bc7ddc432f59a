"""The page of defects: each picture beside its heat map, the most suspicious first. One file, no network access."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import PIL.Image

from keras_vit.cli.pages import render, thumbnail_address
from keras_vit.images.preprocessing import to_channels

# Longest side of a picture on the page, in pixels.
_SIDE = 320


@dataclasses.dataclass(frozen=True)
class Finding:
    """The score and heat map of an image."""

    name: str
    pixels: np.ndarray
    """(h, w, C) uint8."""
    heat: np.ndarray
    """(height, width) at the model's size: the distance of each pixel to good parts."""
    score: float
    threshold: float

    @property
    def is_defect(self) -> bool:
        """Whether the part is defective."""
        return self.score > self.threshold

    @property
    def peak(self) -> tuple[int, int]:
        """Return the pixel (x, y) of the picture with the most heat."""
        row, column = np.unravel_index(np.argmax(self.heat), self.heat.shape)
        height, width = self.pixels.shape[:2]
        return int((column + 0.5) * width / self.heat.shape[1]), int((row + 0.5) * height / self.heat.shape[0])


def anomaly_page(findings: Sequence[Finding], problems: Mapping[str, str]) -> str:
    """Return HTML text of a page. All heat maps have one scale: from the lowest value to twice the threshold."""
    low = min(float(each.heat.min()) for each in findings)
    return render(
        "anomaly",
        title="Defects",
        num_defects=sum(each.is_defect for each in findings),
        threshold=findings[0].threshold,
        cards=[_card(each, low) for each in sorted(findings, key=lambda each: -each.score)],
        problems=problems,
    )


def _card(finding: Finding, low: float) -> dict[str, Any]:
    picture = PIL.Image.fromarray(np.asarray(to_channels(finding.pixels, 3, "white")).round().astype(np.uint8))
    picture.thumbnail((_SIDE, _SIDE))
    scaled = np.clip((finding.heat - low) / max(2.0 * finding.threshold - low, 1e-12), 0.0, 1.0)
    colors = (255 * matplotlib.colormaps["inferno"](scaled)[..., :3]).astype(np.uint8)
    heat_map = PIL.Image.blend(picture, PIL.Image.fromarray(colors).resize(picture.size), 0.6)
    return {
        "name": finding.name,
        "verdict": "defect" if finding.is_defect else "good",
        "score": finding.score,
        "picture": thumbnail_address(np.asarray(picture), _SIDE),
        "heat_map": thumbnail_address(np.asarray(heat_map), _SIDE),
    }
