"""Options of the demo and of the commands that run the papers' experiments."""

import dataclasses
from typing import Annotated

from keras_vit.cli.options import Aliases, Count, Seed
from training.options.common import DataOptions, Execution, StrategyOptions
from training.recipes.finetune import FINETUNE_RECIPES
from training.recipes.recipe import PretrainRecipe, Recipe
from training.recipes.vtab_tasks import RECIPE_NAME, TASKS


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """Train, evaluate, export and verify a small ViT on handwritten digits."""

    workdir: str = "runs/demo"
    """Run directory; the exports and summary.json are written there, too."""
    seed: Seed = 0
    """Seed of initial weights, data order and augmentation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """A study; the fields of its base recipe are options."""

    source: DataOptions
    workdir: str
    """Directory of the report, and of the run directories in runs/."""
    recipe: PretrainRecipe
    seeds: Count = 3
    """Runs of each setting, for the confidence intervals."""
    shots: Count = 5
    """Images per class for the few-shot accuracy."""
    train_images: tuple[Count, ...] | None = None
    """Only for data-size and small-data: numbers of training images; default 1, 10 and 100 % of the training split."""
    jobs: Count | None = None
    """Runs in parallel; default one per core, at most 8, or one if there is a GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VtabOptions:
    """Fine-tune a checkpoint to the tasks of VTAB-1k."""

    checkpoint: Annotated[str, Aliases(("--run",))]
    """As for training.finetune: a run, a file, a folder, an address, or an official name."""
    workdir: str
    """Directory of the runs and the report; the same command continues there."""
    data_dir: str | None = None
    """Directory of prepared TFDS data sets; default TFDS' own."""
    tasks: tuple[str, ...] = tuple(task.name for task in TASKS)
    """Which of the 19 tasks to run."""
    learning_rates: tuple[float, ...] = (0.01,)
    """Peak learning rates to choose from."""
    steps: tuple[int, ...] = (2500,)
    """Training steps to choose from."""
    warmup_steps: int = 0
    """Steps of the warm-up, included in the training steps."""
    batch_size: int = 512
    """Images per step."""
    image_size: tuple[int, int] = (384, 384)
    """Height and width of the model's input in pixels."""
    num_heads: int | None = None
    """Attention heads, if the checkpoint does not specify them."""
    seed: Seed = 0
    """Seed of data order, augmentation and dropout."""
    devices: StrategyOptions = dataclasses.field(default_factory=StrategyOptions)
    execution: Execution = dataclasses.field(default_factory=lambda: Execution(checkpoint_every=500))

    def recipe(self) -> Recipe:
        """Return the recipe of all runs, before its learning rate and steps are chosen."""
        named = FINETUNE_RECIPES[RECIPE_NAME]
        schedule = dataclasses.replace(named.schedule, warmup_steps=self.warmup_steps)
        return dataclasses.replace(named, image_size=self.image_size, batch_size=self.batch_size, schedule=schedule)
