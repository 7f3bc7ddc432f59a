"""Classify images with a run or a checkpoint, and write the results as CSV, JSON or a page."""

import dataclasses
import functools
import json
import math
import pathlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tqdm

from keras_vit import Preprocessing, UserError, inspection
from keras_vit.cli.native_stderr import native_stderr_silenced
from keras_vit.cli.pages import thumbnail_address
from keras_vit.files.atomic import atomic_write
from keras_vit.files.labels import check_number, distinct_names, read_labels
from keras_vit.files.tables import CsvWriter, markdown_table, short_name
from keras_vit.images.files import Image, decode, read_image
from keras_vit.images.formats import LARGEST_SERVED
from keras_vit.inspection.compute import checked_logits, model_inputs, model_name
from keras_vit.inspection.report import maps_of
from keras_vit.models.build import logits_model
from keras_vit.run import Run, check_head
from keras_vit.scores import TOP_K, RankedClasses, Scoring, features_and_logits
from training.data.dataset import check_some_read
from training.options.predict import Explanation, PredictOptions
from training.prediction.pictures import only_folder
from training.prediction.prediction_page import PICTURE_SIDE, PictureCard, groups_of, prediction_page

# Images of one forward pass; with relevance, their activations are kept for the gradient.
BATCH = 8
# Batches that take as long as tracing the model.
_EAGER = 4
# A file with its image, or with the reason why it cannot be read.
Picture = tuple[pathlib.Path, Image | None, str | None]


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A model with its class names and how its classes are chosen."""

    run: Run
    labels: tuple[str, ...]
    """In the order of the logits; empty for class numbers."""
    scoring: Scoring
    explain: Explanation | None = None
    """The map that is made of each image."""
    traced_batch: int | None = None
    """Images of the batches that run as a graph, which takes as long to trace as a few of them take without."""

    def classify(self, images: Sequence[Image]) -> list[PictureCard]:
        """Return the classes of each image, with its map if one is to be made."""
        scorer = self.run.unknown
        maps: list = [()] * len(images)
        inside: dict = {}
        if self.explain is None or scorer is not None:
            inputs = model_inputs(images, self.run.preprocessing)[1]
            traced = len(inputs) == self.traced_batch
            inside = self._network.predict_on_batch(inputs) if traced else self._network(inputs, training=False)
        if self.explain is None:
            logits = checked_logits(inside["logits"])
        else:
            result = inspection.inspect(
                self.run.model, images, checkpoint=self.run.name, figures=(self.explain,), shown=len(images)
            )
            logits, maps = result.arrays["logits"], maps_of(result)
        ranked = [*self.scoring.rank(logits, self.labels)]
        if scorer is not None:
            scores = np.asarray(scorer.score(inside["pre_logits"], inside["logits"])).tolist()
            ranked = [
                dataclasses.replace(each, unknown=score, is_unknown=score > scorer.threshold)
                for each, score in zip(ranked, scores, strict=True)
            ]
        return [
            PictureCard(image.name, classes, groups_of(classes, self.scoring), of_image)
            for image, classes, of_image in zip(images, ranked, maps, strict=True)
        ]

    def with_picture(self, card: PictureCard, image: Image) -> PictureCard:
        """The card of an image with the whole image, reduced, and the part of it that the model sees."""
        height, width = image.pixels.shape[:2]
        box = self.run.preprocessing.boxes_in_picture([0.5, 0.5, 1.0, 1.0], (height, width))
        left, top, right, bottom = (box / [width, height, width, height]).tolist()
        address = thumbnail_address(image.pixels, PICTURE_SIDE)
        return dataclasses.replace(card, address=address, seen=(left, top, right, bottom))

    @functools.cached_property
    def _network(self) -> keras.Model:
        """Images -> what is needed of them, in one pass: "logits" and, for a score of unknown images, "pre_logits"."""
        if self.run.unknown is not None:
            return features_and_logits(self.run.model)
        model = logits_model(self.run.model)
        return keras.Model(model.input, {"logits": model.output})

    def answer(self, data: bytes, name: str) -> str:
        """A page with the classes of one picture. Raises UserError for bytes that are none."""
        image = decode(data, name, preprocessing=self.run.preprocessing, most_pixels=LARGEST_SERVED)
        [card] = self.classify([image])
        return self.page([self.with_picture(card, image)], {})

    def values(self, data: bytes, name: str) -> dict[str, Any]:
        """The classes of one picture, as `--output X.json` has them. Raises UserError for bytes that are none."""
        image = inspection.decode(data, name, preprocessing=self.run.preprocessing, most_pixels=LARGEST_SERVED)
        return as_json(_prediction(name, self.classify([image])[0].ranked))

    def page(self, cards: Sequence[PictureCard], problems: dict[str, str]) -> str:
        """Return a page with the images as HTML text; `problems` says of other files why they are not among them."""
        model = f"{short_name(self.run.name)} ({model_name(self.run.model)})"
        return prediction_page(model, cards, problems, self.scoring, self.explain)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The classes of one file, or why it cannot be read."""

    file: str
    """Its path, with "?" for bytes that are not UTF-8."""
    classes: tuple[tuple[str, float], ...] = ()
    """`RankedClasses.chosen`."""
    rejected: bool = False
    """Whether no class reaches the threshold."""
    unknown: float | None = None
    """The score of an image of none of the classes; None if the run has none."""
    is_unknown: bool = False
    problem: str | None = None


