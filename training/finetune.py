"""Fine-tune a model: any published checkpoint, or a run of this program, at any resolution.

    keras-vit finetune --checkpoint augreg:B_16 --data folder:pictures --workdir runs/pictures

The new head is initialized to zeros; position embeddings are resized to the new grid. --recipe accepts one of the
recipes below, whose fields are options. The same command continues an interrupted run.
"""

from collections.abc import Sequence

from keras_vit import cli
from training.experiments.by_recipe import finetune


def main(arguments: Sequence[str]) -> None:
    """`--checkpoint FILE --data … --workdir … [--recipe NAME]`, and any field of the recipe."""
    if workdir := finetune(arguments, __doc__ or ""):
        from keras_vit.run import Run

        cli.print_next(Run.at(workdir).next_commands("train"))


if __name__ == "__main__":
    cli.run(main)
