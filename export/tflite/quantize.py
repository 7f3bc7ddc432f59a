"""Quantizes a float32 TFLite file to the other formats.

    float32       not quantized
    float16       weights in half precision, arithmetic in float32
    int8-dynamic  dynamic range quantization: weights in 8 bits with one scale per output channel, matrix products in 8
                  bits with activations quantized at run time, everything else in float32
    int8-weights  the same weights, arithmetic in float32
    int4-weights  as int8-dynamic, but the weights of dense layers in 4 bits, except for those of the head. GPTQ (arXiv
                  2210.17323) rounds each weight so that it corrects the errors of those before it
    int8          static quantization: weights, and inputs and outputs of matrix products, in 8 bits with calibrated
                  ranges
    int16x8       the same with inputs and outputs in 16 bits, for processors that support such products

Quantizing all operators ("full int8") makes a Vision Transformer slower than float32, and less accurate: LayerNorm, the
residual stream and the softmax are limited by memory bandwidth and need the precision. So int8 and int16x8 quantize
only the products with weights (FULLY_CONNECTED, CONV_2D).
Ranges are the extremes over all calibration images. The moving average of the library clips rare large activations that
matter for the class, which causes most of its error (docs/phone.md has measurements).
"""

import contextlib
import io
import pathlib
import re
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from ai_edge_quantizer import algorithm_manager, calibrator, qtyping, quantizer, recipe, recipe_manager
from ai_edge_quantizer.utils import qsv_utils, validation_utils

from export.options import TFLiteFormat

# Formats with ranges from calibration images, and the bits of their activations.
STATIC: dict[TFLiteFormat, int] = {"int8": 8, "int16x8": 16}
# Formats that need calibration images: for ranges, or for the correlation of the inputs of a product.
CALIBRATED: tuple[TFLiteFormat, ...] = ("int4-weights", *STATIC)
# Size of a weight relative to float32.
WEIGHT_SHARE: dict[TFLiteFormat, float] = {
    "float32": 1.0,
    "float16": 0.5,
    "int8-dynamic": 0.25,
    "int8-weights": 0.25,
    "int4-weights": 0.125,
    "int8": 0.25,
    "int16x8": 0.25,
}

_PRODUCTS = (qtyping.TFLOperationName.FULLY_CONNECTED, qtyping.TFLOperationName.CONV_2D)
_SIGNATURE, _INPUT = "serving_default", "image"


def quantize(float_file: pathlib.Path, kind: TFLiteFormat, calibration: Sequence[np.ndarray]) -> bytes:
    """Content of the file in another format than float32.

    Args:
        float_file: float32 file with batch 1, or with a dynamic batch if the format needs no calibration.
        kind: the format.
        calibration: inputs (1, H, W, C) of the model, for the formats in CALIBRATED.
    """
    settings = _recipe(kind, float_file)
    ranges = _ranges(float_file, settings, calibration) if kind in STATIC else None
    if kind == "int4-weights":
        with _silenced():
            ranges = quantizer.Quantizer(str(float_file), settings).calibrate(_inputs(calibration))
    with _silenced():
        return bytes(quantizer.Quantizer(str(float_file), settings).quantize(ranges).quantized_model)


def _recipe(kind: TFLiteFormat, float_file: pathlib.Path) -> list[dict]:
    if kind == "int8-dynamic":
        return recipe.dynamic_wi8_afp32()
    if kind == "int8-weights":
        return recipe.weight_only_wi8_afp32()
    manager = recipe_manager.RecipeManager()
    if kind == "int4-weights":
        logits = re.escape(Interpreter(model_path=str(float_file)).get_output_details()[0]["name"])
        dense, convolution = _PRODUCTS
        manager.add_dynamic_config(".*", dense, 4, algorithm_key=algorithm_manager.AlgorithmName.GPTQ)
        manager.add_dynamic_config(logits, dense, 8)  # the head; of rules that match, the last one counts
        manager.add_dynamic_config(".*", convolution, 8)
        return manager.get_quantization_recipe()
    if kind == "float16":
        half = qtyping.OpQuantizationConfig(
            weight_tensor_config=qtyping.TensorQuantizationConfig(num_bits=16, dtype=qtyping.TensorDataType.FLOAT),
            compute_precision=qtyping.ComputePrecision.FLOAT,
            explicit_dequantize=True,
        )
        for operator in _PRODUCTS:
            manager.add_quantization_config(".*", operator, half, "float_casting")
    else:
        for operator in _PRODUCTS:
            manager.add_static_config(".*", operator, STATIC[kind], 8)
    return manager.get_quantization_recipe()


def _ranges(float_file: pathlib.Path, settings: list[dict], calibration: Sequence[np.ndarray]) -> dict:
    """Minimum and maximum of each tensor over all calibration images, by tensor name."""
    manager = recipe_manager.RecipeManager()
    manager.load_quantization_recipe(settings)
    with _silenced():
        found = calibrator.Calibrator(float_file.read_bytes(), qsv_update_func=qsv_utils.min_max_update)
        found.calibrate(_inputs(calibration), manager)
    return found.get_model_qsvs()


def _inputs(images: Sequence[np.ndarray]) -> dict:
    return {_SIGNATURE: [{_INPUT: image} for image in images]}


def layer_errors(
    float_file: pathlib.Path, file: pathlib.Path, images: Sequence[np.ndarray], layers: Sequence[str]
) -> dict[str, float]:
    """Ratio of noise to signal power of each layer in a quantized file, the worst layer first.

    Args:
        float_file: the model in float32.
        file: the quantized model.
        images: inputs (1, H, W, C).
        layers: names of the layers of the model. Tensors with other names are left out.
    """
    ratio = validation_utils.ValidationErrorMetric.SNR
    with _silenced():
        compared = quantizer.Quantizer(str(float_file), previous_quantized_model=str(file)).validate(
            _inputs(images), [ratio], num_threads=2
        )
    found = compared.get_signature_comparison_result(_SIGNATURE)
    errors: dict[str, float] = {}
    for tensor, values in {**found.intermediate_tensors, **found.output_tensors}.items():
        # A fused tensor joins names by ";". A name is model/layer/operator, with a number appended to the layer.
        scopes = [scope for name in tensor.split(";") for scope in name.split("/")[1:2]]
        layer = next(
            (name for scope in scopes for name in (scope, re.sub(r"_\d+$", "", scope)) if name in layers), None
        )
        if layer is not None:
            errors[layer] = max(errors.get(layer, 0.0), 1.0 / max(values[ratio.value], 1e-12))
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Hide the output of the library, and the warning of its interpreter on the memory of calibration."""
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with quiet[0], quiet[1], warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