def open_classifier(
    run: Run, labels: str | None = None, *, threshold: float | None = None, explain: Explanation | None = None
) -> Classifier:
    """Load the model of a run with its class names, or those of the file `labels`.

    Raises UserError if the model has no head, another number of classes than `labels` or the run, or no attention to
    make the map of.
    """
    model, own = run.model, run.class_names
    names = own if labels is None else distinct_names(read_labels(labels), labels)
    if labels is not None:
        check_number(names, labels, model.output_shape[-1], run.name)
        if own and own != names:
            print(f"The names of {labels} replace those of {run.name}, {', '.join(own[:5])}{' …' if own[5:] else ''}.")
    if names:
        check_head(model, names)
    figures = inspection.available_figures(model)
    if "relevance" not in figures:
        raise UserError(
            f"{run.name} ends with features of shape {model.output_shape} and has no classes; add a head with "
            "keras-vit finetune or keras_vit.adapt(model, num_classes=…)."
        )
    if explain is not None and explain not in figures:
        raise UserError(f"{run.name} has no attention to show by --explain {explain}; give --explain relevance.")
    run.warn_of_missing_files(labels_given=bool(names))
    return Classifier(run, names, run.scoring(threshold), explain)


def predict(classifier: Classifier, files: Sequence[pathlib.Path], options: PredictOptions) -> None:
    """Classify files, print a table, and write `--output`.

    A file that cannot be read is named in the results, and the others are classified. Raises UserError if none can be
    read.
    """
    output, folder = options.output, only_folder(options.pictures)
    classifier = dataclasses.replace(classifier, traced_batch=BATCH if len(files) > _EAGER * BATCH else None)
    predictions: list[Prediction] = []
    shown: list[PictureCard] = []
    progress = tqdm.tqdm(total=len(files), unit="picture", disable=None)
    for batch in _batches(files, classifier.run.preprocessing):
        found, cards = classified(classifier, batch)
        predictions += found
        if output is not None and output.endswith(".html"):
            good = [image for _, image, _ in batch if image is not None]
            for card, image in zip(cards, good, strict=True):
                named = dataclasses.replace(card, name=_shown(card.name, folder))
                shown.append(classifier.with_picture(named, image))
        progress.update(len(batch))
    progress.close()
    if table := _table([dataclasses.replace(each, file=_shown(each.file, folder)) for each in predictions]):
        print(table)
    for prediction in predictions:
        if prediction.problem:
            why = prediction.problem.removeprefix(f"{pathlib.Path(prediction.file).name} is ")
            print(f"Not classified: {prediction.file}: {why}")
    problems = {_shown(each.file, folder): each.problem for each in predictions if each.problem}
    if output is not None and (shown or not output.endswith(".html")):
        with atomic_write(pathlib.Path(output)) as temporary:
            if output.endswith(".csv"):
                _write_csv(temporary, predictions, classifier.scoring, excel=options.excel, raw=options.raw)
            elif output.endswith(".parquet"):
                write_parquet(temporary, predictions)
            elif output.endswith(".json"):
                document = [as_json(prediction) for prediction in predictions]
                temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            else:
                temporary.write_text(classifier.page(shown, problems), encoding="utf-8")
        print(f"Results are in {output}.")
    check_some_read(len(predictions) - len(problems))


