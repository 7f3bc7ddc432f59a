"""cuDNN's flash attention on TensorFlow, which has no such operation itself.

XLA has custom calls for it, with a `CudnnfMHABackendConfig` (xla/service/gpu/backend_configs.proto). JAX makes them of
`jax.nn.dot_product_attention(implementation="cudnn")`; here TensorFlow compiles the same calls, as StableHLO.

Axes: B batch, N query tokens, M key tokens, H heads, d width of a head.
"""

import functools
import json
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from keras import ops

_TYPES = {tf.bfloat16: "bf16", tf.float16: "f16", tf.float32: "f32", tf.int32: "i32"}
_AMPERE = (8, 0)  # compute capability
# Rounding of attention in 16 bits, relative to the largest value; without a mask it would differ by 0.1 and more.
_TOLERANCE = 0.03
# The products of the forward pass, and of the gradient: contracting and batch axes of both sides.
_FORWARD = {
    "bmm1": ((3, 3), ((0, 2), (0, 2))),  # query, key -> logits (B, H, N, M)
    "bmm2": ((3, 1), ((0, 1), (0, 2))),  # probabilities, value -> outputs
}
_BACKWARD = {
    "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),  # gradient of the logits, query -> that of key
    "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),  # gradient of the logits, key -> that of query
    "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),  # probabilities, gradient of the outputs -> that of value
    "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),  # gradient of the outputs, value -> that of the probabilities
}


@functools.cache
def computes_attention(num_tokens: int, num_heads: int, head_width: int, dtype: str) -> bool:
    """Whether cuDNN computes attention of this shape and dtype, and its gradients, on the GPUs that TensorFlow sees.

    It is tried once on the first GPU, because the versions of TensorFlow, cuDNN and the driver decide it together.
    """
    gpus = tf.config.list_physical_devices("GPU")
    capabilities = [tf.config.experimental.get_device_details(gpu).get("compute_capability", (0, 0)) for gpu in gpus]
    if dtype not in ("bfloat16", "float16") or min(capabilities, default=(0, 0)) < _AMPERE:
        return False
    padded = (1, num_tokens + -num_tokens % 8, num_heads, head_width)
    rng = np.random.default_rng(0)
    query, key, value, upstream = (tf.constant(rng.normal(size=padded), dtype) for _ in range(4))
    real = tf.constant(np.arange(padded[1]) < num_tokens, dtype)[:, None, None]

    def outputs_and_gradients(attend) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            outputs = attend(query, key, value, num_tokens) * real
        return [outputs, *tape.gradient(outputs, [query, key, value], upstream)]

    expected = outputs_and_gradients(masked_attention)
    try:
        actual = outputs_and_gradients(padded_attention)
    except (tf.errors.OpError, ValueError) as error:
        print(f"Training without cuDNN's attention, which does not run here: {str(error).splitlines()[0]:.200}")
        return False
    difference = max(
        float(tf.reduce_max(abs(a - e)) / tf.reduce_max(abs(e))) for a, e in zip(actual, expected, strict=True)
    )
    if not difference < _TOLERANCE:  # nor is NaN
        print(f"Training without cuDNN's attention, which differs by {difference:.2g} here.")
        return False
    return True


def masked_attention(query, key, value, num_tokens: int):
    """As `padded_attention`, by matrix products and a softmax."""
    logits = ops.einsum("bnhd,bmhd->bhnm", query * query.shape[-1] ** -0.5, key)
    logits = ops.where(ops.arange(key.shape[1]) < num_tokens, ops.cast(logits, "float32"), -np.inf)
    return ops.einsum("bhnm,bmhd->bnhd", ops.cast(ops.softmax(logits), query.dtype), value)


def padded_attention(query, key, value, num_tokens: int):
    """Attention among tokens (B, N, H, d), of which only the first are attended to -> (B, N, H, d).

    What it returns for the others is of no use. The logits are scaled by 1 / sqrt(d). N is a multiple of 8.
    """
    if query.shape[0] is None:  # Keras asks for the shape of the outputs; a call names the batch
        return masked_attention(query, key, value, num_tokens)
    return _attention(num_tokens)(query, key, value)


