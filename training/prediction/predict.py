"""Classify images with a run or a checkpoint, and write the results as CSV, JSON or a page."""

import csv
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tqdm

from keras_vit import Preprocessing, UserError, inspection, preprocessing_of, run_directory
from keras_vit.checkpoints.describe import class_names_of
from keras_vit.checkpoints.fetch.find import find_checkpoint
from keras_vit.files.atomic import atomic_write
from keras_vit.files.labels import LABELS, read_labels
from keras_vit.files.tables import markdown_table
from keras_vit.inspection.html_report import prediction_page
from keras_vit.run_directory import is_keras_model
from training.evaluation.classifiers import load_model, names_beside
from training.options.predict import Explanation, check_names

# Images of one forward pass; with relevance, their activations are kept for the gradient.
_BATCH = 8


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A model with its class names."""

    model: keras.Model
    name: str
    """The run or checkpoint."""
    labels: tuple[str, ...]
    """In the order of the logits; empty for class numbers."""
    temperature: float = 1.0
    """Divides the logits, if the run is calibrated."""
    threshold: float | None = None
    """An image whose most likely class has a lower probability is rejected."""
    multi_label: bool = False
    """Whether an image may have several classes: those that reach the threshold, 0.5 by default."""

    @property
    def preprocessing(self) -> Preprocessing:
        """How the model's images are made of pictures."""
        return preprocessing_of(self.model)

    def inspect(
        self, images: Sequence[inspection.Image], explain: Explanation | None = None
    ) -> inspection.InspectionResult:
        """Return the five most likely classes of each image, and the maps of `explain`."""
        return inspection.inspect(
            self.model,
            images,
            checkpoint=self.name,
            labels=self.labels,
            figures=() if explain is None else (explain,),
            shown=len(images),
            temperature=self.temperature,
            threshold=self.threshold,
            multi_label=self.multi_label,
        )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The classes of one file, or why it cannot be read."""

    file: str
    """Its path, with "?" for bytes that are not UTF-8."""
    classes: tuple[tuple[str, float], ...] = ()
    """Up to five classes with their probabilities, the most likely first; of a multi-label model those that reach the
    threshold."""
    rejected: bool = False
    """Whether no class reaches the threshold."""
    problem: str | None = None


def open_classifier(
    run: str,
    labels: str | None,
    image_size: tuple[int, int] | None = None,
    num_heads: int | None = None,
    *,
    threshold: float | None = None,
) -> Classifier:
    """Load a model of a run or checkpoint with its class names, and the temperature of a calibrated run.

    Raises UserError if the model has no head, or another number of classes than `labels` or the run.
    """
    model = load_model(run, image_size=image_size, num_heads=num_heads)
    own = names_beside(run) or ()
    stored = () if own or is_keras_model(find_checkpoint(run)) else class_names_of(run)
    own = own or (stored if len(stored) == model.output_shape[-1] else ())
    names = own if labels is None else read_labels(labels)
    if labels is not None:
        check_names(labels)
        if model.output_shape[-1] != len(names):
            raise UserError(
                f"{labels} names {len(names)} classes, but the model {run} has {model.output_shape[-1]}; give a line "
                "for each class of the model."
            )
        if own and own != names:
            print(f"The names of {labels} replace those of {run}, {', '.join(own[:5])}{' …' if own[5:] else ''}.")
    if names:
        run_directory.check_classes(model, names)
    if "relevance" not in inspection.available_figures(model):
        raise UserError(
            f"{run} ends with features of shape {model.output_shape} and has no classes; add a head with python -m "
            "training.finetune or keras_vit.adapt(model, num_classes=…)."
        )
    if not names and run_directory.lacks(run, LABELS):
        print(f"{run} has no {LABELS}, so classes are shown by their numbers; copy it from the run, or give --labels.")
    run_directory.warn_without_config(run)
    multi_label = run_directory.is_multi_label(run)
    return Classifier(model, run, names, run_directory.load_temperature(run), threshold, multi_label)


def check_explanation(classifier: Classifier, explain: Explanation | None) -> None:
    """Raise UserError for attention maps of a model without attention."""
    if explain is not None and explain not in inspection.available_figures(classifier.model):
        raise UserError(f"{classifier.name} has no attention to show by --explain {explain}; give --explain relevance.")


def predict(
    classifier: Classifier, files: Sequence[pathlib.Path], *, output: str | None, explain: Explanation | None
) -> None:
    """Classify files, print a table, and write `output`.

    A file that cannot be read is named in the results, and the others are classified. Raises UserError if none can be
    read.
    """
    predictions: list[Prediction] = []
    results: list[inspection.InspectionResult] = []
    progress = tqdm.tqdm(total=len(files), unit="picture", disable=None)
    for batch in _batches(files, classifier.preprocessing):
        good = [image for _, image, _ in batch if image is not None]
        classes: Iterator[tuple[tuple[tuple[str, float], ...], bool]] = iter(())
        if good:
            result = classifier.inspect(good, explain)
            classes = ((result.classes_of(index), result.is_rejected(index)) for index in range(len(good)))
            if output is not None and output.endswith(".html"):
                # The page shows the fitted images; those of the files may be large.
                small = tuple(dataclasses.replace(image, pixels=image.pixels[:1, :1].copy()) for image in good)
                results.append(dataclasses.replace(result, images=small))
        for file, _, problem in batch:
            name = _as_utf8(str(file))
            predictions.append(Prediction(name, problem=problem) if problem else Prediction(name, *next(classes)))
        progress.update(len(batch))
    progress.close()
    if table := _table(predictions):
        print(table)
    for prediction in predictions:
        if prediction.problem:
            why = prediction.problem.removeprefix(f"{pathlib.Path(prediction.file).name} is ")
            print(f"Not classified: {prediction.file}: {why}")
    if output is not None and (results or not output.endswith(".html")):
        _write(pathlib.Path(output), predictions, results)
    if all(prediction.problem for prediction in predictions):
        raise UserError("None of the pictures could be read; convert them, or give others.")


def _batches(
    files: Sequence[pathlib.Path], preprocessing: Preprocessing
) -> Iterator[list[tuple[pathlib.Path, inspection.Image | None, str | None]]]:
    for begin in range(0, len(files), _BATCH):
        yield [(file, *_read(file, preprocessing)) for file in files[begin : begin + _BATCH]]


def _read(file: pathlib.Path, preprocessing: Preprocessing) -> tuple[inspection.Image | None, str | None]:
    if file.is_dir():
        return None, f"{file.name} is a link to a folder, which is not followed; give that folder as well."
    if not file.exists():
        return None, f"{file.name} is no file, or a link to none; repair or remove it."
    try:
        image = inspection.read_images(file, 1, preprocessing=preprocessing)[0]
        return dataclasses.replace(image, name=_as_utf8(str(file))), None
    except (UserError, OSError) as error:
        return None, _as_utf8(str(error))


def _as_utf8(text: str) -> str:
    """The text with "?" for bytes of a path that are not UTF-8, which no text file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _joined(results: Sequence[inspection.InspectionResult]) -> inspection.InspectionResult:
    """Return one result for the images of all batches, without the averages over a batch."""
    keys = [key for key in ("images", "rollout", "relevance", "logits") if key in results[0].arrays]
    return dataclasses.replace(
        results[0],
        images=tuple(image for result in results for image in result.images),
        predictions=tuple(classes for result in results for classes in result.predictions),
        arrays={key: np.concatenate([result.arrays[key] for result in results]) for key in keys},
        measures={},
    )


