"""What a recipe is: everything that decides a training run but the data and the seed, as frozen dataclasses.

The named ones are in `pretrain.py` (from scratch) and `finetune.py`. Any field can be set on the command line.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import tyro

import keras_vit
from keras_vit import ResNetConfig, UserError, ViTConfig
from keras_vit.models.config import Resize
from training.recipes.schedules import Schedule

if TYPE_CHECKING:
    import keras

OptimizerKind = Literal["adamw", "sgd"]
Loss = Literal["softmax", "sigmoid"]
Target = Literal["classes", "patch-colour", "patch-4x4", "patch-pixels"]
MixupPartner = Literal["next", "opposite"]

# Of a masked patch: levels of a channel (3 bits); rows and columns of the reduced patch whose colours are predicted.
COLOUR_LEVELS = 8
PATCH_CELLS = {"patch-colour": 1, "patch-4x4": 4}

# Of the fields that say how long a run is, the first one that is given counts.
DURATIONS = ("steps", "examples", "epochs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained, whatever the model."""

    image_size: tuple[int, int]
    """Height and width of the model's input in pixels."""
    batch_size: int
    """Images per step, of all workers together."""
    learning_rate: float
    """Highest learning rate, reached after the warm-up."""
    epochs: int | None = None
    """Passes over the training set."""
    examples: int | None = None
    """Training images seen, instead of epochs."""
    steps: int | None = None
    """Training steps, instead of epochs."""
    schedule: Annotated[Schedule, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Schedule)
    """How the learning rate rises and falls."""

    optimizer: OptimizerKind = "adamw"
    """adamw: 0.9, 0.999, epsilon 1e-8. sgd: momentum 0.9, not Nesterov's."""
    weight_decay: float = 0.0
    """Decoupled decay of the kernels, times the learning rate, per step. big_vision's wd is this times the peak."""
    layer_decay: float = 1.0
    """Share of the learning rate that each encoder block has of the next one's."""
    freeze: tuple[str, ...] = ()
    """Beginnings of the names of layers that are not trained, such as embedding or Transformer.encoderblock_0."""
    clip_norm: float | None = 1.0
    """Largest global norm of the gradient; None for any."""
    accumulation: int = 1
    """Parts of a batch whose gradients are computed one after the other, to save memory; must divide batch_size."""
    ema_decay: float | None = None
    """Evaluate and keep an average of the weights that forgets at this rate per step; None for the weights."""

    loss: Loss = "softmax"
    """Cross-entropy of the softmax, or of one sigmoid per class, summed over the classes; mean over the batch."""
    head_bias: float = 0.0
    """Initial bias of the head; about minus the logarithm of the number of classes suits the sigmoids."""
    label_smoothing: float = 0.0
    """Probability mass taken from the label and spread over all classes."""

    resize: Resize = "stretch"
    """How pictures of another size are brought to image_size; see keras_vit.Preprocessing."""
    crop_from: int | None = None
    """Side in pixels of which image_size is cut: the smaller side for resize-small, both sides for stretch, where it
    concerns training alone."""
    inception_crop: bool = False
    """Train on random windows of 5 to 100 % of the area and aspect 0.75 to 1.33, stretched to image_size."""
    flip: bool = False
    """Mirror every other image, left to right."""
    shift: int = 0
    """Random translation in each direction, pixels of the input at most; what enters is black."""
    autoaugment: bool = False
    """Apply one of AutoAugment's 25 policies for ImageNet to each image."""
    randaugment_layers: int = 0
    """Operations of RandAugment for each image; 0 for none. Even at magnitude 0 they change the image."""
    randaugment_magnitude: float = 0.0
    """Strength of these operations, 0 to 30; 10 is where their scale was made."""
    random_erasing: float = 0.0
    """Probability of noise in the place of a random window of the image."""
    mixup: float = 0.0
    """p of Beta(p, p), from which the share of the other image of a mixed pair is drawn; 0 for no mixing."""
    mixup_partner: MixupPartner = "next"
    """next: of the batch, with at least half of each image its own (big_vision). opposite: the batch reversed (BiT)."""
    cutmix: float = 0.0
    """As mixup, for the area of a window of the other image. With both, each batch has one of them by chance."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", tuple(self.image_size))
        object.__setattr__(self, "freeze", tuple(self.freeze))
        for field, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"The recipe's {field} must be a finite number, but is {value}.")
        if all(getattr(self, field) is None for field in DURATIONS):
            raise UserError("A recipe needs steps, examples or epochs; give one, such as --epochs 10.")
        self._check_numbers()
        if self.batch_size % self.accumulation:
            raise UserError(
                f"The recipe's accumulation must divide the batch of {self.batch_size}, but is {self.accumulation}."
            )
        if "" in self.freeze:
            raise UserError("The recipe's freeze must be beginnings of layer names, but one is empty.")
        if self.randaugment_magnitude and not self.randaugment_layers:
            raise UserError("The recipe's randaugment_magnitude means nothing without randaugment_layers; give 2.")
        self._check_crop()

    def _check_numbers(self) -> None:
        for field in (*DURATIONS, "batch_size", "learning_rate", "clip_norm", "accumulation"):
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise UserError(f"The recipe's {field} must be positive, but is {value}.")
        for field in ("weight_decay", "shift", "randaugment_layers", "mixup", "cutmix"):
            if getattr(self, field) < 0:
                raise UserError(f"The recipe's {field} must not be negative, but is {getattr(self, field)}.")
        if not 0.0 < self.layer_decay <= 1.0:
            raise UserError(f"The recipe's layer_decay must be in (0, 1], but is {self.layer_decay}.")
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise UserError(f"The recipe's ema_decay must be in (0, 1), but is {self.ema_decay}.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise UserError(f"The recipe's label_smoothing must be in [0, 1), but is {self.label_smoothing}.")
        if not 0.0 <= self.random_erasing <= 1.0:
            raise UserError(f"The recipe's random_erasing must be in [0, 1], but is {self.random_erasing}.")
        if not 0.0 <= self.randaugment_magnitude <= 30.0:
            raise UserError(
                f"The recipe's randaugment_magnitude must be in [0, 30], but is {self.randaugment_magnitude}."
            )

    def _check_crop(self) -> None:
        if (self.resize == "crop" and self.crop_from is not None) or (
            self.resize == "stretch" and self.crop_from is not None and self.inception_crop
        ):
            other = "resize crop" if self.resize == "crop" else "inception_crop"
            raise UserError(f"The recipe's crop_from means nothing to {other}; give --crop-from None.")
        if self.crop_from is not None and self.crop_from < max(self.image_size):
            raise UserError(
                f"The recipe's crop_from must be at least both sides of image_size, {self.image_size}, but is "
                f"{self.crop_from}."
            )

    def preprocessing(self, channels: int, value_range=(-1.0, 1.0)) -> "keras_vit.Preprocessing":
        """What the trained model will expect of an image."""
        crop_from = self.crop_from if self.resize == "resize-small" else None
        return keras_vit.Preprocessing(self.image_size, channels, self.resize, value_range, crop_from)

    def num_steps(self, num_examples: int) -> int:
        """Training steps on a set of that many images; an epoch has whole batches only."""
        if self.steps is not None:
            return self.steps
        if self.examples is not None:
            return max(round(self.examples / self.batch_size), 1)
        return self.epochs * (num_examples // self.batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainRecipe(Recipe):
    """A model and how it is trained from scratch."""

    model: ViTConfig | ResNetConfig
    """Architecture."""
    channels: int = 3
    """1 for grey images, 3 for RGB."""
    target: Target = "classes"
    """What the model learns to tell: the classes of the images; or, of the patches that are hidden from it, the mean
    colour (patch-colour), the 16 colours of the patch reduced to 4x4 (patch-4x4), or all pixels (patch-pixels)."""
    corruption: float = 0.5
    """Share of the patches of an image that are hidden and told, where the target is one of patches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target != "classes":
            self._check_masked()
        if self.channels not in (1, 3):
            raise UserError(f"The recipe's channels must be 1 for grey or 3 for RGB, but are {self.channels}.")
        if isinstance(self.model, ViTConfig) and self.model.classifier in ("none", "unpooled"):
            raise UserError(f"Training needs one prediction per image, not the classifier {self.model.classifier!r}.")

    def _check_masked(self) -> None:
        if not isinstance(self.model, ViTConfig) or self.model.stem is not None or self.model.representation_size:
            raise UserError(
                f"The target {self.target} is for a ViT that cuts the image itself into patches, without a "
                "representation_size; give such a model, or --target classes."
            )
        if not 0.0 < self.corruption <= 1.0:
            raise UserError(f"The recipe's corruption must be in (0, 1], but is {self.corruption}.")
        rows, columns = self.model.grid(self.image_size)
        if rows * columns < 2:
            raise UserError(f"The target {self.target} needs at least 2 patches, but the image has 1.")
        for field in ("mixup", "cutmix", "label_smoothing", "head_bias"):
            if getattr(self, field):
                raise UserError(f"The recipe's {field} is for labels; with --target {self.target} leave it 0.")

    def build(self, num_classes: int) -> "keras.Model":
        """The model that is trained."""
        preprocessing = self.preprocessing(self.channels)
        if self.target == "classes":
            return keras_vit.build(self.model, preprocessing=preprocessing, num_classes=num_classes, name="vit")
        from keras_vit.models.masked_patches import masked_patch_model

        return masked_patch_model(
            self.model,
            preprocessing,
            outputs=num_patch_outputs(self.target, self.model.patch, self.channels),
            corruption=self.corruption,
            name="vit",
        )


def num_patch_outputs(target: Target, patch: tuple[int, int], channels: int) -> int:
    """Length of the prediction for a masked patch; what each target is, `training.loop.objectives` says."""
    if target == "patch-pixels":
        return patch[0] * patch[1] * channels
    return PATCH_CELLS[target] ** 2 * COLOUR_LEVELS**channels


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def override_duration(recipe: AnyRecipe, named: Recipe) -> AnyRecipe:
    """A recipe from the command line, without the duration of the named one if the user gave another.

    Raises UserError when the user gave two of them.
    """
    given = [field for field in DURATIONS if getattr(recipe, field) != getattr(named, field)]
    given = [field for field in given if getattr(recipe, field) is not None]
    if len(given) > 1:
        options = " and ".join(f"--{field} {getattr(recipe, field)}" for field in given)
        raise UserError(f"A run has one duration, but was given {options}; leave one out.")
    return dataclasses.replace(recipe, **{field: None for field in DURATIONS if given and field not in given})
