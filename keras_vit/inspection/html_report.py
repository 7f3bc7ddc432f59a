"""The HTML report: one file with embedded images, no network access, a phone layout and a slider over the layers.

Also a smaller page with the classes of images alone.
"""

import base64
import dataclasses
import html
import io
import json
from collections.abc import Mapping, Sequence

import matplotlib
import matplotlib.colors
import matplotlib.image
import numpy as np

from keras_vit.files.tables import short_name
from keras_vit.inspection import plots
from keras_vit.inspection.compute import InspectionResult
from keras_vit.scores import RankedClasses, Scoring

# Longest side of an image in the report, in pixels. Larger images are subsampled.
_LARGEST_SIDE = 320

_LEGEND = {
    "rollout": "Rollout: how much each patch contributes to the output through the attention of all layers.",
    "relevance": "Relevance: the patches that increase the logit of the predicted class (Grad-CAM).",
    "norms": "Token norms: Euclidean norm of each patch token after the last block, minus the smallest one.",
    "logits": "The most likely classes are listed below.",
}


def html_report(result: InspectionResult) -> str:
    """Return the report as HTML text."""
    sections = [_facts(result), _weights(result), _maps(result), _layer_by_layer(result)]
    return document(f"{result.model}: learned weights and attention", sections)


@dataclasses.dataclass(frozen=True)
class Card:
    """What a page shows of one image."""

    name: str
    pixels: np.ndarray
    """(h, w, C) uint8, as the model sees the image."""
    maps: Sequence[tuple[str, np.ndarray]] = ()
    """Titles and maps (h, w), from 0 to 1."""
    ranked: RankedClasses | None = None
    """None of a model without a head."""
    label: str | None = None


def maps_of(result: InspectionResult) -> list[list[tuple[str, np.ndarray]]]:
    """Titles and maps of each image, as small as a page needs them."""
    return [
        [(title, _thinned(values)) for title, values in plots.maps_of(result, index)]
        for index in range(len(result.images))
    ]


def prediction_page(
    model: str, cards: Sequence[Card], problems: Mapping[str, str], scoring: Scoring, explain: str | None
) -> str:
    """Return a page with each image, its map and its most likely classes as HTML text.

    Args:
        model: its name and what it is.
        cards: one of each image.
        problems: of each file that is not among them, why it is not.
        scoring: how the classes follow from the logits.
        explain: "rollout" or "relevance", the map of each image; None without.
    """
    maps = f"<p>Brighter colors mean higher values. {_LEGEND[explain]}</p>" if explain else ""
    missing = "".join(f"<li>{html.escape(f'{file}: {problem}')}</li>" for file, problem in problems.items())
    listed = f"<h2>Not classified</h2><ul>{missing}</ul>" if missing else ""
    shown = _cards(cards, "h2", scoring)
    sections = ["<h1>Most likely classes</h1>", shown, maps, listed, f"<p>Model: {html.escape(model)}.</p>"]
    return document("Most likely classes", sections)


def document(title: str, sections: Sequence[str]) -> str:
    """A page of its own with these sections of HTML, for phones too; empty ones are left out."""
    return _DOCUMENT.format(title=html.escape(title), style=_STYLE, body="\n".join(filter(None, sections)))


def summary(result: InspectionResult) -> list[str]:
    """Return one sentence for each measurement."""
    lines = []
    if (positions := result.measures.get("position_similarity")) is not None:
        lines.append(
            f"Positions: {positions['own']:.0%} of the patches are most similar to themselves; mean "
            f"cosine similarity {positions['adjacent']:.3f} between adjacent patches, {positions['distant']:.3f} "
            "between distant patches."
        )
    if (layers := result.measures.get("attention_distance")) is not None:
        ranges = ", ".join(f"{layer['lowest']:.1f} to {layer['highest']:.1f}" for layer in layers)
        lines.append(
            f"Mean attention distance of the heads, layer by layer, in pixels, over {_images(result.num_averaged)}: "
            f"{ranges}."
        )
    if (rollout := result.measures.get("rollout")) is not None:
        lines.append(
            f"Attention rollout over {_images(rollout['images'])}: {rollout['ink']:.2f} times the uniform weight on a "
            f"foreground pixel (brighter than half), {rollout['background']:.2f} times on a background pixel."
        )
    return lines


def _images(number: int) -> str:
    return f"{number} image" if number == 1 else f"{number} images"


def _facts(result: InspectionResult) -> str:
    rows, columns = result.grid or (0, 0)
    size = f"{result.image_size[0]}x{result.image_size[1]} pixels"
    size += f", {rows}x{columns} patches" if result.grid else ""
    lines = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in summary(result))
    measured = f"<h2>Measurements</h2><ul>{lines}</ul>" if lines else ""
    return (
        f"<h1>{html.escape(result.model)}</h1><p>Checkpoint <b>{html.escape(short_name(result.checkpoint))}</b>, "
        f"images of {size}. Figures are named after those of <i>An Image is Worth 16x16 Words</i>.</p>{measured}"
    )


