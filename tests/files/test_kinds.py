"""Files are what their first bytes say; wrappers' prefixes are left out; what is not read is refused with a way out."""

import functools
import json
import os
import pathlib
import shutil
import zipfile

import numpy as np
import pytest
import safetensors.numpy

import keras_vit
from keras_vit import UserError
from keras_vit.checkpoints.checkpoint import open_checkpoint
from tests.support import FIXTURES, TINY, TINY_IMAGE, assert_equal_weights

TIMM = FIXTURES / "timm_vit.safetensors"


@functools.cache
def weights_of(path: pathlib.Path, **options) -> list[np.ndarray]:
    return keras_vit.from_checkpoint(path, **options).get_weights()


def assert_same(path: pathlib.Path, expected: pathlib.Path, **options) -> None:
    assert_equal_weights(keras_vit.from_checkpoint(path, **options).get_weights(), weights_of(expected, **options))


@pytest.mark.parametrize("name", ["x.npz", "x"])
def test_a_safetensors_file_of_any_name_is_read(name, tmp_path):
    shutil.copy(TIMM, tmp_path / name)
    assert_same(tmp_path / name, TIMM, num_heads=4)


def test_npz_and_keras_files_of_any_name_are_read(tmp_path):
    keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7).save(tmp_path / "x.keras")
    for file, name in ((FIXTURES / "vit_token.npz", "x.safetensors"), (tmp_path / "x.keras", "x.zip")):
        shutil.copy(file, tmp_path / name)
        assert_same(tmp_path / name, file)


def torch_zip(path: pathlib.Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")


def hdf5(path: pathlib.Path) -> None:
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))


