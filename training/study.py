"""The paper's studies on your data: grids of runs, in parallel, with a table and a figure like the paper's.

    keras-vit study position-embedding --data tfds:mnist --workdir runs/positions

data-size: accuracy of ViT, hybrid and BiT against the number of training images. scaling: against the training FLOPs.
small-data: what is proposed for a ViT on few images, against their number.
position-embedding, head, shape: variants of one model. Each model is trained from scratch for the same number of steps,
once per seed, by the recipe study-small for 28x28 grayscale images, or that of --recipe. The table has the accuracy on
the evaluation images and the few-shot accuracy of frozen features. After an interruption the same command continues and
produces the same table.
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.errors import check_known
from training.experiments.study_grids import STUDIES
from training.options.train import USUAL, StudyOptions
from training.recipes.overrides import overridden
from training.recipes.pretrain import find_recipe


def main(arguments: Sequence[str]) -> None:
    """`STUDY --data … --workdir … [--recipe NAME]`, and any field of the recipe."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        name, rest = "data-size", ["--help"]
    check_known("study", name, STUDIES)
    recipe_name, rest = parser.named(rest, "--recipe", "study-small")
    named, prog = find_recipe(recipe_name), f"keras-vit study {name} --recipe {recipe_name}"
    options = parser.parse(StudyOptions, rest, prog=prog, about=__doc__, usual=USUAL, recipe=named)
    options = dataclasses.replace(options, recipe=overridden(options.recipe, named))

    from training.checks import check_outside
    from training.data.checks import check_data

    check_data(options.source)
    check_outside(options.workdir, options.source.data)
    cli.require_tensorflow()

    from training.experiments.study_runs import study
    from training.loop.callbacks import report_interruption

    with report_interruption():
        study(name, options)


if __name__ == "__main__":
    cli.run(main)
