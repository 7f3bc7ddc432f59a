"""What Keras lacks for a Vision Transformer: the layers that own its weights, and those that need a name.

Those of attention are in `attention.py`. Axes: B batch, N tokens, D width.
Weights have the names and initial values of vit_jax `models_vit.py` (flax 0.x defaults where it gives none).
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import keras
import numpy as np
from keras import ops

from keras_vit.errors import UserError
from keras_vit.files.lazy_array import zeros
from keras_vit.models.config import ResNetConfig

PACKAGE = "keras_vit"
# The order of all axes here, which is said to every layer: the user's Keras may be set to the other.
CHANNELS_LAST = "channels_last"
_no_init_weights = contextvars.ContextVar("weights_will_be_loaded", default=False)


@contextlib.contextmanager
def no_init_weights() -> Iterator[None]:
    """Models built inside begin with zeros that take no memory; to draw random numbers would also take seconds."""
    token = _no_init_weights.set(True)
    try:
        yield
    finally:
        _no_init_weights.reset(token)


def _initial(initializer):
    return _untouched_zeros if _no_init_weights.get() else initializer


def _untouched_zeros(shape, dtype=None):
    return ops.cast(zero_copy(zeros(shape)), dtype or "float32")


def zero_copy(array: np.ndarray):
    """Numbers for a backend to take over, nobody else's from now on.

    TensorFlow copies every np.ndarray, two times, but takes the memory of what can only become one.
    """
    return _ZeroCopy(array) if keras.backend.backend() == "tensorflow" else array


class _ZeroCopy:
    def __init__(self, array: np.ndarray):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        return self._array


def _check_backend() -> None:
    """Raise UserError on a backend where no model can be built: torch's modules take no names with dots in them."""
    backend = keras.backend.backend()
    if backend not in ("tensorflow", "jax"):
        raise UserError(
            f"Models of keras_vit run on the TensorFlow and JAX backends of Keras, but this is {backend}; set "
            "KERAS_BACKEND to tensorflow or jax before Keras is imported."
        )


@keras.saving.register_keras_serializable(PACKAGE)
class ModelSpec(keras.layers.Layer):
    """Carries, inside a saved model, what its weights cannot tell; passes images through unchanged.

    Args:
        model: the fields of the configuration that the model was built from.
        preprocessing: the fields of `keras_vit.Preprocessing`, how an image becomes the model's input.
    """

    def __init__(self, model: dict, preprocessing: dict, **kwargs):
        _check_backend()  # here, since every model begins with this layer, built or loaded
        super().__init__(**kwargs)
        self.model = model
        self.preprocessing = preprocessing

    def call(self, images):
        return images

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "model": self.model, "preprocessing": self.preprocessing}


@keras.saving.register_keras_serializable(PACKAGE)
class StandardizedConv2D(keras.layers.Layer):
    """A convolution without bias whose kernel is standardised per output channel each time it is used.

    (kernel - mean) / (sqrt(variance + variance_epsilon) + deviation_epsilon), with the population variance over height,
    width and input channels. The stored kernel is the raw one. BiT adds its epsilon to the variance, the hybrids add
    theirs to the deviation.

    Args:
        filters: output channels.
        kernel_size, strides: of both sides, in pixels.
        padding: "valid" or "same" (TensorFlow's: at stride 2 and even sizes more after than before).
        variance_epsilon, deviation_epsilon: see above.

    Shape: (B, H, W, C) -> (B, H', W', filters).
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
        self.kernel = self.add_weight(name="kernel", shape=shape, initializer=_initial("lecun_normal"), autocast=False)

    def call(self, images):
        kernel = ops.cast(self.kernel, "float32")  # 1e-10 is nothing in half precision
        centred = kernel - ops.mean(kernel, axis=(0, 1, 2), keepdims=True)
        variance = ops.mean(ops.square(centred), axis=(0, 1, 2), keepdims=True)
        kernel = centred / (ops.sqrt(variance + self.variance_epsilon) + self.deviation_epsilon)
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
    """A convolution without bias, its kernel standardised as the configuration says."""
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
    """GroupNorm with the epsilon of the official code, not Keras' 1e-3; `scale` is the initialiser of its scale."""
    return keras.layers.GroupNormalization(
        config.num_groups, epsilon=config.group_norm_epsilon, gamma_initializer=scale, name=name
    )(x)


