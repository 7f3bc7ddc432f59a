"""Train a model from scratch by a named recipe.

    python -m training.pretrain mnist-notes --data tfds:mnist --workdir runs/mnist-notes

reaches about 97 % on the test images of MNIST. The same command continues an interrupted run from its last checkpoint.
On SIGTERM or Ctrl-C it saves a checkpoint and exits with code 75.
"""

import dataclasses
from collections.abc import Sequence

import tyro

from keras_vit import UserError, cli
from training.devices.tpu import prepare_tpu
from training.options.checks import check_data
from training.options.common import DataOptions
from training.options.jax import check_jax, jax_requested
from training.options.train import PretrainOptions
from training.recipes.pretrain import RECIPES, find_recipe
from training.recipes.recipe import override_duration


def main(arguments: Sequence[str]) -> None:
    """`RECIPE --data … --workdir …`, and any field of the recipe."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m training.pretrain RECIPE --data DATA --workdir DIR [OPTIONS]\n\n{__doc__}")
        print(f"Recipes: {', '.join(RECIPES)}. RECIPE --help lists all options with their values.")
        return
    if arguments[0].startswith("-"):
        raise UserError(f"The first argument must be a recipe, one of {', '.join(RECIPES)}, but is {arguments[0]!r}.")
    named = find_recipe(arguments[0])
    options = cli.parse(
        PretrainOptions,
        arguments[1:],
        prog=f"python -m training.pretrain {arguments[0]}",
        default=PretrainOptions(source=DataOptions(tyro.MISSING), workdir=tyro.MISSING, recipe=named),
    )
    options = dataclasses.replace(options, recipe=override_duration(options.recipe, named))
    check_data(options.source)
    if jax_requested():
        check_jax(options, options.recipe)
    else:
        prepare_tpu(options.devices)
        cli.require_tensorflow()

    from training.loop.pretrain import pretrain
    from training.loop.setup import report_interruption

    with report_interruption():
        pretrain(options, arguments[0])


if __name__ == "__main__":
    cli.run(main)
