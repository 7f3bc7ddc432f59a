"""Quantizes a float32 TFLite file to the other formats.

    float32       not quantized
    float16       weights in half precision, arithmetic in float32
    int8-dynamic  dynamic range quantization: weights in 8 bits with one scale per output channel, matrix products in 8
                  bits with activations quantized at run time, everything else in float32, and so a head that has few
                  of the weights
    int8-weights  the same weights, arithmetic in float32
    int4-weights  as int8-dynamic, but the weights of dense layers in 4 bits, with a scale for each 32 channels, except
                  for those of the head and of the layers with the largest errors (`in_eight_bits`)
    int8          static quantization: weights, and inputs and outputs of matrix products, in 8 bits with calibrated
                  ranges

Quantizing all operators ("full int8") makes a Vision Transformer slower than float32, and less accurate: LayerNorm, the
residual stream and the softmax are limited by memory bandwidth and need the precision. So int8 quantizes only the
products with weights (FULLY_CONNECTED, CONV_2D).
The moving average of the library clips rare large activations that matter for the class, which causes most of its error
(benchmarks/logs/exports.md has measurements). So the ranges of int8 are the extremes over all calibration images;
ranges at run time and products in float32 follow, each kept only where the logits of the calibration images come nearer
to those of the float32 file.
"""

import collections
import contextlib
import dataclasses
import io
import math
import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from ai_edge_quantizer import algorithm_manager, calibrator, qtyping, quantizer, recipe_manager
from ai_edge_quantizer.utils import qsv_utils, validation_utils

from export import parity
from export.options import TFLiteFormat
from export.tflite.flatbuffer import Product, noisy_products, pack, products, unpack, with_weights
from export.tflite.tflite_file import run_interpreter
from keras_vit.cli.progress import tracked
from keras_vit.scores import UNKNOWN_SCORE

EIGHT_BITS_SHARE = 0.25  # share of the weights of all dense layers that may stay in 8 bits in an int4-weights file
LARGEST_OF_FOUR = 7  # of the numbers of 4 bits, with as many below 0
_CHANNELS = 32  # of a block with one scale, the smallest number that LiteRT has
# Size of a weight relative to float32.
WEIGHT_SHARE: dict[TFLiteFormat, float] = {
    "float32": 1.0,
    "float16": 0.5,
    "int8-dynamic": 0.25,
    "int8-weights": 0.25,
    "int4-weights": 0.125,
    "int8": 0.25,
}

_PRODUCTS = (qtyping.TFLOperationName.FULLY_CONNECTED, qtyping.TFLOperationName.CONV_2D)
# Calibration images that judge the steps of static quantization, and that histograms and means are measured on.
_JUDGES, _MEASURED = 64, 32
_FEWEST = 8  # fewer images than these cannot judge the steps, and the extremes stay
_ENOUGH_AGREEMENT = 0.995  # share of these images with the same class that is enough
_FLOAT_SHARE = 0.05  # share of the weights that may stay in float32
_SIGNATURE, _INPUT = "serving_default", "image"


@dataclasses.dataclass(frozen=True)
class Step:
    """The gain of a step of static quantization on some calibration images."""

    name: str
    error: float
    """Root mean square difference of the logits from those of the float32 file."""
    agreement: float
    """Share of the images with the same predicted class."""
    kept: bool


def quantize(float_file: pathlib.Path, kind: TFLiteFormat) -> bytes:
    """Return the content of a float32 file, with batch 1 or a dynamic batch, in a format that needs no calibration."""
    return _quantized(float_file, _recipe(kind, _small_head(float_file) if kind == "int8-dynamic" else ()))


def _quantized(float_file: pathlib.Path, recipe: list[dict], ranges: dict | None = None) -> bytes:
    with _silenced():
        return bytes(quantizer.Quantizer(str(float_file), recipe).quantize(ranges).quantized_model)


def _small_head(float_file: pathlib.Path) -> list[str]:
    """Return the name of the tensor with the logits, if the head has few of the weights.

    In float32 it costs next to nothing then, and no later layer hides its noise.
    """
    sizes = {found.outputs: found.weights.size for found in products(float_file.read_bytes())}
    return [name for name in _head(float_file) if sizes.get(name, math.inf) <= _FLOAT_SHARE * sum(sizes.values())]


def _head(float_file: pathlib.Path) -> list[str]:
    outputs = Interpreter(model_path=str(float_file)).get_signature_runner(_SIGNATURE).get_output_details()
    return [outputs["logits"]["name"]] if "logits" in outputs else []


@dataclasses.dataclass(frozen=True)
class DenseLayers:
    """Dense layers that read the same tensor."""

    outputs: tuple[str, ...]
    """Names of the tensors that they make."""
    error: float
    """Their part of the mean squared error of the logits, of all layers rounded to 4 bits one after the other."""
    weights: float


