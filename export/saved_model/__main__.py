"""Exports a model as a SavedModel for TF Serving, and verifies it against the Keras model.

    keras-vit saved-model --run runs/demo --output served

Writes the next version, served/<version>/, with the signatures of `signatures.py`, assets/labels.txt, warm-up requests,
a model card (README.md) and the verification report (report.md, report.json, report.png). With --embeddings, which
also works for a model without a head, its signatures return embeddings instead.
"""

from collections.abc import Sequence

from export.options import SavedModelOptions
from keras_vit import cli
from keras_vit.cli import parser


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR`"""
    options = parser.parse(SavedModelOptions, arguments, prog="keras-vit saved-model", about=__doc__)

    from export.run import open_for_export

    run = open_for_export(options)

    from export.saved_model.export import export_saved_model, summary
    from export.tasks import Classification, open_task

    task = open_task(run, options.source, options.embeddings)
    path, measures = export_saved_model(task, options)
    print(summary(task, path, measures))
    evaluation = ("evaluate", "--run", str(path), *run.data_options, "--output", f"{path.parent}-report")
    is_evaluated = run.data_options and isinstance(task, Classification)
    cli.print_next([options.kit_command(), *([evaluation] if is_evaluated else [])])


if __name__ == "__main__":
    cli.run(main)
