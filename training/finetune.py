"""Train a model further on other images: any published checkpoint, or a run of ours, at any resolution.

    python -m training.finetune --checkpoint augreg:B_16 --data folder:pictures --workdir runs/pictures

The head is new, of zeros; position embeddings are resampled to the new grid. --recipe takes one of the recipes below,
whose fields are options; the same command continues an interrupted run.
"""

import dataclasses
from collections.abc import Sequence

import tyro

from keras_vit import cli
from training.options.common import DataOptions
from training.options.train import FinetuneOptions
from training.recipes.finetune import FINETUNE_NAMES, FINETUNE_RECIPES, find_finetune_recipe
from training.recipes.recipe import Recipe, override_duration

_DEFAULT_RECIPE = "photos-finetune"


def main(arguments: Sequence[str]) -> None:
    """`--checkpoint FILE --data … --workdir … [--recipe NAME]`, and any field of the recipe."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m training.finetune --checkpoint FILE --data DATA --workdir DIR [OPTIONS]\n\n{__doc__}")
        print(f"Recipes: {', '.join(FINETUNE_NAMES)}; {_DEFAULT_RECIPE} where none is given.")
        print("--recipe NAME --help lists all options with their values.")
        return
    name, rest = cli.named(arguments, "--recipe", _DEFAULT_RECIPE)
    # The HyperRules look at the data before their values are known; for all other recipes this is the recipe.
    parsed = _parse(name, rest, FINETUNE_RECIPES.get(name) or find_finetune_recipe(name, 1, (224, 224)))
    cli.require_tensorflow()

    from training.input.dataset import typical_size
    from training.loop.finetune import finetune
    from training.loop.setup import open_setup, report_interruption

    with report_interruption():
        setting = open_setup(parsed)
        train = setting.source.train
        recipe = find_finetune_recipe(name, train.num_examples, typical_size(train))
        finetune(_parse(name, rest, recipe), name, setting)


def _parse(name: str, rest: list[str], recipe: Recipe) -> FinetuneOptions:
    """The arguments, of which the recipe of that name is a part."""
    parsed = cli.parse(
        FinetuneOptions,
        rest,
        prog=f"python -m training.finetune --recipe {name}",
        default=FinetuneOptions(source=DataOptions(tyro.MISSING), workdir=tyro.MISSING, recipe=recipe),
    )
    return dataclasses.replace(parsed, recipe=override_duration(parsed.recipe, recipe))


if __name__ == "__main__":
    cli.run(main)
