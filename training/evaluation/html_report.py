"""report.html: what a model gets wrong, as one page that needs no network and is readable on a phone.

It begins with the mistakes as pictures; then come the classes as bars, and which classes are taken for which.
"""

import dataclasses
import html
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_vit.inspection.html_page import document, thumbnail_address
from training.evaluation.plots import LEGIBLE_CLASSES, most_confused
from training.input.dataset import Split

# Mistakes with a picture; each is about 5 kB of the page.
_PICTURES = 200
# Longest side of a picture in pixels.
_SIDE = 160
# Pairs of classes, where there are too many for a matrix.
_PAIRS = 30
# Measures that few people know, in words.
_MEANINGS = {
    "log loss": "The log loss is 0 if every answer is right and certain; sure mistakes raise it most.",
    "expected calibration error": "The expected calibration error is how far certainty and accuracy are apart: at 0, "
    "four of five pictures with a probability of 80 % are right.",
    "mean average precision": "The average precision of a class is 1 if all its pictures come before all others in "
    "the order of its probability.",
}


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A picture that is not classified as it is labelled."""

    index: int
    """Its number in the split."""
    label: tuple[str, ...]
    predicted: tuple[str, ...]
    worst: str
    """The class of the surest wrong decision."""
    probability: float
    """Of that class, 0 to 1."""
    label_probability: float | None = None
    """Of the label, where an image has one class."""


def mistakes_of(probabilities: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> list[Mistake]:
    """The mistakes for images of one class each, from (n, K) and (n,); those with the least probable label first."""
    own, predicted = probabilities[np.arange(len(labels)), labels], np.argmax(probabilities, axis=-1)
    wrong = np.flatnonzero(predicted != labels)
    found = []
    for n in wrong[np.argsort(own[wrong], kind="stable")]:
        name = names[predicted[n]]
        highest = float(probabilities[n].max())
        found.append(Mistake(int(n), (names[labels[n]],), (name,), name, highest, float(own[n])))
    return found


def mistakes_of_several(probabilities: np.ndarray, truth: np.ndarray, names: Sequence[str]) -> list[Mistake]:
    """As `mistakes_of`, for images of several classes, from (n, K) and (n, K) bool; the surest wrong decision first."""
    chosen = probabilities >= 0.5
    surest = np.where(truth != chosen, np.abs(probabilities - 0.5), -1.0)
    found = []
    for n in np.argsort(-surest.max(axis=1), kind="stable"):
        if surest[n].max() >= 0.0:
            k = int(surest[n].argmax())
            label, predicted = (tuple(np.asarray(names)[row].tolist()) for row in (truth[n], chosen[n]))
            found.append(Mistake(int(n), label, predicted, names[k], float(probabilities[n, k])))
    return found


@dataclasses.dataclass(frozen=True)
class Bar:
    """The score of a class."""

    name: str
    num_images: int
    values: tuple[float | None, float]
    """Of the two scores, 0 to 1; None where the class has no image."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What the page says beside the pictures."""

    title: str
    headline: str
    """The result in a sentence."""
    facts: Sequence[tuple[str, str, str]]
    """Measures in words, with their values and intervals."""
    bars: Sequence[Bar]
    bar_titles: tuple[str, str]
    """What the scores of a bar are."""
    confusion: np.ndarray | None
    """(K, K): images by label and predicted class; None for images of several classes."""
    notes: Sequence[str] = ()
    """Sentences below the headline."""


def html_report(report: Report, split: Split, mistakes: Sequence[Mistake], root: str) -> str:
    """Return the page as text.

    Args:
        report: the rest of the page.
        split: the images.
        mistakes: the worst first; so many are shown as a page can hold.
        root: folder of the images, which is left out of their names.
    """
    names = [bar.name for bar in report.bars]
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in report.notes)
    sections = [
        f"<h1>{html.escape(report.title)}</h1><p><b>{html.escape(report.headline)}</b></p>{notes}",
        _mistakes(split, mistakes, root),
        _bars(report),
        "" if report.confusion is None else _confusion(report.confusion, names),
        _facts(report.facts),
    ]
    return document(report.title, sections, style=_STYLE, script=_SCRIPT)