def kept_in_eight_bits(float_file: pathlib.Path, calibration: Sequence[np.ndarray]) -> list[DenseLayers]:
    """The layers that keep 8 bits in int4-weights, beside the head, by calibration inputs (1, h, w, C)."""
    measured = _spread(calibration, _MEASURED)
    return in_eight_bits(float_file.read_bytes(), lambda content: _logits(content, measured), _head(float_file))


def in_four_bits(float_file: pathlib.Path, kept: Sequence[DenseLayers], layers: Collection[str]) -> frozenset[str]:
    """Those of the layers of the model whose weights have 4 bits in an int4-weights file; see `quantize_four_bits`."""
    eight = _in_eight(float_file, kept)
    dense = [found.outputs for found in products(float_file.read_bytes()) if found.weights.ndim == 2]
    names = (keras_layer(tensor, layers) for tensor in dense if tensor not in eight)
    return frozenset(name for name in names if name is not None)


def quantize_four_bits(float_file: pathlib.Path, kept: Sequence[DenseLayers]) -> bytes:
    """Content of an int4-weights file, from a float32 file with batch 1 and the layers that keep 8 bits."""
    eight = _in_eight(float_file, kept)
    dense = [product for product in products(float_file.read_bytes()) if product.weights.ndim == 2]
    in_blocks = [found.outputs for found in dense if found.weights.shape[1] % _CHANNELS == 0]
    return _quantized(float_file, _recipe("int4-weights", eight, in_blocks=in_blocks))


def _in_eight(float_file: pathlib.Path, kept: Sequence[DenseLayers]) -> list[str]:
    return [*_head(float_file), *(name for layers in kept for name in layers.outputs)]


def quantize_static(
    float_file: pathlib.Path, calibration: Sequence[np.ndarray], *, multi_label: bool = False, at_run_time: bool = True
) -> tuple[bytes, list[Step]]:
    """Content of an int8 file, and what each step gained.

    The steps: extremes as ranges, ranges at run time for the products that lose most by calibrated ones, and, while
    fewer than 99.5% of the images agree, the product with the most noise in float32, until such products have a
    twentieth of the weights.

    Args:
        float_file: float32 file with batch 1.
        calibration: inputs (1, h, w, C) of the model.
        multi_label: whether an image may have several classes.
        at_run_time: whether products may take ranges at run time, as those of int8-dynamic; delegates may not run them.
    """
    content, steps = float_file.read_bytes(), _Steps(float_file, calibration, multi_label)
    steps.add("extremes as ranges")
    if len(steps.judges) < _FEWEST:
        return steps.best, steps.steps
    dynamic = noisy_products(content, steps.ranges, _spread(calibration, _FEWEST)) if at_run_time else []
    if dynamic and not steps.add(f"ranges at run time for {len(dynamic)} products", dynamic):
        dynamic = []
    in_float, measured = list[str](), _spread(calibration, _MEASURED)
    sizes = {found.outputs: found.weights.size for found in products(content)}
    budget = _FLOAT_SHARE * sum(sizes.values())
    while steps.last_kept.agreement < _ENOUGH_AGREEMENT:
        noisy = [name for name in _noisiest(float_file, steps.best, measured) if name not in in_float]
        fitting = [name for name in noisy if name in sizes and sizes[name] <= budget]
        if not fitting:
            break
        in_float.append(fitting[0])
        budget -= sizes[fitting[0]]
        if not steps.add(f"{layer_of(fitting[0])} in float32", dynamic, in_float):
            break
    return steps.best, steps.steps


class _Steps:
    """The steps of static quantization, judged by the logits of some calibration images."""

    def __init__(self, float_file: pathlib.Path, calibration: Sequence[np.ndarray], multi_label: bool):
        self._file, self._multi_label = float_file, multi_label
        self.judges = _spread(calibration, _JUDGES)
        self._expected = _logits(float_file.read_bytes(), self.judges)
        self.ranges = _ranges(float_file, _recipe("int8"), calibration)
        self.steps = list[Step]()
        self.best = b""
        """The file of the last step that was kept."""

    @property
    def last_kept(self) -> Step:
        return [step for step in self.steps if step.kept][-1]

    def add(self, name: str, dynamic: Sequence[str] = (), in_float: Sequence[str] = ()) -> bool:
        """Quantize, and return whether the logits came nearer to those of the float32 file."""
        recipe = _recipe("int8", in_float, dynamic=dynamic)
        content = _with_signature(_quantized(self._file, recipe, dict(self.ranges)))
        logits = _logits(content, self.judges)
        error = float(np.sqrt(np.mean(np.square(logits - self._expected))))
        agreement = parity.agreement(self._expected, logits, multi_label=self._multi_label)
        kept = not self.steps or error < self.last_kept.error
        self.steps.append(Step(name, error, agreement, kept))
        self.best = content if kept else self.best
        return kept


