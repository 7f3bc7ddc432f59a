"""Train from scratch by the arguments of `keras-vit pretrain`, after checks that need no TensorFlow."""

import dataclasses
import functools
import inspect
from collections.abc import Sequence

from keras_vit import UserError
from keras_vit.cli import parser
from training.options.train import USUAL, PretrainOptions
from training.recipes.auto import DataFacts, auto_reasons, auto_recipe
from training.recipes.overrides import Request, continued, without_model
from training.recipes.pretrain import RECIPES, find_recipe
from training.recipes.recipe import PretrainRecipe

_AUTO = "auto"


def train(arguments: Sequence[str], about: str = "") -> str | None:
    """Train by the arguments of the command; return the directory of the run, None where this process wrote none.

    about: the text of --help, to which the recipes are added.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        arguments = [_AUTO, "--help"]
    if arguments[0].startswith("-"):
        raise UserError(
            f"The first argument must be a recipe, but is {arguments[0]!r}; give {_AUTO}, which fits the data, or one "
            f"of {', '.join(RECIPES)}."
        )
    name, *rest = arguments
    # What the recipe auto is depends on the data, so its values are not known yet.
    named, prog = _named(name, DataFacts(1000, (64, 64))), f"keras-vit pretrain {name}"
    given = parser.read(PretrainOptions, rest, prog=prog, about=_about(about, name), usual=USUAL, recipe=named)

    from training.checks import check_checkpoint, check_data_service, check_workdir
    from training.data.checks import check_data
    from training.loop.devices.backend import prepare_backend

    request = Request(PretrainOptions, prog, given, functools.partial(_named, name))
    if (checkpoint := given.get(("checkpoint",))) is None:
        options = request.over(named)
    else:  # the sizes are those of its model, which is not known yet
        check_checkpoint(checkpoint)
        options = dataclasses.replace(request, given=without_model(given)).over(named)
    if options.chips is not None:
        from training.loop.budget import print_budget

        print_budget(options, options.chips, name, named)
        return None
    check_data(options.source)
    check_data_service(options)
    check_workdir(options, "pretrain", name, is_final=name in RECIPES and checkpoint is None)
    prepare_backend(options)
    return _pretrain(request, name, options, named)


def _named(name: str, facts: DataFacts, steps: int | None = None) -> PretrainRecipe:
    return auto_recipe(facts, steps) if name == _AUTO else find_recipe(name, [_AUTO])


def _pretrain(request: Request, name: str, options: PretrainOptions, named: PretrainRecipe) -> str | None:
    """Open devices, data and checkpoint, and train."""
    from keras_vit.checkpoints.describe import describe
    from keras_vit.run import Run
    from training.data.dataset import typical_image
    from training.loop.devices.strategies import is_chief
    from training.loop.pretrain import pretrain
    from training.loop.setup import open_setup
    from training.loop.signals import report_interruption
    from training.probes.watch import WatchFeatures

    with report_interruption():
        if options.checkpoint is not None:
            options = request.over(continued(named, describe(options.checkpoint).config, request.given))
        setup, callbacks = open_setup(options), []
        if name == _AUTO:
            facts = DataFacts(setup.source.train.num_examples, *typical_image(setup.source.train))
            named, options = request.resolve(facts)
            print("\n".join(auto_reasons(facts, named, options.recipe)))
        watches = options.knn_every is not None or (options.checkpoint is not None and len(setup.source.labels) > 1)
        if watches and not setup.source.multi_label and not options.dry_run:
            callbacks = [WatchFeatures(setup.source, Run.at(options.directory), options.knn_every)]
        pretrain(options, name, setup, callbacks)
        return options.workdir if is_chief(setup.strategy) and not options.dry_run else None


def _about(text: str, recipe: str) -> str:
    """Return the text of --help."""
    note = ", which depend on the data and are those for 1,000 images of 64 pixels" if recipe == _AUTO else ""
    names = f"Recipes: {_AUTO}, {', '.join(RECIPES)}. Below are the defaults of {recipe}{note}."
    return f"{inspect.cleandoc(text)}\n\n{names}"
