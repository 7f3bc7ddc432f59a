import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_vit.models.gpu import fused_attention, gelu_of_kept_input, runs_on_cudnn


def by_definition(query, key, value):
    logits = jnp.einsum("bnhd,bmhd->bhnm", query, key) / np.sqrt(query.shape[-1])
    return jnp.einsum("bhnm,bmhd->bnhd", jax.nn.softmax(logits), value)


@pytest.mark.parametrize(
    ("num_queries", "num_tokens", "transform"),
    [
        (17, 17, jax.jit),
        pytest.param(5, 10, jax.checkpoint, marks=pytest.mark.slow),
        *(pytest.param(*lengths, jax.jit, marks=pytest.mark.slow) for lengths in ((1, 17), (16, 16))),
    ],
)
def test_padding_for_gradients_changes_neither_outputs_nor_gradients(num_queries, num_tokens, transform):
    rng = np.random.default_rng(0)
    lengths = num_queries, num_tokens, num_tokens, num_queries
    *heads, weights = (jnp.asarray(rng.normal(size=(2, length, 3, 8)), "float32") for length in lengths)

    def gradients(attend):
        return jax.jit(jax.value_and_grad(lambda *heads: jnp.sum(weights * attend(*heads)), (0, 1, 2)))(*heads)

    attend = transform(fused_attention("xla"))
    np.testing.assert_allclose(attend(*heads), by_definition(*heads), rtol=1e-5, atol=1e-6)
    jax.tree.map(
        lambda ours, expected: np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=2e-6),
        gradients(attend),
        gradients(by_definition),
    )


def test_only_gradients_are_padded():
    heads = jnp.ones((2, 17, 3, 8))
    attend = fused_attention("xla")
    assert "pad" not in str(jax.make_jaxpr(attend)(heads, heads, heads))
    assert "pad" in str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(attend(x, x, x))))(heads))


def test_the_path_is_chosen_by_card_dtype_and_width(monkeypatch):
    fits = {("9.0", "bfloat16", 64), ("8.0", "float16", 128)}
    others = {("7.5", "float16", 64), ("gfx942", "bfloat16", 64), ("9.0", "float32", 64)}
    others |= {("9.0", "bfloat16", 20), ("9.0", "bfloat16", 136)}
    for capability, dtype, width in fits | others:
        card = types.SimpleNamespace(platform="gpu", compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda card=card: [card])
        assert runs_on_cudnn(dtype, width) is ((capability, dtype, width) in fits), (capability, dtype, width)


@pytest.mark.parametrize(("approximate", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_gelu_keeps_its_input_alone_and_has_the_same_outputs_and_gradients(approximate, dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 7)) * 3, dtype)
    expected, expected_back = jax.vjp(lambda x: jax.nn.gelu(x, approximate=approximate), x)
    outputs, back = jax.vjp(gelu_of_kept_input(approximate), x)
    np.testing.assert_array_equal(outputs, expected)
    np.testing.assert_array_equal(back(x)[0], expected_back(x)[0])
    [kept] = jax.tree.leaves(back)
    np.testing.assert_array_equal(kept, x)
