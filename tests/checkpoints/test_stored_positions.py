"""The grid of stored position embeddings, and their resizing as in the code that wrote the file."""

import dataclasses
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy

import keras_vit
from keras_vit import UserError, ViTConfig
from keras_vit.checkpoints.checkpoint import open_checkpoint
from keras_vit.checkpoints.key_mapping import POSITIONS
from keras_vit.checkpoints.save import convert
from keras_vit.files.safetensors import read_json, write_json
from tests.support import FIXTURES, assert_equal_weights, others_slow, randomize

MODERN = FIXTURES / "modern"
# The config.json of the tests do not say how images are resized.
pytestmark = pytest.mark.filterwarnings("ignore:The original of")


def positions(model) -> np.ndarray:
    return np.asarray(model.get_layer("Transformer.posembed_input").get_weights()[0])


@pytest.mark.parametrize(
    ("architecture", "resampler"), [("flexivit_small", "bilinear"), ("vit_small_patch16_224", "bicubic-antialias")]
)
def test_positions_are_resized_as_timm_does_for_the_architecture(architecture, resampler, tmp_path):
    shutil.copy(MODERN / "timm_flexivit.safetensors", tmp_path / "model.safetensors")
    arguments = {"num_heads": 4, "img_size": 20}
    write_json(tmp_path / "config.json", {"architecture": architecture, "model_args": arguments})
    resized = keras_vit.from_checkpoint(tmp_path, image_size=(12, 28))
    expected = keras_vit.from_checkpoint(tmp_path, image_size=(12, 28), resampler=resampler)
    np.testing.assert_array_equal(positions(resized), positions(expected))


def test_the_image_size_is_checked_against_the_new_patch_size(tmp_path):
    model = randomize(keras_vit.build(ViTConfig(8, 12, 1, 2, 24), image_size=32, num_classes=3))
    keras_vit.save_checkpoint(model, tmp_path / "x.npz", layout="big_vision")
    for changed in (
        keras_vit.from_checkpoint(tmp_path / "x.npz", patch_size=5, image_size=20),
        keras_vit.adapt(model, patch_size=5, image_size=20),
    ):
        assert keras_vit.config_of(changed).grid((20, 20)) == (4, 4)
    with pytest.raises(UserError, match="a multiple of the patch height 5, but is 32; take 30 or 35"):
        keras_vit.from_checkpoint(tmp_path / "x.npz", patch_size=5, image_size=32)


@pytest.mark.parametrize("name", others_slow(["hf_dinov2", "hf_dinov2_registers"], "hf_dinov2_registers"))
def test_dinov2_resizes_a_square_of_stored_positions_to_images_that_are_not_square(name, tmp_path):
    folder = pathlib.Path(shutil.copytree(MODERN / name, tmp_path / "wide"))
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    table = arrays["embeddings.position_embeddings"]
    arrays["embeddings.position_embeddings"] = table[:, :17]  # a class token and 4x4 patches
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    config = read_json(folder / "config.json")
    patch = config["patch_size"]

    def sized(size) -> pathlib.Path:
        (folder / "config.json").unlink()
        write_json(folder / "config.json", config | {"image_size": size})
        return folder

    square = keras_vit.from_checkpoint(sized(4 * patch), image_size=(2 * patch, 8 * patch))
    wide = keras_vit.from_checkpoint(sized([2 * patch, 8 * patch]))
    assert keras_vit.preprocessing_of(wide).image_size == (2 * patch, 8 * patch)
    np.testing.assert_array_equal(positions(wide), positions(square))
    with pytest.raises(UserError, match="DINOv2 of transformers has square images"):
        keras_vit.save_checkpoint(wide, tmp_path / "written", layout="huggingface")
    assert not (tmp_path / "written").exists()


def bare_timm_file(folder: pathlib.Path, rows: int, *, with_class: bool) -> pathlib.Path:
    """A file without config.json and image size, whose table has `rows` rows of positions."""
    config = ViTConfig(8, 12, 1, 2, 24, gelu="erf", prefix_positions=with_class)
    side = int((rows - with_class) ** 0.5)
    model = randomize(keras_vit.build(config, image_size=8 * side, num_classes=3))
    keras_vit.save_checkpoint(model, folder / "own.safetensors", layout="timm")
    arrays = safetensors.numpy.load_file(folder / "own.safetensors")
    assert arrays["pos_embed"].shape[1] == rows
    safetensors.numpy.save_file(arrays, folder / "bare.safetensors")
    return folder / "bare.safetensors"


