"""Train a model further on other images: any published checkpoint, or a run of ours, at any resolution.

    python -m training.finetune --checkpoint augreg:B_16 --data folder:pictures --workdir runs/pictures

The head is new, of zeros; position embeddings are resampled to the new grid. --recipe takes one of the recipes below,
whose fields are options; the same command continues an interrupted run.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from keras_vit import cli
from training.arguments import DataArguments, TrainingArguments
from training.finetune_recipes import FINETUNE_NAMES, FINETUNE_RECIPES, find_finetune_recipe
from training.recipe import Recipe, with_given_duration

_DEFAULT_RECIPE = "photos-finetune"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(TrainingArguments):
    """Fine-tune a checkpoint."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    checkpoint: str | None = None
    """A run directory or .keras file of ours; an .npz, .safetensors or folder of any published layout; an https:// or
    gs:// address; or an official name, such as imagenet21k/ViT-B_16, augreg:B_16 or bit:BiT-M-R50x1."""
    model: str | None = None
    """Instead of --checkpoint an official model, such as ViT-B_16: its checkpoint of ImageNet-21k."""
    channels: int | None = None
    """Image channels; default those of the checkpoint. Other kernels of the first layer spread their sum."""
    num_heads: int | None = None
    """Attention heads, where the file does not tell them."""
    dropout_rate: float = 0.0
    """Of every dropout of the encoder."""
    stochastic_depth_rate: float = 0.0
    """Of the last block; the first has 0 and those between lie on a line."""


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

    from training.command import continued_later, open_setting
    from training.examples import typical_size
    from training.finetuning import finetune

    with continued_later():
        setting = open_setting(parsed)
        train = setting.source.train
        recipe = find_finetune_recipe(name, train.num_examples, typical_size(train))
        finetune(_parse(name, rest, recipe), name, setting)


def _parse(name: str, rest: list[str], recipe: Recipe) -> Arguments:
    """The arguments, of which the recipe of that name is a part."""
    parsed = cli.parse(
        Arguments,
        rest,
        prog=f"python -m training.finetune --recipe {name}",
        default=Arguments(source=DataArguments(tyro.MISSING), workdir=tyro.MISSING, recipe=recipe),
    )
    return dataclasses.replace(parsed, recipe=with_given_duration(parsed.recipe, recipe))


if __name__ == "__main__":
    cli.run(main)
