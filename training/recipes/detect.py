"""The recipe of training a detector. The backbone comes from a checkpoint."""

import dataclasses

from keras_vit.cli.options import Share
from training.recipes.dense import DenseRecipe
from training.recipes.schedules import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectRecipe(DenseRecipe):
    """How to train a detector."""

    mosaic: Share = 0.3
    """Probability to show four pictures, each in a quarter, as OWL-ViT is trained."""


# For a few hundred pictures: a pretrained encoder changes little, its first blocks least.
DETECT = DetectRecipe(
    image_size=(448, 448), batch_size=8, learning_rate=2e-4, steps=2000, schedule=Schedule("cosine", warmup_steps=100),
    weight_decay=0.05, layer_decay=0.7, flip=True, color_jitter=0.3,
)  # fmt: skip
