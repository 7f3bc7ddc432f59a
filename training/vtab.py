"""VTAB-1k: a checkpoint fine-tuned to each of 19 tasks on 1,000 images, and the mean of its accuracies.

    python -m training.vtab --checkpoint augreg:B_16 --workdir runs/vtab --data-dir tfds

runs the tasks that are prepared in TFDS' directory and says how to prepare the others. Each setting is a run of its own
on 800 images, the best of them on the 200 of val200 is trained again on all 1,000, and measured on the test split. The
defaults are the one setting of "An Image is Worth 16x16 Words" (arXiv 2010.11929) Table 4, where nothing is chosen;
"How to train your ViT" (2106.10270) has --learning-rates 0.001 0.003 0.01 0.03 --steps 500 2500. The same command
continues.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from keras_vit import cli
from training.arguments import Execution, StrategyArguments
from training.vtab_tasks import TASKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Fine-tune a checkpoint to the tasks of VTAB-1k."""

    checkpoint: str
    """Whatever training.finetune takes: a run, a file, a folder, an address, or an official name."""
    workdir: str
    """Directory of the runs and of the report; that of the same command, which then continues."""
    data_dir: str | None = None
    """Directory of prepared TFDS data sets; default TFDS' own."""
    tasks: tuple[str, ...] = tuple(task.name for task in TASKS)
    """Which of the 19."""
    learning_rates: tuple[float, ...] = (0.01,)
    """Highest learning rates to choose from."""
    steps: tuple[int, ...] = (2500,)
    """Training steps to choose from."""
    warmup_steps: int = 0
    """Of them, steps in which the learning rate rises."""
    batch_size: int = 512
    """Images per step."""
    image_size: tuple[int, int] = (384, 384)
    """Height and width of the model's input in pixels."""
    num_heads: int | None = None
    """Attention heads, where the file does not tell them."""
    seed: int = 0
    """Of order, augmentation and dropout."""
    place: Annotated[StrategyArguments, tyro.conf.arg(name="")] = dataclasses.field(default_factory=StrategyArguments)
    execution: Annotated[Execution, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: Execution(checkpoint_every=500)
    )


def main(arguments: Sequence[str]) -> None:
    """`--checkpoint FILE --workdir DIR`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m training.vtab")
    cli.require_tensorflow()

    from training.command import continued_later
    from training.vtab_runs import vtab

    with continued_later():
        vtab(parsed)


if __name__ == "__main__":
    cli.run(main)
