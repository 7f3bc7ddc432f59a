"""cuDNN's attention on JAX, for any number of tokens, with and without gradients.

cuDNN computes the attention of any number of tokens, but its gradients only for an even one. So where JAX takes
gradients, the tokens are padded to a multiple of 8, and masked; the result is the same up to rounding.
"""

import functools
from typing import Literal

# Tokens are padded to a multiple of this for gradients.
_MULTIPLE = 8
# Widths of a head that cuDNN takes on every GPU since Ampere, whose compute capability is 8.0.
_WIDEST_HEAD, _AMPERE = 128, 8.0


def runs_on_cudnn(dtype: str, head_width: int) -> bool:
    """Whether JAX computes on a GPU whose cuDNN has fused attention for heads of this width and dtype."""
    if dtype not in ("bfloat16", "float16") or head_width % 8 or head_width > _WIDEST_HEAD:
        return False
    import jax

    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "")  # of AMD's, "gfx942"
    return device.platform == "gpu" and capability[:1].isdigit() and float(capability) >= _AMPERE


@functools.cache
def fused_attention(implementation: Literal["cudnn", "xla"] = "cudnn"):
    """Return the function of query (B, N, H, d), key and value (B, M, H, d) -> (B, N, H, d), scaled by 1 / sqrt(d).

    implementation: see jax.nn.dot_product_attention.
    """
    import jax

    attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation)

    def padded(query, key, value):
        lengths = query.shape[1], key.shape[1]
        if not any(length % _MULTIPLE for length in lengths):
            return attend(query, key, value)
        query_lengths, key_lengths = (jax.numpy.full(query.shape[0], length, "int32") for length in lengths)
        query, key, value = (
            jax.numpy.pad(x, ((0, 0), (0, -x.shape[1] % _MULTIPLE), (0, 0), (0, 0))) for x in (query, key, value)
        )
        outputs = attend(query, key, value, query_seq_lengths=query_lengths, key_value_seq_lengths=key_lengths)
        return outputs[:, : lengths[0]]

    @jax.custom_vjp
    def attention(query, key, value):
        return attend(query, key, value)

    attention.defvjp(functools.partial(jax.vjp, padded), lambda pull_back, gradient: pull_back(gradient))
    return attention
