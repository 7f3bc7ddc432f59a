"""The page on which a person goes through what is odd in a data set, and the file of the decisions."""

import html
import json
import math
import pathlib
from collections.abc import Iterable, Sequence

from keras_vit.files.atomic import atomic_write, write_text
from keras_vit.files.tables import CsvWriter
from training.features.findings import ClassCoverage, Findings, Overlap, findings_of
from training.features.pages import Thumbnails, page, picture
from training.features.store import FeatureIndex
from training.input.decisions import COLUMNS, Decision, read_decisions
from training.options.features import ReviewOptions

DECISIONS = "decisions.csv"
_PAGE = "review.html"
# Pairs of classes with pictures, and in the table.
_SHOWN_PAIRS, _LISTED_PAIRS = 6, 20
# Pictures of one group of copies.
_OF_GROUP = 12


def review(index: FeatureIndex, options: ReviewOptions) -> pathlib.Path:
    """Write review.html and decisions.csv, print what was found, and return the file of the decisions.

    Decisions that the file already has are kept.
    """
    found = findings_of(index, options.duplicate_similarity)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    decisions = folder / DECISIONS
    reasons = _reasons(index, found, options.shown)
    earlier = _earlier(decisions)
    _write_decisions(decisions, index, found, reasons, earlier)
    write_text(folder / _PAGE, _page(index, found, reasons, earlier, options))
    in_two = sum(len({index.pictures.splits[row] for row in group}) > 1 for group in found.copies)
    print(f"Copies: {len(found.copies):,} groups of equal or nearly equal pictures, {in_two:,} of them in two splits.")
    if len(found.suggested):
        share = len(found.wrong_labels) / len(found.suggested)
        print(f"Suspicious labels: {len(found.wrong_labels):,} of {len(found.suggested):,} ({share:.1%}).")
    print(f"Unlike all others: {len(found.odd):,}.")
    for overlap in found.overlaps[:3]:
        print(f"Overlap: {' and '.join(overlap.names)}, {overlap.confused:.1%} with the label of the other.")
    print(f"Open {folder / _PAGE} in a browser; the decisions are in {decisions}.")
    return decisions


def _reasons(index: FeatureIndex, found: Findings, shown: int) -> dict[int, str]:
    """Row -> why it is on the page, for all pictures that are."""
    reasons: dict[int, list[str]] = {}
    for group in found.copies[:shown]:
        for row in group[:_OF_GROUP]:
            reasons.setdefault(row, []).append("copy")
    for row in found.wrong_labels[:shown].tolist():
        reasons.setdefault(row, []).append("suspicious label")
    for row in found.odd[:shown].tolist():
        reasons.setdefault(row, []).append("unlike all others")
    for overlap in found.overlaps[:_SHOWN_PAIRS]:
        for row in overlap.examples:
            reasons.setdefault(row, []).append("like another class")
    return {row: ", ".join(dict.fromkeys(texts)) for row, texts in reasons.items()}


def _earlier(file: pathlib.Path) -> dict[tuple[str, str], Decision]:
    """What was decided before, by path and digest; without keep, which stands for every picture from the beginning."""
    if not file.is_file():
        return {}
    found = [one for decisions in read_decisions(str(file)).by_digest.values() for one in decisions]
    return {(one.path, one.digest): one for one in found if one.decision != "keep"}


def _suggestion(index: FeatureIndex, found: Findings, row: int) -> str:
    """The likeliest class of a picture, if it is not its label; else ""."""
    if not len(found.suggested):
        return ""
    name = index.description.labels[found.suggested[row]]
    return "" if name == index.pictures.labels[row] else name


def _write_decisions(
    file: pathlib.Path,
    index: FeatureIndex,
    found: Findings,
    reasons: dict[int, str],
    earlier: dict[tuple[str, str], Decision],
) -> None:
    """Write a line for each picture on the page, which keeps it where nothing else was decided before."""
    pictures = index.pictures
    with atomic_write(file) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = CsvWriter(stream)
        writer.writerow(COLUMNS)
        for row, reason in sorted(reasons.items()):
            key = pictures.paths[row], pictures.digests[row]
            known = earlier.get(key) or Decision(*key, "keep", _suggestion(index, found, row))
            writer.writerow([*key, known.decision, known.new_label, reason])
        on_page = {(pictures.paths[row], pictures.digests[row]) for row in reasons}
        for key, known in earlier.items():
            if key not in on_page:
                writer.writerow([*key, known.decision, known.new_label, "decided before"])