def _table(predictions: Sequence[Prediction]) -> str:
    best = min(max((len(prediction.classes) for prediction in predictions), default=0), 5)
    rows = [
        [
            f"{prediction.file}{' (rejected)' * prediction.rejected}",
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


def _write(
    output: pathlib.Path, predictions: Sequence[Prediction], results: Sequence[inspection.InspectionResult]
) -> None:
    with atomic_write(output) as temporary:
        if output.suffix == ".csv":
            with temporary.open("w", newline="", encoding="utf-8") as stream:
                writer = csv.writer(stream)
                writer.writerow(["picture", "rank", "class", "probability", "problem", "rejected"])
                for prediction in predictions:
                    for rank, (name, share) in enumerate(prediction.classes, 1):
                        writer.writerow([prediction.file, rank, name, f"{share:.6f}", "", prediction.rejected])
                    if not prediction.classes and not prediction.problem:  # of a multi-label model
                        writer.writerow([prediction.file, "", "", "", "", prediction.rejected])
                    if prediction.problem:
                        writer.writerow([prediction.file, "", "", "", prediction.problem, ""])
        elif output.suffix == ".json":
            document = [
                {"picture": prediction.file, "problem": prediction.problem}
                if prediction.problem
                else {
                    "picture": prediction.file,
                    "rejected": prediction.rejected,
                    "classes": [{"class": name, "probability": share} for name, share in prediction.classes],
                }
                for prediction in predictions
            ]
            temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        else:
            problems = {prediction.file: prediction.problem for prediction in predictions if prediction.problem}
            temporary.write_text(prediction_page(_joined(results), problems), encoding="utf-8")
    print(f"Results are in {output}.")
