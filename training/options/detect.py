"""Options of `keras-vit detect`, and what can be checked of them before TensorFlow is imported."""

import dataclasses
from typing import Annotated, Literal

from keras_vit import UserError
from keras_vit.cli.options import Aliases, Count, MayLead, Port, Positional, Share, check_ranges
from keras_vit.errors import refuse_without_effect
from keras_vit.files.remote import existing_file, existing_folder
from training.options.common import AnnotatedData, CsvOptions, TrainingOptions
from training.options.predict import check_ending
from training.recipes.dense import DETECT, DetectRecipe

OUTPUTS = (".csv", ".json", ".html")
BadBoxes = Literal["refuse", "clip"]
KINDS = ("coco", "yolo", "voc", "csv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectPredictOptions(CsvOptions):
    """Find objects on pictures: of words, like an example, or of the classes of a run."""

    pictures: Annotated[tuple[str, ...], Positional("PICTURES")] = ()
    """Image files, folders, which are searched recursively, and patterns such as 'pictures/*.png'."""
    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory or .keras file of a detector, or OWL-ViT or OWLv2, such as
    hf:google/owlv2-base-patch16-ensemble."""
    classes: tuple[str, ...] | None = None
    """Of OWL-ViT and OWLv2: texts to look for, such as "a red stamp" cat, or a .txt file with one in each line, or with
    a name and its texts, as in "cat: a cat | a kitten". Behind them, a value with a slash or the ending of a picture,
    such as pictures/ or ./cat.jpg, is one of the PICTURES."""
    templates: tuple[str, ...] | None = None
    """Sentences in which each text replaces {}, such as "a photo of a {}.", whose embeddings are averaged; clip, siglip
    or a .txt file. Default: the texts as they are."""
    like: str | None = None
    """Picture of an example to look for."""
    box: tuple[float, float, float, float] | None = None
    """Where the example is on its picture, seen upright: left, top, width and height in pixels; default the whole
    picture, of OWLv2 the likeliest object on it."""
    output: str | None = None
    """File for the results, which ends in .csv, .json (COCO) or .html (a page with the boxes)."""
    serve: bool = False
    """Serve a page on 127.0.0.1 that shows the objects on one picture after the other."""
    port: Port = 8000
    """Port of the page."""
    save: str | None = None
    """New directory for the detector with these classes, model.keras and labels.txt: to use it again as --run, or to
    export it."""
    threshold: Share = 0.1
    """Least score of an object, 0 to 1."""
    top: Count = 100
    """Objects of a picture at most, those of the highest scores."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to resize the model's input to; default its own."""

    def __post_init__(self) -> None:
        check_ranges(self)
        check_ending(self.output, OUTPUTS)
        refuse_without_effect(
            self,
            [
                (("templates",), self.classes is not None, "--classes"),
                (("port",), self.serve, "--serve"),
                (("output",), not self.serve, "results outside of the page of --serve"),
                (("like",), self.classes is None, "a search without --classes"),
                (("box",), self.like is not None, "--like FILE"),
                (("save",), (self.classes or self.like) is not None, "--classes or --like"),
            ],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoxesOptions(AnnotatedData):
    """Pictures with boxes."""

    data: str
    """coco:FILE.json, yolo:data.yaml, voc:FOLDER of Annotations and JPEGImages, or csv:FILE with the columns path, x,
    y, w, h (left, top, width, height in pixels) and label; a row of a path alone is a picture without objects."""
    images: str | None = None
    """Folder of the pictures that coco: and csv: name; default that of the file."""
    bad_boxes: BadBoxes = "refuse"
    """For boxes outside of their picture, without area, with swapped corners or of an unknown class. refuse: name them
    and stop; clip: cut, sort or leave them out, and count them."""

    def __post_init__(self) -> None:
        kind, _, path = self.data.partition(":")
        if kind not in KINDS or not path:
            raise UserError(
                f"--data takes coco:FILE.json, yolo:data.yaml, voc:FOLDER or csv:FILE, but was given {self.data!r}."
            )
        refuse_without_effect(self, [(("images",), kind in ("coco", "csv"), "--data coco:FILE or csv:FILE")])
        (existing_folder if kind == "voc" else existing_file)(path, f"correct the path behind --data {kind}:")
        if self.images is not None:
            existing_folder(self.images, "--images takes the folder of the pictures")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectEvaluateOptions:
    """Measure a detector on pictures with boxes: COCO's average precision, and a page of its worst mistakes."""

    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory or .keras file of a detector, or OWL-ViT or OWLv2, which looks for the names of the classes."""
    source: BoxesOptions
    output: str
    """New or existing folder for detection.json, detection.md and detection.html."""
    templates: tuple[str, ...] | None = None
    """Of OWL-ViT and OWLv2: sentences in which the name of each class replaces {}; see predict."""
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
    """Of OWL-ViT and OWLv2: sentences in which the name of each class replaces {}; see predict."""
    recipe: DetectRecipe = DETECT
    """How to train."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_without_effect(self, [(("data_service",), False, "batches of whole images")])
