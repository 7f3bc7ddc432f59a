"""The classes of files as a table, and as CSV, Parquet, JSON or a page."""

import dataclasses
import json
import math
import pathlib
import shutil
import sys
from collections.abc import Iterator, Sequence

from keras_vit.files.atomic import atomic_write
from keras_vit.files.tables import markdown_table, write_csv
from keras_vit.promise import ANSWERED, LABEL_SET
from keras_vit.scores import TOP_K, RankedClasses
from training.data.dataset import check_some_read
from training.options.predict import PredictOptions
from training.prediction.classifier import BATCH, Classifier, Prediction, batches_of, classified

# Batches that take as long as tracing the model.
_EAGER = 4


def predict(classifier: Classifier, files: Sequence[pathlib.Path], options: PredictOptions) -> None:
    """Classify files, print a table, and write `--output`.

    A file that cannot be read is named in the results, and the others are classified. Raises UserError if none can be
    read.
    """
    output = options.output or ""
    classifier = dataclasses.replace(classifier, traced_batch=BATCH if len(files) > _EAGER * BATCH else None)
    predictions: list[Prediction] = []
    for batch in batches_of(files, classifier.run.preprocessing):
        predictions += classified(classifier, batch, with_images=output.endswith(".html"))
    # For people, paths are relative to the folder that was given alone.
    folder = f"{pathlib.Path(options.images[0])}/" if len(options.images) == 1 else ""
    shown = [dataclasses.replace(each, name=each.name.removeprefix(folder)) for each in predictions]
    if table := _table(shown):
        print(table)
    for each in predictions:
        if each.problem:
            print(f"Not classified: {each.name}: {each.problem.removeprefix(f'{pathlib.Path(each.name).name} is ')}")
    num_read = sum(each.ranked is not None for each in predictions)
    if output and (num_read or not output.endswith(".html")):
        with atomic_write(pathlib.Path(output)) as temporary:
            _write(temporary, classifier, predictions, shown, options)
        print(f"Results are in {output}.")
    check_some_read(num_read)


def _write(
    file: pathlib.Path,
    classifier: Classifier,
    predictions: Sequence[Prediction],
    shown: Sequence[Prediction],
    options: PredictOptions,
) -> None:
    """Write a file in the form that the ending of `--output` says; `shown` are the predictions for people."""
    output = options.output or ""
    if output.endswith(".csv"):
        rows = _csv_rows(predictions, multi_label=classifier.scoring.is_multi_label)
        write_csv(file, rows, raw=options.raw, encoding="utf-8-sig" if options.excel else "utf-8")
    elif output.endswith(".parquet"):
        write_parquet(file, predictions)
    elif output.endswith(".json"):
        text = json.dumps([each.as_json() for each in predictions], indent=2)
        file.write_text(f"{text}\n", encoding="utf-8")
    else:
        problems = {each.name: each.problem for each in shown if each.problem}
        file.write_text(classifier.page(shown, problems), encoding="utf-8")


def _table(predictions: Sequence[Prediction]) -> str:
    """Return the most likely classes of the images that can be read, of which a terminal has room for fewer."""
    best = min(max((len(each.classes) for each in predictions), default=0), TOP_K)
    rows = []
    for each in predictions:
        if each.ranked is None:
            continue
        name = f"{each.name}{' (rejected)' * each.ranked.is_rejected}{' (unknown)' * each.ranked.is_unknown}"
        name += " (for a person)" * (each.ranked.is_answered is False)
        cells = [
            f"{label} {share:.1%}" if share >= 0.001 else f"{label} < 0.1%" for label, share in each.classes[:best]
        ]
        if len(each.classes) > best:
            cells[-1] += " …"
        rows.append([name, *cells, *[""] * (best - len(cells))])
    if not rows:
        return ""
    header = ["image", *("most likely", "second", "third", "fourth", "fifth")[:best]]
    table = markdown_table(header, rows, num_text_columns=len(header))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    while table.find("\n") > width and len(header) > 2:
        header, rows = header[:-1], [row[:-1] for row in rows]
        table = markdown_table(header, rows, num_text_columns=len(header))
    return table


