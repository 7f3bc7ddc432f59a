"""cuDNN's attention on TensorFlow: what XLA compiles for a GPU, when it is chosen, and the padding around it."""

import json
import re
import types

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax._src.cudnn import fused_attention_stablehlo

import keras_vit
from keras_vit import ViTConfig
from keras_vit.models.gpu import padded_attention
from training.loop.devices import cudnn, kernels

_CALL = re.compile(
    r'= (\(.*?\)) custom-call\(.*custom_call_target="(__cudnn[^"]+)", operand_layout_constraints=\{(.*?)\}, '
    r"api_version=(\w+).*?backend_config=(\{.*\})"
)
_TINY = {"patch_size": 4, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "mlp_dim": 24}


def custom_calls(hlo: str) -> list:
    """Return target, results and operands with their layouts, version and config of cuDNN's calls in HLO text."""
    calls = []
    for results, target, operands, version, config in _CALL.findall(re.sub(r"/\*index=\d+\*/", "", hlo)):
        calls.append((target, results, operands, version, _set_fields(json.loads(config))))
    return sorted(calls, key=str)


def _set_fields(config):
    """The fields of a config that are not at the default of its protocol buffer; JAX writes others, and a seed."""
    if not isinstance(config, dict):
        return config
    fields = {key: _set_fields(value) for key, value in config.items() if key != "seed"}
    defaults = (0, "0", [], {}, False, "PRIMITIVE_TYPE_INVALID")
    return {key: value for key, value in fields.items() if value not in defaults}


@pytest.mark.parametrize("dtype", [tf.bfloat16, pytest.param(tf.float16, marks=pytest.mark.slow)])
def test_xla_gets_the_calls_that_jax_makes(dtype, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 90800)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda capability: True)
    shape = (2, 24, 3, 16)

    def on_jax(query, key, value):
        outputs, pull_back = jax.vjp(padded_attention(17), query, key, value)
        return pull_back(outputs)

    @tf.function(jit_compile=True, autograph=False)
    def on_tensorflow(*heads):
        with tf.GradientTape() as tape:
            tape.watch(heads)
            outputs = cudnn.padded_attention(*heads, 17)
        return tape.gradient(outputs, heads, outputs)

    lowered = jax.jit(on_jax).trace(*[jax.ShapeDtypeStruct(shape, dtype.name)] * 3).lower(lowering_platforms=("cuda",))
    expected = custom_calls(lowered.compiler_ir("hlo").as_hlo_text())
    ours = custom_calls(on_tensorflow.experimental_get_compiler_ir(*[tf.TensorSpec(shape, dtype)] * 3)(stage="hlo"))
    assert ours == expected
    assert [call[0] for call in ours] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]


@pytest.mark.parametrize(
    ("size", "changes", "is_padded"),
    [
        ((12, 16), {}, True),  # 13 tokens
        ((16, 16), {"classifier": "gap"}, True),  # 16
        ((12, 16), {"classifier": "map"}, True),
        ((12, 16), {"attention_dropout_rate": 0.1}, False),
        ((12, 16), {"position_embedding": "relative"}, False),
    ],
)
def test_tokens_padded_once_change_neither_outputs_nor_gradients(size, changes, is_padded, monkeypatch):
    monkeypatch.setattr(cudnn, "computes_attention", lambda *shape: True)
    monkeypatch.setattr(cudnn, "padded_attention", cudnn.masked_attention)
    network = keras_vit.build(ViTConfig(**_TINY, **changes), image_size=size, num_classes=3)
    rng = np.random.default_rng(0)
    for weight in network.trainable_variables:
        weight.assign(rng.normal(0.0, 0.3, weight.shape))
    padded = kernels.with_padded_tokens(network)
    assert (padded is not network) is is_padded
    images = tf.constant(rng.normal(size=(2, *size, 3)), tf.float32)
    results = []
    for model in (network, padded):
        with tf.GradientTape() as tape:
            outputs = model(images, training=not changes.get("attention_dropout_rate"))
            loss = tf.reduce_sum(outputs**2)
        results.append([outputs, *tape.gradient(loss, network.trainable_variables)])
    scale = max(float(tf.reduce_max(abs(x))) for x in results[0])
    for expected, ours in zip(*results, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5 * scale)


def _without_mask(query, key, value, num_tokens):
    return cudnn.masked_attention(query, key, value, key.shape[1])


def _refused(query, key, value, num_tokens):
    raise tf.errors.InternalError(None, None, "cuDNN 9.1 has no such engine\nmore")


@pytest.mark.parametrize(
    ("attend", "capabilities", "dtype", "is_used", "printed"),
    [
        (cudnn.masked_attention, [(9, 0), (8, 0)], "bfloat16", True, ""),
        (cudnn.masked_attention, [(9, 0)], "float16", True, ""),
        (cudnn.masked_attention, [(9, 0)], "float32", False, ""),
        (cudnn.masked_attention, [(9, 0), (7, 5)], "float16", False, ""),
        (cudnn.masked_attention, [], "bfloat16", False, ""),
        (_without_mask, [(8, 6)], "bfloat16", False, "differs by"),
        (_refused, [(8, 6)], "bfloat16", False, "has no such engine"),
    ],
)
def test_cudnn_is_used_where_it_computes_attention(attend, capabilities, dtype, is_used, printed, monkeypatch, capsys):
    monkeypatch.setattr(cudnn, "padded_attention", attend)
    gpus = [types.SimpleNamespace(capability=each) for each in capabilities]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    details = lambda gpu: {"compute_capability": gpu.capability}  # noqa: E731
    monkeypatch.setattr(tf.config.experimental, "get_device_details", details)
    assert cudnn.computes_attention.__wrapped__(17, 2, 16, dtype) is is_used
    out = capsys.readouterr().out
    assert printed in out
    assert out.count("\n") == bool(printed)


@pytest.mark.filterwarnings("ignore")
def test_attention_of_an_unknown_batch_has_a_shape():
    heads = [tf.TensorSpec((None, 24, 3, 16), tf.bfloat16)] * 3
    traced = tf.function(lambda *heads: cudnn.padded_attention(*heads, 17)).get_concrete_function(*heads)
    assert traced.output_shapes.as_list() == [None, 24, 3, 16]
