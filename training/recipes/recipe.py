"""Recipes as frozen dataclasses: everything that defines a training run except the data and the seed.

The named recipes are in `pretrain.py` (from scratch) and `finetune.py`. Any field can be set on the command line.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import keras_vit
from keras_vit import ResNetConfig, UserError, ViTConfig
from keras_vit.cli.options import Aliases, Count, Natural, NotNegative, Positive, Range, Share, check_ranges
from keras_vit.errors import Applies, Rules, check_choice, refuse_first, refuse_without_effect
from keras_vit.images.resizing import Resize

if TYPE_CHECKING:
    import keras

Decay = Literal["cosine", "linear", "stair", "rsqrt", "polynomial", "constant"]
OptimizerKind = Literal["adamw", "sgd", "muon"]
Loss = Literal["softmax", "sigmoid", "multi-label"]
Distillation = Literal["soft", "hard", "features"]
Target = Literal[
    "classes", "patch-color", "patch-4x4", "patch-pixels", "patch-normalized-pixels", "next-patch", "self-distillation"
]
MixupPartner = Literal["next", "opposite"]

# Masked patch prediction: levels per channel (3 bits); rows and columns of the downsampled patch that is predicted.
COLOR_LEVELS = 8
PIXEL_TARGETS = ("patch-pixels", "patch-normalized-pixels", "next-patch")
PATCH_CELLS = {"patch-color": 1, "patch-4x4": 4}

# The fields for the duration of a run; the first one that is not None counts.
DURATIONS = ("steps", "examples", "epochs")
# Names of the layers that are new, and of zeros, when training begins.
HEADS = ("head", "head_distillation", "resnet.head.conv2d")
NO_BLOCKS = "A ResNet has no encoder blocks, whose learning rates --layer-decay lowers; leave it out."


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Warm-up, decay and cooldown of the learning rate, independent of its peak and the number of steps.

    cosine and linear: vit_jax `utils.py`. stair: big_transfer `bit_hyperrule.py`. rsqrt: big_vision `utils.py`. The
    warm-up multiplies the decayed value. All decays except stair count their progress from the end of the warm-up.
    """

    decay: Decay = "cosine"
    """cosine: to 0. linear: to linear_end. stair: times 0.1 after each of stairs. rsqrt: by 1 / sqrt(1 + step /
    timescale). polynomial: to 0 by the power 0.9 of what is left. constant: no decay."""
    warmup_steps: Natural = 0
    """Steps over which the learning rate rises linearly from 0."""
    linear_end: NotNegative = 1e-5
    """Learning rate at the end of a linear decay."""
    stairs: tuple[Annotated[float, Range("(0, 1)")], ...] = ()
    """Fractions of all steps after which the learning rate drops; at that step it is still higher."""
    timescale: Count = 10_000
    """Steps after which rsqrt has decayed by the square root of two."""
    cooldown_steps: Natural = 0
    """Last steps, over which the learning rate additionally falls linearly to 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stairs", tuple(self.stairs))
        check_choice("decay", self.decay, get_args(Decay))
        check_ranges(self)
        if self.decay == "stair" and not self.stairs:
            raise UserError("decay stair needs the stairs where the learning rate drops; give --stairs 0.3 0.6 0.9.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train a model, independent of the model."""

    image_size: tuple[int, int]
    """Height and width of the model's input in pixels."""
    batch_size: Count
    """Images per step, on all workers together."""
    learning_rate: Annotated[Positive, Aliases(("--lr",))]
    """Peak learning rate, reached after the warm-up."""
    epochs: Count | None = None
    """Passes over the training data."""
    examples: Count | None = None
    """Training images seen, instead of epochs."""
    steps: Count | None = None
    """Training steps, instead of epochs."""
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    """Learning rate schedule."""

    optimizer: OptimizerKind = "adamw"
    """adamw: betas 0.9 and 0.999, epsilon 1e-8. sgd: momentum 0.9, without Nesterov. muon: orthogonalized momentum for
    the kernels of a Transformer's blocks, adamw for all other weights, at the learning rate of adamw."""
    weight_decay: Annotated[NotNegative, Aliases(("--wd",))] = 0.0
    """Decoupled decay of kernels, times the learning rate, per step. big_vision's wd is this times the peak."""
    layer_decay: Annotated[float, Range("(0, 1]")] = 1.0
    """Ratio of the learning rate of each encoder block to that of the next block."""
    freeze: tuple[str, ...] = ()
    """Layers that are not trained, by the first parts of their names, such as embedding or
    Transformer.encoderblock_0."""
    lora: Natural = 0
    """Rank of LoRA adapters: only they and the head are trained; model.keras has them merged. 0 for none."""
    lora_on: tuple[str, ...] = ("query", "value")
    """Dense layers that get adapters, by the last part of their names: query, key, value, out, Dense_0, Dense_1."""
    clip_norm: Positive | None = 1.0
    """Maximum global norm of the gradient; None for no clipping."""
    accumulation: Count = 1
    """Gradient accumulation: micro-batches per batch, to save memory; must divide batch_size."""
    ema_decay: Annotated[float, Range("(0, 1)")] | None = None
    """Decay per step of the moving average of the weights, which is evaluated and saved; None for no average."""

    loss: Loss = "softmax"
    """Cross-entropy of the softmax, or of a sigmoid per class, summed over the classes; mean over the batch.
    multi-label is the sigmoid's for images of several classes; data of such images choose it."""
    head_bias: float = 0.0
    """Initial bias of the head; for the sigmoid loss about minus the logarithm of the number of classes."""
    label_smoothing: Annotated[float, Range("[0, 1)")] = 0.0
    """Probability mass that is moved from the label to all classes."""
    patch_sizes: tuple[Count, ...] = ()
    """FlexiViT: train with patches of one of these sizes in pixels, another one in each step; none for the model's own.
    The run is evaluated and saved with the model's own patch size; keras_vit.adapt makes the others."""
    patch_dropout: Annotated[float, Range("[0, 1)")] = 0.0
    """Share of the patches of each image, chosen at random, that training leaves out of all blocks (PatchDropout)."""
    balance: bool = False
    """Repeat the training images of each class, until all classes have as many as the largest; an epoch gets longer."""
    class_weights: bool = False
    """Weight the loss of each training image by one over the number of images of its class; the weights have the mean 1
    over the training images."""
    sharpness_radius: NotNegative = 0.0
    """SAM: length of the step uphill at whose end the gradient is taken; 0.05 is the paper's, 0 for none. A training
    step takes twice as long."""
    teacher: str | None = None
    """Model to learn from instead of the labels: run directory, .keras file, checkpoint or official name, of the same
    classes and image size. It sees the same crops and mixtures. For features, any model of any size."""
    distillation: Annotated[Distillation, Aliases(("--distil",))] = "soft"
    """With a teacher, soft: only its probabilities. hard (DeiT): labels for the class token, and the teacher's most
    likely class for the second token of a model with distillation head, by half each. features: no labels and no
    classes, but the teacher's class token and patch tokens; the run ends without a head."""
    temperature: Positive = 1.0
    """Divides the logits of teacher and model, for soft."""

    resize: Resize = "stretch"
    """How images are resized to image_size; see keras_vit.Preprocessing."""
    crop_from: int | None = None
    """Size in pixels before the crop to image_size: of the smaller side for resize-small; of both sides for stretch,
    only for training."""
    inception_crop: bool = False
    """Train on random windows of 5 to 100% of the area and aspect 0.75 to 1.33, stretched to image_size; with
    --resize pad, letterboxed."""
    flip: bool = False
    """Flip images left to right with probability 0.5."""
    shift: Natural = 0
    """Random translation by up to this many pixels in each direction, filled with black; with --resize pad with
    white."""
    autoaugment: bool = False
    """Apply a random one of AutoAugment's 25 ImageNet policies to each image."""
    randaugment_layers: Natural = 0
    """RandAugment operations per image; 0 for none. They change the image even at magnitude 0."""
    randaugment_magnitude: Annotated[float, Range("[0, 30]")] = 0.0
    """Magnitude of the RandAugment operations, 0 to 30; 10 is the end of the original scale."""
    random_erasing: Share = 0.0
    """Probability to replace a random window of the image with noise."""
    three_augment: bool = False
    """Apply grayscale, solarization or Gaussian blur, one of them by chance, to each image (DeiT III)."""
    color_jitter: Share = 0.0
    """Largest change of brightness, contrast and saturation as a share, 0 to 1; follows all changes above."""
    mixup: NotNegative = 0.0
    """p of Beta(p, p), from which the weight of the other image is drawn; 0 for no mixup."""
    mixup_partner: MixupPartner = "next"
    """The other image of mixup and cutmix. next: the next one of the batch, with at most weight 0.5 (big_vision).
    opposite: that of the reversed batch (BiT)."""
    cutmix: NotNegative = 0.0
    """As mixup, for the area of a window from the other image. With both, each batch uses one of them at random."""

    def __post_init__(self) -> None:
        for name in ("image_size", "freeze", "lora_on", "patch_sizes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_ranges(self)
        refuse_without_effect(self, self._applies())
        refuse_first(self._rules())

    def _applies(self) -> list[Applies]:
        """Return fields that would have no effect, or a wrong one, unless others have some value."""
        has_teacher, soft = self.teacher is not None, self.distillation == "soft"
        crops = self.resize == "resize-small" or (self.resize == "stretch" and not self.inception_crop)
        return [
            (("distillation",), has_teacher, "--teacher"),
            (("temperature",), has_teacher and soft, "--teacher with soft distillation"),
            (("loss",), not has_teacher, "labels, without --teacher"),
            (("class_weights",), not (has_teacher or self.balance), "labels, without --teacher and --balance"),
            (("freeze",), not self.lora, "training without --lora"),
            (("randaugment_magnitude",), self.randaugment_layers > 0, "--randaugment-layers of at least 1"),
            (("crop_from",), crops, "--resize resize-small, or stretch without --inception-crop"),
        ]

    def _rules(self) -> Rules:
        """Yield which values do not go together, and the sentence about them."""
        schedule, size = self.schedule, self.image_size
        heads = [name for name in self.freeze if any(f"{head}.".startswith(f"{name}.") for head in HEADS)]
        one_of = (self.distillation != "soft") + bool(self.patch_sizes) + bool(self.patch_dropout)
        yield (
            all(getattr(self, field) is None for field in DURATIONS),
            "A recipe needs steps, examples or epochs; give one, such as --epochs 10.",
        )
        yield (
            schedule.decay == "linear" and schedule.linear_end > self.learning_rate,
            f"The learning rate must not rise, but linear_end is {schedule.linear_end} and the peak "
            f"{self.learning_rate}; give --linear-end 0.",
        )
        yield (
            self.batch_size % self.accumulation,
            f"--accumulation must divide the batch of {self.batch_size}, but is {self.accumulation}.",
        )
        yield heads, f"--freeze {', '.join(heads)} would keep the new head at zeros, from which no layer learns."
        yield (
            self.crop_from is not None and self.crop_from < max(size),
            f"--crop-from must be at least both sides of --image-size, {size}, but is {self.crop_from}.",
        )
        yield (
            one_of > 1,
            f"Of --distillation {self.distillation}, --patch-sizes and --patch-dropout, a run takes one.",
        )

    def preprocessing(
        self, channels: int, checkpoint: "keras_vit.Preprocessing | None" = None
    ) -> "keras_vit.Preprocessing":
        """Return the preprocessing of the trained model.

        checkpoint: that of the model which is trained further; its value range, filter and library stay.
        """
        own = checkpoint or keras_vit.Preprocessing(self.image_size, channels)
        crop_from = self.crop_from if self.resize == "resize-small" else None
        new = {"image_size": self.image_size, "channels": channels, "background": "white", "exif_orientation": True}
        return own.with_resize(self.resize, crop_from, **new)

    @property
    def uses_labels(self) -> bool:
        """Whether the evaluation compares with the classes of the images."""
        return True

    def num_steps(self, num_examples: int) -> int:
        """Return the training steps for `num_examples` training images; an epoch has only complete batches."""
        if self.steps is not None:
            return self.steps
        if self.examples is not None:
            return max(round(self.examples / self.batch_size), 1)
        assert self.epochs is not None  # as __post_init__ checks
        return self.epochs * (num_examples // self.batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PseudoLabelRecipe(Recipe):
    """How to fine-tune with images without labels beside those with labels.

    The defaults are those of "Semi-supervised Vision Transformers at Scale" (arXiv 2208.05688) and its code
    (amazon-science/semi-vit, main_semi.py and SEMIVIT.md): ViT-B with 1% of the labels of ImageNet.
    """

    confidence: Annotated[float, Range("(0, 1)")] = 0.6
    """Probability of a class from which on the teacher's class is learned."""
    unlabelled_weight: NotNegative = 5.0
    """Weight of the loss of the images without labels."""
    unlabelled_per_image: Count = 5
    """Images without labels for each labeled image of a batch."""

    def _applies(self) -> list[Applies]:
        useless = ("teacher", "patch_sizes", "patch_dropout", "loss", "class_weights")
        return [*super()._applies(), (useless, False, "training without --unlabelled")]

    def _rules(self) -> Rules:
        yield from super()._rules()
        average = "Images without labels are learned from the moving average; give --ema-decay 0.999."
        yield self.ema_decay is None, average


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainRecipe(Recipe):
    """A model and how to train it from scratch."""

    model: ViTConfig | ResNetConfig
    """Architecture."""
    channels: int = 3
    """1 for grayscale images, 3 for RGB."""
    target: Target = "classes"
    """Target of the model: the classes of the images; or, for masked patches, the mean color (patch-color), the 16
    colors of the patch downsampled to 4x4 (patch-4x4), all pixels (patch-pixels), or all pixels less their mean and
    divided by their deviation in the patch (patch-normalized-pixels); the same of the next patch, row by row, from
    those before it (next-patch, AIM); or, for crops of an image, what the moving average of the model says of other
    crops of it (self-distillation, DINO)."""
    corruption: Annotated[float, Range("(0, 1]")] = 0.5
    """Fraction of the patches of an image that are masked and predicted, for the targets of patches."""
    decoder_layers: Natural = 0
    """Masked autoencoder: the encoder computes only the patches that are not masked, and a decoder of this many blocks
    predicts the others. 0 for none: the encoder sees a mask token at their places. For next-patch: MLPs of the head,
    which is dropped after training."""
    decoder_width: int = 512
    """Width of that decoder, a multiple of 32, or of the head of next-patch."""
    prototypes: Annotated[int, Range("[2, inf)")] = 65_536
    """Self-distillation: outputs of the head, the probabilities of which are learned."""
    head_width: int = 2048
    """Width of that head, a multiple of 8."""
    local_crops: Natural = 8
    """Small crops of each image, beside two large ones of image_size."""
    local_size: int = 96
    """Height and width of the small crops in pixels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.model, ViTConfig):
            self.model.check_image_size(self.image_size)
            for size in self.patch_sizes:
                dataclasses.replace(self.model, patch_size=size).check_image_size(self.image_size)
            if self.target == "self-distillation" and self.local_crops:
                self.model.check_image_size((self.local_size, self.local_size))

    def _applies(self) -> list[Applies]:
        labels, crops = self.target == "classes", self.target == "self-distillation"
        of_labels = ("teacher", "class_weights", "mixup", "cutmix", "label_smoothing", "head_bias")
        return [
            *super()._applies(),
            (("lora",), False, "keras-vit finetune, which adapts a trained model"),
            (("layer_decay",), isinstance(self.model, ViTConfig), "a Vision Transformer, whose blocks it is for"),
            ((*of_labels, "patch_sizes", "patch_dropout"), labels, "--target classes"),
            (("inception_crop", "crop_from"), not crops, "other targets than self-distillation, which has own crops"),
            (("decoder_layers",), not (labels or crops), "a --target of patches"),
        ]

    def _rules(self) -> Rules:
        yield from super()._rules()
        yield self.channels not in (1, 3), f"--channels must be 1 for grayscale or 3 for RGB, but are {self.channels}."
        classifier = getattr(self.model, "classifier", None)
        no_vector = f"Training needs one prediction per image, not the classifier {classifier!r}; give token or gap."
        yield classifier in ("none", "unpooled"), no_vector
        if self.target == "self-distillation":
            yield from self._rules_of_self_distillation()
        elif self.target != "classes":
            yield from self._rules_of_masks()

    @property
    def learns_features(self) -> bool:
        """Whether it trains without labels, so that the run ends with a model without a head."""
        return self.target != "classes" or self.distillation == "features"

    @property
    def uses_labels(self) -> bool:
        return not self.learns_features

    def _rules_of_self_distillation(self) -> Rules:
        is_vit = isinstance(self.model, ViTConfig)
        yield not is_vit, "The target self-distillation is for a ViT; give such a model, or --target classes."
        average = "Self-distillation learns from the moving average of the weights; give --ema-decay 0.996 or so."
        yield self.ema_decay is None, average
        multiple = f"The head_width of self-distillation must be a multiple of 8, but is {self.head_width}."
        yield self.head_width < 8 or self.head_width % 8, multiple
        most = f"--local-size must be at most --image-size, {self.image_size}, but is {self.local_size}."
        yield self.local_crops and self.local_size > min(self.image_size), most

    def _rules_of_masks(self) -> Rules:
        model, target, layers = self.model, self.target, self.decoder_layers
        cuts = "is for a ViT that cuts the image itself into patches, without a representation_size"
        if not isinstance(model, ViTConfig) or model.stem is not None or model.representation_size:
            yield True, f"The target {target} {cuts}; give such a model, or --target classes."
            return
        pooling = f"The target {target} does not train the pooling of the classifier {model.classifier!r}"
        yield model.classifier in ("map", "sequence"), f"{pooling}; give another model, or --target self-distillation."
        width = f"The decoder_width of a masked autoencoder must be a multiple of 32, but is {self.decoder_width}."
        yield layers and (self.decoder_width < 32 or self.decoder_width % 32), width
        if target == "next-patch":
            yield from _rules_of_next_patch(model)
            return
        fixed = model.position_embedding in ("sincos-2d", "learned") and model.position_injection == "input"
        needs = "needs position_embedding sincos-2d or learned, at the input and without axial attention"
        yield layers and (not fixed or model.axial), f"A masked autoencoder leaves patches out, so its model {needs}."
        model.check_image_size(self.image_size)
        count = math.prod(model.grid(self.image_size))
        none = layers and not 1 <= int(count * (1.0 - self.corruption)) < count
        yield none, f"Of {count} patches, a corruption of {self.corruption} should leave some visible and some masked."
        smaller = "give a smaller patch or a larger --image-size"
        yield count < 2, f"The target {target} needs at least 2 patches, but the image has 1; {smaller}."

    def build(self, num_classes: int | None, own: "keras_vit.Preprocessing | None" = None) -> "keras.Model":
        """Build the model to train; own: the preprocessing of the checkpoint that it begins with, if there is one."""
        preprocessing = self.preprocessing(self.channels, own)
        if self.target == "classes":
            name = "vit" if isinstance(self.model, ViTConfig) else "resnet"
            return keras_vit.build(self.model, preprocessing=preprocessing, num_classes=num_classes, name=name)
        from keras_vit.models import self_supervised

        assert isinstance(self.model, ViTConfig)  # as __post_init__ checks
        if self.target == "self-distillation":
            return self_supervised.self_distillation_model(
                self.model, preprocessing, prototypes=self.prototypes, head_width=self.head_width, name="vit"
            )
        outputs = num_patch_outputs(self.target, self.model.patch, self.channels)
        if self.target == "next-patch":
            head = {"head_layers": self.decoder_layers, "head_width": self.decoder_width}
            return self_supervised.next_patch_model(self.model, preprocessing, outputs=outputs, name="vit", **head)
        if not self.decoder_layers:
            return self_supervised.masked_patch_model(
                self.model, preprocessing, outputs=outputs, corruption=self.corruption, name="vit"
            )
        return self_supervised.masked_autoencoder(
            self.model,
            preprocessing,
            outputs=outputs,
            corruption=self.corruption,
            decoder_layers=self.decoder_layers,
            decoder_width=self.decoder_width,
            name="vit",
        )


def _rules_of_next_patch(model: ViTConfig) -> Rules:
    plain = model.position_injection == "input" and not model.axial and not model.locality_attention
    plain = plain and model.position_embedding != "relative" and not model.num_prefix_tokens
    yield (
        not plain,
        "The target next-patch reads patches alone, in their order; give a model without class token and registers, "
        "such as one with the classifier gap, whose positions are added at the input.",
    )


def num_patch_outputs(target: Target, patch: tuple[int, int], channels: int) -> int:
    """Return the size of the prediction for a masked patch, see `training.objectives.masked_patches`."""
    if target in PIXEL_TARGETS:
        return patch[0] * patch[1] * channels
    return PATCH_CELLS[target] ** 2 * COLOR_LEVELS**channels
