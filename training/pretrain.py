"""Train a model from scratch by a named recipe.

    python -m training.pretrain mnist-notes --data tfds:mnist --workdir runs/mnist-notes

about 97 % on the test images of MNIST. The same command continues an interrupted run from its last saved state; asked
to end (SIGTERM or Ctrl-C), it saves one and leaves with exit code 75.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from keras_vit import UserError, cli
from training.arguments import DataArguments, TrainingArguments
from training.recipe import PretrainRecipe, with_given_duration
from training.recipes import RECIPES, find_recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(TrainingArguments):
    """Train a model from scratch by a recipe, whose fields are options."""

    recipe: Annotated[PretrainRecipe, tyro.conf.arg(name="")]


def main(arguments: Sequence[str]) -> None:
    """`RECIPE --data … --workdir …`, and any field of the recipe."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m training.pretrain RECIPE --data DATA --workdir DIR [OPTIONS]\n\n{__doc__}")
        print(f"Recipes: {', '.join(RECIPES)}. RECIPE --help lists all options with their values.")
        return
    if arguments[0].startswith("-"):
        raise UserError(f"The first argument must be a recipe, one of {', '.join(RECIPES)}, but is {arguments[0]!r}.")
    named = find_recipe(arguments[0])
    parsed = cli.parse(
        Arguments,
        arguments[1:],
        prog=f"python -m training.pretrain {arguments[0]}",
        default=Arguments(source=DataArguments(tyro.MISSING), workdir=tyro.MISSING, recipe=named),
    )
    parsed = dataclasses.replace(parsed, recipe=with_given_duration(parsed.recipe, named))
    cli.require_tensorflow()

    from training.command import continued_later
    from training.pretraining import pretrain

    with continued_later():
        pretrain(parsed, arguments[0])


if __name__ == "__main__":
    cli.run(main)
