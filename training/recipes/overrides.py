"""Recipes whose fields the command line changed."""

import dataclasses
from typing import Any, TypeVar

from keras_vit import UserError
from keras_vit.errors import refuse_without_effect
from training.recipes.recipe import DURATIONS, Recipe

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def overridden(recipe: AnyRecipe, named: AnyRecipe) -> AnyRecipe:
    """Return a recipe from the command line, with the duration of the named recipe removed if another one is set.

    Raises UserError if two durations are set, or a field that has no effect.
    """
    refuse_without_effect(recipe, _applies(recipe), named)
    changed = [field for field in DURATIONS if getattr(recipe, field) != getattr(named, field)]
    overrides = [field for field in changed if getattr(recipe, field) is not None]
    if len(overrides) > 1:
        options = " and ".join(f"--{field} {getattr(recipe, field)}" for field in overrides)
        raise UserError(f"A run has one duration, but was given {options}; leave one out.")
    removed: dict[str, Any] = {field: None for field in DURATIONS if overrides and field not in overrides}
    return dataclasses.replace(recipe, **removed)


def _applies(recipe: Recipe) -> list[tuple[tuple[str, ...], bool, str]]:
    """Names of fields, whether they apply, and what they apply to."""
    by_labels = recipe.teacher is None or recipe.distillation == "hard"
    return [(("label_smoothing",), by_labels, "labels, which a soft teacher replaces, or --distillation hard")]
