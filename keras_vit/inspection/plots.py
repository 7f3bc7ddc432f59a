"""Plots of the paper's figures (arXiv 2010.11929) and related ones with matplotlib.

Maps use the cividis colormap, and dots are blue and orange (Okabe and Ito): readable with color vision deficiency and
in print.
"""

import functools
import math
import textwrap
from collections.abc import Iterator, Sequence

import matplotlib.cm
import matplotlib.figure
import matplotlib.image
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg

from keras_vit.files.tables import short_name
from keras_vit.inspection.analysis import resize_map
from keras_vit.inspection.compute import InspectionResult

COLORMAP = "cividis"
_FILTER_COLUMNS, _FILTERS_SHOWN = 7, 70
# Figures that are maps of each image.
OF_IMAGES = ("rollout", "relevance", "norms", "queries")
_TILES = 16  # of position embeddings, in each direction; more are not legible
_DPI = 110
# Up to so many patches, a map has too few values.
_FEW_PATCHES = 16
_OF_PATCHES = ("positions", "distance", "rollout", "relevance", "norms", "attention")

# What each figure shows, for somebody who has not read the paper, and when it means nothing.
_SENTENCES = {
    "components": "What the first layer tells apart in a patch: the patterns that explain most of its weights. A "
    "trained model has stripes, spots and colors; noise means that it learned little.",
    "filters": "What the first layer looks for. A trained model has edges and colors; noise means that it learned "
    "little.",
    "positions": "Each tile belongs to one patch and shows which positions are similar to its own for the model: in a "
    "trained model those nearby. Tiles that all look alike mean that the model learned no positions.",
    "distance": "How far each head looks, in pixels: low dots look at neighbors, high dots across the image. Dots at "
    "one height mean that the heads look everywhere, as in an untrained model.",
    "renormalized": "The same among the patches alone: what a head gives to the class token does not count.",
    "rollout": "Attention rollout: how much each part of the image reaches the result through all layers. It is the "
    "same for every class, and an even map means nothing.",
    "relevance": "Relevance (Grad-CAM): the parts that speak for the predicted class. Where the map is dark, nothing "
    "speaks for it; a map that is dark everywhere means nothing.",
    "norms": "Token norms: how strong the signal of each part is in the last layer. Single bright patches on the "
    "background are not objects: large models keep other information there.",
    "queries": "Queries: the parts that a query took for one thing, its class, and how sure it is. The four surest "
    "queries are shown; those of a class with a low probability found nothing.",
    "attention": "Where each head of each layer looks, from the output (the class token, or the mean of all tokens). "
    "Each map is scaled separately, so a nearly even map may look lively.",
}


def explanation(figure: str, result: InspectionResult) -> str:
    """Return the sentences under a figure: a name of `FIGURES`, components or renormalized."""
    sentence = _SENTENCES[figure]
    if figure in _OF_PATCHES and result.grid is not None and math.prod(result.grid) <= _FEW_PATCHES:
        rows, columns = result.grid
        sentence += f" This model has only {rows} x {columns} patches: too few values to mean much."
    return sentence


def draw_all(result: InspectionResult) -> Iterator[tuple[str, matplotlib.figure.Figure]]:
    """Yield the file name and figure of each plot of the result, one at a time to save memory."""
    for name, figure, explained in _figures(result):
        width = int(14.0 * figure.get_figwidth())  # letters of a line
        text = "\n".join(textwrap.fill(explanation(each, result), width) for each in explained)
        figure.supxlabel(text, fontsize=8, x=0.02, ha="left", parse_math=False)
        yield name, figure