def _weights(result: InspectionResult) -> str:
    """The panels of Figures 7, 10 and 11."""
    panels = (
        ("filters", "Figure 7, left: filters", plots.draw_filters),
        ("position_similarity", "Figures 7, center, and 10: positions", plots.draw_positions),
        ("attention_distance", "Figures 7, right, and 11: distance", plots.draw_distances),
        ("attention_distance_renormalized", "The same, renormalized", plots.draw_renormalized_distances),
    )
    figures = []
    for key, caption, draw in panels:
        if key in result.arrays:
            stream = io.BytesIO()
            plots.save(plots.panel(result, draw), stream)
            figures.append(_figure(_address(stream.getvalue()), caption))
    return f'<h2>Learned weights</h2><div class="panels">{"".join(figures)}</div>' if figures else ""


def _maps(result: InspectionResult) -> str:
    """Figures 6 and 14."""
    title = "Attention maps: Figures 6 and 14" if "rollout" in result.arrays else "Maps"
    legend = "".join(f" {words}" for key, words in _LEGEND.items() if key in result.arrays)
    cards = [
        Card(image.name, pixels, maps, result.predictions[index] if result.predictions else None, image.label)
        for index, (image, pixels, maps) in enumerate(
            zip(result.images, result.arrays["images"], maps_of(result), strict=True)
        )
    ]
    shown = _cards(cards, "h3", result.scoring)
    return f"<h2>{title}</h2><p>Brighter colors mean higher values.{legend}</p>{shown}"


def _cards(cards: Sequence[Card], heading: str, scoring: Scoring) -> str:
    """The input, maps and classes of each image, under headings of this level."""
    articles = []
    for card in cards:
        tiles = [_figure(_image_address(card.pixels), "input", "pixels")]
        tiles += [_figure(_map_address(values), title) for title, values in card.maps]
        scale = _SCALE if card.maps else ""
        label = "" if card.label is None else f" <small>label: {html.escape(card.label)}</small>"
        articles.append(
            f"<article><{heading}>{html.escape(card.name)}{label}</{heading}>"
            f'<div class="tiles">{"".join(tiles)}</div>{scale}{_classes(card.ranked, scoring)}</article>'
        )
    return f'<div class="cards">{"".join(articles)}</div>'


def _classes(ranked: RankedClasses | None, scoring: Scoring) -> str:
    """The likeliest classes of an image, and which of them count."""
    if ranked is None:
        return "<p>The model has no image-level prediction.</p>"
    listed = "".join(
        f'<li><span>{html.escape(name)}</span><meter value="{probability:.6f}" '
        f'aria-label="{html.escape(name)}"></meter>'
        f"<span>{_percent(probability)}</span></li>"
        for name, probability in ranked.likeliest
    )
    listed = f'<ol class="guesses">{listed}</ol>'
    if ranked.is_unknown:
        return f"<p><b>Unknown</b>: it looks like none of the classes.</p>{listed}"
    if ranked.is_rejected:
        return f"<p><b>Rejected</b>: no class reaches {scoring.least:.1%}.</p>{listed}"
    if scoring.is_multi_label:
        reached = ", ".join(html.escape(name) for name, _ in ranked.chosen)
        return f"<p>Classes from {scoring.least:.1%} on: <b>{reached}</b></p>{listed}"
    return listed


def _percent(probability: float) -> str:
    return f"{probability:.1%}" if probability >= 0.001 else "< 0.1%"


def _layer_by_layer(result: InspectionResult) -> str:
    """A slider over the layers: every head, the rollout up to the layer, and token norms of the selected image."""
    if "attention" not in result.arrays:
        return ""
    sheets = [_sheet(result, index) for index in range(len(result.images))]
    columns, sheet_maps = sheets[0][0], [_map_address(values) for _, values in sheets]
    choices = "".join(
        f'<label><input type="radio" name="picture" value="{index}"{" checked" * (index == 0)}>'
        f'<img src="{_image_address(result.arrays["images"][index])}" alt="{html.escape(image.name)}"></label>'
        for index, image in enumerate(result.images)
    )
    assert result.grid is not None
    height, width = result.grid
    tiles = "".join(
        f'<figure><canvas width="{width}" height="{height}" role="img" aria-label="{name}"></canvas>'
        f"<figcaption>{name}</figcaption></figure>"
        for name in columns
    )
    data = json.dumps({"sheets": sheet_maps, "layers": result.layers, "width": width, "height": height})
    return (
        "<h2>Layer by layer</h2><p>Attention of each head from the output (the class token, or the mean of all tokens) "
        "to the patches, each map divided by its maximum.</p>"
        f'<div class="choices">{choices}</div><p class="slider"><label for="layer">layer <output id="shown">'
        f'{result.layers[0]}</output></label><input type="range" id="layer" min="0" max="{len(result.layers) - 1}" '
        f'value="0"></p>{_SCALE}<div class="heads">{tiles}</div>'
        f'<script type="application/json" id="data">{data}</script><script>{_SCRIPT}</script>'
    )


