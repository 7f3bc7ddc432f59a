"""The HTML report of an inspection: predictions, maps and figures, with a slider over the layers."""

import dataclasses
import html
import io
import json
from collections.abc import Sequence

import matplotlib
import matplotlib.colors
import matplotlib.image
import numpy as np

from keras_vit.files.tables import short_name
from keras_vit.inspection import plots
from keras_vit.inspection.compute import InspectionResult
from keras_vit.inspection.explanations import explanation
from keras_vit.inspection.html_page import data_address, document
from keras_vit.scores import RankedClasses, Scoring

# Longest side of an image in the report, in pixels. Larger images are subsampled.
_LARGEST_SIDE = 320


def html_report(result: InspectionResult) -> str:
    """Return the report as HTML text."""
    sections = [_facts(result), _maps(result), _layer_by_layer(result), _weights(result)]
    return document(result.model, sections, style=_STYLE)


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
        [(title, _thinned(values)) for title, values in plots.image_maps(result, index)]
        for index in range(len(result.images))
    ]


def sentences(result: InspectionResult) -> list[str]:
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
    size = f"{result.image_size[0]} x {result.image_size[1]} pixels"
    size += f", {rows} x {columns} patches" if result.grid else ""
    return (
        f"<h1>{html.escape(result.model)}</h1><p>From <b>{html.escape(short_name(result.checkpoint))}</b>: "
        f"{html.escape(result.architecture)}. It sees pictures of {size}.</p>"
    )


def _weights(result: InspectionResult) -> str:
    """The panels of Figures 7, 10 and 11, and their numbers."""
    filters = "components" if result.filters_are_components else "filters"
    panels = (
        ("filters", filters, "Filters of the first layer (Figure 7, left)", plots.draw_filters),
        ("position_similarity", "positions", "Positions (Figures 7, center, and 10)", plots.draw_positions),
        ("attention_distance", "distance", "Attention distance (Figures 7, right, and 11)", plots.draw_distances),
        (
            "attention_distance_renormalized",
            "renormalized",
            "Attention distance among patches",
            plots.draw_renormalized_distances,
        ),
    )
    figures = []
    for key, name, caption, draw in panels:
        if key in result.arrays:
            stream = io.BytesIO()
            plots.write_png(plots.panel(result, draw), stream)
            shown = _figure(data_address(stream.getvalue()), caption)
            figures.append(f"<div>{shown}<p>{html.escape(explanation(name, result))}</p></div>")
    if not figures:
        return ""
    lines = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences(result))
    return (
        "<h2>What the model learned</h2><p>Figures are named after those of the paper "
        "<i>An Image is Worth 16x16 Words</i>.</p>"
        f'<div class="panels">{"".join(figures)}</div>{f"<ul>{lines}</ul>" if lines else ""}'
    )


def _maps(result: InspectionResult) -> str:
    """The pictures with their classes and maps, as in Figures 6 and 14."""
    cards = [
        Card(image.name, pixels, maps, result.predictions[index] if result.predictions else None, image.label)
        for index, (image, pixels, maps) in enumerate(
            zip(result.images, result.arrays["images"], maps_of(result), strict=True)
        )
    ]
    wrong = sum(is_mistake(card.label, card.ranked) for card in cards) if not result.scoring.is_multi_label else 0
    mistakes = f" {wrong} of these {len(cards)} are mistakes." if wrong else ""
    legend = "".join(
        f"<li>{html.escape(explanation(name, result))}</li>" for name in plots.OF_PICTURES if name in result.arrays
    )
    listed = f"<ul>{legend}</ul>{SCALE}" if legend else ""
    shown = _cards(cards, "h3", result.scoring)
    classes = ", with the likeliest classes" if result.predictions else ""
    return f"<h2>Pictures</h2><p>As the model sees them{classes}.{mistakes}</p>{listed}{shown}"


def is_mistake(label: str | None, ranked: RankedClasses | None) -> bool:
    """Whether the likeliest class of an image is not its label, where both are known."""
    return label is not None and ranked is not None and ranked.likeliest[0][0] != label


def _cards(cards: Sequence[Card], heading: str, scoring: Scoring) -> str:
    """The input, maps and classes of each image, under headings of this level."""
    articles = []
    for card in cards:
        tiles = [_figure(_image_address(card.pixels), "input", "pixels")]
        tiles += [_figure(_map_address(values), _map_title(title, values)) for title, values in card.maps]
        label = "" if card.label is None else f" <small>label: {html.escape(card.label)}</small>"
        if is_mistake(card.label, card.ranked) and not scoring.is_multi_label:
            label += ' <small class="wrong"><b>mistake</b></small>'
        articles.append(
            f"<article><{heading}>{html.escape(card.name)}{label}</{heading}>"
            f'<div class="tiles">{"".join(tiles)}</div>{guesses(card.ranked, scoring)}</article>'
        )
    return f'<div class="cards">{"".join(articles)}</div>'


def _map_title(title: str, values: np.ndarray) -> str:
    return title if values.max() > 0.0 else f"{title}: dark, since nothing counts"


def guesses(ranked: RankedClasses | None, scoring: Scoring) -> str:
    """The likeliest classes of an image, and which of them count."""
    if ranked is None:
        return ""
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
        f"<h2>Layer by layer</h2><p>{html.escape(explanation('attention', result))}</p>"
        f'<div class="choices">{choices}</div><p class="slider"><label for="layer">layer <output id="shown">'
        f'{result.layers[0]}</output></label><input type="range" id="layer" min="0" max="{len(result.layers) - 1}" '
        f'value="0"></p>{SCALE}<div class="heads">{tiles}</div>'
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
    return data_address(stream.getvalue())


def _image_address(image: np.ndarray) -> str:
    stream = io.BytesIO()
    matplotlib.image.imsave(stream, np.ascontiguousarray(_thinned(plots.as_rgb(image))), format="png")
    return data_address(stream.getvalue())


def _thinned(image: np.ndarray) -> np.ndarray:
    step = -(-max(image.shape[:2]) // _LARGEST_SIDE)
    return image[::step, ::step]


# The scale of maps that are divided by their maximum, as a gradient of a few of its colors.
_COLORS = ", ".join(matplotlib.colors.to_hex(matplotlib.colormaps[plots.COLORMAP](step / 8)) for step in range(9))
SCALE = (
    f'<p class="scale"><span>low</span><span class="bar" role="img" aria-label="color scale" '
    f'style="background: linear-gradient(to right, {_COLORS})"></span>'
    "<span>high (each map scaled separately)</span></p>"
)

_STYLE = """
canvas, .pixels { image-rendering: pixelated; }
.panels { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); }
.panels figure { max-width: 36rem; } .panels p { margin: 0.25rem 0; }
.wrong { color: #b34700; }
.tiles { display: grid; gap: 0.5rem; grid-template-columns: 1fr 1fr; }
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