def _figures(result: InspectionResult) -> Iterator[tuple[str, matplotlib.figure.Figure, Sequence[str]]]:
    """Yield the file name, the figure and what is explained under it."""
    arrays = result.arrays
    filters = "components" if result.filters_are_components else "filters"
    if {"filters", "position_similarity", "attention_distance"} <= arrays.keys():
        figure = _in_a_row(result, [draw_filters, draw_positions, draw_distances])
        yield "figure_07_inside.png", figure, (filters, "positions", "distance")
    if "rollout" in arrays:
        yield "figure_06_attention.png", _beside_inputs(result), ("rollout",)
    if "filters" in arrays:
        yield "filters.png", _in_a_row(result, [draw_filters]), (filters,)
    if "position_similarity" in arrays:
        yield "figure_10_positions.png", _in_a_row(result, [draw_positions]), ("positions",)
    if "attention_distance" in arrays:
        figure = _in_a_row(result, [draw_distances, draw_renormalized])
        yield "figure_11_distances.png", figure, ("distance", "renormalized")
    if image_maps(result, 0):
        yield "maps.png", _maps(result), [name for name in OF_IMAGES if name in arrays]
    for index in range(len(result.images) if "attention" in arrays else 0):
        yield f"heads_{index}.png", _heads(result, index), ("attention",)


