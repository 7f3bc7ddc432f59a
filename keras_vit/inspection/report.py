"""Write the plots, arrays and HTML report of an inspection to a directory."""

import io
import json
import os
import pathlib
from typing import Any

import matplotlib
import matplotlib.colors
import matplotlib.image
import numpy as np

from keras_vit.cli.pages import data_address, render
from keras_vit.files.atomic import staged
from keras_vit.files.npz import write_npz
from keras_vit.files.remote import output_folder
from keras_vit.files.tables import short_name
from keras_vit.inspection import plots
from keras_vit.inspection.compute import InspectionResult, is_mistake

_MEASURES = "measures.json"
_LARGEST_SIDE = 320  # longest side of an image in the report, in pixels; larger images are subsampled
# The scale of maps that are divided by their maximum: a few of its colors.
_COLORS = ", ".join(matplotlib.colors.to_hex(matplotlib.colormaps[plots.COLORMAP](step / 8)) for step in range(9))
# Arrays that have a panel: array, explanation, caption, and the function that draws it.
_PANELS = (
    ("filters", "filters", "Filters of the first layer (Figure 7, left)", plots.draw_filters),
    ("position_similarity", "positions", "Positions (Figures 7, center, and 10)", plots.draw_positions),
    ("attention_distance", "distance", "Attention distance (Figures 7, right, and 11)", plots.draw_distances),
    ("attention_distance_renormalized", "renormalized", "Attention distance among patches", plots.draw_renormalized),
)


def write(result: InspectionResult, output: str | os.PathLike) -> list[str]:
    """Write each figure as PNG, arrays.npz, measures.json and index.html. Return the file names.

    Files are moved to the directory after all are written. Figures of an earlier report that are not overwritten are
    removed.
    """
    folder = output_folder(output)
    earlier = _figures_of(folder)
    with staged(folder) as stage:
        for name, figure in plots.draw_all(result):
            plots.write_png(figure, stage / name)
        write_npz(stage / "arrays.npz", result.arrays)
        (stage / "index.html").write_text(html_report(result), encoding="utf-8")
        names = sorted([*(path.name for path in pathlib.Path(stage).iterdir()), _MEASURES])
        measures = json.dumps({**result.measures, "files": names}, indent=2)
        (stage / _MEASURES).write_text(measures + "\n", encoding="utf-8")
    for path in earlier:
        if path.name not in names:
            path.unlink(missing_ok=True)
    return names


def _figures_of(output: pathlib.Path) -> list[pathlib.Path]:
    """Return the PNG files in the directory that an earlier report's measures.json, which is not trusted, lists."""
    try:
        listed = json.loads((output / _MEASURES).read_text(encoding="utf-8"))["files"]
        return [path for path in output.glob("*.png") if path.name in [*listed] and path.is_file()]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def html_report(result: InspectionResult) -> str:
    """Return the report as HTML text."""
    size = f"{result.image_size[0]} x {result.image_size[1]} pixels"
    size += f", {result.grid[0]} x {result.grid[1]} patches" if result.grid else ""
    cards = _cards(result)
    return render(
        "inspection",
        title=result.model,
        checkpoint=short_name(result.checkpoint),
        architecture=result.architecture,
        size=size,
        cards=cards,
        has_classes=bool(result.predictions),
        mistakes=sum(card["is_mistake"] for card in cards),
        scoring=result.scoring,
        legend=[plots.explanation(name, result) for name in plots.OF_IMAGES if name in result.arrays],
        colors=_COLORS,
        layers=_layers(result),
        panels=_panels(result),
        sentences=sentences(result),
    )


def maps_of(result: InspectionResult) -> list[list[tuple[str, np.ndarray]]]:
    """Return titles and maps of each image, as small as a page needs them."""
    maps = (plots.image_maps(result, index) for index in range(len(result.images)))
    return [[(title, _thinned(values)) for title, values in of_image] for of_image in maps]


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
    return "1 image" if number == 1 else f"{number:,} images"


def _cards(result: InspectionResult) -> list[dict[str, Any]]:
    cards = []
    for index, (image, maps) in enumerate(zip(result.images, maps_of(result), strict=True)):
        ranked = result.predictions[index] if result.predictions else None
        titles = [title if values.max() > 0.0 else f"{title}: dark, since nothing counts" for title, values in maps]
        cards.append(
            {
                "name": image.name,
                "label": image.label,
                "is_mistake": is_mistake(image.label, ranked) and not result.scoring.is_multi_label,
                "address": _address(_thinned(plots.as_rgb(result.arrays["images"][index]))),
                "maps": [(title, _map_address(values)) for title, (_, values) in zip(titles, maps, strict=True)],
                "ranked": ranked,
            }
        )
    return cards


def _panels(result: InspectionResult) -> list[dict[str, str]]:
    panels = []
    for key, name, caption, draw in _PANELS:
        if key in result.arrays:
            stream = io.BytesIO()
            plots.write_png(plots.panel(result, draw), stream)
            name = "components" if name == "filters" and result.filters_are_components else name
            words = plots.explanation(name, result)
            panels.append({"address": data_address(stream.getvalue()), "caption": caption, "words": words})
    return panels


def _layers(result: InspectionResult) -> dict[str, Any] | None:
    """Return the maps of every head and layer, or None if the model has no attention."""
    if "attention" not in result.arrays:
        return None
    assert result.grid is not None
    sheets, (height, width) = [_sheet(result, index) for index in range(len(result.images))], result.grid
    addresses = [_map_address(values) for _, values in sheets]
    data = {"sheets": addresses, "layers": result.layers, "width": width, "height": height}
    return {"words": plots.explanation("attention", result), "columns": sheets[0][0], "data": data}


def _sheet(result: InspectionResult, index: int) -> tuple[list[str], np.ndarray]:
    """Return column names and a mosaic of maps, rows of layers and columns of heads: (L * h, columns * w)."""
    arrays = result.arrays
    names = [f"head {head}" for head in result.heads]
    maps = list(np.moveaxis(arrays["attention"][index], 1, 0))  # of (L, h, w) each
    if "rollout" in arrays:
        names.append("rollout")
        maps.append(arrays["rollout"][index][list(result.layer_numbers)])
    if "norms" in arrays:
        norms = arrays["norms"][index][[int(layer.split()[0]) for layer in result.layers]]  # twice for axial blocks
        names.append("token norms")
        maps.append(norms - norms.min(axis=(1, 2), keepdims=True))
    scaled = [values / np.maximum(values.max(axis=(1, 2), keepdims=True), 1e-30) for values in maps]
    return names, np.concatenate([values.reshape(-1, values.shape[-1]) for values in scaled], axis=1)


def _map_address(values: np.ndarray) -> str:
    return _address(values, cmap=plots.COLORMAP, vmin=0.0, vmax=1.0)


def _address(image: np.ndarray, **colors) -> str:
    stream = io.BytesIO()
    matplotlib.image.imsave(stream, np.ascontiguousarray(image), format="png", **colors)
    return data_address(stream.getvalue())


def _thinned(image: np.ndarray) -> np.ndarray:
    step = -(-max(image.shape[:2]) // _LARGEST_SIDE)
    return image[::step, ::step]
