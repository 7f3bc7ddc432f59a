"""The page on which a person goes through what is odd in a data set, and the file of the decisions."""

import itertools
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from keras_vit.cli.pages import render
from keras_vit.files.atomic import atomic_write, write_text
from keras_vit.files.tables import CsvWriter
from training.data.decisions import COLUMNS, Decision, read_decisions
from training.features.findings import Findings, Overlap, findings_of
from training.features.store import FeatureIndex
from training.features.thumbnails import Thumbnails
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
    """Return why a picture is on the page, by its row, for all pictures that are."""
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
    """Return what was decided before, by path and digest; without keep, which every picture has at the beginning."""
    if not file.is_file():
        return {}
    found = [one for decisions in read_decisions(str(file)).by_digest.values() for one in decisions]
    return {(one.path, one.digest): one for one in found if one.decision != "keep"}


def _suggestion(index: FeatureIndex, found: Findings, row: int) -> str:
    """Return the most likely class of a picture, if it is not its label; else ""."""
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
        self._index, self._found, self._thumbnails = index, found, Thumbnails(index)
        self._numbers = itertools.count()  # a picture may be on the page twice

    def of(self, rows: Iterable[int], **notes: Sequence[str]) -> list[dict[str, Any]]:
        """Return the cards of rows, each with its element of `notes`."""
        empty = {"note": "", "looks_like": ""}
        return [
            {**empty, **self._card(row), **{name: values[n] for name, values in notes.items()}}
            for n, row in enumerate(rows)
        ]

    def _card(self, row: int) -> dict[str, Any]:
        pictures = self._index.pictures
        path, split = pictures.paths[row], pictures.splits[row]
        return {
            "row": row,
            "number": next(self._numbers),
            "address": self._thumbnails.address(row, path, split),
            "file": pathlib.PurePath(path).name,
            "name": self._index.shown(path),
            "label": pictures.labels[row] or "",
            "split": split if len(self._index.description.splits) > 1 else "",
            "suggestion": _suggestion(self._index, self._found, row),
        }


def _page(
    index: FeatureIndex,
    found: Findings,
    reasons: dict[int, str],
    earlier: dict[tuple[str, str], Decision],
    options: ReviewOptions,
) -> str:
    cards, pictures, shown = _Cards(index, found), index.pictures, options.shown
    copies = [_copies(cards, index, group) for group in found.copies[:shown]]
    wrong = found.wrong_labels[:shown].tolist() if len(found.suggested) else []
    likely = [index.description.labels[found.suggested[row]] for row in wrong]
    wrong_labels = cards.of(wrong, looks_like=likely, note=[f"{found.confidence[row]:.0%}" for row in wrong])
    odd = found.odd[:shown].tolist()
    return render(
        "review",
        title="Review of the data",
        num_pictures=len(pictures.paths),
        model=index.description.model,
        shown=shown,
        choices=("keep", "relabel", "drop") if len(found.suggested) else ("keep", "drop"),
        num_copies=len(found.copies),
        copies=copies,
        num_wrong_labels=len(found.wrong_labels),
        wrong_labels=wrong_labels if len(found.suggested) else None,
        num_odd=len(found.odd),
        odd=cards.of(odd, note=[f"similarity {found.similarity[row]:.2f}" for row in odd]),
        coverage=found.coverage,
        num_overlaps=len(found.overlaps),
        overlaps=[_overlap(cards, overlap) for overlap in found.overlaps[:_SHOWN_PAIRS]] if found.coverage else [],
        more_overlaps=found.overlaps[_SHOWN_PAIRS:_LISTED_PAIRS],
        classes=index.description.labels,
        data={
            "key": f"review-{index.description.checksum}-{len(pictures.paths)}",
            "columns": COLUMNS,
            "rows": _rows(index, reasons, earlier),
        },
    )


def _rows(
    index: FeatureIndex, reasons: dict[int, str], earlier: dict[tuple[str, str], Decision]
) -> dict[int, dict[str, str]]:
    """Return what the page knows of each picture, with what was decided before."""
    rows = {}
    for row, reason in sorted(reasons.items()):
        path, digest = index.pictures.paths[row], index.pictures.digests[row]
        rows[row] = {"path": path, "digest": digest, "reason": reason}
        if known := earlier.get((path, digest)):
            rows[row] |= {"decision": known.decision, "label": known.new_label}
    return rows


def _copies(cards: _Cards, index: FeatureIndex, group: Sequence[int]) -> dict[str, Any]:
    pictures = index.pictures
    return {
        "is_same": len({pictures.digests[row] for row in group}) == 1,
        "in_two_splits": len({pictures.splits[row] for row in group}) > 1,
        "has_two_labels": len({pictures.labels[row] for row in group}) > 1,
        "more": max(len(group) - _OF_GROUP, 0),
        "cards": cards.of(group[:_OF_GROUP]),
    }


def _overlap(cards: _Cards, overlap: Overlap) -> dict[str, Any]:
    notes = ["most like the other class"] * len(overlap.examples)
    return {"names": overlap.names, "confused": overlap.confused, "cards": cards.of(overlap.examples, note=notes)}