@functools.cache
def _attention(num_tokens: int) -> Callable:
    """Return attention and its gradient, each compiled by XLA, inside a step that it does not compile, too."""

    @functools.partial(tf.function, jit_compile=True, autograph=False)
    def forward(query, key, value):
        batch, tokens, heads, _ = query.shape
        results = [(query.shape, query.dtype), ((batch, heads, tokens), tf.float32)]
        return _custom_call("__cudnn$fmhaSoftmax", [query, key, value], results, num_tokens, _FORWARD)

    @functools.partial(tf.function, jit_compile=True, autograph=False)
    def backward(query, key, value, statistics, upstream, outputs):
        operands = [query, key, value, statistics, upstream, outputs]
        results = [(x.shape, x.dtype) for x in (query, key, value)]
        return _custom_call("__cudnn$fmhaSoftmaxBackward", operands, results, num_tokens, _BACKWARD)

    @tf.custom_gradient
    def attention(query, key, value):
        outputs, statistics = forward(query, key, value)
        return outputs, lambda upstream: backward(query, key, value, statistics, upstream, outputs)

    return attention


def _custom_call(target: str, operands: Sequence, results: Sequence[tuple], num_tokens: int, products: dict) -> list:
    """Call cuDNN in a function that XLA compiles. operands: the first two are query and key."""
    from tensorflow.compiler.tf2xla.python import xla

    lengths = tf.fill((operands[0].shape[0],), num_tokens)
    operands = [*operands, lengths, lengths]
    config = _backend_config(operands[0], operands[1], products)
    module = _stablehlo(target, [(x.shape, x.dtype) for x in operands], results, config)
    return xla.call_module(
        operands,
        module=module.encode(),
        Tout=[dtype for _, dtype in results],
        Sout=[shape for shape, _ in results],
        platforms=["CUDA"],
        # `computes_attention` has asked the device. Without the check, the call can be compiled on any machine.
        disabled_checks=[xla.call_module_disable_check_platform()],
    )


def _backend_config(query, key, products: dict) -> str:
    batch, tokens, heads, width = query.shape
    axes = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [str(contracting[0])],
            "rhs_contracting_dimensions": [str(contracting[1])],
            "lhs_batch_dimensions": list(map(str, batches[0])),
            "rhs_batch_dimensions": list(map(str, batches[1])),
        }
        for name, (contracting, batches) in products.items()
    }
    config = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": width**-0.5,
        "intermediate_tensor_shape": {
            "element_type": _TYPES[query.dtype].upper(),
            "dimensions": [str(size) for size in (batch, heads, tokens, key.shape[1])],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "PADDING",
        "max_seg_per_batch": 1,
        **axes,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config})


def _stablehlo(target: str, operands: Sequence[tuple], results: Sequence[tuple], config: str) -> str:
    """Return a module of one custom call. Tensors of rank 4 come out as (B, H, N, d), stored as (B, N, H, d)."""
    inner = [((s[0], s[2], s[1], s[3]) if len(s) == 4 else tuple(s), dtype) for s, dtype in results]
    inputs, outputs = (", ".join(_tensor(*each) for each in many) for many in (operands, results))
    produced = [*(_tensor(*each) for each in inner), "tensor<0xui8>"]  # the last one for XLA's workspace
    layouts = [_layout((3, 1, 2, 0) if len(shape) == 4 else range(len(shape))[::-1]) for shape, _ in inner]
    lines = [
        f"%r:{len(produced)} = stablehlo.custom_call @{target}({', '.join(f'%a{i}' for i in range(len(operands)))}) {{"
        f"backend_config = {json.dumps(config)}, api_version = 2 : i32, "
        f"operand_layouts = [{', '.join(_layout(range(len(shape))[::-1]) for shape, _ in operands)}], "
        f"result_layouts = [{', '.join([*layouts, _layout([0])])}]}} : ({inputs}) -> ({', '.join(produced)})"
    ]
    names = []
    for i, ((shape, dtype), outer) in enumerate(zip(inner, results, strict=True)):
        names.append(f"%o{i}" if len(shape) == 4 else f"%r#{i}")
        if len(shape) == 4:
            kinds = f"({_tensor(shape, dtype)}) -> {_tensor(*outer)}"
            lines.append(f"%o{i} = stablehlo.transpose %r#{i}, dims = [0, 2, 1, 3] : {kinds}")
    arguments = ", ".join(f"%a{i}: {_tensor(*each)}" for i, each in enumerate(operands))
    body = "\n    ".join([*lines, f"return {', '.join(names)} : {outputs}"])
    return f"module {{\n  func.func public @main({arguments}) -> ({outputs}) {{\n    {body}\n  }}\n}}\n"


def _tensor(shape: Sequence[int], dtype: tf.DType) -> str:
    return f"tensor<{'x'.join(map(str, shape))}x{_TYPES[dtype]}>"


def _layout(minor_to_major: Sequence[int]) -> str:
    return f"dense<{list(minor_to_major)}> : tensor<{len(minor_to_major)}xindex>"
