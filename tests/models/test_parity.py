"""Agreement with the original codes: their golden inputs and outputs, every recorded intermediate."""

import numpy as np
import pytest

import keras_vit
from tests.support import FIXTURES, GOLDEN, loaded, others_slow

KINDS = {"vit", "vit_hybrid", "bit", "big_vision_vit", "torch"}
CHECKPOINTS = [name for name, entry in GOLDEN.items() if entry["kind"] in KINDS]
# The index gives the tolerance of logits, pre_logits and attention, and these for what accumulates in the stream.
STREAM_ATOL = {"vit": 5e-5, "vit_hybrid": 1e-4}
STREAM = ("block", "encoded", "embedded", "patch", "resnet", "features", "hidden", "last_hidden")

# What the files cannot tell.
OVERRIDES = {name: {"num_heads": 4} for name in GOLDEN if name.startswith(("timm_vit", "torchvision"))}
OVERRIDES |= {"timm_hybrid": {"num_heads": 4, "num_groups": 8}, "timm_bit": {"num_groups": 8}}
for _name in ("bv_vit_gap_sincos", "vit_nonsquare", "hybrid_odd_sizes", "hf_bit", "hf_bit_bottleneck_same", "timm_bit"):
    OVERRIDES[_name] = {**OVERRIDES.get(_name, {}), "image_size": tuple(GOLDEN[_name]["image_size"])}
# Other codes' names for what is inside; and what they recorded that has no name here.
SAME_THING = {"pooler_output": "pre_logits", "with_posemb": "embedded", "hidden_0": "embedded"}
SAME_THING |= {"hidden_last": "block_2", "last_hidden_state": "encoded", "features": "encoded"}
NAMELESS = {"images_lowcontrast", "logits_lowcontrast", "logits_float64", "pooler_output_float64"}
NAMELESS |= {"head_input", "sincos2d"}
NAMELESS_HERE = {
    "hf_bit": "last_hidden_state", "hf_bit_bottleneck_same": "last_hidden_state", "timm_bit": "features",
    "timm_vit_avg": "features",
}  # fmt: skip


def golden(name: str) -> tuple[dict, dict]:
    entry = GOLDEN[name]
    return entry | GOLDEN[entry.get("same_weights_as", name)], dict(np.load(FIXTURES / entry["io"]))


def from_golden(name: str):
    return loaded(FIXTURES / GOLDEN[name]["checkpoint"], **OVERRIDES.get(name, {}))


# Those that differ from a sibling in their pooling, the names of their keys or a layer before the head are slow.
@pytest.mark.parametrize(
    "name",
    others_slow(
        [name for name in CHECKPOINTS if name != "bit_r111"],
        *(name for name in CHECKPOINTS if name not in ("vit_token_linen", "timm_vit_avg", "hf_vit_in21k")),
    ),
)
def test_everything_inside_agrees_with_the_original_code(name):
    entry, recorded = golden(name)
    model = from_golden(name)
    images, tolerance = recorded.pop("images"), entry["tolerance"]
    inside = keras_vit.intermediates(model)(images)
    for key in recorded.keys() - NAMELESS - {NAMELESS_HERE.get(name)}:
        stream_atol = STREAM_ATOL.get(entry["kind"], tolerance["atol"])
        atol = stream_atol if key.startswith(STREAM) else tolerance["atol"]
        rtol = 1e-4 if key.startswith("resnet") else tolerance["rtol"]
        expected = recorded[key]
        ours = np.asarray(inside[SAME_THING.get(key, key)])
        if key == "with_posemb":  # before the class token is there
            ours = ours[:, -expected.shape[1] :]
        np.testing.assert_allclose(ours.reshape(expected.shape), expected, rtol=rtol, atol=atol, err_msg=key)
    if "logits_float64" in recorded:
        np.testing.assert_allclose(np.asarray(inside["logits"]), recorded["logits_float64"], **_bounds(tolerance))
    if "images_lowcontrast" in recorded:
        logits = np.asarray(model(recorded["images_lowcontrast"]))
        np.testing.assert_allclose(logits, recorded["logits_lowcontrast"], **_bounds(tolerance))


def _bounds(tolerance: dict) -> dict:
    return {key: tolerance[key] for key in ("atol", "rtol")}


def test_the_maps_of_bit_agree_with_big_transfer():
    """Zero-padded pooling, 1e-10 under the root of the standardisation; hf_bit and timm_bit have the rest."""
    _, recorded = golden("bit_r111")
    config = keras_vit.ResNetConfig((1, 1, 1), 32)
    model = keras_vit.build(config, image_size=64, num_classes=0)
    keras_vit.load_checkpoint(model, FIXTURES / "bit_r111.npz", keep=["resnet/group_norm/"])
    inside = keras_vit.intermediates(model)(recorded.pop("images"))
    for key, expected in recorded.items():
        assert np.abs(inside[key] - expected).max() <= 1e-4 * np.abs(expected).max(), key


@pytest.mark.parametrize("wrong", [{"variance_epsilon": 1e-8}, {"deviation_epsilon": 1e-5, "variance_epsilon": 0.0}])
def test_the_standardisation_of_other_codes_is_seen_in_the_maps_of_bit(wrong):
    _, recorded = golden("bit_r111")
    model = keras_vit.build(keras_vit.ResNetConfig((1, 1, 1), 32, **wrong), image_size=64, num_classes=0)
    keras_vit.load_checkpoint(model, FIXTURES / "bit_r111.npz", keep=["resnet/group_norm/"])
    moved = np.abs(keras_vit.intermediates(model)(recorded["images"])["stage1"] - recorded["stage1"]).max()
    assert moved > 1e-4 * np.abs(recorded["stage1"]).max()


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
    weights = keras_vit.checkpoints.load.weights_by_key(model)
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


def test_a_new_resnet_has_the_epsilon_of_released_files():
    released = keras_vit.config_of(from_golden("hf_bit"))
    assert keras_vit.ResNetConfig((1, 1, 1), 64).group_norm_epsilon == released.group_norm_epsilon