def _csv_rows(predictions: Sequence[Prediction], *, multi_label: bool) -> Iterator[Sequence]:
    """Yield a row for each image.

    Columns: picture; of one class each, class, probability, class_2, probability_2, …; of several classes, classes and
    probabilities, separated by |; rejected; unknown and unknown_score if there is a score; answered, and label_set,
    separated by |, if there is a promise; problem.
    """
    scored = any(each.ranked and each.ranked.unknown is not None for each in predictions)
    best = max((len(each.classes) for each in predictions), default=0)
    columns = ["classes", "probabilities"] if multi_label else _numbered(best)
    flags = ["rejected", "unknown", "unknown_score"][: 3 if scored else 1]
    promised = promised_columns(predictions)
    yield "picture", *columns, *flags, *promised, "problem"
    for each, *decisions in zip(predictions, *promised.values(), strict=True):
        pairs = [(name, f"{share:.6f}") for name, share in each.classes]
        if multi_label:
            pairs = [("|".join(name for name, _ in pairs), "|".join(share for _, share in pairs))]
        cells = [cell for pair in pairs for cell in pair]
        cells += [""] * (len(columns) - len(cells))
        yield each.name, *cells, *_flags(each.ranked)[: len(flags)], *map(_cell, decisions), each.problem or ""


def _cell(decision: bool | tuple[str, ...] | None) -> object:
    if decision is None:
        return ""
    return "|".join(decision) if isinstance(decision, tuple) else decision


def promised_columns(predictions: Sequence[Prediction]) -> dict[str, list]:
    """Return what is promised of each image, by column, None where there is no image; without a promise nothing."""
    ranked = [each.ranked for each in predictions]
    columns: dict[str, list] = {
        ANSWERED: [each and each.is_answered for each in ranked],
        LABEL_SET: [each and each.label_set for each in ranked],
    }
    return {name: column for name, column in columns.items() if any(value is not None for value in column)}


def _numbered(best: int) -> list[str]:
    return [name + (f"_{n}" if n > 1 else "") for n in range(1, best + 1) for name in ("class", "probability")]


def _flags(ranked: RankedClasses | None) -> list[object]:
    """Return whether no class reaches the threshold, whether none fits, and the score of that."""
    if ranked is None:
        return ["", "", ""]
    return [ranked.is_rejected, ranked.is_unknown, "" if ranked.unknown is None else f"{ranked.unknown:.6g}"]


def write_parquet(path: pathlib.Path, predictions: Sequence[Prediction]) -> None:
    """Write a row for each image. Columns: picture, classes and probabilities (lists), rejected, unknown and
    unknown_score (null without a score), answered and label_set (if there is a promise), problem (null for an image
    that can be read).
    """
    import pyarrow  # lazy: no other form of the results needs it
    import pyarrow.parquet

    text, number, truth = pyarrow.string(), pyarrow.float64(), pyarrow.bool_()
    ranked = [each.ranked for each in predictions]
    scores = [each.unknown if each else None for each in ranked]
    unknown = [each.is_unknown if each and each.unknown is not None else None for each in ranked]
    columns = {
        "picture": pyarrow.array([each.name for each in predictions], text),
        "classes": pyarrow.array([[name for name, _ in each.classes] for each in predictions], pyarrow.list_(text)),
        "probabilities": pyarrow.array(
            [[share for _, share in each.classes] for each in predictions], pyarrow.list_(number)
        ),
        "rejected": pyarrow.array([each.is_rejected if each else None for each in ranked], truth),
        "unknown": pyarrow.array(unknown, truth),
        "unknown_score": pyarrow.array(scores, number),
        "problem": pyarrow.array([each.problem for each in predictions], text),
    }
    promised = promised_columns(predictions)
    columns |= zip(promised, map(pyarrow.array, promised.values()), strict=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd", write_statistics=False)
