"""Classify images with a run or a checkpoint, and write the results as CSV, JSON or a page."""

import csv
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence

import tqdm

from keras_vit import Preprocessing, UserError, inspection, run_directory
from keras_vit.files.atomic import atomic_write
from keras_vit.files.labels import read_labels
from keras_vit.files.tables import markdown_table, short_name
from keras_vit.inspection.compute import as_uint8, logits_of, model_inputs, model_name
from keras_vit.inspection.html_report import Card, maps_of, prediction_page
from keras_vit.models.build import logits_model
from keras_vit.runs import Run
from keras_vit.scores import TOP_K, RankedClasses, Scoring
from training.options.predict import Explanation, check_names

# Images of one forward pass; with relevance, their activations are kept for the gradient.
_BATCH = 8


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A model with its class names and how its classes are chosen."""

    run: Run
    labels: tuple[str, ...]
    """In the order of the logits; empty for class numbers."""
    scoring: Scoring
    explain: Explanation | None = None
    """The map that is made of each image."""

    def classify(self, images: Sequence[inspection.Image]) -> list[Card]:
        """Return the classes of each image, with its map if one is to be made."""
        if self.explain is None:
            resized, inputs = model_inputs(images, self.run.preprocessing)
            pixels, logits = as_uint8(resized), logits_of(logits_model(self.run.model), inputs)
            maps: list = [()] * len(images)
        else:
            result = inspection.inspect(
                self.run.model, images, checkpoint=self.run.name, figures=(self.explain,), shown=len(images)
            )
            pixels, logits, maps = result.arrays["images"], result.arrays["logits"], maps_of(result)
        ranked = self._with_unknown(self.scoring.rank(logits, self.labels), images)
        names = (image.name for image in images)
        return [Card(*each) for each in zip(names, pixels, maps, ranked, strict=True)]

    def _with_unknown(self, ranked: Sequence[RankedClasses], images: Sequence[inspection.Image]) -> list[RankedClasses]:
        """Add which images are of none of the classes, if the run has a score for it."""
        scorer = self.run.unknown
        if scorer is None:
            return list(ranked)
        scores = scorer.scores(self.run.model, [model_inputs(images, self.run.preprocessing)[1]]).tolist()
        return [
            dataclasses.replace(each, unknown=score, is_unknown=score > scorer.threshold)
            for each, score in zip(ranked, scores, strict=True)
        ]

    def answer(self, data: bytes, name: str) -> str:
        """A page with the classes of one picture. Raises UserError for bytes that are none."""
        image = inspection.decode(data, name, preprocessing=self.run.preprocessing)
        return self.page(self.classify([image]), {})

    def page(self, cards: Sequence[Card], problems: dict[str, str]) -> str:
        """Return a page with the images as HTML text; `problems` says of other files why they are not among them."""
        model = f"{short_name(self.run.name)}, a {model_name(self.run.model)}"
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
    names = own if labels is None else read_labels(labels)
    if labels is not None:
        check_names(labels)
        if model.output_shape[-1] != len(names):
            raise UserError(
                f"{labels} names {len(names)} classes, but the model {run.name} has {model.output_shape[-1]}; give a "
                "line for each class of the model."
            )
        if own and own != names:
            print(f"The names of {labels} replace those of {run.name}, {', '.join(own[:5])}{' …' if own[5:] else ''}.")
    if names:
        run_directory.check_classes(model, names)
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


def predict(classifier: Classifier, files: Sequence[pathlib.Path], output: str | None) -> None:
    """Classify files, print a table, and write `output`.

    A file that cannot be read is named in the results, and the others are classified. Raises UserError if none can be
    read.
    """
    predictions: list[Prediction] = []
    shown: list[Card] = []
    progress = tqdm.tqdm(total=len(files), unit="picture", disable=None)
    for batch in _batches(files, classifier.run.preprocessing):
        good = [image for _, image, _ in batch if image is not None]
        cards = classifier.classify(good) if good else []
        ranked = (card.ranked for card in cards)
        if output is not None and output.endswith(".html"):
            shown += cards
        for file, _, problem in batch:
            name = as_utf8(str(file))
            if problem is None and (classes := next(ranked)) is not None:
                predictions.append(
                    Prediction(name, classes.chosen, classes.is_rejected, classes.unknown, classes.is_unknown)
                )
            else:
                predictions.append(Prediction(name, problem=problem))
        progress.update(len(batch))
    progress.close()
    if table := _table(predictions):
        print(table)
    for prediction in predictions:
        if prediction.problem:
            why = prediction.problem.removeprefix(f"{pathlib.Path(prediction.file).name} is ")
            print(f"Not classified: {prediction.file}: {why}")
    problems = {prediction.file: prediction.problem for prediction in predictions if prediction.problem}
    if output is not None and (shown or not output.endswith(".html")):
        with atomic_write(pathlib.Path(output)) as temporary:
            if output.endswith(".csv"):
                _write_csv(temporary, predictions)
            elif output.endswith(".json"):
                _write_json(temporary, predictions)
            else:
                temporary.write_text(classifier.page(shown, problems), encoding="utf-8")
        print(f"Results are in {output}.")
    if len(problems) == len(predictions):
        raise UserError("None of the pictures could be read; convert them, or give others.")


def _batches(
    files: Sequence[pathlib.Path], preprocessing: Preprocessing
) -> Iterator[list[tuple[pathlib.Path, inspection.Image | None, str | None]]]:
    for begin in range(0, len(files), _BATCH):
        yield [(file, *read_picture(file, preprocessing)) for file in files[begin : begin + _BATCH]]


def read_picture(file: pathlib.Path, preprocessing: Preprocessing) -> tuple[inspection.Image | None, str | None]:
    """The picture of a file, or why it cannot be read."""
    if file.is_dir():
        return None, f"{file.name} is a link to a folder, which is not followed; give that folder as well."
    if not file.exists():
        return None, f"{file.name} is no file, or a link to none; repair or remove it."
    try:
        image = inspection.read_images(file, 1, preprocessing=preprocessing)[0]
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
    return markdown_table(header, rows, num_text_columns=len(header)) if rows else ""


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "< 0.1%"


def _write_csv(path: pathlib.Path, predictions: Sequence[Prediction]) -> None:
    scored = any(prediction.unknown is not None for prediction in predictions)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        header = ["picture", "rank", "class", "probability", "problem", "rejected"]
        writer.writerow([*header, *(("unknown", "unknown_score") if scored else ())])
        for prediction in predictions:
            unknown = () if prediction.unknown is None else (prediction.is_unknown, f"{prediction.unknown:.6g}")
            for rank, (name, share) in enumerate(prediction.classes, 1):
                writer.writerow([prediction.file, rank, name, f"{share:.6f}", "", prediction.rejected, *unknown])
            if not prediction.classes and not prediction.problem:  # of a multi-label model
                writer.writerow([prediction.file, "", "", "", "", prediction.rejected])
            if prediction.problem:
                writer.writerow([prediction.file, "", "", "", prediction.problem, ""])


def _write_json(path: pathlib.Path, predictions: Sequence[Prediction]) -> None:
    document: list[dict] = []
    for prediction in predictions:
        if prediction.problem:
            document.append({"picture": prediction.file, "problem": prediction.problem})
            continue
        fields: dict = {"picture": prediction.file, "rejected": prediction.rejected}
        if prediction.unknown is not None:
            fields |= {"unknown": prediction.is_unknown, "unknown_score": prediction.unknown}
        fields["classes"] = [{"class": name, "probability": share} for name, share in prediction.classes]
        document.append(fields)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
