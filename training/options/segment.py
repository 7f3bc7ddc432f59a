"""Options of `keras-vit segment`, and what can be checked of them before TensorFlow is imported."""

import dataclasses
import pathlib
import shlex
from typing import Annotated, Any, Literal

from keras_vit.cli.options import Aliases, MayLead, Positional, Share
from keras_vit.errors import Rules, refuse_first, refuse_without_effect
from keras_vit.files.remote import existing_file, existing_folder, is_remote
from keras_vit.models.config import SEGMENT_THRESHOLD, SegmentationTask
from training.options.common import EVALUATION_NAMES, TRAINING_NAMES, AnnotatedData, TrainingOptions
from training.recipes.dense import SegmentRecipe

KINDS = ("folder", "coco", "panoptic", "voc", "tfds")
# What a folder must hold.
_FOLDERS = {"folder": ("images", "masks"), "voc": ("JPEGImages", "SegmentationClass")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SceneOptions(AnnotatedData):
    """Pictures with masks."""

    data: str
    """folder:PATH of images/ and masks/, or of train/ and test/ with these two; coco:FILE.json with polygons or
    run-length encodings; panoptic:FILE.json with its PNGs in the folder FILE; voc:FOLDER of JPEGImages and
    SegmentationClass; or tfds:NAME[:CONFIG], a data set of TensorFlow Datasets with an image and a mask."""
    eval_data: str | None = None
    """Of coco: and panoptic:, the file to evaluate on, such as coco:val.json; default every tenth picture by name."""
    images: str | None = None
    """Of coco: and panoptic:, the folder of the pictures; default that of the file."""
    eval_images: str | None = None
    """Of --eval-data, likewise."""
    background: Literal["class", "ignore"] = "class"
    """Of coco:, and of panoptic: without stuff, what pixels outside of all objects are for --task semantic: the class
    background, or neither learned nor measured."""
    data_dir: str | None = None
    """Directory of TensorFlow Datasets, for tfds:; default its own."""
    train_split: str = "train"
    """Training split, for tfds:, such as train[:80%]."""
    eval_split: str | None = None
    """Evaluation split, for tfds:; default test, validation or val, whichever there is first."""

    def __post_init__(self) -> None:
        refuse_first(self._rules(self.data, self.images, ""))
        of_file, of_tfds = self.kind in ("coco", "panoptic"), self.kind == "tfds"
        refuse_without_effect(
            self,
            [
                (("images", "eval_data", "allow_outside", "background"), of_file, "--data coco:FILE or panoptic:FILE"),
                (("eval_images",), self.eval_data is not None, "--eval-data"),
                (("data_dir", "train_split", "eval_split"), of_tfds, "--data tfds:NAME"),
            ],
        )
        if self.eval_data is not None:
            refuse_first(self._rules(self.eval_data, self.eval_images, "eval-"))
        inside = _FOLDERS.get(self.kind, ())
        refuse_first(
            (
                not (folder / name).is_dir(),
                f"{folder} should hold the folders {' and '.join(inside)}, but has no {name}; add it.",
            )
            for folder in (folders_of_splits(self.path) if self.kind == "folder" else None) or (self.path,)
            for name in inside
        )

    def _rules(self, data: str, images: str | None, prefix: str) -> Rules:
        kind, _, rest = data.partition(":")
        advice = f"; for this folder, give {shlex.quote(f'folder:{data}')}" if pathlib.Path(data).is_dir() else ""
        yield (
            kind not in KINDS or not rest,
            f"--{prefix}data takes folder:PATH, coco:FILE.json, panoptic:FILE.json, voc:FOLDER or tfds:NAME, but was "
            f"given {data!r}{advice}.",
        )
        yield kind != self.kind, f"--eval-data should be of the kind of --data, {self.kind}:, but is {data}."
        yield is_remote(rest), f"--{prefix}data takes files of this machine, but was given {data!r}; copy them first."
        if kind != "tfds":
            existing = existing_folder if kind in _FOLDERS else existing_file
            existing(rest, f"correct the path behind --{prefix}data {kind}:")
        if images is not None:
            existing_folder(images, f"--{prefix}images takes the folder of the pictures")

    def settings(self) -> dict[str, Any]:
        left_out = {"data_dir"} | ({"background"} if self.background == "class" else set())  # as in earlier runs
        return {name: value for name, value in super().settings().items() if name not in left_out}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentFitOptions(TrainingOptions):
    """Train a model that segments, on a checkpoint. The fields of the recipe are options."""

    source: SceneOptions  # type: ignore[assignment]
    checkpoint: Annotated[str, Aliases(("--run",))]
    """Run directory, checkpoint file or folder, address, or official name, of a Vision Transformer; or a model that
    segments, to train it further."""
    task: SegmentationTask = "semantic"
    """semantic: the class of each pixel. instance: objects of their own. panoptic: both, each pixel in one segment."""
    recipe: SegmentRecipe
    """How to train."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_without_effect(
            self,
            [
                (("data_service",), False, "batches of whole images"),
                (("task",), self.recipe.head != "linear", "--head eomt, since the linear one knows classes of pixels"),
            ],
        )
        refuse_without_effect(self.execution, [(("inspect_every",), False, "models of classes")])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentEvaluateOptions:
    """Measure a model that segments, and show its worst pictures."""

    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory or .keras file of a model that segments, or a published EoMT."""
    source: SceneOptions
    task: SegmentationTask | None = None
    """What is measured; default what the model was trained for."""
    output: str
    """New or existing folder for segmentation.json, segmentation.md and segmentation.html."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentPredictOptions:
    """Segment pictures."""

    pictures: Annotated[tuple[str, ...], Positional("PICTURES")]
    """Image files, folders, which are searched recursively, and patterns such as 'pictures/*.png'."""
    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory or .keras file of a model that segments, or a published EoMT."""
    output: str
    """New or existing folder: masks/ with a PNG for each image; masks.json of instance and panoptic, in COCO's panoptic
    format; instances.json of instance, in COCO's format with whole objects; and predictions.html with overlays."""
    task: SegmentationTask | None = None
    """What is found; default what the model was trained for."""
    threshold: Share = SEGMENT_THRESHOLD
    """Minimum score of a segment, 0 to 1, of instance and panoptic."""


def folders_of_splits(root: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path] | None:
    """Return the folders of the training and the evaluation split; None if there is one of both."""
    train, evaluation = (
        next((root / name for name in names if (root / name).is_dir()), None)
        for names in (TRAINING_NAMES, EVALUATION_NAMES)
    )
    return None if train is None or evaluation is None else (train, evaluation)