def _mistakes(split: Split, mistakes: Sequence[Mistake], root: str) -> str:
    if not mistakes:
        return "<h2>Mistakes</h2><p>None: every picture is classified as it is labelled.</p>"
    shown = mistakes[:_PICTURES]
    cards = "".join(_card(split, mistake, order, root) for order, mistake in enumerate(shown))
    classes = sorted({name for mistake in shown for name in (*mistake.label, *mistake.predicted)})
    options = "".join(f"<option>{html.escape(name)}</option>" for name in classes)
    rest = "" if len(shown) == len(mistakes) else f", the {len(shown)} worst of {len(mistakes):,}"
    return (
        f"<h2>Mistakes{rest}</h2><p>The model is surest of the first ones: look at them for wrong labels, and for what "
        "they have in common. predictions.csv lists every picture.</p>"
        '<p class="controls"><label>Order <select id="order"><option value="order">surest mistakes first</option>'
        '<option value="unsure">closest calls first</option><option value="label">by label</option>'
        '<option value="predicted">by predicted class</option></select></label> '
        f'<label>Class <select id="class"><option value="">all</option>{options}</select></label> '
        f'<output id="count">{len(shown)} pictures</output></p><div class="cards" id="mistakes">{cards}</div>'
    )


def _card(split: Split, mistake: Mistake, order: int, root: str) -> str:
    name = split.name(mistake.index).removeprefix(root).lstrip("/")
    label, predicted = (", ".join(names) or "none" for names in (mistake.label, mistake.predicted))
    classes = "\n".join((*mistake.label, *mistake.predicted))
    keys = {"order": order, "label": label, "predicted": predicted, "classes": classes}
    data = "".join(f' data-{key}="{html.escape(str(value))}"' for key, value in keys.items())
    lines = [
        f"label <b>{html.escape(label)}</b>",
        f'predicted <b class="wrong">{html.escape(predicted)}</b>',
    ]
    if mistake.label_probability is not None:
        lines = [f"{lines[0]} {_percent(mistake.label_probability)}", f"{lines[1]} {_percent(mistake.probability)}"]
    else:
        lines.append(f"surest mistake: {html.escape(mistake.worst)} {_percent(mistake.probability)}")
    return (
        f"<article{data}>{_picture(split, mistake.index, name)}<p>{'<br>'.join(lines)}</p>"
        f"<small>{html.escape(name)}</small></article>"
    )


def _picture(split: Split, index: int, name: str) -> str:
    """The picture as it is stored, reduced; or why it cannot be shown: one picture must not cost the others."""
    try:
        address = thumbnail_address(split.example(tf.constant(index, tf.int64))[0].numpy(), _SIDE)
    except Exception as error:
        return f'<p class="none">cannot be shown: {html.escape(str(error)[:120])}</p>'
    return f'<img src="{address}" alt="{html.escape(name)}">'


def _bars(report: Report) -> str:
    first, second = (html.escape(title) for title in report.bar_titles)
    rows = "".join(
        f'<tr data-name="{html.escape(bar.name)}" data-images="{bar.num_images}" '
        f'data-score="{-1.0 if bar.values[0] is None else bar.values[0]:.4f}"><th scope="row">{html.escape(bar.name)}'
        f"</th><td>{bar.num_images:,}</td>{''.join(_bar(value) for value in bar.values)}</tr>"
        for bar in sorted(report.bars, key=lambda bar: 2.0 if bar.values[0] is None else bar.values[0])
    )
    return (
        "<h2>Classes</h2>"
        '<p class="controls"><label>Order <select id="rows"><option value="score">weakest first</option>'
        '<option value="images">most images first</option><option value="name">by name</option></select></label></p>'
        '<div class="scroll"><table class="bars"><thead><tr><th scope="col">class</th><th scope="col">images</th>'
        f'<th scope="col">{first}</th><th scope="col">{second}</th></tr></thead><tbody id="bars">{rows}</tbody></table>'
        "</div>"
    )


def _bar(value: float | None) -> str:
    if value is None:
        return "<td>no image</td>"
    return f'<td><span class="bar" style="--share: {value:.4f}">{_percent(value)}</span></td>'


