"""What the recipes reach on real data. Slow: `make test-slow`."""

import json

import pytest

from tests.support import TFDS
from training import evaluate
from training.data.sources import DataOptions
from training.loop import pretrain as pretraining
from training.options.train import PretrainOptions
from training.recipes.pretrain import find_recipe


@pytest.mark.slow
@pytest.mark.skipif(not TFDS.is_dir(), reason="no prepared MNIST and Fashion-MNIST beside the checkout")
@pytest.mark.parametrize(
    ("recipe", "data", "least"),
    [("mnist-notes", "mnist", 0.970), ("mnist-small", "mnist", 0.988), ("mnist-small", "fashion_mnist", 0.89)],
)
def test_a_recipe_reaches_its_accuracy(recipe, data, least, tmp_path):
    source = DataOptions(f"tfds:{data}", str(TFDS))
    arguments = PretrainOptions(source=source, workdir=str(tmp_path / "run"), recipe=find_recipe(recipe))
    pretraining.pretrain(arguments, recipe)
    evaluate.main(["--run", str(tmp_path / "run"), "--data", source.data, "--data-dir", str(TFDS)])
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["accuracy"] >= least
