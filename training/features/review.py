"""The page on which a person goes through what is odd in a data set, and the file of the decisions."""

import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_vit.cli.pages import render
from keras_vit.files.atomic import atomic_write, write_text
from keras_vit.files.tables import write_csv
from training.data.file_contents import COLUMNS, Decision, read_decisions
from training.features.findings import Findings, findings_of
from training.features.lookup import Thumbnails
from training.features.store import FeatureIndex
from training.options.features import ReviewOptions

DECISIONS = "decisions.csv"
_PAGE = "review.html"
_SHOWN_PAIRS, _LISTED_PAIRS = 6, 20  # pairs of classes with images, and in the table
_OF_GROUP = 12  # images of one group of copies
Key = tuple[str, str]  # the path and digest of an image


def review(index: FeatureIndex, options: ReviewOptions) -> tuple[str, ...]:
    """Write review.html and decisions.csv, print what was found, and return the command to go on with.

    Decisions that the file already has are kept.
    """
    findings = findings_of(index, options.duplicate_similarity)
    page, decisions = options.folder / _PAGE, options.folder / DECISIONS
    options.folder.mkdir(parents=True, exist_ok=True)
    # Every image has the decision keep at the beginning.
    known = read_decisions(str(decisions)).values() if decisions.is_file() else ()
    earlier = {(each.path, each.digest): each for each in itertools.chain(*known) if each.decision != "keep"}
    contents = _Contents(index, findings, earlier, options.shown)
    with atomic_write(decisions) as temporary:
        write_csv(temporary, contents.decisions(), raw=options.raw)
    write_text(page, contents.page())
    copies, wrong, num_labels = findings.copies, len(findings.wrong_labels), len(findings.suggested)
    in_two = sum(len({index.images.splits[row] for row in group}) > 1 for group in copies)
    print(f"Groups of equal or nearly equal images: {len(copies):,}, of which {in_two:,} are in two splits.")
    if num_labels:
        print(f"Suspicious labels: {wrong:,} of {num_labels:,} ({wrong / num_labels:.1%}).")
    elif len(index.description.labels) > 1:
        print("The labels are not judged, because too few images differ.")
    print(f"Images unlike all others: {len(findings.odd):,}.")
    for overlap in findings.overlaps[:3]:
        print(
            f"Classes that overlap: {' and '.join(overlap.names)}; {overlap.confused:.1%} have the label of the other."
        )
    print(f"Open {page} in a browser; the decisions are in {decisions}.")
    data = (index.description.data or {}).get("data", "")
    if data.startswith(("folder:", "csv:")):
        start = ("auto", "--data", data, "--checkpoint", index.description.model)
        return (*start, "--exclude", str(decisions), "--workdir", "runs/reviewed")
    if not data:
        return ("similar", "--index", options.index, *index.some([0]).paths)
    return ("review", "--index", options.index, "--shown", "500")


