"""Options of `keras-vit segment`."""

import dataclasses
import pathlib
from typing import Annotated, Any

from keras_vit import UserError
from keras_vit.files.remote import check_saved_model_path, is_remote
from keras_vit.parser import Aliases, Count, Positive, Seed
from keras_vit.runs import Run, open_run
from training.options.common import EVALUATION_NAMES, TRAINING_NAMES

TFDS = "tfds:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentOptions:
    """Train, evaluate and export a linear segmentation head on frozen features."""

    checkpoint: Annotated[str, Aliases(("--run",))]
    """Run directory, .keras file, checkpoint file or folder, address, or official name, of a Vision Transformer."""
    data: str
    """Folder of images/ and masks/, of which every tenth pair is evaluated, or of train/ and test/ with these two; or
    tfds:NAME[:CONFIG], a data set of TensorFlow Datasets with an image and a mask of one channel."""
    workdir: str
    """Run directory: model.keras, the report segmentation.md, and saved_model/1."""
    data_dir: str | None = None
    """Directory of TensorFlow Datasets, for tfds:; default its own."""
    train_split: str = "train"
    """Training split, for tfds:, such as train[:80%]."""
    eval_split: str | None = None
    """Evaluation split, for tfds:; default test, validation or val, whichever there is first."""
    blocks: tuple[int, ...] = (-1,)
    """Blocks whose tokens are the features, concatenated; negative numbers count from the last. DINOv2: -4 -3 -2 -1."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to which images are stretched; default the model's own."""
    steps: Count = 500
    """Training steps."""
    batch_size: Count = 16
    """Images per step."""
    learning_rate: Positive = 1e-3
    """Peak of the cosine schedule of AdamW."""
    seed: Seed = 0
    """Seed of the initial head and of the order of the images."""

    def __post_init__(self) -> None:
        check_saved_model_path(self.workdir)  # which will hold one

    @property
    def is_tfds(self) -> bool:
        """Whether the data are of TensorFlow Datasets."""
        return self.data.startswith(TFDS)

    def settings(self) -> dict[str, Any]:
        """What changes the result, as config.json stores it."""
        left_out = {"workdir", "data_dir"} | (set() if self.is_tfds else {"train_split", "eval_split"})
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def open_run(self) -> Run:
        """The model of the features. Raises UserError if it is not there."""
        return open_run(self.checkpoint, image_size=self.image_size)

    def check(self) -> None:
        """Raise UserError if the folder of the data is not there, or the run directory holds something else."""
        if is_remote(self.workdir) or is_remote(self.data):
            raise UserError("--data and --workdir of a segmentation are folders of this machine; copy the data first.")
        if self.is_tfds:
            return
        for field in ("data_dir", "train_split", "eval_split"):
            if getattr(self, field) != type(self).__dataclass_fields__[field].default:
                raise UserError(f"--{field.replace('_', '-')} applies to --data tfds:NAME only; leave it out.")
        if not pathlib.Path(self.data).is_dir():
            raise UserError(
                f"There is no folder {self.data!r}; --data takes one with images/ and masks/, or with train/ and test/ "
                "that hold these two, or tfds:NAME."
            )
        root = pathlib.Path(self.data)
        for folder in split_folders(root) or (root,):
            check_pairs(folder)


def split_folders(root: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path] | None:
    """The folders of the training and the evaluation split; None if there is one of both."""
    train, evaluation = (
        next((root / name for name in names if (root / name).is_dir()), None)
        for names in (TRAINING_NAMES, EVALUATION_NAMES)
    )
    return None if train is None or evaluation is None else (train, evaluation)


def check_pairs(folder: pathlib.Path) -> None:
    """Raise UserError unless a folder holds images/ and masks/."""
    for name in ("images", "masks"):
        if not (folder / name).is_dir():
            raise UserError(
                f"{folder} should hold the folders images and masks, or train and test with these two, but has no "
                f"{name}; give --data such a folder."
            )