def write_png(figure: matplotlib.figure.Figure, file) -> None:
    """Write a figure as PNG to a path or a binary file."""
    figure.set_dpi(_DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # savefig would draw the figure twice
    matplotlib.image.imsave(file, np.asarray(canvas.buffer_rgba()), format="png")


def panel(result: InspectionResult, draw) -> matplotlib.figure.Figure:
    """One panel as a figure without a title, for the HTML report."""
    figure = matplotlib.figure.Figure(figsize=(4.6, 4.2), layout="constrained")
    draw(figure.subplots(), result)
    return figure


def _shortened(text: str, length: int = 60, *, from_end: bool = False) -> str:
    """Return the printable characters of a name, truncated at the start, or of a class at the end."""
    shown = "".join(letter if letter.isprintable() and ord(letter) < 0x250 else "?" for letter in text)
    if len(shown) <= length:
        return shown
    return shown[: length - 3] + "..." if from_end else "..." + shown[3 - length :]


def _image_title(result: InspectionResult, index: int, length: int = 60) -> str:
    image = result.images[index]
    label = "" if image.label is None else f" ({_shortened(image.label, 12, from_end=True)})"
    return _shortened(image.name, length - len(label)) + label


def _titled(result: InspectionResult, size: tuple[float, float], note: str = "") -> matplotlib.figure.Figure:
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    lines = filter(None, (_shortened(result.model), _shortened(short_name(result.checkpoint)), note))
    figure.suptitle((" | " if size[0] > 7 else "\n").join(lines), fontsize=11, parse_math=False, wrap=True)
    return figure


def _in_a_row(result: InspectionResult, draws: list) -> matplotlib.figure.Figure:
    figure = _titled(result, (5.4 * len(draws), 5.2))
    for axes, draw in zip(np.atleast_1d(figure.subplots(1, len(draws))), draws, strict=True):
        draw(axes, result)
    return figure


def draw_filters(axes, result: InspectionResult) -> None:
    """Figure 7, left: each filter or component scaled to its range over all channels."""
    filters = result.arrays["filters"][:_FILTERS_SHOWN]
    low, high = (end(filters, axis=(1, 2, 3), keepdims=True) for end in (np.min, np.max))
    tiles = (filters - low) / np.maximum(high - low, np.finfo(np.float64).tiny)
    if tiles.shape[-1] != 3:
        tiles = tiles.mean(axis=-1, keepdims=True).repeat(3, axis=-1)
    rows = -(-len(tiles) // _FILTER_COLUMNS)
    missing = np.full((rows * _FILTER_COLUMNS - len(tiles), *tiles.shape[1:]), np.nan)
    tiles = np.concatenate([tiles, missing]).reshape(rows, _FILTER_COLUMNS, *tiles.shape[1:])
    axes.imshow(np.nan_to_num(_mosaic(tiles), nan=1.0), interpolation="nearest")
    axes.set_axis_off()
    title = f"Embedding filters: first {len(filters)} principal components"
    if not result.filters_are_components:
        title = f"Filters of the first convolution: {len(filters)} of {len(result.arrays['filters'])}"
    axes.set_title(title, fontsize=10)


def draw_positions(axes, result: InspectionResult) -> None:
    """Figures 7, center, and 10: each tile shows the similarity of one patch to all patches."""
    assert result.grid is not None
    rows, columns = result.grid
    tiles = result.arrays["position_similarity"].reshape(rows, columns, rows, columns)
    step = -(-max(rows, columns) // _TILES)
    tiles = tiles[::step, ::step]
    image = axes.imshow(_mosaic(tiles), cmap=COLORMAP, vmin=-1.0, vmax=1.0, interpolation="nearest")
    _label_tiles(axes, tiles.shape, [f"{n * step}" for n in range(max(tiles.shape[:2]))])
    axes.set(xlabel="input patch column", ylabel="input patch row")
    every = f", every {step}th patch" if step > 1 else ""
    axes.set_title(f"Position embedding similarity{every}", fontsize=10)
    axes.figure.colorbar(image, ax=axes, label="cosine similarity", shrink=0.8)


def _draw_dots(axes, result: InspectionResult, *, key: str, how: str, color: str) -> None:
    distances = result.arrays[key]  # (L, H)
    depth = np.arange(len(distances))
    axes.plot(depth, np.median(distances, axis=1), color="0.6", linewidth=1.0, zorder=1)
    axes.scatter(depth.repeat(distances.shape[1]), distances, s=22, color=color, alpha=0.75, linewidths=0, zorder=2)
    height, width = result.image_size
    axes.set(xlabel="network depth (layer)", ylabel="mean attention distance (pixels)")
    axes.set_ylim(0.0, 1.08 * distances.max() or 1.0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    images = f"{result.num_averaged:,} image{'s' * (result.num_averaged != 1)}"
    axes.set_title(f"One dot per head, {how}\n{images} of {height}x{width} px", fontsize=10)


# Figures 7, right, and 11: a dot for each head; and with each row of attention divided by its sum over the patches.
draw_distances = functools.partial(_draw_dots, key="attention_distance", how="not renormalized", color="#0072B2")
draw_renormalized = functools.partial(
    _draw_dots, key="attention_distance_renormalized", how="rows renormalized", color="#D55E00"
)


def _aspect(result: InspectionResult) -> float:
    """Height of an input divided by its width, clipped to a range that fits a figure."""
    return float(np.clip(result.image_size[0] / result.image_size[1], 0.2, 5.0))


def _beside_inputs(result: InspectionResult) -> matplotlib.figure.Figure:
    """Figures 6 and 14: the input, and the input times the rollout of attention divided by its maximum."""
    count = len(result.images)
    columns = min(count, 4)
    rows = -(-count // columns)
    size = max(5.4, 3.2 * columns), 0.7 + (0.4 + 1.6 * _aspect(result)) * rows
    figure = _titled(result, size, "input, and input times attention rollout")
    cells = figure.subplots(rows, 2 * columns, squeeze=False).reshape(-1, 2)
    for axes in cells[count:].flat:
        axes.set_axis_off()
    for index, (left, right) in enumerate(cells[:count]):
        image = result.arrays["images"][index]
        mask = resize_map(result.arrays["rollout"][index, -1], image.shape[:2])[:, :, None]
        show_image(left, image)
        show_image(right, np.round(image * mask).astype(np.uint8))
        left.set_title(_image_title(result, index, 24), fontsize=8, parse_math=False)
        right.set_title("attention", fontsize=8)
    return figure


def show_image(axes, image: np.ndarray) -> None:
    """An image (h, w, C) uint8 without axes."""
    axes.imshow(as_rgb(image), interpolation="nearest")
    axes.set_axis_off()


def as_rgb(image: np.ndarray) -> np.ndarray:
    """(h, w, C) -> (h, w, 3); of an image that is not RGB its first channel, gray."""
    return image if image.shape[-1] == 3 else image[:, :, :1].repeat(3, axis=-1)


def image_maps(result: InspectionResult, index: int) -> list[tuple[str, np.ndarray]]:
    """Return titles and maps of one image, resized to its size, from 0 to 1."""
    arrays, maps = result.arrays, []
    if "rollout" in arrays:
        maps.append(("attention rollout", arrays["rollout"][index, -1]))
    if "relevance" in arrays:
        maps.append(("relevance for the predicted class", arrays["relevance"][index]))
    if "norms" in arrays:
        norms = arrays["norms"][index, -1]
        maps.append(("token norms", norms - norms.min()))
    if result.queries:
        maps += zip(result.queries[index], arrays["queries"][index], strict=True)
    return [(title, resize_map(values, arrays["images"].shape[1:3])) for title, values in maps]


def _maps(result: InspectionResult) -> matplotlib.figure.Figure:
    count, columns = len(result.images), 1 + len(image_maps(result, 0))
    figure = _titled(result, (2.6 * columns + 0.9, 0.8 + (0.4 + 2.6 * _aspect(result)) * count))
    for index, row in enumerate(figure.subplots(count, columns, squeeze=False)):
        show_image(row[0], result.arrays["images"][index])
        title = _image_title(result, index, 26)
        if result.predictions:
            label, probability = result.predictions[index].likeliest[0]
            title += f"\npredicted {_shortened(label, 14, from_end=True)}, {probability:.1%}"
        row[0].set_title(title, fontsize=9, parse_math=False)
        for axes, (name, values) in zip(row[1:], image_maps(result, index), strict=True):
            axes.imshow(values, cmap=COLORMAP, vmin=0.0, vmax=1.0)
            axes.set_axis_off()
            axes.set_title(_shortened(name, 34, from_end=True), fontsize=9, parse_math=False)
        _scale(figure, row)
    return figure


def _scale(figure: matplotlib.figure.Figure, axes) -> None:
    """The scale of maps that are divided by their maximum, beside them."""
    colors = matplotlib.cm.ScalarMappable(norm=matplotlib.colors.Normalize(0.0, 1.0), cmap=COLORMAP)
    figure.colorbar(colors, ax=axes, label="share of the map's maximum", shrink=0.8)


def _heads(result: InspectionResult, index: int) -> matplotlib.figure.Figure:
    """Attention of each selected layer and head to the patches of one image, each map divided by its maximum."""
    maps = result.arrays["attention"][index]  # (L, H, h, w)
    tiles = maps / np.maximum(maps.max(axis=(2, 3), keepdims=True), np.finfo(np.float32).tiny)
    layers, heads, height, width = tiles.shape
    across, down = 0.55 * heads, 0.55 * layers * height / width
    figure = _titled(result, (max(5.0, across + 2.0), max(2.8, down + 1.5)), _image_title(result, index, 40))
    axes = figure.subplots()
    axes.imshow(_mosaic(tiles), cmap=COLORMAP, vmin=0.0, vmax=1.0, interpolation="nearest")
    _label_tiles(axes, tiles.shape, [str(head) for head in result.heads], list(result.layers))
    axes.set(xlabel="head", ylabel="layer")
    _scale(figure, axes)
    return figure


def _mosaic(tiles: np.ndarray) -> np.ndarray:
    """Arrange tiles (rows, columns, h, w, ...) in one array with NaN between them: (rows * (h + 1) - 1, ...)."""
    padding = [(0, 0), (0, 0), (0, 1), (0, 1)] + [(0, 0)] * (tiles.ndim - 4)
    tiles = np.pad(tiles, padding, constant_values=np.nan)
    rows, columns, height, width = tiles.shape[:4]
    return tiles.swapaxes(1, 2).reshape(rows * height, columns * width, *tiles.shape[4:])[:-1, :-1]


def _label_tiles(axes, shape: tuple[int, ...], columns: list[str], rows: list[str] | None = None) -> None:
    """Ticks at the centers of a mosaic's tiles."""
    rows = columns if rows is None else rows
    axes.set_xticks(np.arange(shape[1]) * (shape[3] + 1) + (shape[3] - 1) / 2, columns[: shape[1]], fontsize=8)
    axes.set_yticks(np.arange(shape[0]) * (shape[2] + 1) + (shape[2] - 1) / 2, rows[: shape[0]], fontsize=8)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
