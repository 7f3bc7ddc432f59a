"""Train a model from scratch by a named recipe.

    python -m training.pretrain mnist-notes --data tfds:mnist --workdir runs/mnist-notes

about 97 % on the test images of MNIST. The same command continues an interrupted run after its last finished epoch.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated, Literal

import keras
import tensorflow as tf
import tyro

import keras_vit
from keras_vit import Preprocessing, UserError, cli
from keras_vit.run_directory import SAMPLES
from training.data import save_samples
from training.fit import total_steps, train
from training.recipes import RECIPES, Recipe, find_recipe
from training.run import Run
from training.sources import DataArguments, open_source


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a model from scratch by a recipe, whose fields are options."""

    source: Annotated[DataArguments, tyro.conf.arg(name="")]
    workdir: str
    """Run directory: new, or that of the same command, which then continues."""
    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    seed: int = 0
    """Seed of initial weights, order and augmentation."""
    deterministic: bool = False
    """Repeat bit for bit on a CPU, some per cent slower."""
    strategy: Literal["auto", "single"] = "auto"
    """Where to compute; both are one device, the first GPU where there is one."""


def pretrain(arguments: Arguments, recipe_name: str) -> Run:
    """Train a model and return its run."""
    if "://" in arguments.workdir or not arguments.workdir.isprintable():
        raise UserError(
            "--workdir takes a directory of this machine, in printable characters, "
            f"but was given {arguments.workdir!r}; give one such as runs/{recipe_name}."
        )
    if not 0 <= arguments.seed < 2**32:
        raise UserError(
            f"The seed must be a number from 0 to {2**32 - 1}, but is {arguments.seed}; give --seed 0 or so."
        )
    recipe, run = arguments.recipe, Run(pathlib.Path(arguments.workdir))
    preprocessing = Preprocessing(recipe.image_size, recipe.channels, recipe.resize)
    recipe.model.grid(preprocessing.image_size)
    source = open_source(arguments.source)
    num_steps = total_steps(recipe, source)

    settings = dataclasses.asdict(arguments)
    for field in ("workdir", "strategy"):  # where, not what
        settings.pop(field)
    images = {"train": source.train.num_examples, "evaluation": source.evaluation.num_examples}
    run.start({"command": "pretrain", "recipe_name": recipe_name, "images": images, **settings}, source.labels)
    if run.model_file.is_file():
        print(f"{run.path} is finished: nothing to do.")
        return run

    keras.utils.set_random_seed(arguments.seed)
    if arguments.deterministic:
        tf.config.experimental.enable_op_determinism()
    model = keras_vit.build(recipe.model, preprocessing=preprocessing, num_classes=len(source.labels), name="vit")
    print(
        f"{recipe_name}: {model.count_params():,} parameters, {source.train.num_examples:,} training images of "
        f"{len(source.labels)} classes, {source.evaluation.num_examples:,} to evaluate on, {num_steps:,} steps of "
        f"{recipe.batch_size}."
    )
    save_samples(source.evaluation, preprocessing, run.path / SAMPLES)  # first: with its model a run is finished
    train(model, recipe, source, run, seed=arguments.seed)
    print(f"Trained: accuracy {run.metrics()[-1]['val_accuracy']:.4f} on the evaluation images; see {run.path}.")
    return run


def main(arguments: Sequence[str]) -> None:
    """`RECIPE --data … --workdir …`, and any field of the recipe."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m training.pretrain RECIPE --data DATA --workdir DIR [OPTIONS]\n\n{__doc__}")
        print(f"Recipes: {', '.join(RECIPES)}. RECIPE --help lists all options with their values.")
        return
    if arguments[0].startswith("-"):
        raise UserError(f"The first argument must be a recipe, one of {', '.join(RECIPES)}, but is {arguments[0]!r}.")
    recipe = find_recipe(arguments[0])
    parsed = cli.parse(
        Arguments,
        arguments[1:],
        prog=f"python -m training.pretrain {arguments[0]}",
        default=Arguments(DataArguments(tyro.MISSING), tyro.MISSING, recipe),
    )
    pretrain(parsed, arguments[0])


if __name__ == "__main__":
    cli.run(main)
