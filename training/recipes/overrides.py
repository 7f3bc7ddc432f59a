"""Recipes whose fields the command line changed."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from keras_vit import UserError
from keras_vit.cli import parser
from keras_vit.cli.parser import Given
from keras_vit.errors import Applies, refuse_without_effect
from keras_vit.images.resizing import scaled_crop
from keras_vit.models.config import ModelConfig
from training.recipes.auto import DataFacts
from training.recipes.recipe import DURATIONS, PretrainRecipe, Recipe

# Fields that must suit the patches of the model.
_SIZES = tuple(("recipe", field) for field in ("image_size", "crop_from", "local_size"))

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)
Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True)
class Request(Generic[Options, AnyRecipe]):
    """The options of a training command as they were given, and the recipe that it names."""

    options_class: type[Options]
    """A dataclass with a field `recipe`."""
    prog: str
    """The command, for messages."""
    given: Given
    choose: Callable[[DataFacts, int | None], AnyRecipe]
    """Facts of the data, steps of the run if they are known -> the named recipe."""

    def over(self, recipe: AnyRecipe) -> Options:
        """Return the options that were given, with those of a recipe as their defaults."""
        given = with_crop(self.given, recipe)
        options: Any = parser.options_from(self.options_class, given, prog=self.prog, recipe=recipe)
        return dataclasses.replace(options, recipe=overridden(options.recipe, recipe))

    def resolve(self, facts: DataFacts) -> tuple[AnyRecipe, Options]:
        """Return the named recipe for the data, with the warm-up of this run's duration, and the options over it."""
        options: Any = self.over(self.choose(facts, None))
        named = self.choose(facts, options.recipe.num_steps(facts.num_examples))
        return named, self.over(named)


def with_crop(given: Given, recipe: Recipe) -> Given:
    """Return the options that were given, with `--crop-from` for their resize and image size, unless it is given.

    It grows with the image size, so that the model sees the same part of an image as with the recipe's own.
    """
    crop_from, image_size, resize = (("recipe", field) for field in ("crop_from", "image_size", "resize"))
    if recipe.crop_from is None or crop_from in given:
        return given
    if given.get(resize) in ("crop", "pad"):
        return {**given, crop_from: None}
    if image_size not in given:
        return given
    return {**given, crop_from: scaled_crop(recipe.crop_from, max(recipe.image_size), max(given[image_size]))}


def without_model(given: Given) -> Given:
    """Return the options that were given with a checkpoint, without those that must suit the patches of its model.

    Raises UserError for those of another model.
    """
    if fields := [path[-1].replace("_", "-") for path in given if path[:2] == ("recipe", "model")]:
        raise UserError(f"The model is that of --checkpoint, so --model.{fields[0]} has no effect; leave it out.")
    return {path: value for path, value in given.items() if path not in _SIZES}


def continued(recipe: PretrainRecipe, model: ModelConfig | None, given: Given) -> PretrainRecipe:
    """Return a named recipe for going on from a checkpoint: with its model and a tenth of the learning rate.

    model: None where the file does not tell it.
    """
    if model is None:
        raise UserError(
            "The checkpoint does not tell its number of heads; give a file of transformers with its config.json."
        )
    sizes: dict[str, Any] = {path[-1]: given[path] for path in _SIZES if path in given}
    return dataclasses.replace(recipe, model=model, learning_rate=0.1 * recipe.learning_rate, **sizes)


def overridden(recipe: AnyRecipe, named: AnyRecipe) -> AnyRecipe:
    """Return a recipe from the command line, with the duration of the named recipe removed if another one is set.

    Raises UserError if two durations are set, or a field that has no effect.
    """
    schedule, by_labels = recipe.schedule, recipe.teacher is None or recipe.distillation == "hard"
    applies: list[Applies] = [
        (("lora_on",), recipe.lora > 0, "--lora"),
        (("mixup_partner",), bool(recipe.mixup or recipe.cutmix), "--mixup or --cutmix"),
        (("label_smoothing",), by_labels, "labels, which a soft teacher replaces, or --distillation hard"),
    ]
    if isinstance(recipe, PretrainRecipe):
        crops, classes = recipe.target == "self-distillation", recipe.target == "classes"
        applies += [
            (("prototypes", "head_width", "local_crops", "local_size"), crops, "--target self-distillation"),
            (("local_size",), recipe.local_crops > 0, "--local-crops of at least 1"),
            (("corruption",), not (crops or classes or recipe.target == "next-patch"), "a --target of masked patches"),
            (("decoder_width",), recipe.decoder_layers > 0, "--decoder-layers of a --target of patches"),
            (("loss",), classes, "--target classes"),
        ]
    refuse_without_effect(recipe, applies, named)
    of_decays = (("stairs", "stair"), ("linear_end", "linear"), ("timescale", "rsqrt"))
    of_schedule = [((field,), schedule.decay == decay, f"--decay {decay}") for field, decay in of_decays]
    refuse_without_effect(schedule, of_schedule, named.schedule)
    changed = [field for field in DURATIONS if getattr(recipe, field) != getattr(named, field)]
    overrides = [field for field in changed if getattr(recipe, field) is not None]
    if len(overrides) > 1:
        options = " and ".join(f"--{field} {getattr(recipe, field)}" for field in overrides)
        raise UserError(f"A run has one duration, but was given {options}; leave one out.")
    removed: dict[str, Any] = {field: None for field in DURATIONS if overrides and field not in overrides}
    return dataclasses.replace(recipe, **removed)
