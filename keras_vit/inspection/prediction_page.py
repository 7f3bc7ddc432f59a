"""The page of classified pictures: a summary, the pictures with their classes and maps, to be sorted and filtered."""

import collections
import dataclasses
import html
import io
from collections.abc import Mapping, Sequence

import matplotlib.image
import numpy as np

from keras_vit.inspection.html_page import data_address, document
from keras_vit.inspection.html_report import guesses
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
_SCALE = (
    '<p class="scale"><span>low</span><span class="bar" role="img" aria-label="color scale" style="background: '
    f'linear-gradient(to right, rgb{(*_COLOR, 0.0)}, rgb{(*_COLOR, _OPACITY)})"></span>'
    "<span>high (each map scaled separately)</span></p>"
)
# Shares of a picture that the frame of the model's part leaves out at least, to be shown.
_LEFT_OUT = 0.01


@dataclasses.dataclass(frozen=True)
class PictureCard:
    """What the page shows of one picture."""

    name: str
    ranked: RankedClasses
    groups: Sequence[str]
    """What the picture counts as in the summary."""
    maps: Sequence[tuple[str, np.ndarray]] = ()
    """Titles and maps (h, w), from 0 to 1, of the part of the picture that the model sees."""
    address: str = ""
    """Of the whole picture, inside the page."""
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
    missing = "".join(f"<li>{html.escape(f'{file}: {problem}')}</li>" for file, problem in problems.items())
    articles = "".join(_article(card, number, scoring) for number, card in enumerate(cards))
    title = "Most likely classes" if len(cards) == 1 else f"{len(cards):,} pictures"
    maps = (
        f"<p>{_LEGEND[explain]} A dashed frame is the part that the model sees, if not all. An empty map, or "
        f"one of very few patches, means nothing. A map shows where the model looks, not why.</p>{_SCALE}"
        if explain
        else ""
    )
    sections = [
        f"<h1>{title}</h1>",
        _summary(cards, problems) if len(cards) > 1 else "",
        maps,
        f'<div class="cards" id="pictures">{articles}</div>',
        f"<h2>Not classified</h2><ul>{missing}</ul>" if missing else "",
        f"<p>Model: {html.escape(model)}.</p>",
    ]
    return document(title, sections, style=_STYLE, script=_SCRIPT if len(cards) > 1 else "")


def groups_of(ranked: RankedClasses, scoring: Scoring) -> list[str]:
    """What a picture counts as: its class, of several all that it has, or why it has none."""
    if ranked.is_unknown:
        return ["(unknown)"]
    if ranked.is_rejected:
        return ["(rejected)"]
    return [name for name, _ in (ranked.chosen if scoring.is_multi_label else ranked.chosen[:1])]


def _summary(cards: Sequence[PictureCard], problems: Mapping[str, str]) -> str:
    """How many pictures each class has, and the choice of their order and class."""
    counts = collections.Counter(group for card in cards for group in card.groups)
    most = max(counts.values())
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{count:,}</td><td class="wide">'
        f'<span class="count" style="width: {100 * count / most:.1f}%"></span></td></tr>'
        for name, count in counts.most_common()
    )
    options = "".join(
        f'<option value="{html.escape(name)}">{html.escape(name)} ({count:,})</option>'
        for name, count in sorted(counts.items())
    )
    unread = f" {len(problems):,} more could not be read: they are listed at the end." if problems else ""
    classes = "1 class" if len(counts) == 1 else f"{len(counts):,} classes"
    return (
        f'<p>{classes}.{unread}</p><div class="scroll"><table>{rows}</table></div>'
        '<p class="controls"><label>Order <select id="order"><option value="number">as given</option>'
        '<option value="unsure">least certain first</option><option value="sure">most certain first</option>'
        '<option value="class">by class</option><option value="name">by name</option></select></label> '
        f'<label>Class <select id="class"><option value="">all</option>{options}</select></label> '
        f'<output id="count">{len(cards):,} pictures</output></p>'
    )


