"""What a model costs, told from its configuration alone: parameters, operations, and memory for its gradient.

Counted are matrix products and convolutions, whose pairs of a multiplication and an addition many tables print as
GFLOPs, and what fvcore adds for norms, as it is in timm's tables. Activation functions and softmax are left out.
"""

import dataclasses
import math

from keras_vit.config import ConvStem, ModelConfig, ResNetConfig, ViTConfig

# Further numbers that GELU, a chain of products and a tanh, keeps for its gradient where nothing is fused: told by the
# memory that TensorFlow takes for one image more.
_GELU_KEEPS = 5


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of one image, forward."""

    parameters: int
    """Numbers in all weights, with BatchNorm's statistics."""
    multiply_adds: int
    """Pairs of a multiplication and an addition in matrix products and convolutions."""
    activations: int
    """Numbers kept for the gradient: what all layers put out, attention probabilities, what is inside GELU."""
    normalisation: int = 0
    """Operations of norms: 5 for each number they put out, 4 for each weight that is standardised."""

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return 2 * self.multiply_adds + self.normalisation

    def __add__(self, other: "Costs") -> "Costs":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Costs(*(mine + its for mine, its in pairs))

    def __mul__(self, times: int) -> "Costs":
        return Costs(*(number * times for number in dataclasses.astuple(self)))


def costs(
    config: ModelConfig, image_size: tuple[int, int], *, num_classes: int | None = 1000, channels: int = 3
) -> Costs:
    """The costs of the model that `build` would make of a configuration, at (height, width) pixels."""
    if isinstance(config, ResNetConfig):
        total, shape = _resnet(config, image_size, channels)
        width = shape[2]
        if config.preactivation:
            total += _norm(width, math.prod(shape)) + Costs(0, 0, math.prod(shape))  # norm and ReLU
        return total + Costs(0, 0, width) + _head(width, num_classes)
    return _vit(config, image_size, channels, num_classes)


def _norm(width: int, outputs: int, weights: int = 2) -> Costs:
    return Costs(weights * width, 0, outputs, 5 * outputs)


def _dense(rows: int, inputs: int, outputs: int, bias: bool = True) -> Costs:
    return Costs((inputs + bias) * outputs, rows * inputs * outputs, rows * outputs)


def _head(width: int, num_classes: int | None) -> Costs:
    return _dense(1, width, num_classes) if num_classes else Costs(0, 0, 0)


def _conv(size: tuple[int, int], inputs: int, outputs: int, side: int | tuple[int, int], bias: bool = False) -> Costs:
    """A convolution whose output has `size` (height, width)."""
    window = inputs * (side * side if isinstance(side, int) else math.prod(side))
    pixels = math.prod(size)
    return Costs((window + bias) * outputs, pixels * window * outputs, pixels * outputs)


def _standardized(size: tuple[int, int], inputs: int, outputs: int, side: int) -> Costs:
    """A convolution whose kernel is standardised in every pass."""
    total = _conv(size, inputs, outputs, side)
    return total + Costs(0, 0, 0, 4 * total.parameters)


def _vit(config: ViTConfig, image_size: tuple[int, int], channels: int, num_classes: int | None) -> Costs:
    total, shape = Costs(0, 0, 0), (*image_size, channels)
    if isinstance(config.stem, ConvStem):
        total, shape = _conv_stem(config.stem, image_size, channels)
    elif config.stem is not None:
        total, shape = _resnet(config.stem, image_size, channels)
    grid, width = config.grid(image_size), config.hidden_size
    tokens = math.prod(grid) + config.num_prefix_tokens

    total += _conv(grid, shape[2], width, config.patch, bias=True)
    if config.num_prefix_tokens:
        total += Costs(width, 0, tokens * width)
    total += _positions(config, grid, tokens)
    total += Costs(0, 0, tokens * width) * bool(config.dropout_rate)
    sequences = [(1, tokens)]  # per block: attention among so many sequences of that many tokens
    if config.axial:
        sequences = [(grid[0], grid[1]), (grid[1], grid[0])]
    for layer in range(config.num_layers):
        dropped = bool(config.stochastic_depth_rate and layer)
        for number, length in sequences:
            total += _block(config, number, length, dropped)
    if config.norm_after_pooling:
        return total + Costs(0, 0, width) + _norm(width, width) + _vit_head(config, num_classes, 1)
    total += _norm(width, tokens * width)
    if config.classifier == "none":
        return total
    if config.classifier == "map":
        total += _attention_pooling(config, tokens)
    rows = tokens if config.classifier == "unpooled" else 1
    total += Costs(0, 0, width) * (config.classifier != "unpooled")
    return total + _vit_head(config, num_classes, rows)


def _vit_head(config: ViTConfig, num_classes: int | None, rows: int) -> Costs:
    width, total = config.hidden_size, Costs(0, 0, 0)
    if config.representation_size is not None:
        total, width = _dense(rows, width, config.representation_size), config.representation_size
    return total + _dense(rows, width, num_classes) if num_classes else total


