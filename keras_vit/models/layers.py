"""Layers of Vision Transformers and BiT that Keras does not have. The attention layers are in `attention.py`.

Axes: B batch, N tokens, D width.
Weights have the names and initial values of vit_jax `models_vit.py` (flax 0.x defaults where it gives none).
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator

import keras
import numpy as np
from keras import ops

from keras_vit.errors import UserError
from keras_vit.files.lazy_array import zeros
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.config import ModelConfig, ResNetConfig, TaskConfig, config_to_dict
from keras_vit.models.gpu import gelu_of_kept_input, on_tensor_cores

PACKAGE = "keras_vit"
# Passed to every layer, because the user's Keras may be configured with channels first.
CHANNELS_LAST = "channels_last"
_no_init_weights = contextvars.ContextVar("weights_will_be_loaded", default=False)


@contextlib.contextmanager
def no_init_weights() -> Iterator[None]:
    """Initialize models built inside the block with zeros that use no memory, which is faster than random numbers."""
    token = _no_init_weights.set(True)
    try:
        yield
    finally:
        _no_init_weights.reset(token)


def initial(initializer):
    """The initializer of a new weight: this one, or zeros inside `no_init_weights`."""
    if not _no_init_weights.get():
        return initializer
    return lambda shape, dtype=None: ops.cast(zero_copy(zeros(shape)), dtype or "float32")


def small_normal() -> keras.initializers.Initializer:
    """Return a new initializer. It takes its seed on creation, so a shared one would ignore `set_random_seed`."""
    return keras.initializers.RandomNormal(stddev=0.02)


def zero_copy(array: np.ndarray):
    """Wrap an array so that the backend uses its memory without a copy. The caller must not change it afterwards.

    TensorFlow copies an np.ndarray twice, but not an object that has only `__array__`.
    """
    return _ZeroCopy(array) if keras.backend.backend() == "tensorflow" else array


class _ZeroCopy:
    def __init__(self, array: np.ndarray):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        return self._array


def check_backend() -> None:
    """Refuse torch, whose modules cannot have names with dots; the first layer of each model calls it."""
    if (backend := keras.backend.backend()) not in ("tensorflow", "jax"):
        raise UserError(
            f"Models of keras_vit run on the TensorFlow and JAX backends of Keras, but this is {backend}; set "
            "KERAS_BACKEND to tensorflow or jax before Keras is imported."
        )


@keras.saving.register_keras_serializable(PACKAGE)
class ModelSpec(keras.layers.Layer):
    """Identity layer that stores the configuration and preprocessing of a model in its saved file.

    Args:
        model: the model configuration as a dict.
        preprocessing: the fields of `keras_vit.Preprocessing` as a dict.
        classes: the fields of `Classes` as a dict, a list of them for several heads; None if no names are known.
        task: the configuration of a further task, such as segmentation, as a dict; None for a classifier.
    """

    def __init__(
        self,
        model: dict,
        preprocessing: dict,
        classes: dict | list[dict] | None = None,
        task: dict | None = None,
        **kwargs,
    ):
        check_backend()
        super().__init__(**kwargs)
        self.model = model
        self.preprocessing = preprocessing
        self.classes = classes
        self.task = task

    def call(self, images):
        return images

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        further = {"classes": self.classes, "task": self.task}
        further = {name: value for name, value in further.items() if value is not None}
        return {**super().get_config(), "model": self.model, "preprocessing": self.preprocessing, **further}


def image_input(config: ModelConfig, preprocessing: Preprocessing, task: TaskConfig | None = None):
    """Return the input (B, height, width, channels) of a model, and the same behind the layer that stores its spec."""
    images = keras.Input((*preprocessing.image_size, preprocessing.channels), name="image")
    spec = {"model": config_to_dict(config), "preprocessing": dataclasses.asdict(preprocessing)}
    return images, ModelSpec(**spec, task=None if task is None else config_to_dict(task), name="spec")(images)


@keras.saving.register_keras_serializable(PACKAGE)
class StandardizedConv2D(keras.layers.Layer):
    """A convolution without bias whose kernel is standardized per output channel in each call.

    (kernel - mean) / (sqrt(variance + variance_epsilon) + deviation_epsilon), with the population variance over height,
    width and input channels. The stored kernel is not standardized. BiT adds an epsilon to the variance, hybrids to the
    deviation.

    Args:
        filters: output channels.
        kernel_size, strides: integers, for both axes.
        padding: "valid" or "same", as in TensorFlow.
        variance_epsilon, deviation_epsilon: see above.

    Shape: (B, h, w, C) -> (B, h', w', filters).
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int,
        strides: int,
        padding: str,
        variance_epsilon: float,
        deviation_epsilon: float,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.filters = filters
        self.kernel_size = kernel_size
        self.strides = strides
        self.padding = padding
        self.variance_epsilon = variance_epsilon
        self.deviation_epsilon = deviation_epsilon

    def build(self, input_shape):
        shape = (self.kernel_size, self.kernel_size, input_shape[-1], self.filters)
        self.kernel = self.add_weight(name="kernel", shape=shape, initializer=initial("lecun_normal"), autocast=False)

    def call(self, images):
        kernel = ops.cast(self.kernel, "float32")  # 1e-10 underflows in half precision
        centered = kernel - ops.mean(kernel, axis=(0, 1, 2), keepdims=True)
        variance = ops.mean(ops.square(centered), axis=(0, 1, 2), keepdims=True)
        kernel = centered / (ops.sqrt(variance + self.variance_epsilon) + self.deviation_epsilon)
        return ops.conv(
            images,
            ops.cast(kernel, images.dtype),
            strides=self.strides,
            padding=self.padding,
            data_format=CHANNELS_LAST,
        )

    def compute_output_shape(self, input_shape):
        batch, *sides, _ = input_shape
        window = self.kernel_size if self.padding == "valid" else 1
        return batch, *(-(-(side - window + 1) // self.strides) for side in sides), self.filters


def standardized_conv(x, config: ResNetConfig, filters: int, kernel_size: int, strides: int, padding: str, name: str):
    """Apply a StandardizedConv2D with the epsilons of the configuration."""
    return StandardizedConv2D(
        filters,
        kernel_size,
        strides,
        padding=padding,
        variance_epsilon=config.variance_epsilon,
        deviation_epsilon=config.deviation_epsilon,
        name=name,
    )(x)


def group_norm(x, config: ResNetConfig, name: str, scale: str = "ones"):
    """GroupNorm with the epsilon of the configuration (Keras default: 1e-3); `scale` is the gamma initializer."""
    return keras.layers.GroupNormalization(
        config.num_groups, epsilon=config.group_norm_epsilon, gamma_initializer=scale, name=name
    )(x)


def gelu_tanh(x):
    """GELU in the tanh form of the original code."""
    return _gelu(x, approximate=True)


def gelu_erf(x):
    """The exact GELU."""
    return _gelu(x, approximate=False)


def _gelu(x, *, approximate: bool):
    if keras.backend.backend() == "jax" and on_tensor_cores(keras.backend.standardize_dtype(x.dtype)):
        return gelu_of_kept_input(approximate)(x)
    return ops.gelu(x, approximate=approximate)


def gelu_quick(x):
    """CLIP's approximation of GELU."""
    return x * ops.sigmoid(1.702 * x)


_GELUS = {"gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf, "gelu_quick": gelu_quick}


@keras.saving.register_keras_serializable(PACKAGE)
class TokenDense(keras.layers.Dense):
    """A dense layer on tokens, computed as one 2-D matrix product.

    keras.layers.Dense on (B, N, D) uses a tensordot, whose reshapes between product and bias prevent oneDNN from fusing
    bias and GELU into the product. This layer flattens the tokens first. With a rank-2 kernel, the Glorot initializer
    also computes the same fans as the official code.

    Args:
        units: width of the output.
        activation: "gelu_tanh", "gelu_erf", "gelu_quick" or any activation of keras.layers.Dense.
        kernel_initializer: as in keras.layers.Dense.
        bias_stddev: standard deviation of the initial bias; 0 for zeros.
        use_bias: whether the layer has a bias.
        **kwargs: other arguments of keras.layers.Dense, such as regularizers and constraints.

    Shape: (..., D) -> (..., units).
    """

    def __init__(
        self,
        units: int,
        activation: str | Callable | None = None,
        kernel_initializer: str | keras.Initializer = "glorot_uniform",
        bias_stddev: float = 0.0,
        use_bias: bool = True,
        **kwargs,
    ):
        activation = _GELUS.get(activation, activation) if isinstance(activation, str) else activation
        super().__init__(units, activation, use_bias, kernel_initializer, **kwargs)
        self.bias_stddev = bias_stddev
        if bias_stddev:  # created after the kernel initializer, to keep the order of seeds
            self.bias_initializer = keras.initializers.RandomNormal(stddev=bias_stddev)

    def build(self, input_shape):
        drawn = self.kernel_initializer
        self.kernel_initializer = initial(drawn)
        super().build(input_shape)
        self.kernel_initializer = drawn

    def call(self, tokens, training=None):
        flat = ops.reshape(tokens, (-1, tokens.shape[-1]))  # (B * N, D)
        flat = super().call(flat, training=training)  # (B * N, units)
        return ops.reshape(flat, (-1, *tokens.shape[1:-1], self.units))  # (B, N, units)

    def quantize(self, mode=None, type_check=True, config=None):
        """As keras.layers.Dense, but without its check that refuses subclasses."""
        super().quantize(mode, type_check=False, config=config)

    def get_config(self):
        config = super().get_config()
        if self.activation in _GELUS.values():
            config["activation"] = self.activation.__name__
        if self.bias_stddev:
            del config["bias_initializer"]
        return {**config, "bias_stddev": self.bias_stddev}


@keras.saving.register_keras_serializable(PACKAGE)
class Activation(keras.layers.Layer):
    """The activation that `ViTConfig.gelu` names, of tensors of any shape."""

    def __init__(self, gelu: str, **kwargs):
        super().__init__(**kwargs)
        self.gelu = gelu

    def call(self, x):
        return ops.silu(x) if self.gelu == "silu" else _GELUS[f"gelu_{self.gelu}"](x)


@keras.saving.register_keras_serializable(PACKAGE)
class ClassToken(keras.layers.Layer):
    """Prepend the learned class token: (B, N, D) -> (B, 1 + N, D). The token is initialized with zeros."""

    def build(self, input_shape):
        self.cls = self.add_weight(name="cls", shape=(1, 1, input_shape[-1]), initializer="zeros")

    def call(self, patches):
        token = ops.broadcast_to(self.cls, (ops.shape(patches)[0], 1, patches.shape[-1]))  # (B, 1, D)
        return ops.concatenate([ops.cast(token, patches.dtype), patches], axis=1)  # (B, 1 + N, D)

    def compute_output_shape(self, input_shape):
        return input_shape[0], 1 + input_shape[1], input_shape[2]


@keras.saving.register_keras_serializable(PACKAGE)
class InsertTokens(keras.layers.Layer):
    """Insert learned tokens in front of token `index`: (B, N, D) -> (B, N + num_tokens, D).

    They are initialized from a normal distribution with standard deviation `stddev`.
    """

    def __init__(self, num_tokens: int, index: int, stddev: float = 0.02, **kwargs):
        super().__init__(**kwargs)
        self.num_tokens = num_tokens
        self.index = index
        self.stddev = stddev

    def build(self, input_shape):
        shape = (1, self.num_tokens, input_shape[-1])
        drawn = keras.initializers.RandomNormal(stddev=self.stddev)
        self.tokens = self.add_weight(name="tokens", shape=shape, initializer=initial(drawn))

    def call(self, tokens):
        shape = (ops.shape(tokens)[0], self.num_tokens, tokens.shape[-1])
        inserted = ops.cast(ops.broadcast_to(self.tokens, shape), tokens.dtype)
        parts = [tokens[:, : self.index], inserted, tokens[:, self.index :]] if self.index else [inserted, tokens]
        return ops.concatenate(parts, axis=1)  # (B, N + num_tokens, D)


@keras.saving.register_keras_serializable(PACKAGE)
class LayerScale(keras.layers.Layer):
    """Multiply each channel of (..., D) by a learned factor ("Going deeper with Image Transformers", 2103.17239)."""

    def __init__(self, initial: float, **kwargs):
        super().__init__(**kwargs)
        self.initial = initial

    def build(self, input_shape):
        initializer = initial(keras.initializers.Constant(self.initial))
        self.gamma = self.add_weight(name="gamma", shape=input_shape[-1:], initializer=initializer)

    def call(self, tokens):
        return tokens * ops.cast(self.gamma, tokens.dtype)

    def compute_output_shape(self, input_shape):
        return input_shape


@keras.saving.register_keras_serializable(PACKAGE)
class Probe(keras.layers.Layer):
    """The learned query of attention pooling (big_vision's MAPHead): (B, N, D) -> (B, 1, D), Glorot-uniform."""

    def build(self, input_shape):
        # Keras and flax compute the same fans for (1, 1, D).
        self.probe = self.add_weight(name="probe", shape=(1, 1, input_shape[-1]), initializer="glorot_uniform")

    def call(self, tokens):
        return ops.cast(ops.broadcast_to(self.probe, (ops.shape(tokens)[0], 1, tokens.shape[-1])), tokens.dtype)


@keras.saving.register_keras_serializable(PACKAGE)
class PoolTokens(keras.layers.Layer):
    """Tokens (B, N, D) -> one vector (B, D).

    kind: "token": the first token; "second": the second one; "gap": the mean of the patch tokens; "token+gap": the
    first token and that mean, (B, 2 D).
    """

    def __init__(self, kind: str, num_prefix_tokens: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind
        self.num_prefix_tokens = num_prefix_tokens

    def call(self, tokens):
        if self.kind in ("token", "second"):
            return tokens[:, int(self.kind == "second")]  # (B, D)
        mean = ops.mean(tokens[:, self.num_prefix_tokens :], axis=1)  # (B, D)
        return mean if self.kind == "gap" else ops.concatenate([tokens[:, 0], mean], axis=-1)

    def compute_output_shape(self, input_shape):
        return input_shape[0], input_shape[2] * (2 if self.kind == "token+gap" else 1)


@keras.saving.register_keras_serializable(PACKAGE)
class WeightedMean(keras.layers.Layer):
    """Mean of tokens (B, N, D) with the weights softmax over N of logits (B, N, 1): (B, D)."""

    def call(self, tokens, logits):
        weights = ops.softmax(ops.cast(logits, "float32"), axis=1)  # (B, N, 1)
        mean = ops.matmul(ops.transpose(ops.cast(weights, tokens.dtype), (0, 2, 1)), tokens)  # (B, 1, D)
        return mean[:, 0]
