"""The formats of a TFLite file, each made of one in float32.

    float32       as the model
    float16       weights in half precision, arithmetic in float32
    int8-dynamic  weights in 8 bits, one scale for each output channel; each product in 8 bits, with activations
                  quantised as they come; everything else float32
    int8-weights  the same weights, arithmetic in float32
    int8          weights and the inputs and outputs of products in 8 bits, with ranges fixed beforehand
    int16x8       the same with inputs and outputs in 16 bits, for processors that have such products

Quantising everything ("full int8") makes a Vision Transformer slower than float32, and its classes worse: LayerNorm,
the residual stream and the softmax are memory traffic, not arithmetic, and need their precision. So in int8 and int16x8
the products with weights alone are integers (FULLY_CONNECTED, CONV_2D).
Ranges are the true extremes over the calibration images. The library's own moving average of extremes clips the rare
large activations that carry the class, which is the greater part of its error (docs/phone.md has figures).
"""

import contextlib
import io
import pathlib
import re
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
from ai_edge_quantizer import calibrator, qtyping, quantizer, recipe, recipe_manager
from ai_edge_quantizer.utils import qsv_utils, validation_utils

from export.options import TFLiteFormat

# Formats whose ranges come from calibration images, with the bits of their activations.
STATIC = {"int8": 8, "int16x8": 16}
# Bytes of a weight, as a share of float32's.
WEIGHT_SHARE = {"float32": 1.0, "float16": 0.5} | dict.fromkeys(TFLiteFormat.__args__[2:], 0.25)

_PRODUCTS = (qtyping.TFLOperationName.FULLY_CONNECTED, qtyping.TFLOperationName.CONV_2D)
_SIGNATURE, _INPUT = "serving_default", "image"


def quantize(float_file: pathlib.Path, kind: TFLiteFormat, calibration: Sequence[np.ndarray]) -> bytes:
    """The content of a file in another format than float32.

    Args:
        float_file: of batch 1, or of any batch where the format needs no calibration.
        kind: the format.
        calibration: inputs of the model, each (1, H, W, C), for the formats in STATIC; others do not look at them.
    """
    chosen = _recipe(kind)
    ranges = _ranges(float_file, chosen, calibration) if kind in STATIC else None
    with _silenced():
        return bytes(quantizer.Quantizer(str(float_file), chosen).quantize(ranges).quantized_model)


def _recipe(kind: TFLiteFormat) -> list[dict]:
    if kind == "int8-dynamic":
        return recipe.dynamic_wi8_afp32()
    if kind == "int8-weights":
        return recipe.weight_only_wi8_afp32()
    manager = recipe_manager.RecipeManager()
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


def _ranges(float_file: pathlib.Path, chosen: list[dict], calibration: Sequence[np.ndarray]) -> dict:
    """Tensor name -> least and largest value over all calibration images."""
    manager = recipe_manager.RecipeManager()
    manager.load_quantization_recipe(chosen)
    with _silenced():
        found = calibrator.Calibrator(float_file.read_bytes(), qsv_update_func=qsv_utils.min_max_update)
        found.calibrate({_SIGNATURE: [{_INPUT: image} for image in calibration]}, manager)
    return found.get_model_qsvs()


def layer_errors(
    float_file: pathlib.Path, file: pathlib.Path, images: Sequence[np.ndarray], layers: Sequence[str]
) -> dict[str, float]:
    """What each layer's results are off by in another format: noise as a share of the signal's power, worst first.

    Args:
        float_file, file: the same model in two formats.
        images: inputs, each (1, H, W, C).
        layers: names of the model's layers; what the converter did not name after one of them is left out.
    """
    ratio = validation_utils.ValidationErrorMetric.SNR
    with _silenced():
        compared = quantizer.Quantizer(str(float_file), previous_quantized_model=str(file)).validate(
            {_SIGNATURE: [{_INPUT: image} for image in images]}, [ratio], num_threads=2
        )
    found = compared.get_signature_comparison_result(_SIGNATURE)
    errors = {}
    for tensor, values in {**found.intermediate_tensors, **found.output_tensors}.items():
        # Of what is fused the names are joined by ";"; a name is model/layer/operator, layers numbered once more.
        scopes = [scope for name in tensor.split(";") for scope in name.split("/")[1:2]]
        layer = next(
            (name for scope in scopes for name in (scope, re.sub(r"_\d+$", "", scope)) if name in layers), None
        )
        if layer is not None:
            errors[layer] = max(errors.get(layer, 0.0), 1.0 / max(values[ratio.value], 1e-12))
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """The library reports at length, and its interpreter warns of the memory that calibration is known to take."""
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with quiet[0], quiet[1], warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
