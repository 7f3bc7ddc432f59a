"""Fine-tune by the arguments of `keras-vit finetune`, after checks that need no TensorFlow."""

import functools
import inspect
from collections.abc import Sequence

from keras_vit import UserError
from keras_vit.cli import parser
from training.options.train import USUAL, FinetuneOptions
from training.recipes.auto import DataFacts, auto_finetune_reasons, auto_finetune_recipe
from training.recipes.finetune import FINETUNE_NAMES, FINETUNE_RECIPES, find_finetune_recipe
from training.recipes.overrides import Request
from training.recipes.recipe import Recipe

_DEFAULT_RECIPE, _AUTO = "photos-finetune", "auto"


def train(arguments: Sequence[str], about: str = "") -> str | None:
    """Train by the arguments of the command; return the directory of the run, None where this process wrote none.

    about: the text of --help, to which the recipes are added.
    """
    name, rest = parser.named(arguments, "--recipe", _DEFAULT_RECIPE)
    # auto and the HyperRules depend on the data, so their values are not known yet.
    recipe, prog = _named(name, DataFacts(1000, (224, 224))), f"keras-vit finetune --recipe {name}"
    given = parser.read(FinetuneOptions, rest, prog=prog, about=_about(about, name), usual=USUAL, recipe=recipe)
    request = Request(FinetuneOptions, prog, given, functools.partial(_named, name))
    options = request.over(recipe)
    _check(options, name)

    from training.loop.devices.backend import prepare_backend

    prepare_backend(options)
    return _finetune(request, name, options)


def _named(name: str, facts: DataFacts, steps: int | None = None) -> Recipe:
    if name == _AUTO:
        return auto_finetune_recipe(facts, steps)
    return find_finetune_recipe(name, facts.num_examples, facts.image_size)


def _check(options: FinetuneOptions, name: str) -> None:
    """Raise UserError for paths and names that are wrong, before TensorFlow is imported."""
    from keras_vit.errors import check_known
    from keras_vit.models.named_models import MODELS
    from keras_vit.published import upstream_checkpoint
    from training.checks import check_checkpoint, check_data_service, check_new_workdir, check_outside, check_workdir
    from training.data.checks import check_data, unlabelled_path

    check_data(options.source)
    check_data_service(options)
    if options.unlabelled is None:
        check_workdir(options, "finetune", name, is_final=name in FINETUNE_RECIPES)
    else:  # the runs beside it are checked where they begin
        unlabelled_path(options.unlabelled)
        check_outside(options.workdir, options.source.data)
        check_new_workdir(options.workdir)
    if options.checkpoint is not None and options.model is None:
        check_checkpoint(options.checkpoint)
    if options.model is not None:
        check_known("official model", options.model, MODELS)
        if options.checkpoint is None:
            upstream_checkpoint(options.model)


def _finetune(request: Request, name: str, options: FinetuneOptions) -> str | None:
    """Open devices and data, and train."""
    from training.data.dataset import typical_image
    from training.experiments.few_labels import finetune_with_unlabelled
    from training.loop.devices.strategies import is_chief, several_workers
    from training.loop.finetune import finetune, patch_and_side
    from training.loop.setup import open_setup
    from training.loop.signals import report_interruption

    with report_interruption():
        setup = open_setup(options)
        if options.unlabelled is not None and several_workers(setup.strategy):
            raise UserError("--unlabelled makes several runs on one machine; start it on one alone.")
        if name not in FINETUNE_RECIPES:
            train, sizes = setup.source.train, patch_and_side(options) if name == _AUTO else ()
            facts = DataFacts(train.num_examples, *typical_image(train), *sizes)
            named, options = request.resolve(facts)
            if name == _AUTO:
                for reason in auto_finetune_reasons(facts, named, options.recipe):
                    print(reason)
        if options.unlabelled is None:
            finetune(options, name, setup)
        else:
            finetune_with_unlabelled(options, name, setup)
        return options.workdir if is_chief(setup.strategy) and not options.dry_run else None


def _about(text: str, recipe: str) -> str:
    """Return the text of --help."""
    depends = ", which depend on the data and are those for 1,000 images of 224 pixels"
    note = "" if recipe in FINETUNE_RECIPES else depends
    names = f"Recipes: {_AUTO}, {', '.join(FINETUNE_NAMES)}. Below are the defaults of {recipe}{note}."
    return f"{inspect.cleandoc(text)}\n\n{names}"
