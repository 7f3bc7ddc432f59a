"""Train a model from scratch by a named recipe.

    keras-vit pretrain mnist-notes --data tfds:mnist --workdir runs/mnist-notes

reaches about 97 % on the test images of MNIST. The same command continues an interrupted run from its last checkpoint.
On SIGTERM or Ctrl-C it saves a checkpoint and exits with code 75.

    keras-vit pretrain auto --data folder:pictures --workdir runs/pictures

chooses model, image size, epochs and augmentation from the data, and says why.
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import UserError, cli, parser
from keras_vit.runs import Run
from training.devices.tpu import prepare_tpu
from training.options.checks import check_data, check_loss, check_recipe_of_files
from training.options.jax import check_jax, check_tensorflow, jax_requested
from training.options.train import PretrainOptions
from training.recipes.auto import DataFacts, auto_reasons, auto_recipe
from training.recipes.overrides import overridden, with_crop
from training.recipes.pretrain import RECIPES, find_recipe
from training.recipes.recipe import PretrainRecipe
from training.workdir import check_workdir_of

_AUTO = "auto"


def main(arguments: Sequence[str]) -> None:
    """`RECIPE --data … --workdir …`, and any field of the recipe."""
    if workdir := train(arguments):
        cli.print_next(Run(workdir).next_commands("train"))


def train(arguments: Sequence[str]) -> str | None:
    """Train by the arguments of the command; return the directory of the run, None where this process wrote none."""
    if not arguments or arguments[0] in ("-h", "--help"):
        typed = cli.as_typed("keras-vit pretrain")
        print(f"usage: {typed} RECIPE --data DATA --workdir DIR [OPTIONS]\n\n{__doc__}")
        print(f"Recipes: {_AUTO}, {', '.join(RECIPES)}. RECIPE --help lists all options with their values.")
        return None
    if arguments[0].startswith("-"):
        raise UserError(
            f"The first argument must be a recipe, but is {arguments[0]!r}; give {_AUTO}, which fits the data, or one "
            f"of {', '.join(RECIPES)}."
        )
    name, *rest = arguments
    if name == _AUTO and {"-h", "--help"} & {*rest}:
        print("auto chooses size, epochs and more from the data; below are those for 1,000 images of 64 pixels.\n")
    # What the recipe auto is depends on the data, so its values are not known yet.
    named = auto_recipe(DataFacts(1000, (64, 64))) if name == _AUTO else find_recipe(name, [_AUTO])
    given = parser.read(PretrainOptions, rest, prog=_prog(name), recipe=named)
    options = _options(name, given, named)
    check_data(options.source)
    check_loss(options.source, options.recipe)
    if name != _AUTO:
        check_recipe_of_files(options.source, options.recipe)
    check_workdir_of(options, "pretrain", name, is_final=name in RECIPES)
    if jax_requested():
        check_jax(options, options.recipe)
    else:
        check_tensorflow(options)
        prepare_tpu(options.devices)
        cli.require_tensorflow()

    from training.devices.strategies import is_chief
    from training.input.dataset import typical_image
    from training.loop.pretrain import pretrain
    from training.loop.setup import open_setup
    from training.loop.signals import report_interruption

    with report_interruption():
        setup = open_setup(options)
        if name == _AUTO:
            train = setup.source.train
            facts = DataFacts(train.num_examples, *typical_image(train))
            chosen = _options(name, given, auto_recipe(facts)).recipe
            named = auto_recipe(facts, chosen.num_steps(facts.num_examples))  # for the warm-up of this duration
            options = _options(name, given, named)
            print("\n".join(auto_reasons(facts, named, options.recipe)))
        pretrain(options, name, setup)
        return options.workdir if is_chief(setup.strategy) and not options.dry_run else None


def _options(name: str, given: parser.Given, recipe: PretrainRecipe) -> PretrainOptions:
    """The options that were given, with those of the recipe as their defaults."""
    options = parser.build(PretrainOptions, with_crop(given, recipe), prog=_prog(name), recipe=recipe)
    return dataclasses.replace(options, recipe=overridden(options.recipe, recipe))


def _prog(recipe_name: str) -> str:
    return f"keras-vit pretrain {recipe_name}"


if __name__ == "__main__":
    cli.run(main)