def _article(card: PictureCard, number: int, scoring: Scoring) -> str:
    name, groups = html.escape(card.name), html.escape("\n".join(card.groups))
    tiles = [f'<figure><img src="{card.address}" alt="{name}"><figcaption>picture</figcaption></figure>']
    tiles += [_overlay(card, title, values) for title, values in card.maps]
    sure = card.ranked.likeliest[0][1]
    return (
        f'<article data-number="{number}" data-sure="{sure:.6f}" data-groups="{groups}" data-name="{name}">'
        f'<h2>{name}</h2><div class="tiles{"" if card.maps else " one"}">{"".join(tiles)}</div>'
        f"{guesses(card.ranked, scoring)}</article>"
    )


def _overlay(card: PictureCard, title: str, values: np.ndarray) -> str:
    """The map over the part of the picture that it is of: the higher, the less of the picture shows through."""
    colors = np.empty((*values.shape, 4), np.uint8)
    colors[..., :3], colors[..., 3] = _COLOR, np.round(255.0 * _OPACITY * values)
    stream = io.BytesIO()
    matplotlib.image.imsave(stream, colors, format="png")
    left, top, right, bottom = (100.0 * edge for edge in card.seen)
    place = f"left: {left:.2f}%; top: {top:.2f}%; width: {right - left:.2f}%; height: {bottom - top:.2f}%"
    is_cropped = max(card.seen[:2]) > _LEFT_OUT or min(card.seen[2:]) < 1.0 - _LEFT_OUT
    caption = title if values.max() > 0.0 else f"{title}: nothing counts, so the map is empty"
    kind = "map cropped" if is_cropped else "map"
    return (
        f'<figure><div class="overlay"><img src="{card.address}" alt=""><img class="{kind}" style="{place}" '
        f'src="{data_address(stream.getvalue())}" alt="{html.escape(title)}"></div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


_STYLE = """
.tiles { display: grid; gap: 0.5rem; grid-template-columns: 1fr 1fr; align-items: start; }
.tiles.one { grid-template-columns: 1fr; } .tiles.one img { max-height: 16rem; object-fit: contain; }
.overlay { position: relative; overflow: hidden; }
.overlay > img:first-child { filter: grayscale(0.7); }
.overlay .map { position: absolute; max-width: none; }
.overlay .cropped { outline: 2px dashed #666; outline-offset: -2px; }
.scroll { overflow: auto; max-height: 20rem; } table { border-collapse: collapse; width: 100%; max-width: 40rem; }
th, td { padding: 0.1rem 0.5rem 0.1rem 0; text-align: left; font-weight: normal; }
td { text-align: right; } .wide { width: 55%; }
.count { display: block; height: 0.8rem; background: #9ecae9; }
"""

_SCRIPT = """
const place = document.getElementById("pictures"), order = document.getElementById("order");
const chosen = document.getElementById("class"), names = Intl.Collator(undefined, { numeric: true });
const orders = {
  number: (a, b) => a.dataset.number - b.dataset.number,
  sure: (a, b) => b.dataset.sure - a.dataset.sure,
  unsure: (a, b) => a.dataset.sure - b.dataset.sure,
  class: (a, b) => names.compare(a.dataset.groups, b.dataset.groups) || b.dataset.sure - a.dataset.sure,
  name: (a, b) => names.compare(a.dataset.name, b.dataset.name),
};
function show() {
  place.append(...[...place.children].sort(orders[order.value]));
  let count = 0;
  for (const card of place.children) {
    card.hidden = chosen.value && !card.dataset.groups.split("\\n").includes(chosen.value);
    count += !card.hidden;
  }
  document.getElementById("count").textContent = count + (count === 1 ? " picture" : " pictures");
}
order.addEventListener("change", show);
chosen.addEventListener("change", show);
"""
