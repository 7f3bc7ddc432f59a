"""Agreement with the original code: golden inputs and outputs of vit_jax, every recorded intermediate."""

import numpy as np
import pytest

import keras_vit
from conftest import FIXTURES, GOLDEN

CHECKPOINTS = [name for name, entry in GOLDEN.items() if entry["kind"] == "vit"]
# The index gives the tolerance of logits, pre_logits and attention, and this one for what accumulates in the stream.
STREAM_ATOL = 5e-5


def golden(name: str) -> tuple[dict, dict]:
    entry = GOLDEN[name]
    return entry | GOLDEN[entry.get("same_weights_as", name)], dict(np.load(FIXTURES / entry["io"]))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_everything_inside_agrees_with_vit_jax(name):
    entry, recorded = golden(name)
    model = keras_vit.from_checkpoint(FIXTURES / GOLDEN[name]["checkpoint"], image_size=tuple(entry["image_size"]))
    inside = keras_vit.intermediates(model)(recorded.pop("images"))
    exact = recorded.pop("logits_float64")
    assert recorded.keys() == inside.keys()
    tolerance = entry["tolerance"]
    for key, expected in recorded.items():
        atol = STREAM_ATOL if key.startswith(("block", "encoded", "embedded", "patch")) else tolerance["atol"]
        np.testing.assert_allclose(np.asarray(inside[key]), expected, rtol=tolerance["rtol"], atol=atol, err_msg=key)
    np.testing.assert_allclose(np.asarray(inside["logits"]), exact, rtol=tolerance["rtol"], atol=tolerance["atol"])


@pytest.mark.parametrize(
    ("wrong", "mistake"),
    [({"gelu": "erf"}, "gelu_erf"), ({"layer_norm_epsilon": 1e-5}, "layernorm_eps_1e-5"),
     ({"layer_norm_epsilon": 1e-3}, "layernorm_eps_1e-3")],
)  # fmt: skip
def test_wrong_numerics_move_the_logits_as_far_as_recorded(wrong, mistake):
    entry, recorded = golden("vit_token")
    model = keras_vit.from_checkpoint(FIXTURES / "vit_token.npz", **wrong)
    moved = np.abs(np.asarray(model(recorded["images"])) - recorded["logits"]).max()
    assert moved == pytest.approx(entry["sensitivity_max_abs_logit_change"][mistake], rel=0.05)


@pytest.mark.parametrize("name", [name for name, entry in GOLDEN.items() if entry["kind"] == "checkpoint_adaptation"])
def test_adapting_to_another_size_and_classes_agrees_with_vit_jax(name):
    entry, recorded = golden(name)
    model = keras_vit.from_checkpoint(
        FIXTURES / entry["checkpoint"],
        image_size=tuple(entry["image_size"]),
        num_classes=entry["num_classes"],
        keep_pre_logits="representation_size" in entry,
    )
    inside = keras_vit.intermediates(model)(recorded["images"])
    weights = keras_vit.checkpoint.weights_by_key(model)
    found = {key: inside[key] for key in ("logits", "pre_logits", "encoded", "embedded")}
    found["pos_embedding"] = weights["Transformer/posembed_input/pos_embedding"]
    found |= {"head_kernel": weights["head/kernel"], "head_bias": weights["head/bias"]}
    assert found.keys() | {"images"} == recorded.keys()
    for key, value in found.items():
        np.testing.assert_allclose(np.asarray(value), recorded[key], **entry["tolerance"], err_msg=key)


@pytest.mark.parametrize("case", GOLDEN["posemb"]["cases"])
def test_resized_position_embeddings_agree_with_vit_jax(case):
    facts, recorded = GOLDEN["posemb"]["cases"][case], np.load(FIXTURES / "posemb.io.npz")
    side_in, side_out = facts["grid_in"], facts["grid_out"]
    resized = keras_vit.resize_position_embedding(
        recorded[f"{case}.in"], (side_in, side_in), (side_out, side_out), int(facts["class_token"])
    )
    np.testing.assert_allclose(resized, recorded[f"{case}.out"], **GOLDEN["posemb"]["tolerance"])
