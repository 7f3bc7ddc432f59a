"""Complexity of a model, by layer and summed: parameters, operations, and memory of activations for the gradient.

The operations of matrix products, convolutions and, as in fvcore, norms are counted. Activation functions and softmax
are not. Many tables print multiply-adds as GFLOPs.
"""

import dataclasses
import functools
import math

import keras

from keras_vit.models import layers
from keras_vit.models.attention import DotProductAttention, RelativePositions
from keras_vit.models.build import build
from keras_vit.models.config import ModelConfig

# Further numbers that GELU, a chain of products and a tanh, keeps for its gradient where nothing is fused: measured
# as the memory that TensorFlow takes for one more image.
_GELU_KEEPS = 5
# A sigmoid and its argument.
_SIGMOID_KEEPS = 2
_NORMS = (keras.layers.LayerNormalization, keras.layers.GroupNormalization, keras.layers.BatchNormalization)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of the forward pass for one image."""

    parameters: int
    """Number of elements in all weights, including BatchNorm statistics."""
    multiply_adds: int
    """Multiply-adds of matrix products and convolutions."""
    activations: int
    """Numbers kept for the gradient: what all layers put out, attention probabilities, what is inside GELU."""
    normalization: int = 0
    """Operations of norms: 5 for each number they put out, 4 for each weight that is standardized."""

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return 2 * self.multiply_adds + self.normalization

    def __add__(self, other: "Costs") -> "Costs":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Costs(*(mine + its for mine, its in pairs))


@functools.cache
def costs(
    config: ModelConfig, image_size: tuple[int, int], *, num_classes: int | None = 1000, channels: int = 3
) -> Costs:
    """The costs of the model that `build` makes of a configuration, at (height, width) pixels.

    The model is built, with weights that take no memory.
    """
    with layers.no_init_weights():
        model = build(config, image_size=image_size, num_classes=num_classes, channels=channels)
    total = Costs(model.count_params(), 0, 0)

    def count(layer, *inputs, **options):
        nonlocal total
        outputs = layer(*inputs, **options)
        total += _of_call(layer, keras.tree.flatten(inputs), outputs)
        return outputs

    # With a batch of one image the sequences that attention folds it into are in the shapes, too.
    image = keras.Input(batch_shape=(1, *model.input_shape[1:]))
    keras.models.clone_model(model, image, clone_function=lambda layer: layer, call_function=count)
    return total


def _of_call(layer: keras.layers.Layer, inputs: list, outputs) -> Costs:
    """Return the costs of a call of a layer; the parameters are the layer's."""
    if isinstance(layer, (layers.ModelSpec, keras.layers.Reshape)):
        return Costs(0, 0, 0)
    size, products, kept, normalization = math.prod(outputs.shape), 0, 0, 0
    if isinstance(layer, layers.TokenDense):
        products = size * layer.kernel.shape[0]
        kept = _GELU_KEEPS * size * (layer.activation in (layers.gelu_tanh, layers.gelu_erf))
        kept += _SIGMOID_KEEPS * size * (layer.activation in (layers.gelu_quick, keras.activations.silu))
    elif isinstance(layer, (layers.StandardizedConv2D, keras.layers.Conv2D)):
        products = size * math.prod(layer.kernel.shape[:3])
        normalization = 4 * math.prod(layer.kernel.shape) * isinstance(layer, layers.StandardizedConv2D)
    elif isinstance(layer, DotProductAttention):  # scores, and the mean of the values
        (sequences, queries, _), (_, keys, _) = (tensor.shape for tensor in inputs[:2])
        products, kept = 2 * size * keys, sequences * layer.num_heads * queries * keys
    elif isinstance(layer, RelativePositions):
        sequences, length, width = inputs[0].shape
        products = sequences * length * width * (2 * length - 1)
    elif isinstance(layer, _NORMS):
        normalization = 5 * size
    return Costs(0, products, size + kept, normalization)


def summary(model: keras.Model) -> None:
    """Print a row for each layer of a model: name, type, output shape and number of parameters.

    Names are whole, unlike in `keras.Model.summary`, whatever the width of the terminal.
    """
    rows = [("Layer", "Type", "Output shape", "Parameters")]
    for layer in model.layers:
        shapes = keras.tree.map_structure(lambda tensor: tensor.shape, layer.output)
        rows.append((layer.name, type(layer).__name__, str(shapes), f"{layer.count_params():,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *texts, number in rows:
        cells = [text.ljust(width) for text, width in zip(texts, widths, strict=False)]
        print("  ".join([*cells, number.rjust(widths[-1])]))
    trainable = sum(math.prod(weight.shape) for weight in model.trainable_weights)
    print(f"{model.name}: {model.count_params():,} parameters, {trainable:,} of them trainable")
