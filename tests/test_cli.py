"""The shell: every mistake ends in one sentence on stderr, exit code 2 and no traceback."""

import contextlib
import pathlib
import subprocess
import sys

import pytest

import export.saved_model
import export.tflite
import training.evaluate
import training.pretrain
from keras_vit import UserError
from training.recipes import RECIPES

ROOT = pathlib.Path(__file__).parent.parent
PRETRAIN = ("digits", "--data", "digits", "--workdir", "runs/never")


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (training.pretrain, ["digts"], "There is no recipe named 'digts'; the nearest names are digits"),
        (training.pretrain, ["--data", "digits"], "first argument must be a recipe, one of digits, mnist-notes"),
        (training.pretrain, ["digits"], "Missing from .* --workdir --data"),
        (
            training.pretrain,
            [*PRETRAIN, "--epoch", "2"],
            "Unrecognized options: --epoch, 2; Perhaps you meant: --epochs",
        ),
        (training.pretrain, [*PRETRAIN, "--epochs", "2.5"], "Error parsing --epochs: invalid literal for int"),
        (
            training.pretrain,
            [*PRETRAIN, "--resize", "x"],
            r"invalid choice 'x' .* Expected one of \('stretch', 'crop'\)",
        ),
        (training.pretrain, [*PRETRAIN, "--strategy", "warp"], "invalid choice 'warp'"),
        (
            training.pretrain,
            [*PRETRAIN, "--model.patch-size", "3"],
            "image height must be a multiple of the patch height",
        ),
        (training.pretrain, [*PRETRAIN, "--model.num-heads", "7"], "hidden_size must be a multiple of num_heads"),
        (training.evaluate, ["--run", "nowhere", "--data", "digits"], "There is no run directory 'nowhere'"),
        (export.saved_model, ["--run", "nowhere", "--output", "x"], "There is no run directory 'nowhere'"),
        (export.saved_model, ["--run", "nowhere"], "Missing from .* --output"),
        (export.tflite, ["--run", "nowhere", "--output", "x"], "There is no run directory 'nowhere'"),
        (export.tflite, ["--run", "x", "--output", "x", "--formats", "int3"], "invalid choice 'int3'"),
    ],
)
def test_a_mistake_is_one_sentence(command, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words) as caught:
        command.main(arguments)
    assert "\n" not in str(caught.value)
    assert not any(mark in str(caught.value) for mark in "│╭─")
    assert list(tmp_path.iterdir()) == []


def test_a_command_prints_the_sentence_alone_and_exits_with_2():
    command = [sys.executable, "-m", "training.pretrain", "mnist", "--data", "digits", "--workdir", "runs/never"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == ("There is no recipe named 'mnist'; the nearest names are mnist-small, mnist-notes.\n")


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (training.pretrain, ["--help"], ["RECIPE --data DATA", *RECIPES]),
        (training.pretrain, ["digits", "--help"], ["--learning-rate", "pixels", "(default: 32)"]),
        (training.evaluate, ["--help"], ["--run", "--data", "--output"]),
        (export.saved_model, ["--help"], ["--run", "--output"]),
        (export.tflite, ["--help"], ["--formats", "int8-dynamic"]),
    ],
)
def test_help_names_options_defaults_and_units(command, arguments, words, capsys):
    with contextlib.suppress(SystemExit):  # its code is that of `--help`, 0
        command.main(arguments)
    text = capsys.readouterr().out
    for word in words:
        assert word in text
