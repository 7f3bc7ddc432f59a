"""Model configurations: frozen dataclasses, and what they are in JSON."""

import dataclasses
import itertools
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

from keras_vit.errors import Rules, UserError, check_choice, check_integers, refuse_first

Classifier = Literal["token", "gap", "token+gap", "map", "sequence", "unpooled", "none"]
Gelu = Literal["tanh", "erf", "quick", "silu"]
PositionEmbeddingKind = Literal["learned", "learned-2d", "sincos-2d", "relative", "rotary", "none"]
Distillation = Literal["none", "token", "head"]
Representation = Literal["tanh", "projection"]
PositionInjection = Literal["input", "every-layer", "shared"]


def python_numbers(value):
    """Convert NumPy scalars and arrays to Python numbers, and lists to tuples: configurations are saved as JSON."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(python_numbers, value)) if isinstance(value, list | tuple) else value


def convert_fields(config) -> None:
    """Apply `python_numbers` to each field of a frozen dataclass. Called by `__post_init__`."""
    for field in dataclasses.fields(config):
        object.__setattr__(config, field.name, python_numbers(getattr(config, field.name)))


def check_below_one(config, *fields: str) -> None:
    """Raise UserError unless the values of the fields are in [0, 1)."""
    refuse_first(
        (not 0.0 <= getattr(config, field) < 1.0, f"{field} must be in [0, 1), but is {getattr(config, field)}.")
        for field in fields
    )


def _check_multiples(image_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
    """Raise UserError unless patches cover an image; both are (height, width) in pixels."""
    for side, image, patch in zip(("height", "width"), image_size, patch_size, strict=True):
        if image % patch:
            below = image // patch * patch
            sizes = f"{below} or {below + patch}" if below else str(patch)
            raise UserError(
                f"The image {side} must be a multiple of the patch {side} {patch}, but is {image}; take {sizes}."
            )


def check_blocks(blocks: Collection[int], count: int, what: str = "blocks") -> None:
    """Raise UserError unless these are some of the numbers of `count` things, or negative ones from the end."""
    whole = all(isinstance(block, numbers.Integral) and not isinstance(block, bool) for block in blocks)
    if not len(blocks) or not whole or not all(-count <= block < count for block in blocks):
        raise UserError(f"{what} must be numbers from {-count} to {count - 1}, but are {list(blocks)}.")


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """A ResNet of bottlenecks with GroupNorm and standardized convolutions: BiT, or the stem of a hybrid.

    The defaults are for BiT (big_transfer); `hybrid_resnet` returns the configuration of the hybrids.
    """

    block_units: tuple[int, ...]
    """Bottleneck units of each stage; empty for a root without stages."""
    root_channels: int = 64
    """Channels of the root convolution, 64 times the width factor."""
    stage_channels: tuple[int, ...] | None = None
    """Output channels of each stage; default 4, 8, 16 and 32 times root_channels. Inner convolutions: a quarter."""
    preactivation: bool = True
    """BiT's version 2, norm and ReLU before each convolution; False for the hybrids' version 1."""
    axial_heads: int | None = None
    """Heads of the row and column attention that replaces each 3x3 convolution in an AxialResNet; None elsewhere."""
    num_groups: int = 32
    """Groups of every GroupNorm."""
    group_norm_epsilon: float = 1e-5
    """Added to the variance in every GroupNorm."""
    variance_epsilon: float = 1e-10
    """Added to a kernel's variance when it is standardized."""
    deviation_epsilon: float = 0.0
    """Added to a kernel's standard deviation."""

    def __post_init__(self) -> None:
        convert_fields(self)
        check_integers("block_units", self.block_units, length=0)
        check_integers("stage_channels", self.stage_channels, length=0)
        for field in ("root_channels", "num_groups", "axial_heads"):
            check_integers(field, getattr(self, field))
        if self.stage_channels is None:
            default = tuple(self.root_channels * 4 * 2**stage for stage in range(len(self.block_units)))
            object.__setattr__(self, "stage_channels", default)
        check_below_one(self, "group_norm_epsilon", "variance_epsilon", "deviation_epsilon")
        refuse_first(self._rules())

    def _rules(self) -> Rules:
        stages, count, heads, groups = self.output_channels, len(self.block_units), self.axial_heads, self.num_groups
        yield (
            len(stages) != count,
            f"stage_channels must have one number for each of the {count} stages, but is {stages}.",
        )
        yield any(channels % 4 for channels in stages), f"stage_channels must be multiples of 4, but are {stages}."
        yield (
            heads is not None and (self.preactivation or any(channels // 4 % heads for channels in stages)),
            f"axial_heads belong to a post-activation ResNet and must divide a quarter of {stages}, but are {heads}.",
        )
        for channels in (self.root_channels, *(channels // 4 for channels in stages)):
            yield channels < 1 or channels % groups, f"{groups} groups do not divide {channels} channels."

    @property
    def output_channels(self) -> tuple[int, ...]:
        """Output channels of each stage."""
        assert self.stage_channels is not None  # the constructor replaces None
        return self.stage_channels

    @property
    def total_stride(self) -> int:
        """Pixels of the image per row of the feature map: root and pooling halve, and each stage but the first."""
        return 2 ** (2 + max(len(self.block_units) - 1, 0))

    def feature_map(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the last stage's output: every stride of 2 halves, rounding up."""
        return -(-image_size[0] // self.total_stride), -(-image_size[1] // self.total_stride)


def hybrid_resnet(block_units: tuple[int, ...], root_channels: int = 64) -> ResNetConfig:
    """The ResNet in front of an official hybrid: post-activation, deviation epsilon 1e-5, flax's GroupNorm epsilon."""
    return ResNetConfig(
        block_units,
        root_channels,
        preactivation=False,
        group_norm_epsilon=1e-6,
        variance_epsilon=0.0,
        deviation_epsilon=1e-5,
    )


@dataclasses.dataclass(frozen=True)
class ConvStem:
    """A stack of convolutions, each with BatchNorm and ReLU, that replaces the patch embedding.

    "Early Convolutions Help Transformers See Better" (arXiv 2106.14881); torchvision's `conv_stem_configs`.
    """

    channels: tuple[int, ...]
    """Output channels of each convolution."""
    kernel_sizes: tuple[int, ...]
    """Side of each kernel, odd; the padding is half of it."""
    strides: tuple[int, ...]
    """Stride of each convolution."""
    batch_norm_epsilon: float = 1e-5
    """Added to the variance in every BatchNorm."""

    def __post_init__(self) -> None:
        convert_fields(self)
        for field in ("channels", "kernel_sizes", "strides"):
            check_integers(field, getattr(self, field), length=0)
        counts = {len(self.channels), len(self.kernel_sizes), len(self.strides)}
        if len(counts) > 1 or counts == {0} or not all(size % 2 for size in self.kernel_sizes):
            raise UserError(
                "A convolutional stem needs as many channels as odd kernel sizes and strides, but has "
                f"{self.channels}, {self.kernel_sizes} and {self.strides}."
            )

    @property
    def total_stride(self) -> int:
        """Pixels of the image per row of the feature map."""
        return math.prod(self.strides)

    def feature_map(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the last convolution's output."""
        height, width = image_size
        for size, stride in zip(self.kernel_sizes, self.strides, strict=True):
            height, width = ((side + size // 2 * 2 - size) // stride + 1 for side in (height, width))
        return height, width


@dataclasses.dataclass(frozen=True)
class ShiftedPatches:
    """Patches of the image and of four copies shifted by half a patch to its corners, with a LayerNorm behind them.

    Shifted patch tokenization, "Vision Transformer for Small-Size Datasets" (arXiv 2112.13492), section 3.1. Each
    vector of the feature map is such a patch, so the model's own patch_size is 1.
    """

    patch_size: int
    """Side of a patch in pixels."""

    def __post_init__(self) -> None:
        convert_fields(self)
        check_integers("patch_size of shifted patches", self.patch_size, least=2)

    @property
    def total_stride(self) -> int:
        """Pixels of the image per row of the feature map."""
        return self.patch_size

    def feature_map(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches."""
        _check_multiples(image_size, (self.patch_size, self.patch_size))
        return image_size[0] // self.patch_size, image_size[1] // self.patch_size


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """A Vision Transformer without the size of its images and the number of its classes."""

    patch_size: int | tuple[int, int]
    """Side of a patch in pixels, or (height, width); of the feature map's pixels in a hybrid."""
    hidden_size: int
    """Width D of the token stream; a multiple of num_heads."""
    num_layers: int
    """Number of encoder blocks L."""
    num_heads: int
    """Attention heads per block."""
    mlp_dim: int
    """Width of the hidden layer of each block's MLP."""
    classifier: Classifier = "token"
    """Input of the head: class token, mean of the patch tokens (gap), both concatenated (token+gap), attention pooling
    (map), mean of the tokens with learned weights (sequence, arXiv 2104.05704), each token (unpooled); none: no
    head."""
    representation_size: int | None = None
    """Width of the layer "pre_logits" before the head; None for no such layer, as in all released configs."""
    representation: Representation = "tanh"
    """The layer "pre_logits": dense with tanh, or a projection without bias (CLIP, before texts as classes)."""
    normalized: bool = False
    """Whether what the head reads is divided by its length, so that logits are cosines times the lengths in the head
    (texts as classes)."""
    dropout_rate: float = 0.0
    """Probability of dropping a unit after the position embedding, each attention output and each MLP layer."""
    attention_dropout_rate: float = 0.0
    """Probability of dropping an attention probability."""
    stochastic_depth_rate: float = 0.0
    """Probability of skipping a residual branch in the last block; grows linearly from 0 in the first."""
    gelu: Gelu = "tanh"
    """Activation of the MLPs: GELU in the tanh approximation of JAX, in the exact erf of PyTorch files, or as
    x sigmoid(1.702 x) (quick, CLIP); or SiLU, x sigmoid(x)."""
    layer_norm_epsilon: float = 1e-6
    """Added to the variance in every LayerNorm (flax: 1e-6; the Keras default is 1e-3)."""
    stem: ResNetConfig | ConvStem | ShiftedPatches | None = None
    """Network that computes the feature map to split into patches; None splits the image."""
    position_embedding: PositionEmbeddingKind = "learned"
    """learned: one per token. learned-2d: half per column, half per row. sincos-2d: fixed (big_vision). relative:
    learned attention logits for each offset of two tokens, in every block. rotary: queries and keys of the patches are
    rotated in every block by their row and column (DINOv3). none: no position embedding."""
    rotary_reference: tuple[int, int] | None = None
    """Rotary positions beside learned ones (EVA-02): the rows and columns as which any grid counts. None for none."""
    rotary_offset: float = 0.0
    """The number of the first row and column for these: 1.0 for Perception Encoders."""
    rotary_columns_first: bool = False
    """Whether the first half of their frequencies is that of the columns (Perception Encoders)."""
    position_injection: PositionInjection = "input"
    """Where learned position embeddings are added: to the encoder input, or to each block, separate or shared."""
    axial: bool = False
    """Axial-ViT: each block is attention and MLP along the rows, then attention and MLP along the columns."""
    qkv_bias: bool = True
    """Whether the projections to query, key and value have a bias."""
    norm_after_pooling: bool = False
    """Whether the last LayerNorm follows the mean of the tokens instead of preceding it (timm's "fc_norm")."""
    final_norm: bool = True
    """Whether a LayerNorm follows the last block; False for CLIPForImageClassification of transformers."""
    key_bias: bool = True
    """Whether the projection to the key has a bias, with qkv_bias."""
    patch_bias: bool = True
    """Whether the patch embedding has a bias."""
    head_bias: bool = True
    """Whether the head has a bias; False for CLIP's projection."""
    pre_norm: bool = False
    """Whether a LayerNorm precedes the first block."""
    gated_mlp: bool = False
    """Whether the hidden layer of each MLP is a product of two: activation(gate) * value (SwiGLU with gelu="silu")."""
    mlp_norm: bool = False
    """Whether a LayerNorm precedes the last layer of each MLP (EVA-02)."""
    attention_norm: bool = False
    """Whether a LayerNorm precedes the output projection of each attention (EVA-02 of CLIP)."""
    pool_heads: int | None = None
    """Heads of the attention pooling of the classifier map; None for num_heads."""
    pool_mlp_dim: int | None = None
    """Width of the hidden layer of the MLP behind this pooling; None for mlp_dim."""
    layer_scale: float | None = None
    """Initial factor of each channel of both residual branches, which is learned; None for no such factors."""
    num_registers: int = 0
    """Number of learned tokens without a position between the class token and the patches ("registers")."""
    distillation: Distillation = "none"
    """DeiT's second learned token, behind the class token: none; token: present, but read by no head; head: with a
    second head, whose logits are averaged with those of the first."""
    prefix_positions: bool = True
    """Whether class and distillation token have a position embedding, too (timm: not no_embed_class)."""
    with_class_token: bool = False
    """Whether there is a class token although the classifier does not read it alone: gap (timm's global_pool="avg"),
    map (Perception Encoders), or none."""
    locality_attention: bool = False
    """Whether no token attends to itself and each head learns the temperature of its softmax: locality self-attention
    (arXiv 2112.13492, section 3.2)."""

    def __post_init__(self) -> None:
        convert_fields(self)
        check_integers("patch_size", self.patch, length=2)
        sizes = ("hidden_size", "num_layers", "num_heads", "mlp_dim")
        for field in (*sizes, "representation_size", "pool_heads", "pool_mlp_dim"):
            check_integers(field, getattr(self, field))
        check_integers("num_registers", self.num_registers, least=0)
        check_integers("rotary_reference", self.rotary_reference, length=2)
        check_below_one(self, "dropout_rate", "attention_dropout_rate", "stochastic_depth_rate")
        for field, kind in _CHOICES.items():
            check_choice(field, getattr(self, field), get_args(kind))
        refuse_first(itertools.chain(self._encoder_rules(), self._token_rules(), self._head_rules()))

    def _encoder_rules(self) -> Rules:
        epsilon, scale, width, heads = self.layer_norm_epsilon, self.layer_scale, self.hidden_size, self.num_heads
        positions, in_every_layer = self.position_embedding, self.position_injection != "input"
        multiple = {"learned-2d": 2, "sincos-2d": 4}.get(positions, 1)
        yield width % heads, f"hidden_size must be a multiple of num_heads, but {width} is not one of {heads}."
        yield not 0.0 < epsilon < 1.0, f"layer_norm_epsilon must be between 0 and 1, but is {epsilon}."
        yield scale is not None and not 0.0 <= scale <= 1.0, f"layer_scale must be between 0 and 1, but is {scale}."
        yield (width % multiple, f"Positions {positions!r} need a hidden_size that {multiple} divides, not {width}.")
        is_learned = positions.startswith("learned")
        yield in_every_layer and not is_learned, f"{positions!r} positions are not for every layer."
        yield self.axial and self.num_prefix_tokens, "An axial model has no class token; use gap, map or unpooled."
        yield (
            self.is_rotary and (self.axial or width // heads % 4),
            "Rotary positions need heads whose width is a multiple of 4, and attention over all tokens, but "
            f"hidden_size is {width}, num_heads {heads} and axial {self.axial}.",
        )
        yield (
            self.rotary_reference is not None and positions != "learned",
            f"rotary_reference is for learned positions, not for {positions!r}; leave it out.",
        )
        yield (
            self.pool_mlp_dim is not None and self.classifier != "map",
            f"pool_mlp_dim is for the classifier map, not for {self.classifier!r}; leave it out.",
        )
        yield (
            self.pool_heads is not None and (self.classifier != "map" or width % self.pool_heads),
            f"pool_heads must divide the width {width} of a model with the classifier map, but are {self.pool_heads}.",
        )
        yield (
            self.locality_attention and (self.axial or positions == "relative" or self.is_rotary),
            "Locality self-attention is for learned, fixed or no positions, and all tokens at once.",
        )
        yield (
            isinstance(self.stem, ShiftedPatches) and self.patch != (1, 1),
            f"Shifted patches have their own size; give patch_size 1 instead of {self.patch_size}.",
        )

    def _token_rules(self) -> Rules:
        classifier, has_token, positions = self.classifier, self.has_class_token, self.position_injection
        has_registers, reads_all = self.num_registers > 0, classifier in ("map", "sequence")
        yield has_registers and reads_all, f"Classifier {classifier!r} reads all tokens; leave num_registers out."
        yield (
            self.with_class_token and (classifier not in ("gap", "map", "none") or self.distillation != "none"),
            "with_class_token is for gap, map and none without distillation token, not for "
            f"{classifier!r}; leave it out.",
        )
        yield (
            self.distillation != "none" and not has_token,
            f"A distillation token needs the classifier 'token', not {classifier!r}; choose that.",
        )
        yield (
            self.distillation == "head" and (classifier != "token" or self.representation_size is not None),
            "Two heads read class and distillation token; use classifier 'token' without pre_logits.",
        )
        yield not self.prefix_positions and not has_token, "prefix_positions=False needs a class token; leave it out."
        yield (
            positions != "input" and (has_registers or not self.prefix_positions),
            "Positions that are added in every layer are of all tokens; leave num_registers out.",
        )

    def _head_rules(self) -> Rules:
        is_gap, is_one_vector = self.classifier == "gap", self.classifier not in ("unpooled", "none")
        yield self.norm_after_pooling and not is_gap, "norm_after_pooling belongs to the classifier 'gap'."
        yield (
            self.norm_after_pooling and not self.final_norm,
            "norm_after_pooling places the last LayerNorm, which final_norm=False leaves out; leave one of them out.",
        )
        yield (
            self.normalized and (self.distillation == "head" or not is_one_vector),
            "Features are normalized in front of one head of one vector; leave normalized out.",
        )
        yield (
            isinstance(self.stem, ResNetConfig) and self.stem.preactivation,
            "The ResNet in front of a hybrid is post-activation; see hybrid_resnet.",
        )

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch in pixels."""
        return (self.patch_size, self.patch_size) if isinstance(self.patch_size, int) else self.patch_size

    @property
    def is_rotary(self) -> bool:
        """Whether queries and keys are rotated by their positions."""
        return self.position_embedding == "rotary" or self.rotary_reference is not None

    @property
    def has_class_token(self) -> bool:
        """Whether the first token is the class token."""
        return self.classifier in ("token", "token+gap") or self.with_class_token

    @property
    def num_class_tokens(self) -> int:
        """Number of class and distillation tokens: 0 to 2."""
        return int(self.has_class_token) + int(self.distillation != "none")

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches: class token, distillation token and registers."""
        return self.num_class_tokens + self.num_registers

    @property
    def num_prefix_positions(self) -> int:
        """Number of rows before those of the patches in a table of position embeddings."""
        return self.num_class_tokens if self.prefix_positions else 0

    def grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches in an image of `image_size` (height, width) pixels.

        As in the original codes, the last pixels, or rows and columns of a feature map, that fill no patch are dropped:
        SigLIP So400m/14 has 27 x 27 of 384.
        """
        size, patch = image_size if self.stem is None else self.stem.feature_map(image_size), self.patch
        if size[0] < patch[0] or size[1] < patch[1]:
            raise UserError(
                f"An image of {image_size[0]}x{image_size[1]} gives a feature map of {size[0]}x{size[1]}, which holds "
                f"no patch of {patch[0]}x{patch[1]}; take a larger image."
            )
        return size[0] // patch[0], size[1] // patch[1]

    def check_image_size(self, image_size: tuple[int, int]) -> None:
        """Raise UserError unless the patches cover the image; for sizes that no checkpoint sets."""
        if self.stem is None:
            _check_multiples(image_size, self.patch)
        self.grid(image_size)


SegmentationTask = Literal["semantic", "instance", "panoptic"]
# Minimum score of a segment of instance and panoptic in predictions, their evaluation and SavedModels.
SEGMENT_THRESHOLD = 0.5


@dataclasses.dataclass(frozen=True)
class SegmentationConfig:
    """The parts of an encoder-only mask transformer (EoMT) beside its Vision Transformer, see `segmentation_model`."""

    num_classes: int
    """Number of classes K; the class head has one more output, for "no object"."""
    num_queries: int = 200
    """Learned tokens Q, each of which predicts a class and a mask."""
    num_blocks: int = 4
    """The last encoder blocks, which the queries pass beside the other tokens."""
    num_upscale_blocks: int = 2
    """Doublings of the grid of patches before the masks are made."""
    mask_attention: bool = False
    """Whether queries attend only to the patches inside of the masks that they predict before each of these blocks: the
    training form. A model that is trained to the end needs none."""
    gelu: Gelu = "erf"
    """Activation of mask head and upscaling."""
    task: SegmentationTask = "semantic"
    """The result that classes and masks become: the class of each pixel; the masks of objects, which may overlap; or
    segments that do not."""
    stuff: tuple[int, ...] = ()
    """For panoptic: classes all of whose masks in an image are one segment."""

    def __post_init__(self) -> None:
        convert_fields(self)
        check_choice("task", self.task, get_args(SegmentationTask))
        for field in ("num_classes", "num_queries", "num_blocks"):
            check_integers(field, getattr(self, field))
        check_integers("num_upscale_blocks", self.num_upscale_blocks, least=0)
        check_choice("gelu", self.gelu, get_args(Gelu))


@dataclasses.dataclass(frozen=True)
class LinearSegmentationConfig:
    """A linear classifier of the patches of a Vision Transformer, see `segmentation_model`."""

    num_classes: int
    """Number of classes K."""
    blocks: tuple[int, ...] = (-1,)
    """Blocks whose tokens are the features, concatenated; negative numbers count from the last."""

    def __post_init__(self) -> None:
        convert_fields(self)
        check_integers("num_classes", self.num_classes)


@dataclasses.dataclass(frozen=True)
class DetectionConfig:
    """The parts of an open-vocabulary detector (OWL-ViT, OWLv2) beside its encoder, see `detection_model`."""

    embedding_size: int
    """Width of the class embeddings, which are compared with those of texts or images."""
    objectness: bool = False
    """Whether each box has a logit for being any object (OWLv2)."""

    def __post_init__(self) -> None:
        convert_fields(self)
        check_integers("embedding_size", self.embedding_size)


TaskConfig = SegmentationConfig | LinearSegmentationConfig | DetectionConfig

_CHOICES: dict[str, Any] = {
    "classifier": Classifier,
    "gelu": Gelu,
    "distillation": Distillation,
    "position_embedding": PositionEmbeddingKind,
    "position_injection": PositionInjection,
    "representation": Representation,
}

ModelConfig = ViTConfig | ResNetConfig


def with_rates(config: ModelConfig, rates: Mapping[str, float | None]) -> ModelConfig:
    """The config with these rates for training; a rate of None is kept. Raises UserError for a ResNet and any but 0."""
    changes: dict[str, Any] = {name: rate for name, rate in rates.items() if rate is not None}
    if isinstance(config, ViTConfig):
        return dataclasses.replace(config, **changes)
    if given := [name for name, rate in changes.items() if rate]:
        raise UserError(f"{', '.join(given)} do not apply to a ResNet, which has no dropout; leave them out.")
    return config


@dataclasses.dataclass(frozen=True)
class Classes:
    """The classes of a model, saved with it: their names, and of a head of texts what it was made of."""

    labels: tuple[str, ...]
    """Class names, in the order of the logits."""
    texts: tuple[tuple[str, ...], ...] = ()
    """The texts of each class, before the templates; empty for a head that was trained."""
    templates: tuple[str, ...] = ()
    """Sentences in which each text replaces {}; the embeddings of all of a class are averaged."""
    multi_label: bool = False
    """Whether an image may have several classes: its probabilities are the sigmoid of the logits."""
    head: str | None = None
    """Name of the layer that makes the logits; None for a file of an older version."""

    def __post_init__(self) -> None:
        convert_fields(self)
        if not all(isinstance(label, str) and "\n" not in label for label in self.labels):
            raise UserError(f"Class names must be texts of one line, but are {self.labels!r:.200}.")

    def selected(self, rows: Sequence[int | None]) -> "Classes":
        """Return the classes of these rows; without the texts if a row is None, which is none of them."""
        texts = tuple(self.texts[row] for row in rows if row is not None) if self.texts and None not in rows else ()
        return dataclasses.replace(self, texts=texts, templates=self.templates if texts else ())


# Fields that are newer than runs, exports and features on disk, which know a model by all fields of its config.
_NEWER = {
    *("rotary_reference", "rotary_offset", "rotary_columns_first"),
    *("mlp_norm", "attention_norm", "pool_heads", "pool_mlp_dim"),
}


def identifying_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config by which files know a model: without newer ones that are not set."""
    return {name: value for name, value in fields.items() if value or name not in _NEWER}


def config_to_dict(config: ModelConfig | ConvStem | ShiftedPatches | TaskConfig) -> dict[str, Any]:
    """Convert a configuration to a dict for JSON, with its kind."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, value in fields.items():
        if isinstance(value, ResNetConfig | ConvStem | ShiftedPatches):
            fields[name] = config_to_dict(value)
    return {"kind": type(config).__name__, **fields}


def config_from_dict(fields: Mapping[str, Any]) -> Any:
    """Inverse of `config_to_dict`: returns a ModelConfig, the stem inside one, or a TaskConfig."""
    known = (ConvStem, ShiftedPatches, *get_args(ModelConfig), *get_args(TaskConfig))
    kinds: dict[str, Any] = {kind.__name__: kind for kind in known}
    values = {name: config_from_dict(value) if isinstance(value, dict) else value for name, value in fields.items()}
    return kinds[values.pop("kind", "ViTConfig")](**values)
