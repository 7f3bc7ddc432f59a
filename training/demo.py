"""The complete workflow on real images that need no download: train, evaluate, export, verify.

    keras-vit demo --workdir runs/demo

trains a small ViT on scikit-learn's handwritten digits, evaluates it on the 360 test images, exports it as SavedModel
and TFLite, compares both with the Keras model on all test images, and writes summary.json. Minutes on two cores.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.train import DemoOptions


def demo(workdir: str, seed: int) -> dict:
    """Train, evaluate, export and verify; return the summary."""
    from export.files import directory_bytes
    from export.options import SavedModelOptions, SourceOptions, TFLiteOptions
    from export.parity import as_table
    from export.run import open_run
    from export.saved_model.export import export_saved_model
    from export.tasks import open_task
    from export.tflite.export import export_tflite
    from training.experiments.demo import Artifact, summary_rows, train_and_evaluate, write_summary

    run, accuracy = train_and_evaluate(workdir, seed)
    source = SourceOptions(run=str(run.path), verify_images=360)  # all test images
    task = open_task(open_run(source), source)
    path, measures = export_saved_model(task, SavedModelOptions(source, str(run.path / "saved_model")))
    served = Artifact(path, directory_bytes(path), measures["max_abs_diff"], measures["accuracy"])
    files = export_tflite(task, TFLiteOptions(source, str(run.path / "tflite")))
    phone: dict[str, Artifact] = {
        name: Artifact(path, path.stat().st_size, measures["max_abs_diff"], measures["accuracy"])
        for name, (path, measures) in files.items()
    }
    summary = write_summary(run, task.exported.model.count_params(), accuracy, served, phone)
    header, *rows = summary_rows(run, accuracy, served, phone)
    print(as_table(rows, header), f"\nAll files are in {run.path}.", sep="\n")
    return summary


def main(arguments: Sequence[str]) -> None:
    """`--workdir DIR`"""
    options = parser.parse(DemoOptions, arguments, prog="keras-vit demo", about=__doc__)
    cli.require_tensorflow()

    from keras_vit.files.lock import locked
    from keras_vit.files.remote import local_path
    from training.loop.signals import report_interruption

    # A second lock besides that of the training, because the exports also need the directory for themselves.
    with report_interruption(), locked(local_path(options.workdir, "workdir"), ".demo.lock"):
        demo(options.workdir, options.seed)
    models, kit = f"{options.workdir}/saved_model", f"{options.workdir}/serving"
    cli.print_next(
        [
            ("predict", "--run", options.workdir, "--serve"),
            ("inspect", "--run", options.workdir, "--output", f"{options.workdir}/inspection"),
            ("serving", "--models", models, "--name", "digits", "--output", kit),
        ]
    )


if __name__ == "__main__":
    cli.run(main)