def _with_signature(content: bytes) -> bytes:
    """A quantized file whose signature names the outputs of its graph.

    Where the score of unknown images reads the logits too, ai-edge-quantizer 0.10.0 leaves the signature at their
    integers.
    """
    model = unpack(content)
    [subgraph], [signature] = model.subgraphs, model.signatureDefs
    unnamed = {*subgraph.outputs} - {end.tensorIndex for end in signature.outputs}
    for end in signature.outputs:
        if end.tensorIndex not in subgraph.outputs:
            end.tensorIndex = unnamed.pop()
    return pack(model)


def _spread(images: Sequence[np.ndarray], most: int) -> list[np.ndarray]:
    return [images[index] for index in np.unique(np.linspace(0, len(images) - 1, most).astype(int))]


def _logits(content: bytes, images: Sequence[np.ndarray]) -> np.ndarray:
    return run_interpreter(content, (image[0] for image in images))["logits"]


def _noisiest(float_file: pathlib.Path, content: bytes, images: Sequence[np.ndarray]) -> list[str]:
    """Names of the tensors of a quantized file, those with the most noise relative to their power first."""
    with tempfile.NamedTemporaryFile(suffix=".tflite", dir=float_file.parent) as temporary:
        temporary.write(content)
        temporary.flush()
        noise = _noise(float_file, pathlib.Path(temporary.name), images)
    return sorted(noise, key=lambda name: -noise[name])


def layer_of(tensor: str) -> str:
    """The layer in the name of a tensor, model/layer/operator."""
    return [*tensor.split(";")[0].split("/"), tensor][1]


def _recipe(
    kind: TFLiteFormat, excepted: Sequence[str] = (), *, dynamic: Sequence[str] = (), in_blocks: Sequence[str] = ()
) -> list[dict]:
    """The recipe of a format.

    `excepted` names the outputs of products that int8-dynamic and int8 leave in float32, and int4-weights in 8 bits;
    `dynamic` those that take ranges at run time in int8; `in_blocks` those whose weights have a scale for each block of
    channels in 4 bits. The score of unknown images stays in float32: it is a difference of large numbers, and
    small beside the model.
    """
    manager, no = recipe_manager.RecipeManager(), algorithm_manager.AlgorithmName.NO_QUANTIZE
    every = qtyping.TFLOperationName.ALL_SUPPORTED
    if kind == "int8-dynamic":
        manager.add_dynamic_config(".*", every, 8)
        for name in excepted:
            manager.add_quantization_config(f"^{re.escape(name)};$", every, algorithm_key=no)
    elif kind == "int8-weights":
        manager.add_weight_only_config(".*", every, 8)
    elif kind == "int4-weights":
        dense, convolution = _PRODUCTS
        manager.add_dynamic_config(".*", dense, 4)
        for name in in_blocks:  # of rules that match, the last one counts
            manager.add_dynamic_config(f"^{re.escape(name)};$", dense, 4, qtyping.QuantGranularity.BLOCKWISE_32)
        for name in excepted:
            manager.add_dynamic_config(f"^{re.escape(name)};$", dense, 8)
        manager.add_dynamic_config(".*", convolution, 8)
    elif kind == "float16":
        half = qtyping.OpQuantizationConfig(
            weight_tensor_config=qtyping.TensorQuantizationConfig(num_bits=16, dtype=qtyping.TensorDataType.FLOAT),
            compute_precision=qtyping.ComputePrecision.FLOAT,
            explicit_dequantize=True,
        )
        for operator in _PRODUCTS:
            manager.add_quantization_config(".*", operator, half, "float_casting")
    else:
        for operator in _PRODUCTS:
            manager.add_static_config(".*", operator, 8, 8)
            for name in dynamic:
                manager.add_dynamic_config(f"^{re.escape(name)};$", operator, 8)
            for name in excepted:
                manager.add_quantization_config(f"^{re.escape(name)};$", operator, algorithm_key=no)
    manager.add_quantization_config(f"^{UNKNOWN_SCORE}/", every, algorithm_key=no)
    return manager.get_quantization_recipe()


def _ranges(float_file: pathlib.Path, settings: list[dict], calibration: Sequence[np.ndarray]) -> dict:
    """Minimum and maximum of each tensor over all calibration images, by tensor name."""
    manager = recipe_manager.RecipeManager()
    manager.load_quantization_recipe(settings)
    with _silenced():
        found = calibrator.Calibrator(float_file.read_bytes(), qsv_update_func=qsv_utils.min_max_update)
        for image in tracked(calibration, "ranges of the calibration images"):
            found.calibrate({_SIGNATURE: [{_INPUT: image}]}, manager)
    return found.get_model_qsvs()


