"""The page of defects: each picture beside its heat map, the most suspicious first. One file, no network access."""

import dataclasses
import html
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
import PIL.Image

from keras_vit.images.preprocessing import to_channels
from keras_vit.inspection.html_page import document, thumbnail_address

# Longest side of a picture on the page, in pixels.
_SIDE = 320


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found on a picture."""

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
        """The pixel (x, y) of the picture with the most heat."""
        row, column = np.unravel_index(np.argmax(self.heat), self.heat.shape)
        height, width = self.pixels.shape[:2]
        return int((column + 0.5) * width / self.heat.shape[1]), int((row + 0.5) * height / self.heat.shape[0])


def anomaly_page(findings: Sequence[Finding], problems: Mapping[str, str]) -> str:
    """The page as HTML text. All heat maps have one scale: from the coolest pixel of all to twice the threshold."""
    low = min(float(each.heat.min()) for each in findings)
    cards = "".join(_card(each, low) for each in sorted(findings, key=lambda each: -each.score))
    missing = "".join(f"<li>{html.escape(f'{name}: {problem}')}</li>" for name, problem in problems.items())
    defects = sum(each.is_defect for each in findings)
    sections = [
        f"<h1>Defects on {defects:,} of {len(findings):,} pictures</h1>",
        f"<p>The most suspicious picture comes first. A score above {findings[0].threshold:.4g} is a defect. "
        "Bright places differ most from the good parts; all maps have one scale.</p>",
        f'<div class="cards">{cards}</div>',
        f"<h2>Not read</h2><ul>{missing}</ul>" if missing else "",
    ]
    return document("Defects", sections, style=_STYLE)


def _card(finding: Finding, low: float) -> str:
    picture = PIL.Image.fromarray(np.asarray(to_channels(finding.pixels, 3, "white")).round().astype(np.uint8))
    picture.thumbnail((_SIDE, _SIDE))
    scaled = np.clip((finding.heat - low) / max(2.0 * finding.threshold - low, 1e-12), 0.0, 1.0)
    colors = (255 * matplotlib.colormaps["inferno"](scaled)[..., :3]).astype(np.uint8)
    heat = PIL.Image.blend(picture, PIL.Image.fromarray(colors).resize(picture.size), 0.6)
    verdict = "defect" if finding.is_defect else "good"
    name = html.escape(finding.name)
    tiles = "".join(
        f'<figure><img src="{thumbnail_address(np.asarray(image), _SIDE)}" alt="{words} of {name}">'
        f"<figcaption>{words}</figcaption></figure>"
        for image, words in ((picture, "picture"), (heat, "heat map"))
    )
    return (
        f'<article class="{verdict}"><h2>{name}</h2><p>{verdict}, score {finding.score:.4g}</p>'
        f'<div class="tiles">{tiles}</div></article>'
    )


_STYLE = """
.tiles { display: grid; gap: 0.5rem; grid-template-columns: 1fr 1fr; align-items: start; }
article.defect { border: 2px solid #b00020; } article p { margin: 0.25rem 0 0.5rem; }
"""
