"""The paper's studies on your data: grids of ordinary runs, in parallel, to a table and a figure in the paper's form.

    python -m training.study position-embedding --data tfds:mnist --workdir runs/positions

data-size: accuracy of ViT, hybrid and BiT against the number of training images. scaling: against the operations of
training. position-embedding, head, shape: of one model with this or that. Each model is trained from scratch for the
same number of steps, once for each seed; measured are its accuracy on the evaluation images and the few-shot accuracy
of its frozen features. Killed, the same command goes on and ends with the same table.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from keras_vit import UserError, cli
from keras_vit.errors import nearest
from training.arguments import DataArguments
from training.recipe import PretrainRecipe, with_given_duration
from training.recipes import find_recipe
from training.studies import STUDIES

_DEFAULT_RECIPE = "study-small"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """A study; the fields of its base recipe are options."""

    source: Annotated[DataArguments, tyro.conf.arg(name="")]
    workdir: str
    """Directory of the report, and of the run directories in runs/."""
    recipe: Annotated[PretrainRecipe, tyro.conf.arg(name="")]
    seeds: int = 3
    """Runs of each setting, whose intervals are told."""
    shots: int = 5
    """Images of each class for the few-shot accuracy."""
    train_images: tuple[int, ...] | None = None
    """data-size alone: how many; default 1, 10 and 100 % of the training split."""
    jobs: int | None = None
    """Runs at a time; default one for each core, 8 at most, and one where there is a GPU."""

    def __post_init__(self) -> None:
        for field in ("seeds", "shots", "jobs"):
            if getattr(self, field) is not None and getattr(self, field) < 1:
                raise UserError(f"--{field} must be at least 1, but is {getattr(self, field)}.")


def main(arguments: Sequence[str]) -> None:
    """`STUDY --data … --workdir … [--recipe NAME]`, and any field of the recipe."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m training.study STUDY --data DATA --workdir DIR [OPTIONS]\n\n{__doc__}")
        print(f"Studies: {', '.join(STUDIES)}. The base recipe is {_DEFAULT_RECIPE}, for grey images of 28 pixels, or")
        print("that of --recipe NAME. STUDY --help lists all options with their values.")
        return
    name, rest = arguments[0], arguments[1:]
    if name not in STUDIES:
        raise UserError(f"There is no study {name!r}; the nearest names are {nearest(name, STUDIES)}.")
    recipe_name, rest = cli.named(rest, "--recipe", _DEFAULT_RECIPE)
    named = find_recipe(recipe_name)
    parsed = cli.parse(
        Arguments,
        rest,
        prog=f"python -m training.study {name} --recipe {recipe_name}",
        default=Arguments(source=DataArguments(tyro.MISSING), workdir=tyro.MISSING, recipe=named),
    )
    parsed = dataclasses.replace(parsed, recipe=with_given_duration(parsed.recipe, named))
    cli.require_tensorflow()

    from training.command import continued_later
    from training.study_runs import study

    with continued_later():
        study(name, parsed)


if __name__ == "__main__":
    cli.run(main)
