"""Recipes for targets at places of an image: masks or boxes. The model comes from a checkpoint, or is a new one."""

import dataclasses
from typing import Literal

import keras_vit
from keras_vit.cli.options import Count, Share
from keras_vit.errors import Applies, Rules
from training.recipes.recipe import Recipe, Schedule

SegmentationHead = Literal["eomt", "linear"]
# Fields of `Recipe` that are for classes of whole images.
_OF_CLASSES = (
    "loss", "head_bias", "label_smoothing", "patch_sizes", "patch_dropout", "balance", "class_weights",
    "sharpness_radius", "teacher", "distillation", "temperature", "resize", "crop_from", "inception_crop", "shift",
    "autoaugment", "randaugment_layers", "randaugment_magnitude", "random_erasing", "mixup", "cutmix",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseRecipe(Recipe):
    """How to train a model for masks or boxes."""

    scale_jitter: tuple[float, float] = (0.5, 2.0)
    """Large-scale jitter: images are resized by a random factor between these, relative to fitting into image_size,
    and a window of image_size is taken, filled up on the right and below; 1 1 for none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale_jitter", tuple(self.scale_jitter))
        super().__post_init__()

    @property
    def uses_labels(self) -> bool:
        return False

    def _applies(self) -> list[Applies]:
        return [*super()._applies(), (_OF_CLASSES, False, "classes of whole images, not to masks and boxes")]

    def _rules(self) -> Rules:
        yield from super()._rules()
        least, most = self.scale_jitter
        factors = (
            f"--scale-jitter accepts the least and the largest factor, from 0.05 to 10, but is {self.scale_jitter}"
        )
        yield not 0.05 <= least <= most <= 10.0, f"{factors}; give two such as 0.5 2."

    def preprocessing(
        self, channels: int, checkpoint: "keras_vit.Preprocessing | None" = None
    ) -> "keras_vit.Preprocessing":
        """Show the whole image in its aspect ratio, in the upper left corner of the input, as in training."""
        own = super().preprocessing(channels, checkpoint)
        return dataclasses.replace(own.with_resize("pad", None), padding="after")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentRecipe(DenseRecipe):
    """How to train a model that segments."""

    head: SegmentationHead = "eomt"
    """eomt: queries join the last blocks, and each predicts a class and a mask ("Your ViT is Secretly an Image
    Segmentation Model"). linear: a linear layer on the frozen features of the patches, for classes of pixels alone."""
    num_queries: Count = 100
    """Queries of eomt, at least as many as an image has segments."""
    num_blocks: Count = 4
    """Blocks of eomt that the queries pass."""
    blocks: tuple[int, ...] = (-1,)
    """Blocks, for linear, whose tokens are the features, concatenated; negative numbers count from the last. DINOv2: -4
    -3 -2 -1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        super().__post_init__()

    def _applies(self) -> list[Applies]:
        return [*super()._applies(), (("lora",), False, "classes of whole images and boxes")]


# As EoMT is trained (tue-mps/eomt, configs/dinov2/ade20k/semantic): AdamW, weight decay 0.05, layer decay 0.8, clipped
# at 0.01, polynomial decay of power 0.9. Few steps, for the data of a person, and five times its learning rate: after
# 200 steps on the scenes of docs/how-to/segment.md, the mean IoU is 0.114 instead of 0.095.
EOMT = SegmentRecipe(
    image_size=(448, 448), batch_size=8, learning_rate=5e-4, steps=2000,
    schedule=Schedule("polynomial", warmup_steps=100), weight_decay=0.05, layer_decay=0.8, clip_norm=0.01, flip=True,
    color_jitter=0.3,
)  # fmt: skip
# As DINOv2's linear evaluation (arXiv 2304.07193, section 7.4): the features are frozen.
LINEAR = dataclasses.replace(
    EOMT,
    head="linear",
    learning_rate=1e-3,
    steps=1000,
    schedule=Schedule("cosine"),
    weight_decay=1e-4,
    layer_decay=1.0,
    clip_norm=1.0,
)
SEGMENT_RECIPES = {"eomt": EOMT, "linear": LINEAR}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectRecipe(DenseRecipe):
    """How to train a detector."""

    mosaic: Share = 0.3
    """Probability to show four images, each in a quarter, as OWL-ViT is trained."""


# For a few hundred images: a pretrained encoder changes little, its first blocks least.
DETECT = DetectRecipe(
    image_size=(448, 448), batch_size=8, learning_rate=2e-4, steps=2000, schedule=Schedule("cosine", warmup_steps=100),
    weight_decay=0.05, layer_decay=0.7, flip=True, color_jitter=0.3,
)  # fmt: skip