def layer_errors(
    float_file: pathlib.Path, file: pathlib.Path, images: Sequence[np.ndarray], layers: Sequence[str]
) -> dict[str, float]:
    """Ratio of noise to signal power of each of these layers in a quantized file, the worst layer first.

    images: inputs (1, h, w, C). Tensors of other layers are left out.
    """
    errors: dict[str, float] = {}
    for tensor, noise in _noise(float_file, file, images).items():
        if (layer := keras_layer(tensor, layers)) is not None:
            errors[layer] = max(errors.get(layer, 0.0), noise)
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


def keras_layer(tensor: str, layers: Collection[str]) -> str | None:
    """The first of some layers whose name is in that of a tensor; None if there is none.

    A fused tensor joins names by ";". A name is model/layer/operator, with a number appended to the layer.
    """
    scopes = [scope for name in tensor.split(";") for scope in name.split("/")[1:2]]
    return next((name for scope in scopes for name in (scope, re.sub(r"_\d+$", "", scope)) if name in layers), None)


def _noise(float_file: pathlib.Path, file: pathlib.Path, images: Sequence[np.ndarray]) -> dict[str, float]:
    """Ratio of noise to signal power of each tensor in a quantized file."""
    ratio = validation_utils.ValidationErrorMetric.SNR
    with _silenced():
        quantized = quantizer.Quantizer(str(float_file), previous_quantized_model=str(file))
        inputs = {_SIGNATURE: [{_INPUT: image} for image in images]}
        compared = quantized.validate(inputs, [ratio], num_threads=2)
    found = compared.get_signature_comparison_result(_SIGNATURE)
    tensors = {**found.intermediate_tensors, **found.output_tensors}
    return {name: 1.0 / max(values[ratio.value], 1e-12) for name, values in tensors.items()}


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Hide the output of the library, and the warning of its interpreter on the memory of calibration."""
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with quiet[0], quiet[1], warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def in_eight_bits(
    content: bytes, logits: Callable[[bytes], np.ndarray], excluded: Sequence[str], share: float = EIGHT_BITS_SHARE
) -> list[DenseLayers]:
    """Return the layers that keep 8 bits, those with the largest error for their weights first.

    They are those whose rounding to 4 bits changes the logits most. The errors of the layers are far from equal: of a
    ViT of six blocks on Fashion-MNIST, the attention of the first block had 63% of the squared error of all, and 6%
    of the weights (benchmarks/logs/exports.md). Layers that read the same tensor, such as query, key and value, stay
    together: ai-edge-quantizer 0.10.0 breaks those in 4 bits beside one in 8 bits.
    The others have a scale for each block of 32 channels of a unit: with one for the whole unit, the logits of DINOv2-S
    have 1.7 times the error.

    `logits` gives those of a file on some calibration images. Products with `excluded` outputs have 8 bits anyway.
    """
    groups: dict[str, list[Product]] = collections.defaultdict(list)
    for product in products(content):
        if product.weights.ndim == 2 and product.outputs not in excluded:
            groups[product.inputs].append(product)
    expected = logits(content)
    errors = dict[str, float]()
    for name, group in tracked(groups.items(), "errors of 4 bits", unit="inputs of dense layers"):
        errors[name] = float(np.mean(np.square(logits(with_weights(content, _rounded(group))) - expected)))
    sizes = {name: sum(product.weights.size for product in group) for name, group in groups.items()}
    all_errors, left = sum(errors.values()) or 1.0, share * sum(sizes.values())
    found = []
    for name in sorted(groups, key=lambda name: -errors[name] / sizes[name]):
        if sizes[name] <= left:
            left -= sizes[name]
            outputs = tuple(product.outputs for product in groups[name])
            found.append(DenseLayers(outputs, errors[name] / all_errors, sizes[name] / sum(sizes.values())))
    return found


def scale_block(channels: int) -> int:
    """Channels of a unit that have the same scale in 4 bits: all of them, if they cannot be divided into blocks."""
    return channels if channels % _CHANNELS else _CHANNELS


def _rounded(group: Sequence[Product]) -> dict[str, np.ndarray]:
    """Output -> weights (units, D), rounded to 4 bits."""
    found = {}
    for product in group:
        blocks = product.weights.reshape(len(product.weights), -1, scale_block(product.weights.shape[1]))
        steps = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True), 1e-30) / LARGEST_OF_FOUR
        found[product.outputs] = (np.round(blocks / steps) * steps).reshape(product.weights.shape).astype(np.float32)
    return found
