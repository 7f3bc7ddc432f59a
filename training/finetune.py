"""Train a model further on other images: any published checkpoint, or a run of ours, at any resolution.

    python -m training.finetune --checkpoint augreg:B_16 --data folder:pictures --workdir runs/pictures

The head is new, of zeros; position embeddings are resampled to the new grid. --recipe takes one of the recipes below,
whose fields are options; the same command continues an interrupted run.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated

import keras
import tyro

import keras_vit
from keras_vit import MODELS, UserError, ViTConfig, cli, run_directory
from keras_vit.errors import nearest
from keras_vit.finding import find_checkpoint
from training.command import Setting, TrainingArguments, continued_later, open_setting, run_training, tell_plan
from training.examples import typical_size
from training.finetune_recipes import FINETUNE_NAMES, FINETUNE_RECIPES, find_finetune_recipe
from training.fit import rebuilt
from training.recipe import Recipe, with_given_duration
from training.run import Run
from training.sources import DataArguments

_DEFAULT_RECIPE = "photos-finetune"
# Models whose ImageNet-21k checkpoint is among AugReg's, under a name of its own.
_AUGREG_NAMES = {
    "ViT-Ti_16": "Ti_16",
    "ViT-S_16": "S_16",
    "ViT-S_32": "S_32",
    "R+ViT-Ti_16": "R_Ti_16",
    "R26+ViT-S_32": "R26_S_32",
}


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


def finetune(arguments: Arguments, recipe_name: str, setting: Setting) -> Run:
    """Train a checkpoint further and return its run, or tell the plan of it."""
    recipe = arguments.recipe
    path = _checkpoint(arguments)

    def make_model(num_classes: int) -> keras.Model:
        model = _loaded(path, arguments, num_classes)
        known = keras_vit.preprocessing_of(model)
        config = keras_vit.config_of(model)
        rates = {"dropout_rate": arguments.dropout_rate, "stochastic_depth_rate": arguments.stochastic_depth_rate}
        if isinstance(config, ViTConfig):
            config = dataclasses.replace(config, **rates)
        elif any(rates.values()):
            raise UserError("A ResNet has no dropout; leave --dropout-rate and --stochastic-depth-rate out.")
        return rebuilt(model, config, recipe.preprocessing(known.channels, known.value_range))

    if arguments.dry_run:
        model = make_model(len(setting.source.labels))
        channels = keras_vit.preprocessing_of(model).channels
        tell_plan(arguments, recipe, setting, keras_vit.config_of(model), channels, recipe_name)
        return Run(pathlib.Path(arguments.workdir))
    return run_training(arguments, recipe, setting, make_model, command="finetune", recipe_name=recipe_name)


def _checkpoint(arguments: Arguments) -> pathlib.Path:
    """The local path of what to start from."""
    if (arguments.checkpoint is None) == (arguments.model is None):
        raise UserError("Give either --checkpoint, a file, folder, address or name, or --model, an official model.")
    return find_checkpoint(arguments.checkpoint or official_checkpoint(arguments.model))


def official_checkpoint(model: str) -> str:
    """The name of the ImageNet-21k checkpoint of an official model."""
    if model not in MODELS:
        raise UserError(f"There is no official model {model!r}; the nearest names are {nearest(model, MODELS)}.")
    if model.startswith("BiT-"):
        return f"bit:BiT-M-{model.removeprefix('BiT-')}"
    return f"augreg:{_AUGREG_NAMES[model]}" if model in _AUGREG_NAMES else f"imagenet21k/{model}"


def _loaded(path: pathlib.Path, arguments: Arguments, num_classes: int) -> keras.Model:
    """The checkpoint's model for the recipe's image size, with a new head."""
    changes = {"image_size": arguments.recipe.image_size, "num_classes": num_classes, "channels": arguments.channels}
    if path.suffix != ".keras" and not (path / run_directory.MODEL).is_file():
        return keras_vit.from_checkpoint(path, num_heads=arguments.num_heads, **changes)
    if arguments.num_heads is not None:
        raise UserError("A model of ours tells its number of heads; leave --num-heads out.")
    return keras_vit.adapt(run_directory.load_model(path), **changes)


def main(arguments: Sequence[str]) -> None:
    """`--checkpoint FILE --data … --workdir … [--recipe NAME]`, and any field of the recipe."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m training.finetune --checkpoint FILE --data DATA --workdir DIR [OPTIONS]\n\n{__doc__}")
        print(f"Recipes: {', '.join(FINETUNE_NAMES)}; {_DEFAULT_RECIPE} where none is given.")
        print("--recipe NAME --help lists all options with their values.")
        return
    name, rest = cli.named(arguments, "--recipe", _DEFAULT_RECIPE)
    with continued_later():
        _parse_and_finetune(name, rest)


def _parse_and_finetune(name: str, rest: list[str]) -> Run:
    def parse(recipe: Recipe) -> Arguments:
        parsed = cli.parse(
            Arguments,
            rest,
            prog=f"python -m training.finetune --recipe {name}",
            default=Arguments(source=DataArguments(tyro.MISSING), workdir=tyro.MISSING, recipe=recipe),
        )
        return dataclasses.replace(parsed, recipe=with_given_duration(parsed.recipe, recipe))

    # The HyperRules look at the data before their values are known; for all other recipes this is the recipe.
    arguments = parse(FINETUNE_RECIPES.get(name) or find_finetune_recipe(name, 1, (224, 224)))
    setting = open_setting(arguments)
    train = setting.source.train
    return finetune(parse(find_finetune_recipe(name, train.num_examples, typical_size(train))), name, setting)


if __name__ == "__main__":
    cli.run(main)