def _positions(config: ViTConfig, grid: tuple[int, int], tokens: int) -> Costs:
    width = config.hidden_size
    parameters = {
        "learned": tokens * width,
        "learned-2d": sum(grid) * (width // 2) + config.num_prefix_tokens * width,
        "sincos-2d": 0,
    }
    if config.position_embedding not in parameters:
        return Costs(0, 0, 0)
    tables = config.num_layers if config.position_injection == "every-layer" else 1
    calls = 1 if config.position_injection == "input" else config.num_layers
    return Costs(parameters[config.position_embedding] * tables, 0, tokens * width * calls)


def _block(config: ViTConfig, sequences: int, length: int, dropped: bool) -> Costs:
    """Attention and MLP, each behind a norm and a residual."""
    width, tokens = config.hidden_size, sequences * length
    outputs = Costs(0, 0, tokens * width)
    total = (_norm(width, tokens * width) + outputs) * 2 + outputs * 2 * dropped
    total += outputs * 2 * config.axial  # into rows or columns and back
    total += _dense(tokens, width, width, config.qkv_bias) * 3
    total += _mixing(sequences, length, length, width, config.num_heads) + _dense(tokens, width, width)
    if config.position_embedding == "relative":
        offsets, head = 2 * length - 1, width // config.num_heads
        total += Costs(offsets * head, tokens * offsets * width, sequences * config.num_heads * length * length)
    total += outputs * bool(config.dropout_rate)
    return total + _mlp(config, tokens, config.dropout_rate)


def _mixing(sequences: int, queries: int, keys: int, width: int, num_heads: int) -> Costs:
    """Softmax of products, and the values by them; heads change nothing but the number of probabilities."""
    pairs = sequences * queries * keys
    return Costs(0, 2 * pairs * width, num_heads * pairs + sequences * queries * width)


def _mlp(config: ViTConfig, tokens: int, dropout_rate: float) -> Costs:
    width, hidden = config.hidden_size, config.mlp_dim
    total = _dense(tokens, width, hidden) + _dense(tokens, hidden, width)
    total += Costs(0, 0, _GELU_KEEPS * tokens * hidden)
    return total + Costs(0, 0, tokens * (width + hidden)) * bool(dropout_rate)


def _attention_pooling(config: ViTConfig, tokens: int) -> Costs:
    width = config.hidden_size
    total = Costs(width, 0, width) + _dense(1, width, width) * 2 + _dense(tokens, width, width) * 2
    total += _mixing(1, 1, tokens, width, config.num_heads)
    return total + _norm(width, width) + _mlp(config, 1, 0.0) + Costs(0, 0, width)


def _conv_stem(stem: ConvStem, size: tuple[int, int], channels: int) -> tuple[Costs, tuple[int, int, int]]:
    """The costs of early convolutions, and the shape of their feature map."""
    total = Costs(0, 0, 0)
    for filters, side, stride in zip(stem.channels, stem.kernel_sizes, stem.strides, strict=True):
        padded = tuple(length + side // 2 * 2 for length in size)
        size = tuple((length - side) // stride + 1 for length in padded)
        outputs = math.prod(size) * filters
        total += Costs(0, 0, math.prod(padded) * channels) + _conv(size, channels, filters, side)
        total += _norm(filters, outputs, weights=4) + Costs(0, 0, outputs)  # ReLU
        channels = filters
    return total, (*size, channels)


def _resnet(config: ResNetConfig, size: tuple[int, int], channels: int) -> tuple[Costs, tuple[int, int, int]]:
    """The costs of root and stages, and the shape of the feature map."""
    halved = tuple(-(-side // 2) for side in size)
    quartered = tuple(-(-side // 2) for side in halved)
    width, pixels = config.root_channels, math.prod(halved)
    total = _standardized(halved, channels, width, 7) + Costs(0, 0, math.prod(quartered) * width)
    if config.preactivation:  # paddings of their own
        total += Costs(0, 0, math.prod(side + 6 for side in size) * channels)
        total += Costs(0, 0, math.prod(side + 2 for side in halved) * width)
    else:
        total += _norm(width, pixels * width) + Costs(0, 0, pixels * width)
    size = quartered
    for stage, (units, outputs) in enumerate(zip(config.block_units, config.stage_channels, strict=True)):
        for unit in range(units):
            strides = 2 if stage > 0 and unit == 0 else 1
            total += _bottleneck(config, size, width, outputs, strides)
            size, width = tuple(-(-side // strides) for side in size), outputs
    return total, (*size, width)


def _bottleneck(config: ResNetConfig, size: tuple[int, int], inputs: int, outputs: int, strides: int) -> Costs:
    inner, after = outputs // 4, tuple(-(-side // strides) for side in size)
    before_pixels, after_pixels = math.prod(size), math.prod(after)
    projected = inputs != outputs or strides > 1
    total = _standardized(size, inputs, inner, 1) + _standardized(after, inner, outputs, 1)
    if config.axial_heads is None:
        total += _standardized(after, inner, inner, 3)
    else:
        total += _axial_attention(size, inner, config.axial_heads, strides)
    total += _standardized(after, inputs, outputs, 1) * projected
    norms = _norm(inner, before_pixels * inner) + _norm(inner, after_pixels * inner)
    relus = Costs(0, 0, (before_pixels + after_pixels) * inner)
    total += norms + relus + Costs(0, 0, after_pixels * outputs)  # the sum
    if config.preactivation:
        total += _norm(inputs, before_pixels * inputs) + Costs(0, 0, before_pixels * inputs)
        return total + Costs(0, 0, math.prod(side + 2 for side in size) * inner)  # padding
    return total + _norm(outputs, after_pixels * outputs) * (1 + projected) + Costs(0, 0, after_pixels * outputs)


def _axial_attention(size: tuple[int, int], width: int, num_heads: int, strides: int) -> Costs:
    """Along the rows, then the columns, with relative positions; then the mean where there is a stride."""
    pixels, total = math.prod(size), Costs(0, 0, 0)
    for sequences, length in (size, size[::-1]):
        offsets = 2 * length - 1
        total += _dense(pixels, width, width) * 4 + _mixing(sequences, length, length, width, num_heads)
        total += Costs(offsets * width // num_heads, pixels * offsets * width, sequences * num_heads * length * length)
        total += Costs(0, 0, 2 * pixels * width)  # into rows or columns and back
    means = math.prod(-(-side // strides) for side in size) * width if strides > 1 else 0
    return total + Costs(0, 0, means)
