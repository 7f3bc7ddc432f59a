"""The classes of files as a table, and as CSV, Parquet, JSON or a page."""

import dataclasses
import json
import math
import pathlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_vit.files.atomic import atomic_write
from keras_vit.files.tables import markdown_table, write_csv
from keras_vit.promise import ANSWERED, LABEL_SET
from keras_vit.scores import TOP_K
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
        with atomic_write(pathlib.Path(output)) as file:
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
        print(f"Results are in {output}.")
    check_some_read(num_read)


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
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    table = markdown_table(header, rows, num_text_columns=len(header))
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
    images = [each.as_json() for each in predictions]
    best = max((len(each.classes) for each in predictions), default=0)
    numbers = ["", *(f"_{number}" for number in range(2, best + 1))][:best]
    columns = [name + number for number in numbers for name in ("class", "probability")]
    columns = ["classes", "probabilities"] if multi_label else columns
    flags = ["rejected", *_present(images, "unknown", "unknown_score", ANSWERED, LABEL_SET)]
    yield "picture", *columns, *flags, "problem"
    for image in images:
        pairs = [(each["class"], f"{each['probability']:.6f}") for each in image.get("classes", ())]
        if multi_label:
            pairs = [("|".join(name for name, _ in pairs), "|".join(share for _, share in pairs))]
        cells = [cell for pair in pairs for cell in pair]
        cells += [""] * (len(columns) - len(cells))
        yield image["picture"], *cells, *(_cell(image.get(name, "")) for name in flags), image.get("problem", "")


def _present(images: Sequence[Mapping[str, Any]], *fields: str) -> list[str]:
    """Return those of some fields that an image has."""
    return [field for field in fields if any(field in image for image in images)]


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return "|".join(value)
    return f"{value:.6g}" if isinstance(value, float) else value


def write_parquet(path: pathlib.Path, predictions: Sequence[Prediction]) -> None:
    """Write a row for each image. Columns: picture, classes and probabilities (lists), rejected, unknown and
    unknown_score (null without a score), problem (null for an image that can be read), and answered and label_set (if
    there is a promise).
    """
    import pyarrow  # lazy: no other form of the results needs it
    import pyarrow.parquet

    text, number, truth = pyarrow.string(), pyarrow.float64(), pyarrow.bool_()
    images = [each.as_json() for each in predictions]
    for image, each in zip(images, predictions, strict=True):
        image |= {"classes": [name for name, _ in each.classes], "probabilities": [share for _, share in each.classes]}
    types = {
        "picture": text, "classes": pyarrow.list_(text), "probabilities": pyarrow.list_(number), "rejected": truth,
        "unknown": truth, "unknown_score": number, "problem": text,
    }  # fmt: skip
    promised = {ANSWERED: truth, LABEL_SET: pyarrow.list_(text)}
    types |= {name: promised[name] for name in _present(images, *promised)}
    table = pyarrow.Table.from_pylist(images, pyarrow.schema(types.items()))
    pyarrow.parquet.write_table(table, path, compression="zstd", write_statistics=False)
