"""Recipes as frozen dataclasses: everything that defines a training run except the data and the seed.

The named recipes are in `pretrain.py` (from scratch) and `finetune.py`. Any field can be set on the command line.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import keras_vit
from keras_vit import ResNetConfig, UserError, ViTConfig
from keras_vit.cli.options import Aliases, Count, Natural, NotNegative, Positive, Range, Share, check_ranges
from keras_vit.errors import Rules, check_choice, refuse_first
from keras_vit.images.resizing import Resize

if TYPE_CHECKING:
    import keras

Decay = Literal["cosine", "linear", "stair", "rsqrt", "polynomial", "constant"]
OptimizerKind = Literal["adamw", "sgd", "muon"]
Loss = Literal["softmax", "sigmoid", "multi-label"]
Distillation = Literal["soft", "hard", "features"]
Target = Literal["classes", "patch-color", "patch-4x4", "patch-pixels", "patch-normalized-pixels", "self-distillation"]
MixupPartner = Literal["next", "opposite"]

# Masked patch prediction: levels per channel (3 bits); rows and columns of the downsampled patch that is predicted.
COLOR_LEVELS = 8
PIXEL_TARGETS = ("patch-pixels", "patch-normalized-pixels")
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
        if list(self.stairs) != sorted(self.stairs):
            raise UserError(f"stairs must be increasing fractions of all steps, but are {self.stairs}.")
        if self.decay == "stair" and not self.stairs:
            raise UserError("decay stair needs the stairs where the learning rate drops; give --stairs 0.3 0.6 0.9.")


def _option(field: str) -> str:
    """The option of a command that sets a field."""
    return f"--{field.replace('_', '-')}"


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
    """Train on random windows of 5 to 100 % of the area and aspect 0.75 to 1.33, stretched to image_size; with
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
        object.__setattr__(self, "image_size", tuple(self.image_size))
        object.__setattr__(self, "freeze", tuple(self.freeze))
        object.__setattr__(self, "lora_on", tuple(self.lora_on))
        object.__setattr__(self, "patch_sizes", tuple(self.patch_sizes))
        check_ranges(self)
        refuse_first(self._rules())

    def _rules(self) -> Rules:
        """Yield which values do not go together, and the sentence about them."""
        schedule, crop, resize = self.schedule, self.crop_from, self.resize
        rises = schedule.decay == "linear" and schedule.linear_end > self.learning_rate
        heads = [name for name in self.freeze if any(f"{head}.".startswith(f"{name}.") for head in HEADS)]
        unused = self.randaugment_magnitude and not self.randaugment_layers
        no_duration = all(getattr(self, field) is None for field in DURATIONS)
        yield no_duration, "A recipe needs steps, examples or epochs; give one, such as --epochs 10."
        ends = f"linear_end is {schedule.linear_end} and the peak {self.learning_rate}"
        yield rises, f"The learning rate must not rise, but {ends}; give --linear-end 0."
        parts = f"--accumulation must divide the batch of {self.batch_size}, but is {self.accumulation}."
        yield self.batch_size % self.accumulation, parts
        different = len(set(self.patch_sizes)) == len(self.patch_sizes)
        yield not different, f"--patch-sizes must be different pixels, but are {self.patch_sizes}."
        yield "" in self.freeze, "--freeze must be the first parts of layer names, but one is empty."
        frozen = "LoRA trains nothing but its adapters and the head; leave --freeze out, or --lora."
        yield self.freeze and self.lora, frozen
        yield heads, f"--freeze {', '.join(heads)} would keep the new head at zeros, from which no layer learns."
        yield "" in self.lora_on or not self.lora_on, "--lora-on must be names of layers, such as query value."
        yield unused, "--randaugment-magnitude has no effect without --randaugment-layers; give 2 of these."
        yield self.balance and self.class_weights, "--balance and --class-weights both make up for small classes."
        has_none = crop is not None and resize in ("crop", "pad")
        yield has_none, f"--crop-from does not apply to resize {resize}; give --crop-from None."
        windows = crop is not None and resize == "stretch" and self.inception_crop
        yield windows, "--crop-from does not apply to inception_crop; give --crop-from None."
        least = f"--crop-from must be at least both sides of --image-size, {self.image_size}, but is {crop}."
        yield crop is not None and crop < max(self.image_size), least
        yield from self._rules_of_teachers()

    def _rules_of_teachers(self) -> Rules:
        way, own_temperature, has_teacher = self.distillation, self.temperature != 1.0, self.teacher is not None
        is_soft, name = way == "soft", {"hard": "Hard", "features": "Feature"}.get(way)
        needs_one = not has_teacher and (not is_soft or own_temperature)
        yield needs_one, "--distillation and --temperature need a teacher; give --teacher runs/large or so."
        yield not is_soft and own_temperature, f"{name} distillation has no temperature; leave --temperature out."
        weights = "A teacher's probabilities replace the labels, so --class-weights has no effect; give one."
        yield has_teacher and self.class_weights, weights
        loss = f"A teacher gives probabilities that sum to 1; leave --loss {self.loss} out."
        yield has_teacher and self.loss != "softmax", loss
        one = f"Of --distillation {way}, --patch-sizes and --patch-dropout, a run takes one; leave one out."
        yield (not is_soft) + bool(self.patch_sizes) + bool(self.patch_dropout) > 1, one

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
    """How to fine-tune with pictures without labels beside those with labels.

    The defaults are those of "Semi-supervised Vision Transformers at Scale" (arXiv 2208.05688) and its code
    (amazon-science/semi-vit, main_semi.py and SEMIVIT.md): ViT-B with 1 % of the labels of ImageNet.
    """

    confidence: Annotated[float, Range("(0, 1)")] = 0.6
    """Probability of a class from which on the teacher's class is learned."""
    unlabelled_weight: NotNegative = 5.0
    """Of the loss of the pictures without labels."""
    unlabelled_per_image: Count = 5
    """Pictures without labels for each labeled image of a batch."""

    def _rules(self) -> Rules:
        yield from super()._rules()
        others = self.teacher is not None or self.patch_sizes or self.patch_dropout or self.loss != "softmax"
        out = "leave --teacher, --patch-sizes, --patch-dropout and --loss out"
        yield others, f"Pictures without labels are learned by a softmax from the run's own average; {out}."
        yield self.class_weights, "Pictures without labels have no class weights; leave --class-weights out."
        average = "Pictures without labels are learned from the moving average; give --ema-decay 0.999."
        yield self.ema_decay is None, average


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainRecipe(Recipe):
    """A model and how to train it from scratch."""

    model: ViTConfig | ResNetConfig
    """Architecture."""
    channels: int = 3
    """1 for grayscale images, 3 for RGB."""
    target: Target = "classes"
    """What the model predicts: the classes of the images; or, for masked patches, the mean color (patch-color), the 16
    colors of the patch downsampled to 4x4 (patch-4x4), all pixels (patch-pixels), or all pixels less their mean and
    divided by their deviation in the patch (patch-normalized-pixels); or, for crops of an image, what the moving
    average of the model says of other crops of it (self-distillation, DINO)."""
    corruption: Annotated[float, Range("(0, 1]")] = 0.5
    """Fraction of the patches of an image that are masked and predicted, for the targets of patches."""
    decoder_layers: int = 0
    """Masked autoencoder: the encoder computes only the patches that are not masked, and a decoder of this many blocks
    predicts the others. 0 for none: the encoder sees a mask token at their places."""
    decoder_width: int = 512
    """Width of that decoder, a multiple of 32."""
    prototypes: int = 65_536
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
        refuse_first(self._rules_of_patches())

    def _rules(self) -> Rules:
        yield from super()._rules()
        yield self.lora, "LoRA adapts a trained model; give --lora to keras-vit finetune, or leave it out."
        yield isinstance(self.model, ResNetConfig) and self.layer_decay != 1.0, NO_BLOCKS
        if self.target != "classes":
            yield from self._rules_without_labels()
        useless = self.decoder_layers and self.target in ("classes", "self-distillation")
        yield useless, "A decoder is for masked patches; give --target patch-normalized-pixels, or leave it out."
        yield self.channels not in (1, 3), f"--channels must be 1 for grayscale or 3 for RGB, but are {self.channels}."
        classifier = getattr(self.model, "classifier", None)
        no_vector = f"Training needs one prediction per image, not the classifier {classifier!r}; give token or gap."
        yield classifier in ("none", "unpooled"), no_vector

    @property
    def learns_features(self) -> bool:
        """Whether it trains without labels, so that the run ends with a model without a head."""
        return self.target != "classes" or self.distillation == "features"

    @property
    def uses_labels(self) -> bool:
        return not self.learns_features

    def _rules_without_labels(self) -> Rules:
        target, model, crops = self.target, self.model, self.target == "self-distillation"
        is_vit = isinstance(model, ViTConfig)
        yield crops and not is_vit, "The target self-distillation is for a ViT; give such a model, or --target classes."
        whole = not crops and (not isinstance(model, ViTConfig) or model.stem is not None or model.representation_size)
        cuts = "is for a ViT that cuts the image itself into patches, without a representation_size"
        yield whole, f"The target {target} {cuts}; give such a model, or --target classes."
        patches = f"The target {target} needs all patches; leave --patch-sizes and --patch-dropout out."
        yield self.patch_sizes or self.patch_dropout, patches
        yield self.teacher is not None, f"A teacher gives classes; with --target {target} leave --teacher out."
        yield self.class_weights, f"--class-weights is for labels; with --target {target} leave it out."
        for field in ("mixup", "cutmix", "label_smoothing", "head_bias"):
            yield getattr(self, field), f"{_option(field)} is for labels; with --target {target} leave it 0."
        assert isinstance(model, ViTConfig)  # by the first rules
        yield from self._rules_of_self_distillation() if crops else self._rules_of_masks(model)

    def _rules_of_self_distillation(self) -> Rules:
        average = "Self-distillation learns from the moving average of the weights; give --ema-decay 0.996 or so."
        yield self.ema_decay is None, average
        widths = "at least 2 prototypes and a head_width that is a multiple of 8"
        wrong = self.prototypes < 2 or self.head_width < 8 or self.head_width % 8
        yield wrong, f"Self-distillation needs {widths}, but they are {self.prototypes} and {self.head_width}."
        crops = "Self-distillation draws its own crops; leave --inception-crop and --crop-from out."
        yield self.inception_crop or self.crop_from is not None, crops
        most = f"--local-size must be at most --image-size, {self.image_size}, but is {self.local_size}."
        yield self.local_crops and self.local_size > min(self.image_size), most

    def _rules_of_masks(self, model: ViTConfig) -> Rules:
        layers, width = self.decoder_layers, self.decoder_width
        pooling = f"The target {self.target} does not train the pooling of the classifier {model.classifier!r}"
        yield model.classifier in ("map", "sequence"), f"{pooling}; give another model, or --target self-distillation."
        sizes = "decoder_layers of at least 1 and a decoder_width that is a multiple of 32"
        wrong = layers and (layers < 0 or width < 32 or width % 32)
        yield wrong, f"A masked autoencoder needs {sizes}, but they are {layers} and {width}."
        fixed = model.position_embedding in ("sincos-2d", "learned") and model.position_injection == "input"
        needs = "needs position_embedding sincos-2d or learned, at the input and without axial attention"
        yield layers and (not fixed or model.axial), f"A masked autoencoder leaves patches out, so its model {needs}."

    def _rules_of_patches(self) -> Rules:
        """Yield rules on the number of patches of an image, which must fit into it."""
        if self.target in ("classes", "self-distillation"):
            return
        assert isinstance(self.model, ViTConfig)  # by the rules
        count = math.prod(self.model.grid(self.image_size))
        none = self.decoder_layers and not 1 <= int(count * (1.0 - self.corruption)) < count
        yield none, f"Of {count} patches, a corruption of {self.corruption} should leave some visible and some masked."
        smaller = "give a smaller patch or a larger --image-size"
        yield count < 2, f"The target {self.target} needs at least 2 patches, but the image has 1; {smaller}."

    def build(self, num_classes: int | None, own: "keras_vit.Preprocessing | None" = None) -> "keras.Model":
        """Build the model to train; own: the preprocessing of the checkpoint that it begins with, if there is one."""
        preprocessing = self.preprocessing(self.channels, own)
        if self.target == "classes":
            name = "vit" if isinstance(self.model, ViTConfig) else "resnet"
            return keras_vit.build(self.model, preprocessing=preprocessing, num_classes=num_classes, name=name)
        from keras_vit.models.self_supervised import masked_autoencoder, masked_patch_model, self_distillation_model

        assert isinstance(self.model, ViTConfig)  # as __post_init__ checks
        if self.target == "self-distillation":
            return self_distillation_model(
                self.model, preprocessing, prototypes=self.prototypes, head_width=self.head_width, name="vit"
            )
        outputs = num_patch_outputs(self.target, self.model.patch, self.channels)
        if not self.decoder_layers:
            return masked_patch_model(
                self.model, preprocessing, outputs=outputs, corruption=self.corruption, name="vit"
            )
        return masked_autoencoder(
            self.model,
            preprocessing,
            outputs=outputs,
            corruption=self.corruption,
            decoder_layers=self.decoder_layers,
            decoder_width=self.decoder_width,
            name="vit",
        )


def num_patch_outputs(target: Target, patch: tuple[int, int], channels: int) -> int:
    """Return the size of the prediction for a masked patch, see `training.objectives.masked_patches`."""
    if target in PIXEL_TARGETS:
        return patch[0] * patch[1] * channels
    return PATCH_CELLS[target] ** 2 * COLOR_LEVELS**channels
