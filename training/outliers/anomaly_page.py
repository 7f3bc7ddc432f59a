"""The page of defects: each picture beside its heat map, the most suspicious first. One file, no network access."""

import base64
import dataclasses
import html
import io
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
import PIL.Image

from keras_vit.images.preprocessing import to_channels

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
    listed = f"<h2>Not read</h2><ul>{missing}</ul>" if missing else ""
    defects = sum(each.is_defect for each in findings)
    return _PAGE.format(defects=defects, count=len(findings), threshold=findings[0].threshold, cards=cards, rest=listed)


def _card(finding: Finding, low: float) -> str:
    picture = PIL.Image.fromarray(np.asarray(to_channels(finding.pixels, 3)).round().astype(np.uint8))
    picture.thumbnail((_SIDE, _SIDE))
    scaled = np.clip((finding.heat - low) / max(2.0 * finding.threshold - low, 1e-12), 0.0, 1.0)
    colors = (255 * matplotlib.colormaps["inferno"](scaled)[..., :3]).astype(np.uint8)
    heat = PIL.Image.blend(picture, PIL.Image.fromarray(colors).resize(picture.size), 0.6)
    verdict = "defect" if finding.is_defect else "good"
    name = html.escape(finding.name)
    tiles = "".join(f'<img src="{_address(image)}" alt="{alt} of {name}">' for image, alt in _tiles(picture, heat))
    return f'<article class="{verdict}"><h2>{name}</h2><p>{verdict}, score {finding.score:.4g}</p>{tiles}</article>'


def _tiles(picture: PIL.Image.Image, heat: PIL.Image.Image) -> list[tuple[PIL.Image.Image, str]]:
    return [(picture, "picture"), (heat, "heat map")]


def _address(image: PIL.Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Defects</title><style>
body {{ font: 16px/1.4 system-ui, sans-serif; margin: 1rem auto; max-width: 76rem; padding: 0 .75rem }}
main {{ display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)) }}
article {{ border: 1px solid #bbb; border-radius: .5rem; padding: .75rem; overflow: hidden }}
article.defect {{ border: 2px solid #b00020 }}
h2 {{ font-size: 1rem; margin: 0; overflow-wrap: anywhere }} p {{ margin: .25rem 0 .5rem }}
img {{ width: 49%; margin-right: 1% }}
</style></head><body>
<h1>Defects on {defects} of {count} pictures</h1>
<p>A score above {threshold:.4g} is a defect. Bright places differ most from the good parts.</p>
<main>{cards}</main>{rest}
</body></html>
"""