@pytest.mark.parametrize(("rows", "with_class", "wanted"), [(10, True, (16, 40)), (25, False, (32, 48))])
def test_wanted_images_that_would_read_a_bare_table_in_another_way_are_refused(rows, with_class, wanted, tmp_path):
    file = bare_timm_file(tmp_path, rows, with_class=with_class)
    square = 8 * int((rows - with_class) ** 0.5)
    known = keras_vit.from_checkpoint(file, num_heads=2, image_size=square)
    assert keras_vit.config_of(known).prefix_positions == with_class
    with pytest.raises(UserError, match=rf"The {rows} rows of 'pos_embed' .* give stored_grid="):
        keras_vit.from_checkpoint(file, num_heads=2, image_size=wanted)
    grid = (square // 8, square // 8)
    model = keras_vit.from_checkpoint(file, num_heads=2, image_size=wanted, stored_grid=grid)
    assert keras_vit.config_of(model).prefix_positions == with_class
    assert keras_vit.preprocessing_of(model).image_size == wanted


def test_the_input_size_of_a_timm_folder_decides_where_it_agrees_with_a_square_table(tmp_path):
    file = bare_timm_file(tmp_path, 25, with_class=False)
    (tmp_path / "folder").mkdir()
    shutil.move(file, tmp_path / "folder" / "model.safetensors")
    config = {"architecture": "deit3_small_patch16_224", "model_args": {"num_heads": 2, "init_values": None}}
    write_json(tmp_path / "folder" / "config.json", config | {"pretrained_cfg": {"input_size": [3, 40, 40]}})
    model = keras_vit.from_checkpoint(tmp_path / "folder", image_size=(32, 48))
    assert not keras_vit.config_of(model).prefix_positions


def test_rotary_positions_are_not_loaded_into_a_model_without_them():
    config = keras_vit.describe(MODERN / "hf_dinov3").config
    other = dataclasses.replace(config, position_embedding="none")
    model = keras_vit.build(other, image_size=20, num_classes=0)
    with pytest.raises(UserError, match="position_embedding='rotary', but this one has 'none'"):
        keras_vit.load_checkpoint(model, MODERN / "hf_dinov3")


@pytest.mark.parametrize("name", others_slow(["hf_dinov2", "hf_dinov3", "hf_siglip", "hf_mae"], "hf_dinov3", "hf_mae"))
def test_a_model_without_head_is_converted_to_its_own_layout(name, tmp_path, capsys):
    convert(MODERN / name, tmp_path / "converted", "huggingface")
    printed = capsys.readouterr().out
    assert "verified, all are equal bit for bit" in printed
    assert ("add_pooling_layer=False" in printed) == (name == "hf_mae")


def test_dinov3_without_registers_and_biases_of_its_attention_is_read_again(tmp_path):
    config = ViTConfig(
        4, 16, 1, 2, 32, gelu="erf", layer_norm_epsilon=1e-5, layer_scale=0.1, position_embedding="rotary",
        qkv_bias=False,
    )  # fmt: skip
    model = randomize(keras_vit.build(config, image_size=16, num_classes=0))
    keras_vit.save_checkpoint(model, tmp_path / "x", layout="huggingface")
    arrays = safetensors.numpy.load_file(tmp_path / "x" / "model.safetensors")
    assert arrays["embeddings.register_tokens"].shape == (1, 0, 16)
    again = keras_vit.from_checkpoint(tmp_path / "x")
    assert_equal_weights(again, model)


@pytest.mark.parametrize(("grid", "first"), [((4, 5), 0), ((2, 10), 0), ((4, 4), 4), ((2, 8), 4), (None, 4)])
def test_the_grid_tells_whether_timm_has_positions_of_the_registers(grid, first, tmp_path):
    """Of 4 registers: 20 rows are those of 20 patches, or of 16 and of the registers in front of them."""
    arrays = safetensors.numpy.load_file(MODERN / "timm_reg_gap.safetensors")
    table = arrays["pos_embed"] = arrays["pos_embed"][:, :20].copy()
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    weights = open_checkpoint(tmp_path / "x.safetensors", grid).weights
    np.testing.assert_array_equal(weights[POSITIONS].read(), table[:, first:])
    registers = arrays["reg_token"] + (table[:, :4] if first else 0)
    np.testing.assert_array_equal(weights["registers/tokens"].read(), registers)
