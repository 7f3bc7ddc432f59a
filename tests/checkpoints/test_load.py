"""load_checkpoint and from_checkpoint: strict matching, resizing, damaged and malicious files."""

import dataclasses
import json
import pathlib
import zipfile

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit import UserError
from keras_vit.files.npz import read_npz, write_npz
from tests.support import FIXTURES, TINY, TINY_IMAGE, assert_equal_weights, loaded, randomize

TOKEN = FIXTURES / "vit_token.npz"
BLOCK = "Transformer/encoderblock_1/"


@pytest.fixture(name="arrays")
def _arrays() -> dict[str, np.ndarray]:
    return read_npz(TOKEN)


def saved(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> pathlib.Path:
    write_npz(path / "changed.npz", arrays)
    return path / "changed.npz"


@pytest.fixture(name="model", scope="module")
def _model() -> keras.Model:
    """Of the file, with other weights; no test may change it."""
    return randomize(keras_vit.from_checkpoint(TOKEN))


def test_twelve_blocks_are_loaded_in_the_order_of_their_numbers(tmp_path, arrays):
    first = {key: array for key, array in arrays.items() if "encoderblock_0/" in key}
    for block in range(12):
        arrays |= {key.replace("block_0", f"block_{block}"): array + block for key, array in first.items()}
    model = keras_vit.from_checkpoint(saved(tmp_path, arrays))
    for block in range(12):
        found = model.get_layer(f"Transformer.encoderblock_{block}.LayerNorm_0").gamma
        np.testing.assert_array_equal(found, first["Transformer/encoderblock_0/LayerNorm_0/scale"] + block)


def test_a_model_without_pooling_is_saved_and_loaded_exactly(tmp_path):
    config = dataclasses.replace(TINY, classifier="unpooled", representation_size=9)
    model = randomize(keras_vit.build(config, image_size=TINY_IMAGE, num_classes=7))
    keras_vit.save_checkpoint(model, tmp_path / "model.npz", layout="npz-linen")
    again = keras_vit.from_checkpoint(tmp_path / "model.npz", image_size=TINY_IMAGE, classifier="unpooled")
    assert keras_vit.config_of(again) == config
    assert_equal_weights(model, again)


def test_missing_and_unexpected_keys_are_named_and_the_model_is_unchanged(model, tmp_path, arrays):
    before = model.get_weights()
    del arrays[f"{BLOCK}LayerNorm_2/scale"]
    arrays["foreign/kernel"] = np.zeros(3, np.float32)
    with pytest.raises(UserError) as caught:
        keras_vit.load_checkpoint(model, saved(tmp_path, arrays))
    assert f"missing keys: {BLOCK}LayerNorm_2/scale" in str(caught.value)
    assert "unexpected keys: foreign/kernel" in str(caught.value)
    assert_equal_weights(before, model)


def test_dropped_and_kept_weights_are_reported():
    model = loaded(TOKEN, num_classes=5)
    report = keras_vit.load_checkpoint(model, TOKEN, drop=["head/"], keep=["head/"])
    assert report.dropped == report.kept == ("head/bias", "head/kernel")
    assert len(report.loaded) == 54
    assert report.loaded["cls"] == "cls"
    assert report.resized == ()


def test_num_classes_gives_a_head_of_zeros_and_no_pre_logits():
    model = keras_vit.from_checkpoint(FIXTURES / "vit_token_rep.npz", num_classes=7)
    kernel, bias = model.get_layer("head").get_weights()
    assert kernel.shape == (48, 7)
    assert not kernel.any()
    assert not bias.any()
    assert "pre_logits" not in [layer.name for layer in model.layers]


def test_a_grid_that_is_not_square_needs_stored_grid():
    with pytest.raises(UserError, match="24 patches, not for a square; .* give stored_grid="):
        keras_vit.from_checkpoint(FIXTURES / "vit_nonsquare.npz")
    by_grid = keras_vit.from_checkpoint(FIXTURES / "vit_nonsquare.npz", stored_grid=(4, 6))
    assert keras_vit.preprocessing_of(by_grid).image_size == (32, 48)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda _: {"weights": np.zeros(3, np.float32)}, "known layout: its 1 arrays begin with weights"),
        (
            lambda arrays: {key.replace("block_1/", "block_7/"): array for key, array in arrays.items()},
            r"numbered from 0 without gaps, but are \[0, 2, 7\]",
        ),
        ({"head/bias": np.zeros(7, np.int64)}, "'head/bias' .* floating-point numbers, but holds int64"),
        ({"head/kernel": np.zeros((48, 5), np.float32)}, r"'head/kernel' has shape \(48, 5\), .* \(48, 7\)"),
        (
            lambda arrays: arrays | {f"{BLOCK}MlpBlock_0/Dense_0/kernel": arrays[f"{BLOCK}MlpBlock_3/Dense_0/kernel"]},
            f"unexpected keys: {BLOCK}MlpBlock_0/Dense_0/kernel",
        ),
        # Shapes larger than the file, for which no memory is allocated.
        ({"embedding/kernel": np.zeros((1, 1, 1, 60_000), "f4"), "embedding/bias": np.zeros(60_000, "f4")}, None),
        ({f"{BLOCK.replace('1', '0')}MlpBlock_3/Dense_0/kernel": np.zeros((0, 10**11), np.float32)}, None),
        ({"Transformer/posembed_input/pos_embedding": np.zeros((1, 10**12 + 1, 0), np.float32)}, None),
        ({"head/bias": np.zeros((), np.float32)}, None),
        ({"pre_logits/bias": np.zeros((), np.float32)}, None),
        ({"pre_logits/kernel": np.zeros((48, 10**10, 0), np.float32)}, None),
    ],
)
def test_arrays_of_no_model_here_are_refused(change, sentence, tmp_path, arrays):
    changed = change(arrays) if callable(change) else arrays | change
    with pytest.raises(UserError, match=sentence):
        keras_vit.from_checkpoint(saved(tmp_path, changed))