def _confusion(matrix: np.ndarray, names: Sequence[str]) -> str:
    """The matrix; of more classes than are legible, the most confused pairs."""
    title = "<h2>Which classes are taken for which?</h2>"
    if len(names) > LEGIBLE_CLASSES:
        return title + _pairs(matrix, names)
    head = "".join(f'<th scope="col"><span>{html.escape(name)}</span></th>' for name in names)
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(names[row])}</th>'
        + "".join(
            f'<td class="{"right" if row == column else "off"}" style="--share: {share[row, column]:.3f}">'
            f"{count or ''}</td>"
            for column, count in enumerate(counts)
        )
        + "</tr>"
        for row, counts in enumerate(matrix.tolist())
    )
    return (
        f"{title}<p>Rows are labels, columns what the model says; numbers are pictures. Blue is right, orange wrong, "
        'stronger for a larger share of the row.</p><div class="scroll"><table class="matrix"><thead><tr><td></td>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _pairs(matrix: np.ndarray, names: Sequence[str]) -> str:
    pairs = most_confused(matrix, _PAIRS)
    if not pairs:
        return "<p>None.</p>"
    rows = "".join(
        f'<tr><th scope="row">{html.escape(names[row])}</th><td>{html.escape(names[column])}</td>'
        f"<td>{count:,}</td>{_bar(count / matrix[row].sum())}</tr>"
        for row, column, count in pairs
    )
    return (
        f"<p>The {len(pairs)} most frequent confusions. A matrix of {len(names):,} classes would not be legible.</p>"
        '<div class="scroll"><table class="bars"><thead><tr><th scope="col">label</th><th scope="col">predicted</th>'
        f'<th scope="col">images</th><th scope="col">of the label</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _facts(facts: Sequence[tuple[str, str, str]]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{html.escape(words)}</th><td>{value}</td><td>{interval}</td></tr>'
        for words, value, interval in facts
    )
    meanings = " ".join(meaning for name, meaning in _MEANINGS.items() if any(name in words for words, *_ in facts))
    return (
        '<h2>All measures</h2><div class="scroll"><table class="facts"><thead><tr><th scope="col">measure</th>'
        f'<th scope="col">value</th><th scope="col">95 % interval</th></tr></thead><tbody>{rows}</tbody></table></div>'
        f"<p>{meanings}</p>"
        "<p>The interval says how far chance reaches: another sample of as many pictures could give any value in it. "
        "To see whether another model is really better, evaluate it with <code>--compare</code>.</p>"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f}&nbsp;%" if share >= 0.005 or share == 0.0 else "&lt;&nbsp;1&nbsp;%"


_STYLE = """
p { margin: 0.4rem 0; max-width: 48rem; } .controls { max-width: none; } article small { font-size: 0.75rem; }
.cards { gap: 0.75rem; grid-template-columns: repeat(auto-fill, minmax(min(10.5rem, 45%), 1fr)); }
article { padding: 0.5rem; font-size: 0.85rem; }
article img, .none { height: 9rem; object-fit: contain; background: #f4f4f4; }
.wrong { color: #b34700; }
.scroll { overflow: auto; max-height: 40rem; max-width: 100%; }
table { border-collapse: collapse; font-size: 0.85rem; }
th, td { padding: 0.15rem 0.5rem; text-align: left; font-weight: normal; overflow-wrap: normal; }
thead th { position: sticky; top: 0; background: #fff; border-bottom: 1px solid #999; font-weight: bold; }
th[scope=row] { min-width: 6rem; max-width: 14rem; overflow-wrap: anywhere; }
.bars td:nth-child(n+3) { min-width: 6rem; }
.bar { display: block; padding: 0 0.25rem; white-space: nowrap; background: linear-gradient(to right,
  #9ecae9 calc(var(--share) * 100%), #eee calc(var(--share) * 100%)); }
.matrix td { text-align: right; min-width: 1.6rem; border: 1px solid #eee; }
.matrix thead th { vertical-align: bottom; text-align: left; padding: 0.15rem; }
.matrix thead span { writing-mode: vertical-rl; transform: rotate(180deg); max-height: 10rem; overflow: hidden; }
.matrix .right { background: rgb(0 114 178 / calc(var(--share) * 60%)); }
.matrix .off { background: rgb(213 94 0 / calc(var(--share) * 80%)); }
code { white-space: nowrap; }
@media (max-width: 30rem) {
  th, td { padding: 0.15rem 0.25rem; } .bars td:nth-child(n+3) { min-width: 4rem; }
  th[scope=row] { min-width: 4.5rem; }
}
"""

_SCRIPT = """
const order = document.getElementById("order"), chosen = document.getElementById("class");
const sorted = (place, key) => place.append(...[...place.children].sort(key));
const by = key => (a, b) => a.dataset[key].localeCompare(b.dataset[key]) || a.dataset.order - b.dataset.order;
function show() {
  const place = document.getElementById("mistakes");
  sorted(place, order.value === "order" ? (a, b) => a.dataset.order - b.dataset.order
    : order.value === "unsure" ? (a, b) => b.dataset.order - a.dataset.order : by(order.value));
  let count = 0;
  for (const card of place.children) {
    card.hidden = chosen.value && !card.dataset.classes.split("\\n").includes(chosen.value);
    count += !card.hidden;
  }
  document.getElementById("count").textContent = count + (count === 1 ? " picture" : " pictures");
}
if (order) { order.addEventListener("change", show); chosen.addEventListener("change", show); }
document.getElementById("rows").addEventListener("change", event => {
  const key = event.target.value, value = row => row.dataset.score < 0 ? 2 : Number(row.dataset.score);
  sorted(document.getElementById("bars"), key === "name" ? (a, b) => a.dataset.name.localeCompare(b.dataset.name)
    : key === "images" ? (a, b) => b.dataset.images - a.dataset.images : (a, b) => value(a) - value(b));
});
"""
