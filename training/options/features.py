"""Options of the commands that extract features: measure them by probes, make an index, find images by it."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Annotated, Any, Literal

from keras_vit import UserError
from keras_vit.cli.options import Aliases, Count, MayLead, Positional, Positive, Range, Seed
from keras_vit.cli.parser import arguments_of
from keras_vit.errors import refuse_without_effect
from keras_vit.files.remote import to_path
from keras_vit.images.resizing import Resize
from training.options.common import CsvOptions, DataOptions, FalseAlarms, ModelOptions, Runner
from training.options.predict import check_ending

if TYPE_CHECKING:
    from keras_vit import Preprocessing

FeatureKind = Literal["pre_logits", "token", "mean", "both"]
IndexKind = Literal["pre_logits", "token", "mean", "both", "joint"]
# The file that says what the features in a folder are of.
DESCRIPTION = "features.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureOptions(ModelOptions):
    """Options of all commands that extract features."""

    source: DataOptions
    features: FeatureKind = "pre_logits"
    """Features of a Vision Transformer. pre_logits: what its head reads. Of its normalized tokens, token: the class
    token; mean: the mean of the patch tokens; both: the two one after the other, as DINOv2's linear classifiers."""
    output: str | None = None
    """Directory of the report; default the run directory."""
    random_weights: bool = False
    """Use random weights (seed 0) instead of the trained ones, as a baseline for the architecture."""
    crop_from: int | None = None
    """Stretch images to a square of this side in pixels and center crop, as in the papers (256 for models of 224);
    default the model's own preprocessing."""
    resize: Resize | None = None
    """How images are resized to the model's input: pad shows them whole; default the model's own."""
    batch_size: Count = 256
    """Images per forward pass."""
    cache: str | None = None
    """Directory of computed features; default features/ in KERAS_VIT_CACHE, else in ~/.cache/keras_vit."""
    index: str | None = None
    """Folder of keras-vit embed with the features of these images; they are then not computed."""

    def __post_init__(self) -> None:
        applies = [
            (("cache",), self.index is None, "features that are computed, without --index"),
            (("resize",), self.crop_from is None, "images without --crop-from, which are stretched"),
        ]
        refuse_without_effect(self, applies)

    def preprocessing(self, own: "Preprocessing") -> "Preprocessing":
        """Return a model's own preprocessing with these options applied; --crop-from is a stretch and a center crop."""
        if self.resize is not None:
            return own.with_resize(self.resize, None)
        return own if self.crop_from is None else own.with_resize("stretch", (self.crop_from, self.crop_from))

    def probe_command(self) -> tuple[str, ...]:
        """Return the command that makes a model of these features."""
        kept = ("image_size", "num_heads", "features", "resize", "crop_from")  # without which they are others
        how = arguments_of(self, *(field.name for field in dataclasses.fields(self) if field.name not in kept))
        return ("linear-probe", "--checkpoint", self.run, *self.source.arguments(), *how, "--workdir", "runs/probe")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeOptions(FeatureOptions):
    """Options of the probes that a model can be made of."""

    workdir: str | None = None
    """Directory of a new run: the model with the probe as its head, to predict, evaluate, inspect and export."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_without_effect(self, [(("random_weights",), self.workdir is None, "measurements, without --workdir")])

    @property
    def directory(self) -> pathlib.Path | None:
        return None if self.workdir is None else to_path(self.workdir)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the probe for config.json of the run."""
        names = ("features", "image_size", "resize", "crop_from")
        return {"source": self.source.settings(), **{name: getattr(self, name) for name in names}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewshotOptions(ProbeOptions):
    """Few-shot linear accuracy of frozen features, and with --workdir a model: that of the most shots, first seed."""

    shots: tuple[Count, ...] | None = None
    """Training images per class. Default: those of 1, 5, 10 and 25 that every class has."""
    seeds: Count = 3
    """Number of random selections of these images."""
    l2: Positive = 1024.0
    """Strength of the L2 penalty."""
    sweep: bool = False
    """Instead of --l2 try 2^-10 to 2^19, and choose the best on training images outside the shots."""

    def settings(self) -> dict[str, Any]:
        shots = None if self.shots is None else list(self.shots)
        return {"command": "fewshot", **super().settings(), "shots": shots, "l2": self.l2, "sweep": self.sweep}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearProbeOptions(ProbeOptions):
    """Accuracy of logistic regression on frozen features, and with --workdir a model that consists of both."""

    c: tuple[Positive, ...] = (0.001, 0.01, 0.1, 1.0, 10.0)
    """Inverse strengths of the penalty to choose from, scikit-learn's C; a single value is used as it is."""
    max_iterations: Count = 1000
    """Maximum iterations of the solver (L-BFGS), for each strength."""
    folds: Annotated[int, Range("[2, 100]")] | None = None
    """Also measure by cross-validation in that many stratified folds of all images, copies in one fold; for few
    images, of which a single split says little."""
    attentive: Count | None = None
    """Also train an attentive probe (AIM) for that many epochs, such as 20: a query that attends to the tokens of all
    patches, and a linear head. It measures only."""

    def settings(self) -> dict[str, Any]:
        return {"command": "linear_probe", **super().settings(), "c": list(self.c)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnnOptions(FeatureOptions):
    """Accuracy of the nearest neighbors among frozen features. It measures only: the vote needs the features of all
    training images, so no ordinary model computes it; fewshot and linear-probe make models.
    """

    neighbors: tuple[Count, ...] = (1, 10, 20, 100)
    """Numbers of neighbors that vote; each is a row of the table."""
    temperature: Positive = 0.07
    """A neighbor votes with exp(cosine / temperature): the smaller, the more the nearest ones count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedOptions(ModelOptions):
    """Write the features of images into a folder, for similar, search, review and the probes."""

    images: Annotated[tuple[str, ...], Positional("IMAGES")] = ()
    """Image files, folders, which are searched recursively, and patterns such as 'pictures/*.png'; or --data."""
    output: str
    """Folder of the features. If it has some of the same images and model, the command continues."""
    source: DataOptions = dataclasses.field(default_factory=lambda: DataOptions(""))
    """Instead of IMAGES: a data set with classes and splits. IMAGES that cannot be read are always skipped."""
    features: IndexKind | None = None
    """pre_logits: what the head reads. Of a Vision Transformer's normalized tokens, token: the class token; mean: the
    mean of the patch tokens; both. joint: what texts are compared with. Default: joint for a checkpoint with a text
    tower (CLIP, SigLIP), else pre_logits."""
    dtype: Literal["float16", "float32"] = "float16"
    """Type of the stored numbers; float16 takes half the space."""
    resize: Resize | None = None
    """How images are resized to the model's input: pad shows them whole; default the model's own."""
    batch_size: Count = 64
    """Images per forward pass."""
    runner: Runner | None = None
    """Run as an Apache Beam pipeline on many machines. IMAGES may then be in a bucket, and be a .csv file with a
    column path; --data is a csv:FILE with the columns path, label and split. Options of the pipeline follow --, as in
    --runner DataflowRunner -- --project mine --region europe-west1 --temp_location gs://bucket/temporary."""

    def __post_init__(self) -> None:
        if bool(self.source.data) == bool(self.images):
            raise UserError("Give --data, such as folder:pictures, or images, such as pictures/, but not both.")

    @property
    def folder(self) -> pathlib.Path:
        return to_path(self.output)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that change the features beside the model."""
        return {"image_size": self.image_size, "num_heads": self.num_heads, "resize": self.resize}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupOptions(CsvOptions):
    """Options of all commands that look up images in an index."""

    index: str
    """Folder of features that keras-vit embed has written."""
    run: Annotated[str, Aliases(("--checkpoint", "--model"))] | None = None
    """Where the model of the index is now; default where it was when the index was made."""
    neighbors: Annotated[Count, Aliases(("-k",))] = 10
    """Images to show."""
    approximate: bool = False
    """For many millions of images: look them up in a graph (FAISS, HNSW), which is made once and kept beside the
    index. Prints how many of the true neighbors it finds. Needs pip install faiss-cpu."""
    output: str | None = None
    """File for the results, which ends in .csv or .html (a page with small images)."""

    def __post_init__(self) -> None:
        check_ending(self.output, (".csv", ".html"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimilarOptions(LookupOptions):
    """Find the images of an index that are most similar to given ones."""

    images: Annotated[tuple[str, ...], Positional("IMAGES")]
    """Image files, folders and patterns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions(LookupOptions):
    """Find the images of an index that fit a text."""

    text: Annotated[str, Positional("TEXT")]
    """Text to look for, such as "red bicycle in snow"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReviewOptions(CsvOptions):
    """Make a page to clean a data set: copies, suspicious labels, odd images, classes that overlap."""

    index: str
    """Folder of features that keras-vit embed has written."""
    output: str | None = None
    """Folder of review.html and decisions.csv; default review/ in the folder of the features."""
    duplicate_similarity: Annotated[float, Range("(0, 1]")] = 0.95
    """Least cosine similarity, after the mean of all features is subtracted, of images that are shown as near
    copies."""
    shown: Count = 100
    """Most images, or groups of copies, of each section."""

    @property
    def folder(self) -> pathlib.Path:
        return to_path(self.index) / "review" if self.output is None else to_path(self.output)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """Compare new images with those that a run was evaluated on."""

    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory; or an export with monitor.npz, for saved features."""
    images: Annotated[tuple[str, ...], Positional("IMAGES")] = ()
    """Image files, folders and patterns; or an .npz file with features (n, D) and probabilities (n, K), as a served
    model gives them. Without any, the summary of the evaluation images is made again."""
    source: DataOptions = dataclasses.field(default_factory=lambda: DataOptions(""))
    """Data of the summary; default those of the run."""
    false_alarms: FalseAlarms = 0.01
    """Probability of an alarm for images of the same kind."""
    output: str | None = None
    """Page with the images that moved most, which ends in .html."""
    metrics: str | None = None
    """File for the results as lines of Prometheus."""
    batch_size: Count = 64
    """Images per forward pass."""

    def __post_init__(self) -> None:
        check_ending(self.output, (".html",))

    @property
    def saved_features(self) -> bool:
        """Whether there are no images, but features or none of both."""
        return not self.images or (len(self.images) == 1 and self.images[0].endswith(".npz"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelNextOptions(ModelOptions, CsvOptions):
    """Choose the images to label next."""

    source: DataOptions
    """The labeled images."""
    unlabelled: str
    """Folder of images without labels."""
    count: Count = 50
    """Images to choose."""
    output: str = "label-next"
    """Folder of label_next.html and label_next.csv."""
    cache: str | None = None
    """Directory of computed features; default features/ in KERAS_VIT_CACHE, else in ~/.cache/keras_vit."""
    duplicate_similarity: Annotated[float, Range("(0, 1]")] = 0.95
    """Least cosine similarity, after the mean of all features is subtracted, of images that are near copies."""
    batch_size: Count = 64
    """Images per forward pass."""
    seed: Seed = 0
    """Seed of the clusters."""
