"""The complete workflow on real images that need no download: train, evaluate, export, verify.

    keras-vit demo --workdir runs/demo

trains a small ViT on scikit-learn's handwritten digits, evaluates it on the 360 test images, exports it as SavedModel
and TFLite, compares both with the Keras model on all test images, and writes summary.json. Minutes on two cores.
"""

import json
from collections.abc import Sequence
from typing import Any

from keras_vit import cli
from keras_vit.cli import parser
from training.options.train import DemoOptions

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
    from training.data.sources import digits
    from training.evaluation import opening
    from training.evaluation.evaluate import evaluate
    from training.evaluation.predictors import open_predictor
    from training.loop.pretrain import pretrain
    from training.options.common import DataOptions, Execution
    from training.options.evaluate import EvaluateOptions
    from training.options.train import PretrainOptions
    from training.recipes.pretrain import find_recipe

    data, recipe, execution = DataOptions("digits"), find_recipe("digits"), Execution(evaluate_every=_EVALUATE_EVERY)
    training = PretrainOptions(source=data, workdir=workdir, recipe=recipe, seed=seed, execution=execution)
    run = pretrain(training, "digits")
    evaluation = EvaluateOptions(workdir, data)
    predictor = open_predictor(opening.open_run(evaluation), evaluation.input, evaluation.devices)
    accuracy = evaluate(predictor, digits(), evaluation)["accuracy"]
    source = SourceOptions(run=str(run.path), verify_images=360)  # all test images
    task = open_task(open_run(source), source)
    served, measures = export_saved_model(task, SavedModelOptions(source, str(run.path / "saved_model")))
    files = export_tflite(task, TFLiteOptions(source, str(run.path / "tflite")))
    exports = {"SavedModel": (served, directory_bytes(served), measures)}
    exports |= {f"TFLite {name}": (path, path.stat().st_size, found) for name, (path, found) in files.items()}
    summary: dict[str, Any] = {
        "parameters": task.exported.model.count_params(),
        "test_accuracy": accuracy,
        "train_seconds": round(sum(epoch["seconds"] for epoch in run.metrics()), 1),
        "tflite": {},
    }
    rows = [("Keras model", MODEL, f"{(run.path / MODEL).stat().st_size:,}", "", f"{accuracy:.4f}")]
    for name, (path, size, found) in exports.items():
        place, difference = str(path.relative_to(run.path)), found["max_abs_diff"]
        entry = {"path": place, "bytes": size, "max_abs_diff": difference}
        rows.append((name, place, f"{size:,}", f"{difference:.2g}", f"{found['accuracy']:.4f}"))
        if name == "SavedModel":
            summary["saved_model"] = entry
        else:
            summary["tflite"][name.removeprefix("TFLite ")] = entry | {"accuracy": found["accuracy"]}
    write_text(run.path / "summary.json", json.dumps(summary, indent=2) + "\n")
    print(as_table(rows, ("artifact", "path", "bytes", "max |logit diff|", "test accuracy")))
    print(f"\nAll files are in {run.path}.")
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
