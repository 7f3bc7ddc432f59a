"""Exports a model as a SavedModel for TF Serving, and verifies it against the Keras model.

    keras-vit saved-model --run runs/demo --output served

Writes the next version, served/<version>/, with the signatures of `signatures.py`, assets/labels.txt, warm-up requests,
a model card (README.md) and the verification report (report.md, report.json, report.png). With --embeddings, also of a
model without a head, it has the signatures of `embeddings.py` instead.
"""

from collections.abc import Sequence

from export.options import SavedModelOptions
from keras_vit import cli
from keras_vit.cli import parser


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR`"""
    options = parser.parse(SavedModelOptions, arguments, prog="keras-vit saved-model", about=__doc__)

    from export.run import export_folder, open_run

    run = open_run(options.source)
    output = export_folder(options.output)
    cli.require_tensorflow()

    from export.saved_model.export import export_saved_model, summary
    from export.saved_model.task import export_task
    from export.source import open_model
    from export.task_of_run import task_of_run

    if (task := task_of_run(run, options.source, options.embeddings)) is not None:
        path, measures = export_task(task, output)
        print(f"{path}: {task.sentence(measures)}; see {path / 'report.md'}.")
        cli.print_next([options.kit_command()])
        return
    path, found = export_saved_model(open_model(run, options.source), options)
    print(summary(path, found))
    evaluation = ("evaluate", "--run", str(path), *run.data_options, "--output", f"{path.parent}-report")
    cli.print_next([options.kit_command(), *([evaluation] if run.data_options else [])])


if __name__ == "__main__":
    cli.run(main)
