"""Classify images with a run or a checkpoint: their classes, maps of what counts, and the page of both."""

import collections
import dataclasses
import functools
import io
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import matplotlib.image
import numpy as np
import tqdm

from keras_vit import Preprocessing, UserError, inspection
from keras_vit.cli.pages import data_address, render, thumbnail_address
from keras_vit.cli.start import native_stderr_silenced
from keras_vit.files.labels import check_number, distinct_names, read_labels
from keras_vit.files.tables import short_name
from keras_vit.images.files import Image, decode, read_image
from keras_vit.images.formats import LARGEST_SERVED
from keras_vit.inspection.compute import checked_logits, model_inputs, model_name
from keras_vit.inspection.report import maps_of
from keras_vit.models.build import logits_model
from keras_vit.run import Run, check_head
from keras_vit.scores import RankedClasses, Scoring, features_and_logits
from training.data.file_contents import shown
from training.options.predict import Explanation

# Images of one forward pass; with relevance, their activations are kept for the gradient.
BATCH = 8
# A file with its image, or with the reason why it cannot be read.
ReadFile = tuple[pathlib.Path, Image | None, str | None]
_LEGEND = {
    "rollout": "Attention rollout: how much each part of the image reaches the result through all layers. It is the "
    "same for every class.",
    "relevance": "Relevance (Grad-CAM): the parts that speak for the predicted class.",
}
# Longest side of an image on the page, in pixels.
_SIDE = 320
# The color of a map over its image, RGB, and its opacity where the map is highest.
_COLOR, _OPACITY = (213, 94, 0), 0.85
# Shares of an image that the frame of the model's part leaves out at least, to be shown.
_LEFT_OUT = 0.01


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The classes of one image, or why it cannot be read."""

    name: str
    """Its path, as `shown` has it."""
    ranked: RankedClasses | None = None
    problem: str | None = None
    maps: Sequence[tuple[str, np.ndarray]] = ()
    """Titles and maps (h, w), from 0 to 1, of the part of the image that the model sees."""
    address: str = ""
    """The address of the whole image, inside the page."""
    seen: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)
    """Left, top, right and bottom of the part that the model sees, in shares of the image; padding is outside."""

    @property
    def classes(self) -> tuple[tuple[str, float], ...]:
        """The classes that count, with their probabilities."""
        return self.ranked.chosen if self.ranked else ()

    def as_json(self) -> dict[str, Any]:
        if self.ranked is None:
            return {"picture": self.name, "problem": self.problem}
        fields: dict[str, Any] = {"picture": self.name, "rejected": self.ranked.is_rejected}
        if self.ranked.unknown is not None:
            fields |= {"unknown": self.ranked.is_unknown, "unknown_score": self.ranked.unknown}
        if self.ranked.is_answered is not None:
            fields["answered"] = self.ranked.is_answered
        if self.ranked.label_set is not None:
            fields["label_set"] = [*self.ranked.label_set]
        return {**fields, "classes": [{"class": name, "probability": share} for name, share in self.classes]}


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

    def classify(self, images: Sequence[Image]) -> list[Prediction]:
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
            pairs = zip(ranked, scores, strict=True)
            ranked = [
                dataclasses.replace(each, unknown=score, is_unknown=score > scorer.threshold) for each, score in pairs
            ]
        rows = zip(images, ranked, maps, strict=True)
        return [Prediction(image.name, classes, maps=of_image) for image, classes, of_image in rows]

    @functools.cached_property
    def _network(self) -> keras.Model:
        """Images -> what is needed of them, in one pass: "logits" and, for a score of unknown images, "pre_logits"."""
        if self.run.unknown is not None:
            return features_and_logits(self.run.model)
        model = logits_model(self.run.model)
        return keras.Model(model.input, {"logits": model.output})

    def with_image(self, prediction: Prediction, image: Image) -> Prediction:
        """Return a prediction with the whole image, reduced, and the part of it that the model sees."""
        height, width = image.pixels.shape[:2]
        box = self.run.preprocessing.boxes_in_picture([0.5, 0.5, 1.0, 1.0], (height, width))
        left, top, right, bottom = (box / [width, height, width, height]).tolist()
        address = thumbnail_address(image.pixels, _SIDE)
        return dataclasses.replace(prediction, address=address, seen=(left, top, right, bottom))

    def answer(self, data: bytes, name: str) -> str:
        """Return a page with the classes of one image. Raises UserError for bytes that are none."""
        image = self._decoded(data, name)
        return self.page([self.with_image(self.classify([image])[0], image)], {})

    def values(self, data: bytes, name: str) -> dict[str, Any]:
        """Return the classes of one image as `--output X.json` has them. Raises UserError for bytes that are none."""
        return dataclasses.replace(self.classify([self._decoded(data, name)])[0], name=name).as_json()

    def _decoded(self, data: bytes, name: str) -> Image:
        return decode(data, name, preprocessing=self.run.preprocessing, most_pixels=LARGEST_SERVED)

    def page(self, predictions: Sequence[Prediction], problems: Mapping[str, str | None]) -> str:
        """Return a page of images with their classes and maps; `problems` says of other files why they are missing.

        Its summary counts the class of each image, of several all that it has, or why it has none.
        """
        cards = [_card(each, each.ranked, self.scoring) for each in predictions if each.ranked]
        return render(
            "predictions",
            title="Most likely classes" if len(cards) == 1 else f"{len(cards):,} images",
            model=f"{short_name(self.run.name)} ({model_name(self.run.model)})",
            cards=cards,
            counts=collections.Counter(group for card in cards for group in card["groups"]).most_common(),
            problems=problems,
            scoring=self.scoring,
            legend=_LEGEND[self.explain] if self.explain else "",
            colors=f"rgb{(*_COLOR, 0.0)}, rgb{(*_COLOR, _OPACITY)}",
        )


def _card(prediction: Prediction, ranked: RankedClasses, scoring: Scoring) -> dict[str, Any]:
    groups = [name for name, _ in (ranked.chosen if scoring.is_multi_label else ranked.chosen[:1])]
    if ranked.is_unknown:
        groups = ["(unknown)"]
    elif ranked.is_rejected:
        groups = ["(rejected)"]
    elif ranked.is_answered is False:
        groups = ["(for a person)"]
    left, top, right, bottom = (100.0 * edge for edge in prediction.seen)
    return {
        "name": prediction.name,
        "ranked": ranked,
        "groups": groups,
        "address": prediction.address,
        "maps": [
            {"title": title, "address": _overlay_address(values), "is_empty": values.max() <= 0.0}
            for title, values in prediction.maps
        ],
        "place": f"left: {left:.2f}%; top: {top:.2f}%; width: {right - left:.2f}%; height: {bottom - top:.2f}%",
        "is_cropped": max(prediction.seen[:2]) > _LEFT_OUT or min(prediction.seen[2:]) < 1.0 - _LEFT_OUT,
    }


def _overlay_address(values: np.ndarray) -> str:
    """Return a map that covers the image: the higher, the less of the image shows through."""
    colors = np.empty((*values.shape, 4), np.uint8)
    colors[..., :3], colors[..., 3] = _COLOR, np.round(255.0 * _OPACITY * values)
    stream = io.BytesIO()
    matplotlib.image.imsave(stream, colors, format="png")
    return data_address(stream.getvalue())


def open_classifier(
    run: Run, labels: str | None = None, *, threshold: float | None = None, explain: Explanation | None = None
) -> Classifier:
    """Load the model of a run with its class names, or those of the file `labels`.

    Raises UserError if the model has no head, another number of classes than `labels` or the run, or no attention to
    make the map of, and for a checkpoint whose preprocessing is not known.
    """
    run.check_preprocessing()
    model, own = run.model, run.class_names
    names = own if labels is None else distinct_names(read_labels(labels), labels)
    if labels is not None:
        check_number(names, labels, model.output_shape[-1], run.name)
        if own and own != names:
            print(f"The names of {labels} replace those of {run.name}, {', '.join(own[:5])}{' …' if own[5:] else ''}.")
    if names:
        check_head(model, names)
    _ = run.classifier  # raises UserError for a model without a head
    if explain is not None and explain not in inspection.available_figures(model):
        raise UserError(f"{run.name} has no attention to show by --explain {explain}; give --explain relevance.")
    run.warn_of_missing_files(labels_given=bool(names))
    return Classifier(run, names, run.scoring(threshold), explain)


def classified(classifier: Classifier, batch: Sequence[ReadFile], *, with_images: bool = False) -> list[Prediction]:
    """Return the prediction for each image of a batch, for a page with the images."""
    good = [image for _, image, _ in batch if image is not None]
    predictions = iter(zip(classifier.classify(good) if good else [], good, strict=True))
    results = []
    for file, _, problem in batch:
        prediction = Prediction("", problem=problem)
        if problem is None:
            prediction, image = next(predictions)
            prediction = classifier.with_image(prediction, image) if with_images else prediction
        results.append(dataclasses.replace(prediction, name=shown(str(file))))
    return results


def batches_of_images(
    files: Sequence[pathlib.Path], preprocessing: Preprocessing, problems: list[str]
) -> Iterator[list[Image]]:
    """Yield the images of files, for each batch those that can be read; for each other one add a line to problems."""
    for batch in batches_of(files, preprocessing):
        yield [image for _, image, _ in batch if image is not None]
        problems += [f"{shown(str(f))}: {why.removeprefix(f'{f.name} is ')}" for f, _, why in batch if why]


def batches_of(files: Sequence[pathlib.Path], preprocessing: Preprocessing) -> Iterator[list[ReadFile]]:
    """Yield the images of files, and why others cannot be read, with a progress bar."""
    with tqdm.tqdm(total=len(files), unit="image", disable=None) as progress:
        for begin in range(0, len(files), BATCH):
            with native_stderr_silenced():  # once for all: each begins a process
                batch = [(file, *try_to_read(file, preprocessing)) for file in files[begin : begin + BATCH]]
            yield batch
            progress.update(len(batch))


def try_to_read(file: pathlib.Path, preprocessing: Preprocessing) -> tuple[Image | None, str | None]:
    """Return the image of a file, or why it cannot be read."""
    if file.is_dir():
        return None, f"{file.name} is a link to a folder, which is not followed; give that folder as well."
    if not file.exists():
        return None, f"{file.name} is no file, or a link to none; repair or remove it."
    try:
        image = read_image(file, preprocessing)
        return dataclasses.replace(image, name=shown(str(file))), None
    except (UserError, OSError) as error:
        return None, shown(str(error))
