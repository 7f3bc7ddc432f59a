"""Attention and GELU on JAX as an NVIDIA GPU computes them fast, in bfloat16 and float16.

Axes: B batch, N tokens, M key tokens, H heads, d width of a head.
"""

import functools
from typing import Literal

# Tokens are padded to a multiple of this for gradients of cuDNN.
MULTIPLE = 8
# Width of a head that cuDNN takes on every GPU since Ampere, whose compute capability is 8.0.
_WIDEST_HEAD, _AMPERE = 128, 8.0


def on_tensor_cores(dtype: str) -> bool:
    """Whether JAX computes in this dtype, bfloat16 or float16, on an NVIDIA GPU since Ampere."""
    if dtype not in ("bfloat16", "float16"):
        return False
    import jax

    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "")  # of AMD's, "gfx942"
    return device.platform == "gpu" and capability[:1].isdigit() and float(capability) >= _AMPERE


def runs_on_cudnn(dtype: str, head_width: int) -> bool:
    """Whether JAX computes on a GPU whose cuDNN has fused attention for heads of this width and dtype."""
    return head_width % 8 == 0 and head_width <= _WIDEST_HEAD and on_tensor_cores(dtype)


def padded_attention(num_tokens: int, implementation: Literal["cudnn", "xla"] = "cudnn"):
    """Return the attention of `fused_attention` among N' >= num_tokens tokens, of which only the first are attended to.

    What it returns for the others is of no use.
    """
    import jax

    def attend(query, key, value):
        lengths = jax.numpy.full(query.shape[0], num_tokens, "int32")
        return jax.nn.dot_product_attention(
            query, key, value, query_seq_lengths=lengths, key_value_seq_lengths=lengths, implementation=implementation
        )

    return attend


@functools.cache
def fused_attention(implementation: Literal["cudnn", "xla"] = "cudnn"):
    """Return cuDNN's attention on JAX: query (B, N, H, d), key and value (B, M, H, d) -> (B, N, H, d).

    The logits are scaled by 1 / sqrt(d). cuDNN computes the attention of any number of tokens, but its gradients only
    for an even one. So where JAX takes gradients, the tokens are padded to a multiple of 8, and masked; the result is
    the same up to rounding.

    implementation: see jax.nn.dot_product_attention.
    """
    import jax

    attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation)

    def padded(query, key, value):
        lengths = query.shape[1], key.shape[1]
        if not any(length % MULTIPLE for length in lengths):
            return attend(query, key, value)
        query_lengths, key_lengths = (jax.numpy.full(query.shape[0], length, "int32") for length in lengths)
        query, key, value = (
            jax.numpy.pad(x, ((0, 0), (0, -x.shape[1] % MULTIPLE), (0, 0), (0, 0))) for x in (query, key, value)
        )
        outputs = attend(query, key, value, query_seq_lengths=query_lengths, key_value_seq_lengths=key_lengths)
        return outputs[:, : lengths[0]]

    @jax.custom_vjp
    def fused(query, key, value):
        return attend(query, key, value)

    fused.defvjp(functools.partial(jax.vjp, padded), lambda pull_back, gradient: pull_back(gradient))
    return fused


@functools.cache
def gelu_of_kept_input(approximate: bool):
    """Return GELU on JAX, which keeps its input alone for the gradient: x -> y.

    XLA would keep a second array of the hidden width. Without it, cuBLAS adds the bias and computes the tanh form in
    the epilogue of the product before the GELU.
    """
    import jax

    gelu = functools.partial(jax.nn.gelu, approximate=approximate)

    @jax.custom_vjp
    def keeping_input(x):
        return gelu(x)

    def backward(x, gradient):
        # Behind the barrier, XLA does not find out that the forward pass has computed the same.
        return jax.vjp(gelu, jax.lax.optimization_barrier(x))[1](gradient)

    keeping_input.defvjp(lambda x: (gelu(x), x), backward)
    return keeping_input
