"""Train by the arguments of `keras-vit pretrain`, `finetune` and `study`, after checks that need no TensorFlow."""

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.errors import UserError, check_known, refuse_without_effect
from training.experiments.study_grids import STUDIES
from training.options.common import DataOptions
from training.options.train import USUAL, FinetuneOptions, PretrainOptions, StudyOptions
from training.recipes.auto import DataFacts, auto_finetune_reasons, auto_finetune_recipe, auto_reasons, auto_recipe
from training.recipes.finetune import FINETUNE_NAMES, FINETUNE_RECIPES, find_finetune_recipe
from training.recipes.overrides import Request, continued, overridden, without_model
from training.recipes.pretrain import RECIPES, find_recipe
from training.recipes.recipe import PretrainRecipe, Recipe

if TYPE_CHECKING:
    from keras_vit.run import Run
    from training.data.dataset import DataSet

_FINETUNE_DEFAULT, _AUTO = "photos-finetune", "auto"


def pretrain(arguments: Sequence[str], about: str = "") -> str | None:
    """Train from scratch; return the directory of the run, None where this process wrote none.

    about: the text of --help, to which the recipes are added.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        arguments = [_AUTO, "--help"]
    name, *rest = arguments
    if name.startswith("-"):
        raise UserError(f"keras-vit pretrain takes the name of a recipe first, such as auto, but was given {name!r}.")
    # What the recipe auto is depends on the data, so its values are not known yet.
    named, prog = _pretrain_recipe(name, DataFacts(1000, (64, 64))), f"keras-vit pretrain {name}"
    about = _about(about, name, RECIPES, 64 if name == _AUTO else None)
    given = parser.read(PretrainOptions, rest, prog=prog, about=about, usual=USUAL, recipe=named)

    from keras_vit.run import Run
    from training.checks import check_data_service, check_workdir
    from training.data.checks import check_data
    from training.loop.devices.backend import prepare_backend

    request = Request(PretrainOptions, prog, given, functools.partial(_pretrain_recipe, name))
    if (checkpoint := given.get(("checkpoint",))) is None:
        options = request.over(named)
    else:  # the sizes are those of its model, which is not known yet
        Run.open(checkpoint)
        options = dataclasses.replace(request, given=without_model(given)).over(named)
    if options.chips is not None:
        from training.loop.dry_run import print_budget

        print_budget(options, options.chips, name, named)
        return None
    check_data(options.source)
    check_data_service(options)
    check_workdir(options, "pretrain", name, is_final=name in RECIPES and checkpoint is None)
    prepare_backend(options)
    return _pretrain(request, name, options, named)


def _pretrain_recipe(name: str, facts: DataFacts, steps: int | None = None) -> PretrainRecipe:
    return auto_recipe(facts, steps) if name == _AUTO else find_recipe(name, [_AUTO])


def _pretrain(request: Request, name: str, options: PretrainOptions, named: PretrainRecipe) -> str | None:
    from keras_vit.checkpoints.describe import describe
    from keras_vit.run import Run
    from training.data.dataset import typical_image
    from training.features.nearest_neighbors import WatchFeatures
    from training.loop.callbacks import report_interruption
    from training.loop.devices.strategies import is_chief
    from training.loop.plan import open_setup
    from training.loop.pretrain import pretrain as run

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
        run(options, name, setup, callbacks)
        return options.workdir if is_chief(setup.strategy) and not options.dry_run else None


def finetune(arguments: Sequence[str], about: str = "", source: "DataSet | None" = None) -> str | None:
    """Fine-tune a checkpoint; return the directory of the run, None where this process wrote none.

    about: the text of --help, to which the recipes are added. source: what `--data` names, if it is open already.
    """
    name, rest = parser.named(arguments, "--recipe", _FINETUNE_DEFAULT)
    # auto and the HyperRules depend on the data, so their values are not known yet.
    recipe, prog = _finetune_recipe(name, DataFacts(1000, (224, 224))), f"keras-vit finetune --recipe {name}"
    about = _about(about, name, FINETUNE_NAMES, None if name in FINETUNE_RECIPES else 224)
    given = parser.read(FinetuneOptions, rest, prog=prog, about=about, usual=USUAL, recipe=recipe)
    request = Request(FinetuneOptions, prog, given, functools.partial(_finetune_recipe, name))
    options = request.over(recipe)

    from keras_vit.models.named_models import MODELS
    from keras_vit.run import Run
    from training.checks import check_data_service, check_new_workdir, check_outside, check_workdir
    from training.data.checks import check_data, unlabelled_path
    from training.loop.devices.backend import prepare_backend

    check_data(options.source)
    check_data_service(options)
    if options.unlabelled is None:
        check_workdir(options, "finetune", name, is_final=name in FINETUNE_RECIPES)
    else:  # the runs beside it are checked where they begin
        unlabelled_path(options.unlabelled)
        check_outside(options.workdir, options.source.data)
        check_new_workdir(options.workdir)
    if options.model is not None:
        check_known("official model", options.model, MODELS)
    start = options.start  # which not every model has
    if options.model is None:
        Run.open(start)
    prepare_backend(options)
    return _finetune(request, name, options, source)


def _finetune_recipe(name: str, facts: DataFacts, steps: int | None = None) -> Recipe:
    if name == _AUTO:
        return auto_finetune_recipe(facts, steps)
    return find_finetune_recipe(name, facts.num_examples, facts.image_size)


def _finetune(request: Request, name: str, options: FinetuneOptions, source: "DataSet | None") -> str | None:
    from keras_vit.run import Run
    from training.data.dataset import typical_image
    from training.experiments.few_labels import finetune_with_unlabelled
    from training.features.linear_models import note_split
    from training.loop.callbacks import report_interruption
    from training.loop.devices.strategies import is_chief, several_workers
    from training.loop.finetune import finetune as run
    from training.loop.finetune import patch_and_side
    from training.loop.plan import open_setup

    with report_interruption():
        setup = open_setup(options, source=source)
        if options.unlabelled is not None:
            is_alone = not several_workers(setup.strategy)
            refuse_without_effect(options, [(("unlabelled",), is_alone, "one training machine")])
        if name not in FINETUNE_RECIPES:
            train, sizes = setup.source.train, patch_and_side(options) if name == _AUTO else ()
            facts = DataFacts(train.num_examples, *typical_image(train), *sizes)
            named, options = request.resolve(facts)
            if name == _AUTO:
                for reason in auto_finetune_reasons(facts, named, options.recipe):
                    print(reason)
        (run if options.unlabelled is None else finetune_with_unlabelled)(options, name, setup)
        if not is_chief(setup.strategy) or options.dry_run:
            return None
        if options.model is None and setup.strategy.num_replicas_in_sync == 1:
            start = Run.open(options.start, image_size=options.recipe.image_size, num_heads=options.num_heads)
            note_split(Run.at(options.directory), setup.source, start)
        return options.workdir


def study(arguments: Sequence[str], about: str = "") -> None:
    """Run the study that the first argument names. about: the text of --help."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        name, rest = "data-size", ["--help"]
    check_known("study", name, STUDIES)
    recipe_name, rest = parser.named(rest, "--recipe", "study-small")
    named, prog = find_recipe(recipe_name), f"keras-vit study {name} --recipe {recipe_name}"
    options = parser.parse(StudyOptions, rest, prog=prog, about=about, usual=USUAL, recipe=named)
    options = dataclasses.replace(options, recipe=overridden(options.recipe, named))

    from training.checks import check_outside
    from training.data.checks import check_data

    check_data(options.source)
    check_outside(options.workdir, options.source.data)
    cli.require_tensorflow()

    from training.experiments import study_runs
    from training.loop.callbacks import report_interruption

    with report_interruption():
        study_runs.study(name, options)


def train_on_digits(workdir: str, seed: int) -> tuple["Run", float]:
    """Train the demo's model on handwritten digits and evaluate it; return the run and its test accuracy."""
    # Ten epochs: the run is so short that evaluating each epoch would take a noticeable part of its time.
    pretrain(["digits", "--data", "digits", "--workdir", workdir, "--seed", str(seed), "--evaluate-every", "440"])

    from training.checks import open_measured
    from training.evaluation.evaluate import evaluate_run
    from training.options.evaluate import EvaluateOptions

    options = EvaluateOptions(workdir, DataOptions("digits"))
    run = open_measured(options)
    return run, evaluate_run(run, options)[1]["accuracy"]


def _about(text: str, recipe: str, names: Iterable[str], side: int | None) -> str:
    """Return the text of --help. side: of the images that the values of the recipe are shown for, if it needs any."""
    note = f", which depend on the data and are those for 1,000 images of {side} pixels" if side else ""
    recipes = f"Recipes: {_AUTO}, {', '.join(names)}. Below are the defaults of {recipe}{note}."
    return f"{inspect.cleandoc(text)}\n\n{recipes}"
