"""Recipes: what is trained and how, as frozen dataclasses. Any field can be set on the command line."""

import dataclasses
import math
from typing import Annotated

import tyro

from keras_vit import UserError, ViTConfig
from keras_vit.errors import nearest
from keras_vit.preprocess import Resize
from training.optimizers import OptimizerKind
from training.schedules import Schedule


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run but the data and the seed."""

    model: ViTConfig
    """Architecture."""
    image_size: tuple[int, int]
    """Height and width of the model's input in pixels."""
    channels: int
    """1 for grey images, 3 for RGB."""
    epochs: int
    """Passes over the training set."""
    batch_size: int
    """Images per step."""
    learning_rate: float
    """Highest learning rate, reached after the warm-up."""
    resize: Resize = "stretch"
    """How pictures of another size are brought to image_size."""
    steps: int | None = None
    """Training steps, instead of epochs."""
    schedule: Annotated[Schedule, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Schedule)
    """How the learning rate rises and falls."""
    optimizer: OptimizerKind = "adamw"
    """adamw: 0.9, 0.999, epsilon 1e-8. sgd: momentum 0.9, not Nesterov's."""
    weight_decay: float = 0.0
    """Decoupled decay of the kernels, times the learning rate, per step."""
    layer_decay: float = 1.0
    """Share of the learning rate that each encoder block has of the next one's."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient."""
    label_smoothing: float = 0.0
    """Probability mass taken from the label and spread over all classes."""
    shift: int = 0
    """Random translation in each direction, pixels of the input at most; what enters is black."""
    inception_crop: bool = False
    """Train on random windows of 5 to 100 % of the area and aspect 3/4 to 4/3, stretched to image_size."""
    flip: bool = False
    """Mirror every other image, left to right."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", tuple(self.image_size))
        for field, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"The recipe's {field} must be a finite number, but is {value}.")
        for field in ("epochs", "batch_size", "learning_rate", "clip_norm"):
            if getattr(self, field) <= 0:
                raise UserError(f"The recipe's {field} must be positive, but is {getattr(self, field)}.")
        for field in ("weight_decay", "shift"):
            if getattr(self, field) < 0:
                raise UserError(f"The recipe's {field} must not be negative, but is {getattr(self, field)}.")
        if not 0.0 < self.layer_decay <= 1.0:
            raise UserError(f"The recipe's layer_decay must be in (0, 1], but is {self.layer_decay}.")
        if self.steps is not None and self.steps <= 0:
            raise UserError(f"The recipe's steps must be positive, but are {self.steps}.")
        if self.channels not in (1, 3):
            raise UserError(f"The recipe's channels must be 1 for grey or 3 for RGB, but are {self.channels}.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise UserError(f"The recipe's label_smoothing must be in [0, 1), but is {self.label_smoothing}.")
        if self.model.classifier in ("none", "unpooled"):
            raise UserError(f"Training needs one prediction per image, not the classifier {self.model.classifier!r}.")


RECIPES = {
    # scikit-learn's handwritten digits, 8x8 pixels: the demo. Dropout and shifts, for 1,437 are few.
    "digits": Recipe(
        model=ViTConfig(
            patch_size=4,
            hidden_size=96,
            num_layers=4,
            num_heads=3,
            mlp_dim=384,
            classifier="gap",
            dropout_rate=0.1,
        ),
        image_size=(8, 8),
        channels=1,
        epochs=80,
        batch_size=32,
        learning_rate=2e-3,
        schedule=Schedule(warmup_steps=100),
        weight_decay=0.05,
        label_smoothing=0.1,
        shift=1,
    ),
    # The 7,850-parameter ViT of a well-known MNIST exercise: 15 epochs, about 96 % there with plain Adam.
    "mnist-notes": Recipe(
        model=ViTConfig(patch_size=7, hidden_size=16, num_layers=2, num_heads=2, mlp_dim=64),
        image_size=(28, 28),
        channels=1,
        epochs=15,
        batch_size=128,
        learning_rate=5e-3,
        schedule=Schedule(warmup_steps=500),
    ),
    # A pure ViT for 28x28 grey images, made for two CPU cores. Patches of 7 rather than 4 pixels give 16 tokens instead
    # of 49: in the same time the network can be wider and see more epochs, which Fashion-MNIST repays.
    "mnist-small": Recipe(
        model=ViTConfig(patch_size=7, hidden_size=96, num_layers=6, num_heads=3, mlp_dim=384, classifier="gap"),
        image_size=(28, 28),
        channels=1,
        epochs=14,
        batch_size=128,
        learning_rate=2e-3,
        schedule=Schedule(warmup_steps=468),
        weight_decay=0.05,
        label_smoothing=0.1,
        shift=1,
    ),
    # A folder of photographs of your own, on a CPU or any GPU.
    "photos-small": Recipe(
        model=ViTConfig(
            patch_size=8,
            hidden_size=192,
            num_layers=6,
            num_heads=3,
            mlp_dim=384,
            classifier="gap",
            stochastic_depth_rate=0.1,
        ),
        image_size=(64, 64),
        channels=3,
        resize="crop",
        epochs=100,
        batch_size=64,
        learning_rate=1e-3,
        schedule=Schedule(warmup_steps=50),
        weight_decay=0.05,
        label_smoothing=0.1,
        inception_crop=True,
        flip=True,
    ),
}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises UserError with the nearest names."""
    if name not in RECIPES:
        raise UserError(f"There is no recipe named {name!r}; the nearest names are {nearest(name, RECIPES)}.")
    return RECIPES[name]
