"""Options of `keras-vit segment` and `keras-vit detect`, and what can be checked of them without TensorFlow."""

import dataclasses
import pathlib
import shlex
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from keras_vit import UserError
from keras_vit.cli.options import Aliases, Count, MayLead, Port, Positional, Share, check_ranges
from keras_vit.errors import refuse_without_effect
from keras_vit.files.remote import existing_file, existing_folder, is_remote
from keras_vit.models.config import SEGMENT_THRESHOLD, SegmentationTask
from training.options.common import EVALUATION_NAMES, TRAINING_NAMES, AnnotatedData, CsvOptions, TrainingOptions
from training.options.predict import check_ending
from training.recipes.dense import DETECT, DetectRecipe, SegmentRecipe

BadBoxes = Literal["refuse", "clip"]
# The kinds of images with masks and of those with boxes, and what a path of each must be.
_Kinds = Mapping[str, Callable[[str, str], pathlib.Path] | None]
_SCENES: _Kinds = {
    "folder": existing_folder,
    "coco": existing_file,
    "panoptic": existing_file,
    "voc": existing_folder,
    "tfds": None,
}
_BOXES: _Kinds = {"coco": existing_file, "yolo": existing_file, "voc": existing_folder, "csv": existing_file}
# What a folder of masks must hold.
_FOLDERS = {"folder": ("images", "masks"), "voc": ("JPEGImages", "SegmentationClass")}


