"""LoRA by a recipe: what is trained, merged, continued and refused."""

import numpy as np
import pytest

from keras_vit import UserError, run_directory
from tests.support import replaced
from training import finetune, pretrain

COMMAND = ["--data", "digits", "--recipe", "mnist-finetune", "--image-size", "8", "8", "--batch-size", "8"]
COMMAND += ["--steps", "4", "--warmup-steps", "0", "--decay", "constant", "--lora", "2", "--lora-on", "query", "out"]


@pytest.mark.slow
def test_adapters_of_the_chosen_layers_and_the_head_are_trained_and_merged(upstream, tmp_path):
    finetune.main([*COMMAND, "--checkpoint", str(upstream.path), "--workdir", str(tmp_path / "run")])
    (before, _), (after, _) = run_directory.load(upstream.path), run_directory.load(tmp_path / "run")
    changes = {new.path: np.array(new) - np.array(old) for old, new in zip(before.weights, after.weights, strict=True)}
    for path, change in changes.items():
        layer, _, name = path.partition("/")
        adapted = layer.endswith((".query", ".out")) and name == "kernel"
        assert np.any(change) == (adapted or layer == "head"), path
        if adapted:
            assert np.linalg.matrix_rank(change, tol=1e-6) == 2


@pytest.mark.slow
def test_a_run_with_adapters_resumes_exactly(upstream, assert_resumes_exactly):
    def command(workdir):
        more = ["--evaluate-every", "2", "--ema-decay", "0.5", "--workdir", str(workdir)]
        finetune.main([*COMMAND, "--checkpoint", str(upstream.path), *more])

    assert_resumes_exactly(command, step=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lora", "13"], "--lora 13 is larger than the layer .*query of 12 inputs and 12 outputs; give --lora 12 or"),
        (["--lora-on", "querry"], "--lora-on querry is not a dense layer of this model; its dense layers are query,"),
        (["--lora", "-1"], "lora must be at least 0, but is -1"),
    ],
)
def test_what_cannot_be_adapted_is_refused_and_leaves_nothing(options, words, upstream, tmp_path):
    with pytest.raises(UserError, match=words):
        command = [*COMMAND, "--checkpoint", str(upstream.path), "--workdir", str(tmp_path / "run")]
        finetune.main(replaced(command, *options))
    assert list(tmp_path.iterdir()) == []


def test_lora_from_scratch_is_refused(tmp_path):
    with pytest.raises(UserError, match="LoRA adapts a trained model; give --lora to keras-vit finetune"):
        pretrain.main(["digits", "--data", "digits", "--workdir", str(tmp_path), "--lora", "2"])
