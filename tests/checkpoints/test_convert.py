"""`keras-vit convert`: its report, its errors, and no files after a failure."""

import dataclasses

import pytest

import keras_vit
from keras_vit import UserError, convert
from tests.support import FIXTURES, TINY, TINY_IMAGE, assert_equal_weights, full_disk, loaded, randomize


def test_every_key_is_reported_and_the_written_file_is_verified(tmp_path, capsys):
    convert.main([str(FIXTURES / "vit_token.npz"), str(tmp_path / "x.safetensors"), "--layout", "timm"])
    lines = capsys.readouterr().out.partition("Next:")[0].splitlines()
    query = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
    assert f"{query}  ->  blocks.0.attn.qkv.weight  (144, 48)" in lines
    assert len(lines) == 56 + 4
    assert lines[-4].startswith("56 weights, 67,447 parameters, in")
    assert lines[-4].endswith("verified, all are equal bit for bit.")
    assert lines[-3] == "GELU: tanh in this model, erf in the code of timm files; set it there."
    assert lines[-2].startswith(
        "Preprocessing of this model: RGB, turned upright by the EXIF orientation, stretched to 32 x 32"
    )
    assert "center crop to 32 x 32 (bicubic, antialiased, rounded to bytes" in lines[-1]
    again = keras_vit.from_checkpoint(tmp_path / "x.safetensors", num_heads=4)
    assert_equal_weights(again, loaded(FIXTURES / "vit_token.npz"))


def test_resized_new_and_dropped_weights_are_reported(tmp_path, capsys):
    arguments = ["--layout", "npz", "--num-classes", "3", "--image-size", "48", "48"]
    convert.main([str(FIXTURES / "vit_token_rep.npz"), str(tmp_path / "x.npz"), *arguments])
    lines = capsys.readouterr().out.partition("Next:")[0].splitlines()
    assert "head/kernel  ->  head/kernel  (48, 3)  new, of zeros" in lines
    positions = "Transformer/posembed_input/pos_embedding"
    assert f"{positions}  ->  {positions}  (1, 37, 48)  resized" in lines
    assert {"pre_logits/bias  ->  dropped", "pre_logits/kernel  ->  dropped"} <= set(lines)


def test_heads_and_gelu_that_a_file_lacks_are_options(tmp_path, capsys):
    config = dataclasses.replace(TINY, patch_size=4, classifier="gap")
    model = randomize(keras_vit.build(config, image_size=12, num_classes=3))
    keras_vit.save_checkpoint(model, tmp_path / "gap.safetensors", layout="timm")
    arguments = [str(tmp_path / "gap.safetensors"), str(tmp_path / "x.npz"), "--layout", "npz", "--num-heads", "3"]
    with pytest.raises(UserError, match="config.json beside the file, .* give gelu"):
        convert.main(arguments)
    convert.main([*arguments, "--gelu", "erf"])
    assert "GELU: erf in this model, tanh in the code of npz files; set it there." in capsys.readouterr().out


def test_a_full_disk_leaves_no_converted_file(tmp_path):
    for name, layout in (("x.npz", "npz"), ("hf", "huggingface")):
        with full_disk(), pytest.raises(OSError, match="File too large"):
            convert.main([str(FIXTURES / "vit_token.npz"), str(tmp_path / name), "--layout", layout])
    assert list(tmp_path.iterdir()) == []


def test_a_keras_model_is_adapted_and_converted(tmp_path, capsys):
    randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=3)).save(tmp_path / "model.keras")
    arguments = ["--layout", "npz", "--num-classes", "5", "--image-size", "12", "60"]
    convert.main([str(tmp_path / "model.keras"), str(tmp_path / "x.npz"), *arguments])
    assert "head/bias  ->  head/bias  (5,)  new, of zeros" in capsys.readouterr().out
    assert keras_vit.describe(tmp_path / "x.npz", stored_grid=(3, 10)).num_classes == 5


@pytest.mark.parametrize("of_folder", [False, True], ids=["own", "that of transformers"])
def test_preprocessing_that_a_file_cannot_hold_is_reported(of_folder, tmp_path, capsys):
    fields = {"library": "transformers", "background": None, "interpolation": "bicubic"} if of_folder else {}
    preprocessing = keras_vit.Preprocessing(24, resize="resize-small", crop_from=30, value_range=(0.0, 1.0), **fields)
    config = dataclasses.replace(TINY, patch_size=8)
    randomize(keras_vit.build(config, preprocessing=preprocessing, num_classes=3)).save(tmp_path / "model.keras")
    convert.main([str(tmp_path / "model.keras"), str(tmp_path / "hf"), "--layout", "huggingface"])
    printed = capsys.readouterr().out
    if of_folder:
        assert "Images" not in printed
        return
    assert "smaller side resized to 30, center crop to 24 x 24 (box, antialiased" in printed
    convert.main([str(tmp_path / "model.keras"), str(tmp_path / "x.npz"), "--layout", "npz"])
    lines = capsys.readouterr().out.partition("Next:")[0].splitlines()
    assert "smaller side resized to 30, center crop to 24 x 24 (area), 0..255 to 0.0..1.0." in lines[-2]
    assert "stretched to 24 x 24 (bilinear), 0..255 to -1.0..1.0; set it there." in lines[-1]


def test_differing_epsilons_of_a_resnet_are_reported(tmp_path, capsys):
    convert.main([str(FIXTURES / "hybrid_stages2.npz"), str(tmp_path / "x.safetensors"), "--layout", "timm"])
    printed = capsys.readouterr().out
    assert "GroupNorm epsilon: 1e-06 in this model, 1e-05 in the code of timm files; set it there." in printed
    assert "epsilon of the kernels' deviation: 1e-05 in this model, 0.0 in the code of timm files" in printed


def test_weights_that_a_layout_changes_are_reported(tmp_path, capsys):
    convert.main([str(FIXTURES / "vit_token.npz"), str(tmp_path / "x.npz"), "--layout", "big_vision"])
    assert "changed: cls, Transformer/posembed_input/pos_embedding." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{in}", "{out}/x.npz", "--layout", "h5"], "The layout must be one of npz, npz-linen"),
        (["{in}", "{out}", "--layout", "npz"], "already exists; give the name of a new one"),
        (["{in}", "{out}/no/x.npz", "--layout", "npz"], "x.npz cannot be written, because there is no folder .*/no"),
        (["{out}/none.npz", "{out}/x.npz", "--layout", "npz"], "There is no file or folder"),
        (["{bit}", "{out}/x.safetensors", "--layout", "torchvision"], "torchvision cannot express this ResNet"),
    ],
)
def test_invalid_arguments_raise_and_leave_no_file(arguments, sentence, tmp_path):
    names = {"in": FIXTURES / "vit_token.npz", "bit": FIXTURES / "hf_bit", "out": tmp_path}
    with pytest.raises(UserError, match=sentence):
        convert.main([argument.format(**names) for argument in arguments])
    assert list(tmp_path.iterdir()) == []