def _check_data(option: str, data: str, kinds: _Kinds, takes: str) -> None:
    """Raise UserError unless the data of an option are of one of these kinds, and on this machine."""
    kind, _, path = data.partition(":")
    if kind not in kinds or not path or is_remote(path):
        is_folder = "folder" in kinds and pathlib.Path(data).is_dir()
        advice = f"; for this folder, give {shlex.quote(f'folder:{data}')}" if is_folder else ""
        advice = "; copy the files to this machine" if is_remote(path) else advice
        raise UserError(f"{option} accepts {takes}, but was given {data!r}{advice}.")
    if (existing := kinds[kind]) is not None:
        existing(path, f"correct the path behind {option} {kind}:")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SceneOptions(AnnotatedData):
    """Images with masks."""

    data: str
    """folder:PATH of images/ and masks/, or of train/ and test/ with these two; coco:FILE.json with polygons or
    run-length encodings; panoptic:FILE.json with its PNGs in the folder FILE; voc:FOLDER of JPEGImages and
    SegmentationClass; or tfds:NAME[:CONFIG], a data set of TensorFlow Datasets with an image and a mask."""
    eval_data: str | None = None
    """File to evaluate on, for coco: and panoptic:, such as coco:val.json; default every tenth image by name."""
    eval_images: str | None = None
    """Folder of the images of --eval-data; default that of the file."""
    background: Literal["class", "ignore"] = "class"
    """For --task semantic on coco:, and on panoptic: without stuff, what pixels outside of all objects are: the class
    background, or neither learned nor measured."""
    data_dir: str | None = None
    """Directory of TensorFlow Datasets, for tfds:; default its own."""
    train_split: str = "train"
    """Training split, for tfds:, such as train[:80%]."""
    eval_split: str | None = None
    """Evaluation split, for tfds:; default test, validation or val, whichever there is first."""

    def __post_init__(self) -> None:
        takes = "folder:PATH, coco:FILE.json, panoptic:FILE.json, voc:FOLDER or tfds:NAME"
        _check_data("--data", self.data, _SCENES, takes)
        of_file, of_tfds = self.kind in ("coco", "panoptic"), self.kind == "tfds"
        applies = [
            (("images", "eval_data", "allow_outside", "background"), of_file, "--data coco:FILE or panoptic:FILE"),
            (("eval_images",), self.eval_data is not None, "--eval-data"),
            (("data_dir", "train_split", "eval_split"), of_tfds, "--data tfds:NAME"),
            (("group",), not of_tfds and self.eval_data is None, "data whose evaluation images are drawn"),
        ]
        refuse_without_effect(self, applies)
        if self.eval_data is not None:
            _check_data(
                "--eval-data", self.eval_data, {self.kind: _SCENES[self.kind]}, f"the kind of --data, {self.kind}:"
            )
        for option, images in (("--images", self.images), ("--eval-images", self.eval_images)):
            if images is not None:
                existing_folder(images, f"{option} accepts the folder of the images")
        inside = _FOLDERS.get(self.kind, ())
        for folder in (folders_of_splits(self.path) if self.kind == "folder" else None) or (self.path,):
            for name in inside:
                existing_folder(folder / name, f"--data {self.kind}: takes a folder with {' and '.join(inside)} inside")

    def settings(self) -> dict[str, Any]:
        left_out = {"data_dir"} | ({"background"} if self.background == "class" else set())  # as in earlier runs
        left_out |= {"group"} if self.kind == "tfds" or self.eval_data is not None else set()
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
        applies = [
            (("data_service",), False, "batches of whole images"),
            (("task",), self.recipe.head != "linear", "--head eomt, since the linear one knows classes of pixels"),
        ]
        refuse_without_effect(self, applies)
        refuse_without_effect(self.execution, [(("inspect_every",), False, "models of classes")])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentEvaluateOptions:
    """Measure a model that segments, and show its worst images."""

    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory or .keras file of a model that segments, or a published EoMT."""
    source: SceneOptions
    task: SegmentationTask | None = None
    """Task to measure; default what the model was trained for."""
    output: str
    """New or existing folder for segmentation.json, segmentation.md and segmentation.html."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentPredictOptions:
    """Segment images."""

    images: Annotated[tuple[str, ...], Positional("IMAGES")]
    """Image files, folders, which are searched recursively, and patterns such as 'pictures/*.png'."""
    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory or .keras file of a model that segments, or a published EoMT."""
    output: str
    """New or existing folder: masks/ with a PNG for each image; masks.json of instance and panoptic, in COCO's panoptic
    format; instances.json of instance, in COCO's format with whole objects; and predictions.html with overlays."""
    task: SegmentationTask | None = None
    """Task of the results; default what the model was trained for."""
    threshold: Share = SEGMENT_THRESHOLD
    """Minimum score of a segment, 0 to 1, of instance and panoptic."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectPredictOptions(CsvOptions):
    """Find objects on images: of words, like an example, or of the classes of a run."""

    images: Annotated[tuple[str, ...], Positional("IMAGES")] = ()
    """Image files, folders, which are searched recursively, and patterns such as 'pictures/*.png'."""
    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory or .keras file of a detector, or OWL-ViT or OWLv2, such as
    hf:google/owlv2-base-patch16-ensemble."""
    classes: tuple[str, ...] | None = None
    """For OWL-ViT and OWLv2: texts to look for, such as "a red stamp" cat, or a .txt file with one in each line, or
    with a name and its texts, as in "cat: a cat | a kitten". Behind them, a value with a slash or the ending of an
    image, such as pictures/ or ./cat.jpg, and all values after it are IMAGES."""
    templates: tuple[str, ...] | None = None
    """Sentences in which each text replaces {}, such as "a photo of a {}.", whose embeddings are averaged; clip, siglip
    or a .txt file. Default: the texts as they are."""
    like: str | None = None
    """Image of an example to look for."""
    box: tuple[float, float, float, float] | None = None
    """Where the example is on its image, seen upright: left, top, width and height in pixels; default the whole
    image, of OWLv2 the most likely object on it."""
    output: str | None = None
    """File for the results, which ends in .csv, .json (COCO) or .html (a page with the boxes)."""
    serve: bool = False
    """Serve a page on 127.0.0.1 that shows the objects on one image after the other."""
    port: Port = 8000
    """Port of the page."""
    save: str | None = None
    """New directory for the detector with these classes, model.keras and labels.txt: to use it again as --run, or to
    export it."""
    threshold: Share = 0.1
    """Least score of an object, 0 to 1."""
    top: Count = 100
    """Objects of an image at most, those of the highest scores."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to resize the model's input to; default its own."""

    def __post_init__(self) -> None:
        check_ranges(self)
        check_ending(self.output, (".csv", ".json", ".html"))
        if self.like is not None:
            existing_file(self.like, "--like accepts an image of the example")
        if self.save is not None and pathlib.Path(self.save).exists():
            raise UserError(f"{self.save} exists, but --save accepts a new directory; choose another.")
        applies = [
            (("templates",), self.classes is not None, "--classes"),
            (("port",), self.serve, "--serve"),
            (("output",), not self.serve, "results outside of the page of --serve"),
            (("like",), self.classes is None, "a search without --classes"),
            (("box",), self.like is not None, "--like FILE"),
            (("save",), (self.classes or self.like) is not None, "--classes or --like"),
        ]
        refuse_without_effect(self, applies)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoxesOptions(AnnotatedData):
    """Images with boxes."""

    data: str
    """coco:FILE.json, yolo:data.yaml, voc:FOLDER of Annotations and JPEGImages, or csv:FILE with the columns path, x,
    y, w, h (left, top, width, height in pixels) and label; a row of a path alone is an image without objects."""
    bad_boxes: BadBoxes = "refuse"
    """For boxes outside of their image, without area, with swapped corners or of an unknown class. refuse: name them
    and stop; clip: cut, sort or leave them out, and count them."""

    def __post_init__(self) -> None:
        _check_data("--data", self.data, _BOXES, "coco:FILE.json, yolo:data.yaml, voc:FOLDER or csv:FILE")
        refuse_without_effect(self, [(("images",), self.kind in ("coco", "csv"), "--data coco:FILE or csv:FILE")])
        if self.images is not None:
            existing_folder(self.images, "--images accepts the folder of the images")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectEvaluateOptions:
    """Measure a detector on images with boxes: COCO's average precision, and a page of its worst mistakes."""

    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory or .keras file of a detector, or OWL-ViT or OWLv2, which looks for the names of the classes."""
    source: BoxesOptions
    output: str
    """New or existing folder for detection.json, detection.md and detection.html."""
    templates: tuple[str, ...] | None = None
    """For OWL-ViT and OWLv2: sentences in which the name of each class replaces {}; see predict."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to resize the model's input to; default its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectFitOptions(TrainingOptions):
    """Train a detector for the classes of your boxes. The fields of the recipe are options."""

    source: BoxesOptions  # type: ignore[assignment]
    checkpoint: Annotated[str, Aliases(("--run",))]
    """Run directory, checkpoint file or folder, address, or official name, of a Vision Transformer, which gets a new
    head, or of OWL-ViT or OWLv2, whose head is kept and whose classes begin as their names."""
    templates: tuple[str, ...] | None = None
    """For OWL-ViT and OWLv2: sentences in which the name of each class replaces {}; see predict."""
    recipe: DetectRecipe = DETECT
    """How to train."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_without_effect(self, [(("data_service",), False, "batches of whole images")])


def folders_of_splits(root: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path] | None:
    """Return the folders of the training and the evaluation split; None if there is one of both."""
    kinds = (TRAINING_NAMES, EVALUATION_NAMES)
    train, evaluation = ([root / name for name in names if (root / name).is_dir()] for names in kinds)
    return (train[0], evaluation[0]) if train and evaluation else None