def test_an_array_that_is_twice_in_the_archive_is_refused(tmp_path, arrays):
    with zipfile.ZipFile(saved(tmp_path, arrays), "a") as archive, archive.open("cls", "w") as stream:
        np.lib.format.write_array(stream, arrays["cls"] + 1)
    with pytest.raises(UserError, match="holds the array 'cls' twice"):
        keras_vit.from_checkpoint(tmp_path / "changed.npz")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.99])
def test_a_truncated_file_is_refused(share, tmp_path):
    content = TOKEN.read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match="cut.npz (is empty|cannot be read).* download it again"):
        keras_vit.from_checkpoint(tmp_path / "cut.npz")


def test_pickled_objects_are_never_loaded(tmp_path):
    np.savez(tmp_path / "evil.npz", **{"embedding/kernel": np.array([print], dtype=object)})
    with pytest.raises(UserError, match="'embedding/kernel.npy' holds pickled objects"):
        keras_vit.from_checkpoint(tmp_path / "evil.npz")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (b"(250000000000,)", r"claims shape \(250000000000,\) of float32"),  # which allocates no memory
        (b"(3,4", "cannot be read as a NumPy array"),
    ],
)
def test_a_header_that_does_not_describe_the_file_is_refused(shape, words, tmp_path):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + b", }"
    header += b" " * (118 - len(header) - 1) + b"\n"
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("embedding/kernel.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(UserError, match=words):
        keras_vit.from_checkpoint(tmp_path / "huge.npz")


def test_a_flipped_bit_and_bytes_behind_the_values_of_an_array_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", **{"embedding/kernel": np.full((4, 4, 3, 2000), 0.3, np.float32)})
    content = bytearray((tmp_path / "x.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "flipped.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"bad checksum of 'embedding/kernel.npy'"):
        np.asarray(read_npz(tmp_path / "flipped.npz")["embedding/kernel"])
    with zipfile.ZipFile(tmp_path / "x.npz") as archive:
        array = archive.read("embedding/kernel.npy")
    with zipfile.ZipFile(tmp_path / "longer.npz", "w") as archive:
        archive.writestr("embedding/kernel.npy", array + b"more")
    with pytest.raises(UserError, match=r"claims shape \(4, 4, 3, 2000\)"):
        read_npz(tmp_path / "longer.npz")


def test_a_zip_bomb_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "bomb.npz", zeros=np.zeros(50_000_000, np.float32))
    with pytest.raises(UserError, match="claims to hold 2000"):
        keras_vit.from_checkpoint(tmp_path / "bomb.npz")


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_refused_and_the_model_is_unchanged(value, model, tmp_path, arrays):
    arrays["head/kernel"][3, 2] = value
    before = model.get_weights()
    for load in (keras_vit.from_checkpoint, lambda path: keras_vit.load_checkpoint(model, path)):
        with pytest.raises(UserError, match="'head/kernel' has values that are not finite"):
            load(saved(tmp_path, arrays))
    assert_equal_weights(before, model)


def test_damage_in_a_compressed_archive_is_refused(tmp_path, arrays):
    np.savez_compressed(tmp_path / "packed.npz", **arrays)
    content = (tmp_path / "packed.npz").read_bytes()
    model = keras_vit.from_checkpoint(tmp_path / "packed.npz")
    for place in range(0, len(content), len(content) // 25):
        (tmp_path / "flipped.npz").write_bytes(content[:place] + bytes([content[place] ^ 8]) + content[place + 1 :])
        try:
            keras_vit.load_checkpoint(model, tmp_path / "flipped.npz")
        except UserError as refusal:
            assert "flipped.npz" in str(refusal) or "array" in str(refusal)  # noqa: PT017 (some flips are harmless)


def test_pickles_are_refused_with_the_way_to_convert_them(tmp_path):
    (tmp_path / "x.pth").write_bytes(b"PK")
    with pytest.raises(UserError, match="is a pickle, .* safetensors.torch.save_file"):
        keras_vit.from_checkpoint(tmp_path / "x.pth")


def header_of(**arrays) -> bytes:
    header = json.dumps(arrays).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 40,
        (10**12).to_bytes(8, "little") + b"{}",
        header_of(a={"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}),
        header_of(
            a={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            b={"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        )
        + bytes(12),
        header_of(a={"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 8]}) + bytes(8),
    ],
    ids=["empty", "noise", "long header", "cut", "overlapping", "too large a shape"],
)
def test_incomplete_safetensors_are_refused(content, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"x.safetensors (cannot be read|is empty|is a text file)"):
        keras_vit.from_checkpoint(tmp_path / "x.safetensors")
