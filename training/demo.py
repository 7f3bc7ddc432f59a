"""The complete workflow on real images that need no download: train, evaluate, export, verify.

    keras-vit demo --workdir runs/demo

trains a small ViT on scikit-learn's handwritten digits, evaluates it on the 360 test images, exports it as SavedModel
and TFLite, compares both with the Keras model on all test images, and writes summary.json. Minutes on two cores.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keras_vit import cli
from keras_vit.cli import parser
from training.options.train import DemoOptions

if TYPE_CHECKING:
    from keras_vit.run import Run

# Ten epochs: the run is so short that evaluating each epoch would take a noticeable part of its time.
_EVALUATE_EVERY = 440


def demo(workdir: str, seed: int) -> dict[str, Any]:
    """Train, evaluate, export and verify; write summary.json, whose paths are relative to it, and return it."""
    from export.files import directory_bytes
    from export.options import SavedModelOptions, SourceOptions, TFLiteOptions
    from export.parity import as_table
    from export.run import open_run
    from export.saved_model.export import export_saved_model
    from export.tasks import open_task
    from export.tflite.export import export_tflite
    from keras_vit.files.atomic import write_text
    from keras_vit.files.keras_model import MODEL

    run, accuracy = _trained(workdir, seed)
    source = SourceOptions(run=str(run.path), verify_images=360)  # all test images
    task = open_task(open_run(source), source)
    exports = {"SavedModel": export_saved_model(task, SavedModelOptions(source, str(run.path / "saved_model")))}
    files = export_tflite(task, TFLiteOptions(source, str(run.path / "tflite")))
    exports |= {f"TFLite {name}": exported for name, exported in files.items()}
    summary: dict[str, Any] = {
        "parameters": task.exported.model.count_params(),
        "test_accuracy": accuracy,
        "train_seconds": round(sum(epoch["seconds"] for epoch in run.metrics()), 1),
        "tflite": {},
    }
    rows = [("Keras model", MODEL, f"{(run.path / MODEL).stat().st_size:,}", "", f"{accuracy:.4f}")]
    for name, (path, found) in exports.items():
        place, difference = str(path.relative_to(run.path)), found["max_abs_diff"]
        size = directory_bytes(path) if path.is_dir() else path.stat().st_size
        entry = {"path": place, "bytes": size, "max_abs_diff": difference}
        rows.append((name, place, f"{size:,}", f"{difference:.2g}", f"{found['accuracy']:.4f}"))
        if name == "SavedModel":
            summary["saved_model"] = entry
        else:
            summary["tflite"][name.removeprefix("TFLite ")] = entry | {"accuracy": found["accuracy"]}
    write_text(run.path / "summary.json", json.dumps(summary, indent=2) + "\n")
    header = ("artifact", "path", "bytes", "max |logit diff|", "test accuracy")
    print(as_table(rows, header), f"\nAll files are in {run.path}.", sep="\n")
    return summary


def _trained(workdir: str, seed: int) -> tuple["Run", float]:
    """Train on the digits, evaluate, and return the run and its test accuracy."""
    from training.checks import open_measured
    from training.data.sources import digits
    from training.evaluation.evaluate import evaluate
    from training.evaluation.predictors import open_predictor
    from training.loop.pretrain import pretrain
    from training.options.common import DataOptions, Execution
    from training.options.evaluate import EvaluateOptions
    from training.options.train import PretrainOptions
    from training.recipes.pretrain import find_recipe

    data, recipe, execution = DataOptions("digits"), find_recipe("digits"), Execution(evaluate_every=_EVALUATE_EVERY)
    options = PretrainOptions(source=data, workdir=workdir, recipe=recipe, seed=seed, execution=execution)
    run, evaluation = pretrain(options, "digits"), EvaluateOptions(workdir, data)
    predictor = open_predictor(open_measured(evaluation), evaluation.input, evaluation.devices)
    return run, evaluate(predictor, digits(), evaluation)["accuracy"]


def main(arguments: Sequence[str]) -> None:
    """`--workdir DIR`"""
    options = parser.parse(DemoOptions, arguments, prog="keras-vit demo", about=__doc__)
    cli.require_tensorflow()

    from keras_vit.files.atomic import locked
    from keras_vit.files.remote import local_path
    from training.loop.callbacks import report_interruption

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
