"""`python -m keras_vit.convert`: what it prints, what it refuses, and that nothing is left where it fails."""

import numpy as np
import pytest

import keras_vit
from conftest import FIXTURES, TINY, TINY_IMAGE, randomize
from keras_vit import UserError, convert


def test_every_key_is_reported_and_what_was_written_is_read_again(tmp_path, capsys):
    convert.main([str(FIXTURES / "vit_token.npz"), str(tmp_path / "x.safetensors"), "--layout", "timm"])
    lines = capsys.readouterr().out.splitlines()
    query = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
    assert f"{query}  ->  blocks.0.attn.qkv.weight  (144, 48)" in lines
    assert len(lines) == 56 + 2
    assert lines[-2].startswith("56 weights, 67,447 numbers, in")
    assert lines[-2].endswith("read again, all are equal bit for bit.")
    assert "tanh GELU and epsilon 1e-06, the code of timm files with erf GELU" in lines[-1]
    again = keras_vit.from_checkpoint(tmp_path / "x.safetensors", num_heads=4)
    expected = keras_vit.from_checkpoint(FIXTURES / "vit_token.npz").get_weights()
    for one, other in zip(again.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_a_layout_changes_is_named(tmp_path, capsys):
    convert.main([str(FIXTURES / "vit_token.npz"), str(tmp_path / "x.npz"), "--layout", "big_vision"])
    assert "changed: cls, Transformer/posembed_input/pos_embedding." in capsys.readouterr().out


def test_a_saved_model_is_converted(tmp_path, capsys):
    model = randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=3))
    model.save(tmp_path / "model.keras")
    convert.main([str(tmp_path / "model.keras"), str(tmp_path / "hf"), "--layout", "huggingface"])
    assert "equal bit for bit" in capsys.readouterr().out
    assert keras_vit.config_of(keras_vit.from_checkpoint(tmp_path / "hf")) == TINY


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{in}", "{out}/x.npz", "--layout", "h5"], "The layout must be one of npz, npz-linen"),
        (["{in}", "{out}", "--layout", "npz"], "is there already; give the name of a new file"),
        (["{in}", "{out}/no/x.npz", "--layout", "npz"], "There is no folder '.*/no' to write x.npz into"),
        (["{out}/none.npz", "{out}/x.npz", "--layout", "npz"], "There is no file, folder or official checkpoint"),
        (["{bit}", "{out}/x.npz", "--layout", "torchvision"], "The layout torchvision cannot express this ResNet"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_left(arguments, sentence, tmp_path):
    names = {"in": FIXTURES / "vit_token.npz", "bit": FIXTURES / "hf_bit", "out": tmp_path}
    with pytest.raises(UserError, match=sentence):
        convert.main([argument.format(**names) for argument in arguments])
    assert list(tmp_path.iterdir()) == []
