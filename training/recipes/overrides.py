"""Recipes whose fields the command line changed."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

from keras_vit import UserError
from keras_vit.errors import Applies, refuse_without_effect
from keras_vit.images.geometry import scaled_crop
from training.recipes.recipe import DURATIONS, PretrainRecipe, Recipe
from training.recipes.schedules import Schedule

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def with_crop(arguments: Sequence[str], recipe: Recipe) -> list[str]:
    """Return the arguments of a command with `--crop-from` for the resize and the image size that they hold.

    It grows with the image size, so that the model sees the same part of an image as with the recipe's own; crop and
    pad have none. Nothing is added where they have one, or where the recipe or the arguments have none to grow.
    """
    if recipe.crop_from is None or _value(arguments, "--crop-from") is not None:
        return [*arguments]
    if _value(arguments, "--resize") in ("crop", "pad"):
        return [*arguments, "--crop-from", "None"]
    size = _image_size(arguments)
    if size is None or max(size) == 0:
        return [*arguments]
    return [*arguments, "--crop-from", str(scaled_crop(recipe.crop_from, max(recipe.image_size), max(size)))]


def _value(arguments: Sequence[str], name: str) -> str | None:
    """What stands behind an option or its "="; None if there is no such option."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        option, _, value = argument.partition("=")
        if option.replace("_", "-") == name:
            return value or following
    return None


def _image_size(arguments: Sequence[str]) -> tuple[int, int] | None:
    """The size behind `--image-size`, one number for a square or two; None if there is none, or anything else."""
    for index, argument in enumerate(arguments):
        option, _, value = argument.replace("_", "-").partition("=")
        if option == "--image-size":
            found = [value, *arguments[index + 1 : index + 2]] if value else arguments[index + 1 : index + 3]
            sides = [int(number) for number in itertools.takewhile(str.isdecimal, found)]
            return (sides[0], sides[-1]) if sides else None
    return None


def overridden(recipe: AnyRecipe, named: AnyRecipe) -> AnyRecipe:
    """Return a recipe from the command line, with the duration of the named recipe removed if another one is set.

    Raises UserError if two durations are set, or a field that has no effect.
    """
    refuse_without_effect(recipe, _applies(recipe), named)
    refuse_without_effect(recipe.schedule, _applies_to_schedule(recipe.schedule), named.schedule)
    if isinstance(recipe, PretrainRecipe):
        refuse_without_effect(recipe, _applies_from_scratch(recipe), named)
    changed = [field for field in DURATIONS if getattr(recipe, field) != getattr(named, field)]
    overrides = [field for field in changed if getattr(recipe, field) is not None]
    if len(overrides) > 1:
        options = " and ".join(f"--{field} {getattr(recipe, field)}" for field in overrides)
        raise UserError(f"A run has one duration, but was given {options}; leave one out.")
    removed: dict[str, Any] = {field: None for field in DURATIONS if overrides and field not in overrides}
    return dataclasses.replace(recipe, **removed)


def _applies(recipe: Recipe) -> list[Applies]:
    by_labels = recipe.teacher is None or recipe.distillation == "hard"
    return [
        (("lora_on",), recipe.lora > 0, "--lora"),
        (("mixup_partner",), bool(recipe.mixup or recipe.cutmix), "--mixup or --cutmix"),
        (("label_smoothing",), by_labels, "labels, which a soft teacher replaces, or --distillation hard"),
    ]


def _applies_to_schedule(schedule: Schedule) -> list[Applies]:
    fields = {"stair": "stairs", "linear": "linear_end", "rsqrt": "timescale"}
    return [((field,), schedule.decay == decay, f"--decay {decay}") for decay, field in fields.items()]


def _applies_from_scratch(recipe: PretrainRecipe) -> list[Applies]:
    crops = recipe.target == "self-distillation"
    masked = recipe.target not in ("classes", "self-distillation")
    return [
        (("prototypes", "head_width", "local_crops", "local_size"), crops, "--target self-distillation"),
        (("local_size",), recipe.local_crops > 0, "--local-crops of at least 1"),
        (("corruption",), masked, "a --target of patches"),
        (("decoder_width",), recipe.decoder_layers > 0, "--decoder-layers of a --target of patches"),
        (("loss",), recipe.target == "classes", "--target classes"),
    ]