def gelu_tanh(x):
    """GELU in the tanh form of the original code."""
    return ops.gelu(x, approximate=True)


def gelu_erf(x):
    """The exact GELU."""
    return ops.gelu(x, approximate=False)


_GELUS = {"gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf}


@keras.saving.register_keras_serializable(PACKAGE)
class TokenDense(keras.layers.Dense):
    """A dense layer on tokens, computed as one 2-D matrix product.

    Keras' Dense on (B, N, D) becomes a Tensordot, whose reshapes stand between product and bias, so that oneDNN can
    fuse neither bias nor GELU into the product. Here the tokens are flattened first and product, bias and activation
    follow each other. A rank-2 kernel also gives Glorot's bound the official fans (a rank-3 one would not).

    Args:
        units: width of the output.
        activation: "gelu_tanh", "gelu_erf" or what Keras' Dense takes.
        kernel_initializer: as Keras' Dense.
        bias_stddev: standard deviation of the initial bias; 0 for zeros.
        use_bias: False for the projections of models without them.
        **kwargs: the other arguments of Keras' Dense, such as regularizers and constraints.

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
        if bias_stddev:  # made behind that of the kernel, for each takes its seed when it is made
            self.bias_initializer = keras.initializers.RandomNormal(stddev=bias_stddev)

    def build(self, input_shape):
        drawn = self.kernel_initializer
        self.kernel_initializer = _initial(drawn)
        super().build(input_shape)
        self.kernel_initializer = drawn

    def call(self, tokens, training=None):
        flat = ops.reshape(tokens, (-1, tokens.shape[-1]))  # (B * N, D)
        flat = super().call(flat, training=training)  # (B * N, units)
        return ops.reshape(flat, (-1, *tokens.shape[1:-1], self.units))  # (B, N, units)

    def quantize(self, mode=None, type_check=True, config=None):
        """As keras.layers.Dense, which refuses subclasses because they may compute something else."""
        super().quantize(mode, type_check=False, config=config)

    def get_config(self):
        config = super().get_config()
        if self.activation in _GELUS.values():
            config["activation"] = self.activation.__name__
        if self.bias_stddev:
            del config["bias_initializer"]
        return {**config, "bias_stddev": self.bias_stddev}


@keras.saving.register_keras_serializable(PACKAGE)
class ClassToken(keras.layers.Layer):
    """Puts the learned class token in front of the patches: (B, N, D) -> (B, 1 + N, D). Initial value zero."""

    def build(self, input_shape):
        self.cls = self.add_weight(name="cls", shape=(1, 1, input_shape[-1]), initializer="zeros")

    def call(self, patches):
        token = ops.broadcast_to(self.cls, (ops.shape(patches)[0], 1, patches.shape[-1]))  # (B, 1, D)
        return ops.concatenate([ops.cast(token, patches.dtype), patches], axis=1)  # (B, 1 + N, D)

    def compute_output_shape(self, input_shape):
        batch, tokens, width = input_shape
        return batch, tokens + 1, width


class _OnGrid(keras.layers.Layer):
    """What adds positions to the tokens of a grid of patches.

    Args:
        grid: rows and columns of patches; the checkpoint loader resizes to it.
        num_prefix_tokens: tokens before the grid that have a row of their own, 1 with a class token.
    """

    def __init__(self, grid: tuple[int, int], num_prefix_tokens: int, **kwargs):
        super().__init__(**kwargs)
        self.grid = tuple(grid)
        self.num_prefix_tokens = num_prefix_tokens

    def compute_output_shape(self, input_shape):
        return input_shape


@keras.saving.register_keras_serializable(PACKAGE)
class PositionEmbedding(_OnGrid):
    """Adds a learned table (1, N, D), initially normal with deviation 0.02."""

    def build(self, input_shape):
        self.pos_embedding = self.add_weight(
            name="pos_embedding", shape=(1, *input_shape[1:]), initializer=_initial(small_normal())
        )

    def call(self, tokens):
        return tokens + ops.cast(self.pos_embedding, tokens.dtype)  # (B, N, D)


def small_normal() -> keras.initializers.Initializer:
    """Made anew for each table: an initialiser takes its seed when it is made, so that one of a module would ignore
    `keras.utils.set_random_seed`.
    """
    return keras.initializers.RandomNormal(stddev=0.02)


@keras.saving.register_keras_serializable(PACKAGE)
class PositionEmbedding2D(_OnGrid):
    """Adds to a patch half a vector for its column, then half a vector for its row; all learned.

    Paper "An Image is Worth 16x16 Words", appendix D.4, which does not say what becomes of the class token: here it has
    a vector of its own.
    """

    def build(self, input_shape):
        (rows, columns), width = self.grid, input_shape[-1]
        self.row = self.add_weight(name="row", shape=(rows, 1, width // 2), initializer=small_normal())
        self.column = self.add_weight(name="column", shape=(1, columns, width // 2), initializer=small_normal())
        if self.num_prefix_tokens:
            shape = (self.num_prefix_tokens, width)
            self.prefix = self.add_weight(name="prefix", shape=shape, initializer=small_normal())

    def call(self, tokens):
        rows, columns = self.grid
        halves = (ops.broadcast_to(half, (rows, columns, half.shape[-1])) for half in (self.column, self.row))
        table = ops.reshape(ops.concatenate(list(halves), axis=-1), (rows * columns, tokens.shape[-1]))
        if self.num_prefix_tokens:
            table = ops.concatenate([self.prefix, table], axis=0)
        return tokens + ops.cast(table, tokens.dtype)  # (B, N, D)


@keras.saving.register_keras_serializable(PACKAGE)
class SinCosPositions(_OnGrid):
    """Adds fixed sines and cosines of a patch's column and row (big_vision's sincos2d); nothing to the class token."""

    def call(self, tokens):
        table = sincos_2d(self.grid, tokens.shape[-1])
        table = np.concatenate([np.zeros((self.num_prefix_tokens, table.shape[1]), np.float32), table])
        return tokens + ops.cast(ops.convert_to_tensor(table), tokens.dtype)  # (B, N, D)


def sincos_2d(grid: tuple[int, int], width: int) -> np.ndarray:
    """[sin x, cos x, sin y, cos y] of column x and row y, at width / 4 frequencies from 1 to 1e-4: (h * w, width)."""
    y, x = (axis.reshape(-1, 1) for axis in np.mgrid[: grid[0], : grid[1]])
    frequencies = 10_000.0 ** -np.linspace(0.0, 1.0, width // 4)
    waves = [wave(axis * frequencies) for axis in (x, y) for wave in (np.sin, np.cos)]
    return np.concatenate(waves, axis=1).astype(np.float32)


@keras.saving.register_keras_serializable(PACKAGE)
class Probe(keras.layers.Layer):
    """The learned query of attention pooling (big_vision's MAPHead): (B, N, D) -> (B, 1, D), Glorot-uniform."""

    def build(self, input_shape):
        # Drawn as one (1, D) row: flax counts the fans of (1, 1, D) the same way.
        self.probe = self.add_weight(name="probe", shape=(1, 1, input_shape[-1]), initializer="glorot_uniform")

    def call(self, tokens):
        return ops.cast(ops.broadcast_to(self.probe, (ops.shape(tokens)[0], 1, tokens.shape[-1])), tokens.dtype)

    def compute_output_shape(self, input_shape):
        return input_shape[0], 1, input_shape[2]


@keras.saving.register_keras_serializable(PACKAGE)
class PoolTokens(keras.layers.Layer):
    """Tokens (B, N, D) -> one vector (B, D): the first token ("token") or their mean ("gap")."""

    def __init__(self, kind: str, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind

    def call(self, tokens):
        return tokens[:, 0] if self.kind == "token" else ops.mean(tokens, axis=1)  # (B, D)

    def compute_output_shape(self, input_shape):
        return input_shape[0], input_shape[2]