class _Contents:
    """The images on the page, why they are there, and what was decided of them before."""

    def __init__(self, index: FeatureIndex, findings: Findings, earlier: Mapping[Key, Decision], shown: int) -> None:
        self._index, self._images, self._findings = index, index.images, findings
        self._earlier, self._shown, self._thumbnails = earlier, shown, Thumbnails(index)
        self._numbers = itertools.count()  # of the cards: an image may be on the page twice
        self._copies = findings.copies[:shown]
        self._wrong_labels = findings.wrong_labels[:shown].tolist()
        self._odd = findings.odd[:shown].tolist()
        self._overlaps = findings.overlaps[:_SHOWN_PAIRS]
        sections = {
            "copy": {row for group in self._copies for row in group[:_OF_GROUP]},
            "suspicious label": set(self._wrong_labels),
            "unlike all others": set(self._odd),
            "like another class": {row for overlap in self._overlaps for row in overlap.examples},
        }
        rows = sorted(set[int]().union(*sections.values()))
        self._reasons = {
            row: ", ".join(reason for reason, section in sections.items() if row in section) for row in rows
        }

    def decisions(self) -> Iterator[Sequence[str]]:
        """Yield the rows of decisions.csv: every image on the page, then those that were decided before."""
        yield COLUMNS
        for row, reason in self._reasons.items():
            decision = self._earlier.get(self._key(row)) or Decision(*self._key(row), "keep", self._suggestion(row))
            yield *self._key(row), decision.decision, decision.new_label, reason
        on_page = set(map(self._key, self._reasons))
        for key, decision in self._earlier.items():
            if key not in on_page:
                yield *key, decision.decision, decision.new_label, "decided before"

    def _key(self, row: int) -> Key:
        return self._images.paths[row], self._images.digests[row]

    def _suggestion(self, row: int) -> str:
        """Return the most likely class of an image, if it is not its label; else ""."""
        if not len(self._findings.suggested):
            return ""
        name = self._index.description.labels[self._findings.suggested[row]]
        return "" if name == self._images.labels[row] else name

    def page(self) -> str:
        """Return the page as text."""
        findings, description = self._findings, self._index.description
        has_labels = len(findings.suggested) > 0
        likely = [description.labels[findings.suggested[row]] for row in self._wrong_labels]
        surely = [f"{findings.confidence[row]:.0%}" for row in self._wrong_labels]
        alike = [f"similarity {findings.similarity[row]:.2f}" for row in self._odd]
        # In the order of the page, in which the cards are numbered.
        copies = [self._group(group) for group in self._copies]
        wrong_labels = self._cards(self._wrong_labels, note=surely, looks_like=likely)
        odd = self._cards(self._odd, note=alike)
        overlaps = [
            {
                "names": overlap.names,
                "confused": overlap.confused,
                "cards": self._cards(overlap.examples, note=["most like the other class"] * len(overlap.examples)),
            }
            for overlap in self._overlaps
        ]
        return render(
            "review",
            title="Review of the data",
            num_images=len(self._images.paths),
            model=description.model,
            shown=self._shown,
            choices=("keep", "relabel", "drop") if has_labels else ("keep", "drop"),
            num_copies=len(findings.copies),
            copies=copies,
            num_wrong_labels=len(findings.wrong_labels),
            wrong_labels=wrong_labels if has_labels else None,
            num_odd=len(findings.odd),
            odd=odd,
            coverage=findings.coverage,
            num_overlaps=len(findings.overlaps),
            overlaps=overlaps,
            more_overlaps=findings.overlaps[_SHOWN_PAIRS:_LISTED_PAIRS],
            classes=description.labels,
            data={
                "key": f"review-{description.checksum}-{len(self._images.paths)}",
                "columns": COLUMNS,
                "rows": {row: self._known(row, reason) for row, reason in self._reasons.items()},
            },
        )

    def _known(self, row: int, reason: str) -> dict[str, str]:
        path, digest = self._key(row)
        known = {"path": path, "digest": digest, "reason": reason}
        earlier = self._earlier.get((path, digest))
        return known if earlier is None else {**known, "decision": earlier.decision, "label": earlier.new_label}

    def _group(self, group: Sequence[int]) -> dict[str, Any]:
        images = self._images
        return {
            "is_same": len({images.digests[row] for row in group}) == 1,
            "in_two_splits": len({images.splits[row] for row in group}) > 1,
            "has_two_labels": len({images.labels[row] for row in group}) > 1,
            "more": max(len(group) - _OF_GROUP, 0),
            "cards": self._cards(group[:_OF_GROUP]),
        }

    def _cards(self, rows: Sequence[int], **notes: Sequence[str]) -> list[dict[str, Any]]:
        cards = []
        for place, row in enumerate(rows):
            path, split = self._images.paths[row], self._images.splits[row]
            card = {
                "note": "",
                "looks_like": "",
                "row": row,
                "number": next(self._numbers),
                "address": self._thumbnails.address(row, path, split),
                "file": pathlib.PurePath(path).name,
                "name": self._index.shown(path),
                "label": self._images.labels[row] or "",
                "split": split if len(self._index.description.splits) > 1 else "",
                "suggestion": self._suggestion(row),
            }
            cards.append(card | {name: values[place] for name, values in notes.items()})
        return cards