def classified(classifier: Classifier, batch: Sequence[Picture]) -> tuple[list[Prediction], list[PictureCard]]:
    """Return the prediction for each picture of a batch, and the cards of those that can be read."""
    good = [image for _, image, _ in batch if image is not None]
    cards = classifier.classify(good) if good else []
    ranked, predictions = (card.ranked for card in cards), []
    for file, _, problem in batch:
        name = as_utf8(str(file))
        if problem is None and (classes := next(ranked)) is not None:
            predictions.append(_prediction(name, classes))
        else:
            predictions.append(Prediction(name, problem=problem))
    return predictions, cards


def _prediction(name: str, classes: RankedClasses) -> Prediction:
    return Prediction(name, classes.chosen, classes.is_rejected, classes.unknown, classes.is_unknown)


def _shown(file: str, folder: pathlib.Path | None) -> str:
    """The path of a file, relative to the folder that was given."""
    path = pathlib.PurePath(file)
    return str(path.relative_to(folder)) if folder is not None and path.is_relative_to(folder) else file


def batches_of_pictures(
    files: Sequence[pathlib.Path], preprocessing: Preprocessing, problems: list[str]
) -> Iterator[list[Image]]:
    """The pictures of files, for each batch those that can be read; a line for each other one is added to problems."""
    with tqdm.tqdm(total=len(files), unit="picture", disable=None) as progress:
        for batch in _batches(files, preprocessing):
            yield [image for _, image, _ in batch if image is not None]
            problems += [f"{as_utf8(str(f))}: {why.removeprefix(f'{f.name} is ')}" for f, _, why in batch if why]
            progress.update(len(batch))


def _batches(files: Sequence[pathlib.Path], preprocessing: Preprocessing) -> Iterator[list[Picture]]:
    for begin in range(0, len(files), BATCH):
        with native_stderr_silenced():  # once for all: each begins a process
            batch = [(file, *read_picture(file, preprocessing)) for file in files[begin : begin + BATCH]]
        yield batch


def read_picture(file: pathlib.Path, preprocessing: Preprocessing) -> tuple[Image | None, str | None]:
    """The picture of a file, or why it cannot be read."""
    if file.is_dir():
        return None, f"{file.name} is a link to a folder, which is not followed; give that folder as well."
    if not file.exists():
        return None, f"{file.name} is no file, or a link to none; repair or remove it."
    try:
        image = read_image(file, preprocessing)
        return dataclasses.replace(image, name=as_utf8(str(file))), None
    except (UserError, OSError) as error:
        return None, as_utf8(str(error))