class _Cards:
    """Cards of pictures, each with its choice."""

    def __init__(self, index: FeatureIndex, found: Findings) -> None:
        self._index, self._found, self._thumbnails, self._count = index, found, Thumbnails(index), 0

    def of(self, rows: Iterable[int], notes: Sequence[str]) -> str:
        """The cards of rows, each with a note in HTML."""
        cards = "".join(self._card(row, note) for row, note in zip(rows, notes, strict=True))
        return f'<div class="cards">{cards}</div>'

    def _card(self, row: int, note: str) -> str:
        pictures, number = self._index.pictures, self._count
        self._count += 1
        address = self._thumbnails.address(row, pictures.paths[row], pictures.splits[row])
        radios = "".join(
            f'<label><input type="radio" name="d{number}" value="{name}"> {name}</label>'
            for name in ("keep", "relabel", "drop")
            if name != "relabel" or len(self._found.suggested)
        )
        suggestion = html.escape(_suggestion(self._index, self._found, row), quote=True)
        relabel = (
            f'<input class="label" list="classes" aria-label="new label" value="{suggestion}" size="12">'
            if len(self._found.suggested)
            else ""
        )
        label = html.escape(pictures.labels[row] or "")
        split = f" ({pictures.splits[row]})" if len(self._index.description.splits) > 1 else ""
        return (
            f'<div class="card" data-row="{row}">{picture(address, pictures.paths[row])}'
            f"<b>{label}{split}</b>{note} <small>{html.escape(self._index.shown(pictures.paths[row]))}</small>"
            f'<div class="choice">{radios}{relabel}</div></div>'
        )


def _page(
    index: FeatureIndex,
    found: Findings,
    reasons: dict[int, str],
    earlier: dict[tuple[str, str], Decision],
    options: ReviewOptions,
) -> str:
    cards, pictures, shown = _Cards(index, found), index.pictures, options.shown
    sections = [
        "<h1>Review of the data</h1>",
        f"<p>{len(pictures.paths):,} pictures, features of {html.escape(index.description.model)}. Choose for each "
        "picture, then save decisions.csv and train with <code>--exclude decisions.csv</code>. What is not chosen is "
        "kept. This browser remembers the choices.</p>",
        '<p class="bar"><button id="save">Save decisions.csv</button> <span id="state" role="status"></span></p>',
    ]
    sections += _copy_sections(cards, index, found, shown)
    if len(found.suggested):
        rows = found.wrong_labels[:shown].tolist()
        notes = [
            f"looks like <b>{html.escape(index.description.labels[found.suggested[row]])}</b> "
            f"{found.confidence[row]:.0%} "
            for row in rows
        ]
        sections.append(_heading("Suspicious labels", len(found.wrong_labels), shown))
        sections.append(cards.of(rows, notes))
    odd = found.odd[:shown].tolist()
    sections.append(_heading("Unlike all others", len(found.odd), shown))
    sections.append(cards.of(odd, [f"similarity {found.similarity[row]:.2f}" for row in odd]))
    if found.coverage:
        sections += _overlap_sections(cards, found.overlaps)
        sections += _coverage_section(found.coverage)
    chosen = {
        row: {"path": pictures.paths[row], "digest": pictures.digests[row], "reason": reason}
        for row, reason in sorted(reasons.items())
    }
    for one in chosen.values():
        if known := earlier.get((one["path"], one["digest"])):
            one |= {"decision": known.decision, "label": known.new_label}
    data = {"key": f"review-{index.description.checksum}-{len(pictures.paths)}", "columns": COLUMNS, "rows": chosen}
    classes = "".join(f'<option value="{html.escape(name, quote=True)}">' for name in index.description.labels)
    sections.append(f'<datalist id="classes">{classes}</datalist>')
    text = json.dumps(data).replace("<", "\\u003c")
    sections.append(f'<script type="application/json" id="data">{text}</script>')
    return page("Review of the data", sections, _SCRIPT)


def _heading(title: str, count: int, shown: int) -> str:
    rest = f", the first {shown:,} shown" if count > shown else ""
    return f"<h2>{title}: {count:,}{rest}</h2>"


