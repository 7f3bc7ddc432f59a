"""Fine-tune a model: any published checkpoint, or a run of this program, at any resolution.

    keras-vit finetune --checkpoint augreg:B_16 --data folder:pictures --workdir runs/pictures

The new head is initialized to zeros; position embeddings are resized to the new grid. --recipe takes one of the recipes
below, whose fields are options. The same command continues an interrupted run.
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import UserError, cli, parser
from keras_vit.errors import check_known
from keras_vit.models.named_models import MODELS
from keras_vit.published import upstream_checkpoint
from keras_vit.runs import Run
from training.loop.devices.backend import prepare_backend
from training.options.checks import (
    check_checkpoint,
    check_data,
    check_data_service,
    unlabelled_path,
)
from training.options.train import FinetuneOptions
from training.recipes.auto import auto_finetune_reasons, auto_finetune_recipe
from training.recipes.finetune import FINETUNE_NAMES, FINETUNE_RECIPES, find_finetune_recipe
from training.recipes.overrides import overridden, with_crop
from training.recipes.recipe import Recipe
from training.workdir import check_new_workdir, check_outside, check_workdir_of

_DEFAULT_RECIPE, _AUTO = "photos-finetune", "auto"


def main(arguments: Sequence[str]) -> None:
    """`--checkpoint FILE --data … --workdir … [--recipe NAME]`, and any field of the recipe."""
    if workdir := train(arguments):
        cli.print_next(Run(workdir).next_commands("train"))


def train(arguments: Sequence[str]) -> str | None:
    """Train by the arguments of the command; return the directory of the run, None where this process wrote none."""
    if not arguments or arguments[0] in ("-h", "--help"):
        typed = cli.as_typed("keras-vit finetune")
        print(f"usage: {typed} --checkpoint FILE --data DATA --workdir DIR [OPTIONS]\n\n{__doc__}")
        print(f"Recipes: {_AUTO}, {', '.join(FINETUNE_NAMES)}; default {_DEFAULT_RECIPE}.")
        print("--recipe NAME --help lists all options with their values.")
        return None
    name, rest = parser.named(arguments, "--recipe", _DEFAULT_RECIPE)
    # auto and the HyperRules depend on the data, so their values are not known yet.
    recipe = FINETUNE_RECIPES.get(name) or _find(name, 1000, (224, 224))
    if name not in FINETUNE_RECIPES and {"-h", "--help"} & {*rest}:
        print(f"{name} chooses size, steps and more from the data; below are those for 1,000 images of 224 pixels.\n")
    given = parser.read(FinetuneOptions, rest, prog=_prog(name), recipe=recipe)
    options = _options(name, given, recipe)
    check_data(options.source)
    check_data_service(options)
    if options.unlabelled is not None:
        unlabelled_path(options.unlabelled)
    if options.unlabelled is None:
        check_workdir_of(options, "finetune", name, is_final=name in FINETUNE_RECIPES)
    else:  # the runs beside it are checked where they begin
        check_outside(options.workdir, options.source.data)
        check_new_workdir(options.workdir)
    if options.checkpoint is not None and options.model is None:
        check_checkpoint(options.checkpoint)
    if options.model is not None:
        check_known("official model", options.model, MODELS)
        if options.checkpoint is None:
            upstream_checkpoint(options.model)
    prepare_backend(options)

    from training.experiments.few_labels import finetune_with_unlabelled
    from training.input.dataset import typical_image
    from training.loop.devices.strategies import is_chief, several_workers
    from training.loop.finetune import finetune, patch_and_side
    from training.loop.setup import open_setup
    from training.loop.signals import report_interruption

    with report_interruption():
        setup = open_setup(options)
        if options.unlabelled is not None and several_workers(setup.strategy):
            raise UserError("--unlabelled makes several runs on one machine; start it on one alone.")
        train = setup.source.train
        (size, _, transparent), count = typical_image(train), train.num_examples
        options = _options(name, given, _find(name, count, size))
        if name == _AUTO:
            steps = options.recipe.num_steps(count)  # for its warm-up
            patch, side = patch_and_side(options)
            recipe = auto_finetune_recipe(
                count, size, steps, patch=patch, pretrained_side=side, transparent=transparent
            )
            options = _options(name, given, recipe)
            for reason in auto_finetune_reasons(count, size, recipe, options.recipe, pretrained_side=side):
                print(reason)
        if options.unlabelled is None:
            finetune(options, name, setup)
        else:
            finetune_with_unlabelled(options, name, setup)
        return options.workdir if is_chief(setup.strategy) and not options.dry_run else None


def _find(name: str, num_examples: int, image_size: tuple[int, int]) -> Recipe:
    """Return a recipe by name."""
    if name == _AUTO:
        return auto_finetune_recipe(num_examples, image_size)
    return find_finetune_recipe(name, num_examples, image_size)


def _options(name: str, given: parser.Given, recipe: Recipe) -> FinetuneOptions:
    """The options that were given, with those of the recipe as their defaults."""
    options = parser.options_from(FinetuneOptions, with_crop(given, recipe), prog=_prog(name), recipe=recipe)
    return dataclasses.replace(options, recipe=overridden(options.recipe, recipe))


def _prog(recipe_name: str) -> str:
    return f"keras-vit finetune --recipe {recipe_name}"


if __name__ == "__main__":
    cli.run(main)
