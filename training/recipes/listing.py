"""The recipes as lines of text, for `keras-vit recipes`."""

from keras_vit.published import fitting
from training.recipes.finetune import FINETUNE_NAMES, FINETUNE_RECIPES
from training.recipes.pretrain import RECIPES
from training.recipes.recipe import DURATIONS, Recipe


def recipe_lines(wildcard: str) -> list[str]:
    """Return a line for each recipe whose name fits a wildcard or a part of a name: command, size, duration, batch."""
    lines = {"auto": f"{'auto':32} pretrain, finetune  model, size, epochs and augmentation follow from the data"}
    lines |= {name: _line(name, "pretrain", recipe) for name, recipe in RECIPES.items()}
    for name in FINETUNE_NAMES:
        if name in FINETUNE_RECIPES:
            lines[name] = _line(name, "finetune", FINETUNE_RECIPES[name])
        else:
            lines[name] = f"{name:32} finetune  size and steps follow from the data"
    return [lines[name] for name in fitting(lines, wildcard)]


def _line(name: str, command: str, recipe: Recipe) -> str:
    height, width = recipe.image_size
    unit = next(field for field in DURATIONS if getattr(recipe, field) is not None)
    duration = f"{getattr(recipe, unit):,} {unit}"
    return (
        f"{name:32} {command}  {f'{height}x{width} pixels':14} {duration:18} batch {recipe.batch_size:5,}  "
        f"{recipe.optimizer} {recipe.learning_rate:g}"
    )