def as_utf8(text: str) -> str:
    """The text with "?" for bytes of a path that are not UTF-8, which no text file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _table(predictions: Sequence[Prediction]) -> str:
    best = min(max((len(prediction.classes) for prediction in predictions), default=0), TOP_K)
    rows = [
        [
            f"{prediction.file}{' (rejected)' * prediction.rejected}{' (unknown)' * prediction.is_unknown}",
            *(
                f"{name} {_percent(share)}{' …' * (rank == best and len(prediction.classes) > best)}"
                for rank, (name, share) in enumerate(prediction.classes[:best], 1)
            ),
            *[""] * (best - len(prediction.classes)),
        ]
        for prediction in predictions
        if not prediction.problem
    ]
    header = ["picture", *("most likely", "second", "third", "fourth", "fifth")[:best]]
    table = markdown_table(header, rows, num_text_columns=len(header)) if rows else ""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    while table.find("\n") > width and len(header) > 2:  # a terminal has room for fewer of the classes
        header, rows = header[:-1], [row[:-1] for row in rows]
        table = markdown_table(header, rows, num_text_columns=len(header))
    return table


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "< 0.1%"


def _write_csv(
    path: pathlib.Path, predictions: Sequence[Prediction], scoring: Scoring, *, excel: bool, raw: bool
) -> None:
    """One row for each picture.

    Columns: picture; of one class each, class, probability, class_2, probability_2, …; of several classes, classes and
    probabilities, separated by |; rejected; unknown and unknown_score if there is a score; problem.
    """
    scored = any(prediction.unknown is not None for prediction in predictions)
    best = max((len(prediction.classes) for prediction in predictions), default=0)
    columns = [name + (f"_{n}" if n > 1 else "") for n in range(1, best + 1) for name in ("class", "probability")]
    columns = ["classes", "probabilities"] if scoring.is_multi_label else columns
    with path.open("w", newline="", encoding="utf-8-sig" if excel else "utf-8") as stream:
        writer = CsvWriter(stream, raw=raw)
        writer.writerow(["picture", *columns, "rejected", *(["unknown", "unknown_score"] if scored else []), "problem"])
        for each in predictions:
            shares = [f"{share:.6f}" for _, share in each.classes]
            names = [name for name, _ in each.classes]
            pairs = [cell for pair in zip(names, shares, strict=True) for cell in pair]
            cells = ["|".join(names), "|".join(shares)] if scoring.is_multi_label else pairs
            cells += [""] * (len(columns) - len(cells))
            unknown = ["", ""] if each.unknown is None else [each.is_unknown, f"{each.unknown:.6g}"]
            rejected = "" if each.problem else each.rejected
            writer.writerow([each.file, *cells, rejected, *(unknown if scored else []), each.problem or ""])


def write_parquet(path: pathlib.Path, predictions: Sequence[Prediction]) -> None:
    """One row for each picture. Columns: picture, classes and probabilities (lists), rejected, unknown and
    unknown_score (null without a score), problem (null for a picture that can be read).
    """
    import pyarrow  # lazy: no other form of the results needs it
    import pyarrow.parquet

    text, number, truth = pyarrow.string(), pyarrow.float64(), pyarrow.bool_()
    columns = {
        "picture": pyarrow.array([each.file for each in predictions], text),
        "classes": pyarrow.array([[name for name, _ in each.classes] for each in predictions], pyarrow.list_(text)),
        "probabilities": pyarrow.array(
            [[share for _, share in each.classes] for each in predictions], pyarrow.list_(number)
        ),
        "rejected": pyarrow.array([None if each.problem else each.rejected for each in predictions], truth),
        "unknown": pyarrow.array([None if each.unknown is None else each.is_unknown for each in predictions], truth),
        "unknown_score": pyarrow.array([each.unknown for each in predictions], number),
        "problem": pyarrow.array([each.problem for each in predictions], text),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd", write_statistics=False)


def as_json(prediction: Prediction) -> dict[str, Any]:
    """A prediction as an object of JSON."""
    if prediction.problem:
        return {"picture": prediction.file, "problem": prediction.problem}
    fields: dict[str, Any] = {"picture": prediction.file, "rejected": prediction.rejected}
    if prediction.unknown is not None:
        fields |= {"unknown": prediction.is_unknown, "unknown_score": prediction.unknown}
    return {**fields, "classes": [{"class": name, "probability": share} for name, share in prediction.classes]}
