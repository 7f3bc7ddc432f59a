"""Options of the commands that make an index of features and find pictures by it. Imports no TensorFlow."""

import dataclasses
import pathlib
from typing import Annotated, Any, Literal

from keras_vit import UserError
from keras_vit.cli.options import Aliases, Count, MayLead, Positional, Range
from keras_vit.files.remote import to_path
from keras_vit.images.geometry import Resize
from training.options.common import CsvOptions, DataOptions, OnBadImage
from training.options.pipeline import Runner
from training.options.predict import check_ending

IndexKind = Literal["pre_logits", "token", "mean", "both", "joint"]
TABLES = (".csv", ".html")
# The file that says what the features in a folder are of.
DESCRIPTION = "features.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """Write the features of pictures into a folder, for similar, search, review and the probes."""

    pictures: Annotated[tuple[str, ...], Positional("PICTURES")] = ()
    """Image files, folders, which are searched recursively, and patterns such as 'pictures/*.png'; or --data."""
    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory, .keras file, checkpoint file or folder, address, or official name such as augreg:B_16."""
    output: str
    """Folder of the features. If it has some of the same pictures and model, the command continues."""
    data: str | None = None
    """digits, tfds:NAME[:CONFIG], folder:PATH, csv:FILE, tfrecord:GLOB or tar:GLOB, with classes and splits; see
    pretrain."""
    data_dir: str | None = None
    """Directory of prepared TFDS data sets; default TFDS' own."""
    train_split: str = "train"
    """TFDS split to train on, such as train[:90%]."""
    eval_split: str | None = None
    """TFDS split to evaluate on; default test, else validation."""
    on_bad_image: OnBadImage = "stop"
    """For an image of --data that cannot be decoded: stop, or skip. PICTURES that cannot be read are always skipped."""
    split_seed: Annotated[int, Range("[0, inf)")] | None = None
    """Of --data without splits, draw the tenth that is kept for evaluation with this seed."""
    exclude: str | None = None
    """decisions.csv of keras-vit review, for --data."""
    features: IndexKind | None = None
    """pre_logits: what the head reads. Of a Vision Transformer's normalized tokens, token: the class token; mean: the
    mean of the patch tokens; both. joint: what texts are compared with. Default: joint for a checkpoint with a text
    tower (CLIP, SigLIP), else pre_logits."""
    dtype: Literal["float16", "float32"] = "float16"
    """Type of the stored numbers; float16 takes half the space."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to resize the model's input to; default its own."""
    num_heads: int | None = None
    """Attention heads, if the checkpoint does not specify them."""
    resize: Resize | None = None
    """How images are resized to the model's input: pad shows them whole; default the model's own."""
    batch_size: Count = 64
    """Images per forward pass."""
    runner: Runner | None = None
    """Run as an Apache Beam pipeline on many machines. PICTURES may then be in a bucket, and be a .csv file with a
    column path; --data is a csv:FILE with the columns path, label and split. Options of the pipeline follow --, as in
    --runner DataflowRunner -- --project mine --region europe-west1 --temp_location gs://bucket/temporary."""

    def __post_init__(self) -> None:
        if (self.data is None) == (not self.pictures):
            raise UserError("Give --data, such as folder:pictures, or pictures, such as pictures/, but not both.")

    @property
    def source(self) -> DataOptions | None:
        """The options of the data; None for pictures."""
        if self.data is None:
            return None
        return DataOptions(
            self.data,
            self.data_dir,
            self.train_split,
            self.eval_split,
            self.on_bad_image,
            self.split_seed,
            self.exclude,
        )

    @property
    def folder(self) -> pathlib.Path:
        """Where the features go."""
        return to_path(self.output)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that change the features beside the model."""
        return {"image_size": self.image_size, "num_heads": self.num_heads, "resize": self.resize}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupOptions(CsvOptions):
    """Options of all commands that look up pictures in an index."""

    index: str
    """Folder of features that keras-vit embed has written."""
    run: Annotated[str, Aliases(("--checkpoint", "--model"))] | None = None
    """Where the model of the index is now; default where it was when the index was made."""
    neighbors: Annotated[Count, Aliases(("-k",))] = 10
    """Pictures to show."""
    approximate: bool = False
    """For many millions of pictures: look them up in a graph (FAISS, HNSW), which is made once and kept beside the
    index. Prints how many of the true neighbors it finds. Needs pip install faiss-cpu."""
    output: str | None = None
    """File for the results, which ends in .csv or .html (a page with small pictures)."""

    def __post_init__(self) -> None:
        check_ending(self.output, TABLES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimilarOptions(LookupOptions):
    """Find the pictures of an index that are most similar to given ones."""

    pictures: Annotated[tuple[str, ...], Positional("PICTURES")]
    """Image files, folders and patterns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions(LookupOptions):
    """Find the pictures of an index that fit a text."""

    text: Annotated[str, Positional("TEXT")]
    """What to look for, such as "red bicycle in snow"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReviewOptions(CsvOptions):
    """Make a page to clean a data set: copies, suspicious labels, odd pictures, classes that overlap."""

    index: str
    """Folder of features that keras-vit embed has written."""
    output: str | None = None
    """Folder of review.html and decisions.csv; default review/ in the folder of the features."""
    duplicate_similarity: Annotated[float, Range("(0, 1]")] = 0.95
    """Least cosine similarity, after the mean of all features is subtracted, of pictures that are shown as near
    copies."""
    shown: Count = 100
    """Most pictures, or groups of copies, of each section."""

    @property
    def folder(self) -> pathlib.Path:
        """Where the page goes."""
        return to_path(self.index) / "review" if self.output is None else to_path(self.output)