def _sheet(result: InspectionResult, index: int) -> tuple[list[str], np.ndarray]:
    """Column names and a mosaic of maps, a row for each layer and a column for each head: (L * h, columns * w)."""
    found = result.arrays
    names = [f"head {head}" for head in result.heads]
    maps = list(np.moveaxis(found["attention"][index], 1, 0))  # of (L, h, w) each
    if "rollout" in found:
        names.append("rollout")
        maps.append(found["rollout"][index][list(result.layer_numbers)])
    if "norms" in found:
        norms = found["norms"][index][[int(layer.split()[0]) for layer in result.layers]]  # twice for axial blocks
        names.append("token norms")
        maps.append(norms - norms.min(axis=(1, 2), keepdims=True))
    scaled = [values / np.maximum(values.max(axis=(1, 2), keepdims=True), 1e-30) for values in maps]
    return names, np.concatenate([values.reshape(-1, values.shape[-1]) for values in scaled], axis=1)


def _figure(address: str, caption: str, kind: str = "") -> str:
    text = html.escape(caption)
    return f'<figure><img src="{address}" alt="{text}" class="{kind}"><figcaption>{text}</figcaption></figure>'


def _map_address(values: np.ndarray) -> str:
    stream = io.BytesIO()
    matplotlib.image.imsave(stream, values, cmap=plots.COLORMAP, vmin=0.0, vmax=1.0, format="png")
    return _address(stream.getvalue())


def _image_address(image: np.ndarray) -> str:
    stream = io.BytesIO()
    matplotlib.image.imsave(stream, np.ascontiguousarray(_thinned(plots.as_rgb(image))), format="png")
    return _address(stream.getvalue())


def _thinned(image: np.ndarray) -> np.ndarray:
    step = -(-max(image.shape[:2]) // _LARGEST_SIDE)
    return image[::step, ::step]


def _address(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


# The scale of maps that are divided by their maximum, as a gradient of a few of its colors.
_COLORS = ", ".join(matplotlib.colors.to_hex(matplotlib.colormaps[plots.COLORMAP](step / 8)) for step in range(9))
_SCALE = (
    f'<p class="scale"><span>low</span><span class="bar" role="img" aria-label="color scale" '
    f'style="background: linear-gradient(to right, {_COLORS})"></span>'
    "<span>high (each map scaled separately)</span></p>"
)

_STYLE = """
:root { color-scheme: light; font: 16px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { max-width: 76rem; margin: 0 auto; padding: 0.75rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0.25rem 0; } h2 { font-size: 1.15rem; margin: 1.5rem 0 0.25rem; }
h3, article h2 { font-size: 1rem; margin: 0 0 0.5rem; } small { font-weight: normal; color: #444; }
figure { margin: 0; } img, canvas { width: 100%; height: auto; display: block; }
figcaption { font-size: 0.8rem; color: #333; }
canvas, .pixels { image-rendering: pixelated; }
.scale { display: flex; align-items: center; gap: 0.5rem; margin: 0.5rem 0; font-size: 0.8rem; color: #333; }
.scale .bar { flex: 1; max-width: 12rem; height: 0.6rem; border-radius: 0.15rem; }
.panels { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); }
.panels figure { max-width: 36rem; }
.cards { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); }
article { border: 1px solid #ccc; border-radius: 0.5rem; padding: 0.75rem; }
.tiles { display: grid; gap: 0.5rem; grid-template-columns: 1fr 1fr; }
.guesses { list-style: none; margin: 0.75rem 0 0; padding: 0; font-size: 0.9rem; }
.guesses li { display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr) 4rem; gap: 0.5rem; }
.guesses li span:last-child { text-align: right; } meter { width: 100%; }
.choices { display: flex; flex-wrap: wrap; gap: 0.5rem; }
.choices label { width: 4rem; border: 3px solid transparent; border-radius: 0.25rem; }
.choices label:has(:checked) { border-color: #0072b2; }
.choices input { position: absolute; opacity: 0; } .choices label:has(:focus-visible) { outline: 2px solid #000; }
.slider { position: sticky; top: 0; background: #fff; padding: 0.5rem 0; margin: 0.5rem 0; z-index: 1; }
.slider input { width: 100%; height: 2rem; margin: 0; }
.heads { display: grid; gap: 0.5rem; grid-template-columns: repeat(auto-fill, minmax(5.5rem, 1fr)); }
"""

_SCRIPT = """
const { sheets, layers, width, height } = JSON.parse(document.getElementById("data").textContent);
const slider = document.getElementById("layer");
const images = sheets.map(address => Object.assign(new Image(), { src: address, onload: draw }));
function draw() {
  const sheet = images[document.querySelector("input[name=picture]:checked").value];
  document.getElementById("shown").textContent = layers[slider.value];
  if (!sheet.complete) return;
  document.querySelectorAll(".heads canvas").forEach((canvas, column) => canvas.getContext("2d").drawImage(
    sheet, column * width, slider.value * height, width, height, 0, 0, width, height));
}
slider.addEventListener("input", draw);
document.querySelectorAll("input[name=picture]").forEach(choice => choice.addEventListener("change", draw));
draw();
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