REFUSED = {
    "a pipe": (os.mkfifo, "{} is a pipe or device; save what it gives"),
    "a pickle": (torch_zip, "is a pickle, .*torch.load.'{}', weights_only=True.*'state_dict', 'model'"),
    "an old pickle": (lambda path: path.write_bytes(b"\x80\x02}q\x00."), "is a pickle"),
    "a pointer": (
        lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "{} is a Git LFS pointer, .*git lfs pull",
    ),
    "a web page": (lambda path: path.write_bytes(b"\n<!DOCTYPE html>\n<html>"), "is a web page, .*the file itself"),
    "GGUF": (lambda path: path.write_bytes(b"GGUF\3" + bytes(99)), "is a file of llama.cpp; give the .npz"),
    "ONNX": (lambda path: path.write_bytes(b"\x08\x0a\x12\x07pytorch"), "is an ONNX file; give the .npz"),
    "TFLite": (lambda path: path.write_bytes(b"\x1c\0\0\0TFL3" + bytes(99)), "is a TFLite file; give the .npz"),
    "gzip": (lambda path: path.write_bytes(b"\x1f\x8b\x08" + bytes(99)), "is an archive of other files; unpack it"),
    "an image": (lambda path: path.write_bytes(b"\xff\xd8\xff\xe0"), "is an image; give a model"),
    "a text": (lambda path: path.write_text("Straße\n"), "is a text file; give a model"),
    "damaged HDF5": (hdf5, "{} (cannot be read as Keras weights .*it may be damaged|is an HDF5 file of Keras)"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("name", ["model.safetensors", "x.npz", "x.pth"])
def test_what_is_not_read_is_refused_by_its_content(kind, name, tmp_path):
    write, words = REFUSED[kind]
    write(tmp_path / name)
    for path in (tmp_path / name, *([tmp_path] if name == "model.safetensors" else [])):
        with pytest.raises(UserError, match=words.format(name)):
            keras_vit.from_checkpoint(path)


@pytest.mark.parametrize("name", ["x", "x.gguf", "x.pth", "x.h5"])
def test_bytes_of_no_known_format_are_called_so(name, tmp_path):
    (tmp_path / name).write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match=f"{name} is of no format that is known here; give a model"):
        keras_vit.from_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", "pytorch_model.bin is a pickle, .*import torch"),
        ("tf_model.h5", "tf_model.h5 is not read; .*from_tf=True"),
        ("flax_model.msgpack", "flax_model.msgpack is not read; .*from_flax=True"),
    ],
)
def test_a_folder_without_safetensors_is_refused_with_a_way_out(name, words, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    hdf5(tmp_path / name) if name.endswith("h5") else (tmp_path / name).write_bytes(b"\x80\x02" + bytes(100))
    if name.endswith("bin"):
        (tmp_path / "training_args.bin").write_bytes(b"\x80\x02}.")
    with pytest.raises(UserError, match=words):
        keras_vit.from_checkpoint(tmp_path)


def shards(folder: pathlib.Path) -> list[pathlib.Path]:
    arrays = safetensors.numpy.load_file(FIXTURES / "hf_vit" / "model.safetensors")
    shutil.copy(FIXTURES / "hf_vit" / "config.json", folder)
    files = [f"model-0000{part + 1}-of-00002.safetensors" for part in range(2)]
    names = {key: files[index % 2] for index, key in enumerate(arrays)}
    for file in files:
        safetensors.numpy.save_file({key: arrays[key] for key in arrays if names[key] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return [folder / file for file in files]


def test_an_index_a_shard_and_shards_without_their_index_are_the_folder(tmp_path):
    files, index = shards(tmp_path), tmp_path / "model.safetensors.index.json"
    assert_same(index, FIXTURES / "hf_vit")
    assert_same(files[1], FIXTURES / "hf_vit")
    index.rename(tmp_path / "away")
    assert_same(tmp_path, FIXTURES / "hf_vit")
    shutil.copy(files[0], files[1])
    with pytest.raises(UserError, match="Two shards in the folder .* hold the array"):
        keras_vit.from_checkpoint(tmp_path)
    files[0].unlink()
    with pytest.raises(UserError, match="holds 1 of the 2 shards of a model"):
        keras_vit.from_checkpoint(files[1])
    (tmp_path / "away").rename(index)
    with pytest.raises(UserError, match="model-00001-of-00002.safetensors cannot be read"):
        keras_vit.from_checkpoint(files[1])


def test_the_only_file_of_a_folder_is_its_model(tmp_path):
    shutil.copy(TIMM, tmp_path / "weights.safetensors")
    assert_same(tmp_path, TIMM, num_heads=4)


@pytest.mark.parametrize("prefix", ["_orig_mod.module.", "teacher.backbone.", "net/"])
def test_the_prefix_of_a_wrapper_is_left_out_and_said(prefix, tmp_path):
    arrays = {prefix + key: array for key, array in safetensors.numpy.load_file(TIMM).items()}
    arrays |= {"n_averaged": np.zeros((), np.int64), "epoch": np.zeros(1), "optimizer.0.exp_avg": np.zeros((2, 3))}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    with pytest.warns(UserWarning, match=f"The keys of x.safetensors are read without '{prefix}'"):
        assert_same(tmp_path / "x.safetensors", TIMM, num_heads=4)


def test_what_training_keeps_beside_a_model_is_skipped_and_reported(tmp_path):
    arrays = safetensors.numpy.load_file(TIMM) | {"epoch": np.zeros(1), "optimizer.0.exp_avg": np.zeros((2, 3))}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    assert open_checkpoint(tmp_path / "x.safetensors").unused == ("epoch", "optimizer.0.exp_avg")
    keras_vit.describe(tmp_path / "x.safetensors", num_heads=4)


def test_other_arrays_beside_the_prefix_of_a_model_are_named(tmp_path):
    arrays = {f"backbone.{key}": array for key, array in safetensors.numpy.load_file(TIMM).items()}
    safetensors.numpy.save_file(arrays | {"box_head.weight": np.zeros((3, 4))}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"arrays begin with backbone\."):
        keras_vit.describe(tmp_path / "x.safetensors", num_heads=4)


def test_a_prefix_hides_no_setting_that_is_in_the_keys(tmp_path):
    file = FIXTURES / "modern" / "timm_reg_gap.safetensors"
    arrays = {f"module.{key}": array for key, array in safetensors.numpy.load_file(file).items()}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    with pytest.warns(UserWarning, match="read without 'module.'"):
        wrapped = keras_vit.describe(tmp_path / "x.safetensors", num_heads=4)
    assert wrapped.config == keras_vit.describe(file, num_heads=4).config


def test_an_adapter_is_refused_as_one(tmp_path):
    key = "base_model.model.vit.encoder.layer.0.attention.attention.query.lora_A.weight"
    safetensors.numpy.save_file({key: np.zeros((4, 8), "f4")}, tmp_path / "adapter_model.safetensors")
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        with pytest.raises(UserError, match="holds a PEFT adapter, .*merge_and_unload"):
            keras_vit.from_checkpoint(path)


def test_missing_keys_are_those_of_the_file(tmp_path):
    arrays = safetensors.numpy.load_file(TIMM)
    del arrays["blocks.1.mlp.fc1.bias"]
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    model = keras_vit.from_checkpoint(TIMM, num_heads=4)
    with pytest.raises(UserError, match=r"missing keys: blocks\.1\.mlp\.fc1\.bias\.$"):
        keras_vit.load_checkpoint(model, tmp_path / "x.safetensors")