def _copy_sections(cards: _Cards, index: FeatureIndex, found: Findings, shown: int) -> list[str]:
    pictures, sections = index.pictures, [_heading("Groups of copies", len(found.copies), shown)]
    for group in found.copies[:shown]:
        facts = ["the same file" if len({pictures.digests[row] for row in group}) == 1 else "nearly the same"]
        facts += ["<b>in two splits</b>"] if len({pictures.splits[row] for row in group}) > 1 else []
        facts += ["<b>different labels</b>"] if len({pictures.labels[row] for row in group}) > 1 else []
        more = f", {len(group) - _OF_GROUP:,} more" if len(group) > _OF_GROUP else ""
        rows = group[:_OF_GROUP]
        sections.append(f'<div class="group">{", ".join(facts)}{more}{cards.of(rows, [""] * len(rows))}</div>')
    return sections


def _overlap_sections(cards: _Cards, overlaps: Sequence[Overlap]) -> list[str]:
    sections = [f"<h2>Classes that overlap: {len(overlaps):,}</h2>"]
    for overlap in overlaps[:_SHOWN_PAIRS]:
        title = f"{html.escape(' and '.join(overlap.names))}: {overlap.confused:.1%} with the label of the other"
        notes = ["most like the other class"] * len(overlap.examples)
        sections.append(f'<div class="group">{title}{cards.of(overlap.examples, notes)}</div>')
    rest = overlaps[_SHOWN_PAIRS:_LISTED_PAIRS]
    lines = "".join(f"<li>{html.escape(' and '.join(one.names))}: {one.confused:.1%}</li>" for one in rest)
    return [*sections, f"<ul>{lines}</ul>"] if rest else sections


def _coverage_section(coverage: Sequence[ClassCoverage]) -> list[str]:
    def number(value: float, form: str) -> str:
        return "" if math.isnan(value) else format(value, form)

    rows = "".join(
        f"<tr><td>{html.escape(one.name)}</td><td>{one.train:,}</td><td>{one.test:,}</td>"
        f"<td>{number(one.recognized, '.0%')}</td><td>{number(one.train_similarity, '.2f')}</td>"
        f"<td>{number(one.test_similarity, '.2f')}</td></tr>"
        for one in coverage
    )
    return [
        "<h2>Coverage of the classes</h2><p>Recognized: by a linear head that was fitted to other pictures. Nearest: "
        "median similarity to the nearest training picture of the class; if it is much lower for the evaluation "
        "pictures, the training pictures do not cover them.</p>",
        '<div class="wide"><table><tr><th>class</th><th>train</th><th>test</th><th>recognized</th><th>nearest, train'
        f"</th><th>nearest, test</th></tr>{rows}</table></div>",
    ]


_SCRIPT = """
const { key, columns, rows } = JSON.parse(document.getElementById("data").textContent);
const cards = [...document.querySelectorAll(".card[data-row]")];
let kept = {};
try { kept = JSON.parse(localStorage.getItem(key)) || {}; } catch (error) { }
for (const [row, one] of Object.entries(kept)) if (rows[row]) Object.assign(rows[row], one);
function show(row) {
  for (const card of cards.filter(each => each.dataset.row === String(row))) {
    const { decision, label } = rows[row];
    for (const radio of card.querySelectorAll("input[type=radio]")) radio.checked = radio.value === decision;
    const field = card.querySelector(".label");
    if (field && label !== undefined) field.value = label;
    card.classList.toggle("done", decision !== undefined);
  }
}
function count() {
  const done = Object.values(rows).filter(one => one.decision !== undefined).length;
  document.getElementById("state").textContent = done + " of " + Object.keys(rows).length + " decided";
}
for (const card of cards) {
  card.addEventListener("change", event => {
    const row = card.dataset.row, field = card.querySelector(".label");
    const isLabel = event.target === field;
    const decision = isLabel ? "relabel" : card.querySelector("input[type=radio]:checked").value;
    Object.assign(rows[row], { decision, label: field ? field.value : "" });
    kept[row] = { decision, label: rows[row].label };
    try { localStorage.setItem(key, JSON.stringify(kept)); } catch (error) { }
    show(row);
    count();
  });
}
const quoted = text => /[",\\n\\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
document.getElementById("save").addEventListener("click", () => {
  const lines = [columns, ...Object.values(rows).map(one =>
    [one.path, one.digest, one.decision || "keep", one.decision === "relabel" ? one.label : "", one.reason])];
  const text = lines.map(line => line.map(quoted).join(",")).join("\\n") + "\\n";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = "decisions.csv";
  link.click();
});
Object.keys(rows).forEach(show);
count();
"""
