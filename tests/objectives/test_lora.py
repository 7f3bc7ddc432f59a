"""LoRA by a recipe: what is trained, merged, continued and refused."""

import numpy as np
import pytest

from keras_vit.run import load
from training import finetune

COMMAND = ["--data", "digits", "--recipe", "mnist-finetune", "--image-size", "8", "8", "--batch-size", "8"]
COMMAND += ["--steps", "4", "--warmup-steps", "0", "--decay", "constant", "--lora", "2", "--lora-on", "query", "out"]


@pytest.mark.slow
def test_adapters_of_the_chosen_layers_and_the_head_are_trained_and_merged(upstream, tmp_path):
    finetune.main([*COMMAND, "--checkpoint", str(upstream.path), "--workdir", str(tmp_path / "run")])
    (before, _), (after, _) = load(upstream.path), load(tmp_path / "run")
    changes = {new.path: np.array(new) - np.array(old) for old, new in zip(before.weights, after.weights, strict=True)}
    for path, change in changes.items():
        layer, _, name = path.partition("/")
        adapted = layer.endswith((".query", ".out")) and name == "kernel"
        assert np.any(change) == (adapted or layer == "head"), path
        if adapted:
            assert np.linalg.matrix_rank(change, tol=1e-6) == 2
