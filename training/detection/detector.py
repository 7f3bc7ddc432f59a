"""A detector with its classes: of a run, of words, or of an example; and the objects that it finds on images."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_vit import Preprocessing, UserError, preprocessing_of, query_embeddings, task_of, with_classes
from keras_vit.files.atomic import atomic_folder
from keras_vit.files.keras_model import MODEL
from keras_vit.files.labels import LABELS, check_classes, labels_text
from keras_vit.images.files import Image, read_image
from keras_vit.models.config import Classes, DetectionConfig
from keras_vit.models.detection import SUPPRESSED
from keras_vit.run import Run
from keras_vit.text.classes import classes_of_labels
from keras_vit.text.zero_shot import class_embeddings

# Overlap (IoU) from which the less likely of two boxes is left out, for an example: as OWL-ViT's original.
_SAME_OBJECT = 0.3


@dataclasses.dataclass(frozen=True)
class Objects:
    """The objects of one image, the most likely first."""

    corners: np.ndarray
    """(n, 4) float32: left, top, right and bottom in pixels of the upright image, cut at its edges."""
    scores: np.ndarray
    """(n,), 0 to 1."""
    classes: np.ndarray
    """(n,) int."""

    def annotations(self) -> list[dict[str, Any]]:
        """Return the objects in COCO's format."""
        rows = zip(coco_boxes(self.corners, self.classes), self.scores.tolist(), strict=True)
        return [box | {"score": score} for box, score in rows]


def coco_boxes(corners: np.ndarray, classes: np.ndarray) -> list[dict[str, Any]]:
    """Return boxes (n, 4), left, top, right, bottom, as annotations in COCO's format; categories begin at 1."""
    boxes = np.asarray(corners, np.float64)
    sizes = boxes[:, 2:] - boxes[:, :2]
    rows = zip(np.concatenate([boxes[:, :2], sizes], axis=1).tolist(), classes, sizes.prod(axis=1), strict=True)
    return [{"bbox": box, "category_id": int(label) + 1, "area": float(area)} for box, label, area in rows]


@dataclasses.dataclass(frozen=True, eq=False)
class Detector:
    """A model with "class_logits" and the names of its classes."""

    name: str
    model: keras.Model
    labels: tuple[str, ...]

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of the model, for upright images, whose boxes are given."""
        return dataclasses.replace(preprocessing_of(self.model), exif_orientation=True)

    def detect(self, images: Sequence[Image], top: int, threshold: float = 0.0) -> list[Objects]:
        """Return at most `top` objects of each image with a score of at least `threshold`."""
        inputs = np.stack([np.asarray(self.preprocessing(image.pixels)) for image in images])
        outputs = self.model.predict_on_batch(inputs)
        rows = zip(outputs["boxes"], outputs["class_logits"], images, strict=True)
        return [self._objects(boxes, logits, image.pixels.shape[:2], top, threshold) for boxes, logits, image in rows]

    def _objects(
        self, boxes: np.ndarray, logits: np.ndarray, size: tuple[int, int], top: int, threshold: float
    ) -> Objects:
        """Return an image's objects from boxes (N, 4) and logits (N, K); each patch is of its most likely class."""
        scores = 1.0 / (1.0 + np.exp(-logits.max(axis=-1).astype(np.float64)))
        corners = self.preprocessing.boxes_in_picture(boxes, size)
        corners = np.clip(corners, 0, [size[1], size[0]] * 2).astype(np.float32)
        order = np.argsort(-scores, kind="stable")
        is_kept = (scores >= threshold) & (logits.max(axis=-1) > SUPPRESSED) & (corners[:, 2:] > corners[:, :2]).all(-1)
        order = order[is_kept[order]][:top]
        return Objects(corners[order], scores[order], logits[order].argmax(axis=-1))


def save_detector(detector: Detector, folder: pathlib.Path) -> None:
    """Write model.keras and labels.txt to a new folder, which is a run for prediction and exports."""
    with atomic_folder(folder) as temporary:
        detector.model.save(temporary / MODEL)
        (temporary / LABELS).write_text(labels_text(detector.labels), encoding="utf-8")
    print(f"The detector is in {folder}.")


def open_detector(run: Run, texts: Classes | None = None) -> Detector:
    """Return the detector of a run, or of a checkpoint that looks for texts. Raises UserError for another model."""
    model = _detector_model(run)
    has_classes = "class_logits" in model.output
    if has_classes == (texts is not None):
        problem = "no classes of its own; give --classes, words to look for, or --like, an image"
        if has_classes:
            problem = f"classes of its own, {', '.join(run.labels[:5])}; leave --classes out"
        raise UserError(f"{run.name} has {problem}.")
    if texts is None:
        return Detector(run.name, model, run.labels_of(model.output["class_logits"].shape[-1]))
    return Detector(run.name, with_classes(model, class_embeddings(run.checkpoint, texts)), texts.labels)


def open_detector_of(run: Run, labels: Sequence[str], templates: Sequence[str] | None) -> Detector:
    """Return the detector of a run with these classes; of a checkpoint without its own, it looks for their names."""
    texts = None if "class_logits" in _detector_model(run).output else classes_of_labels(labels, templates)
    detector = open_detector(run, texts)
    check_classes(detector.labels, tuple(labels))
    return detector


def detector_like(run: Run, file: pathlib.Path, box: tuple[float, float, float, float] | None) -> Detector:
    """Return a detector of what an example shows in a box, or on the whole image.

    box: left, top, width and height in pixels of the upright image.
    """
    model = _detector_model(run)
    preprocessing = dataclasses.replace(preprocessing_of(model), exif_orientation=True)
    image = read_image(file, preprocessing)
    boxes, (height, width) = None, image.pixels.shape[:2]
    if box is not None:
        left, top, right, bottom = box[0], box[1], box[0] + box[2], box[1] + box[3]
        # Shares of the image are less than a pixel, too.
        if min(min(right, width) - max(left, 0), min(bottom, height) - max(top, 0)) <= 1:
            raise UserError(
                f"--box {' '.join(f'{number:g}' for number in box)} has no more than a pixel on {file}, which is "
                f"{width} pixels wide and {height} high; give left, top, width and height in pixels."
            )
        boxes = preprocessing.boxes_in_input([[left, top, right, bottom]], (height, width))
    without = keras.Model(model.input, {name: x for name, x in model.output.items() if name != "class_logits"})
    embeddings, _ = query_embeddings(without, np.asarray(preprocessing(image.pixels))[None], boxes)
    return Detector(run.name, with_classes(without, embeddings, _SAME_OBJECT), (file.stem,))


def _detector_model(run: Run) -> keras.Model:
    if not isinstance(run.model.output, dict) or not isinstance(task_of(run.model), DetectionConfig):
        raise UserError(
            f"{run.name} is not a detector; give OWL-ViT or OWLv2, such as hf:google/owlv2-base-patch16-ensemble, or a "
            "run of keras-vit detect fit."
        )
    return run.model
