"""The whole way on real images that need no download: train, evaluate, export, verify.

    python -m training.demo --workdir runs/demo

trains a small ViT on scikit-learn's handwritten digits, measures it on the 360 test images, exports it as SavedModel
and TFLite, compares both with the Keras model on all test images, and writes summary.json. Minutes on two cores.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keras_vit import cli
from training.options.common import DataOptions, Execution
from training.options.evaluate import EvaluateOptions
from training.options.train import PretrainOptions
from training.recipes.pretrain import find_recipe

if TYPE_CHECKING:
    from export.parity import Parity

_FORMATS = ("float32", "int8-dynamic")
# Ten epochs: so short a run would spend a part of its time on the evaluations.
_EVALUATE_EVERY = 440


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train, evaluate, export and verify a small ViT on handwritten digits."""

    workdir: str = "runs/demo"
    """Run directory; the exports and summary.json are put there too."""
    seed: int = 0
    """Seed of initial weights, order and augmentation."""


def demo(arguments: Arguments) -> dict:
    """Walk the whole way and return the summary."""
    from export.saved_model.export import directory_bytes, export_saved_model
    from export.tflite.export import export_tflite
    from keras_vit import run_directory
    from training.evaluation.evaluate import evaluate
    from training.loop.pretrain import pretrain
    from training.loop.run import write_text

    data = DataOptions("digits")
    run = pretrain(
        PretrainOptions(
            source=data,
            workdir=arguments.workdir,
            recipe=find_recipe("digits"),
            seed=arguments.seed,
            execution=Execution(evaluate_every=_EVALUATE_EVERY),
        ),
        "digits",
    )
    metrics = evaluate(EvaluateOptions(arguments.workdir, data))

    model, labels = run_directory.load(run.path)
    samples = run_directory.Samples.load(run_directory.find(run.path, run_directory.SAMPLES))
    served, served_parity = export_saved_model(model, labels, samples, run.path / "saved_model")
    files = export_tflite(model, labels, samples, run.path / "tflite", _FORMATS)

    def entry(path: pathlib.Path, size: int, parity: "Parity") -> dict:
        return {"path": str(path.relative_to(run.path)), "bytes": size, "max_abs_diff": parity.max_abs_diff}

    summary = {
        "parameters": model.count_params(),
        "test_accuracy": metrics["accuracy"],
        "train_seconds": round(sum(record["seconds"] for record in run.metrics()), 1),
        "saved_model": entry(served, directory_bytes(served), served_parity),
        "tflite": {
            name: entry(path, path.stat().st_size, parity) | {"accuracy": parity.accuracy}
            for name, (path, parity) in files.items()
        },
    }
    write_text(run.path / "summary.json", json.dumps(summary, indent=2) + "\n")
    print(
        _table(summary, run.model_file.stat().st_size, served_parity.accuracy),
        f"\nAll of it is in {run.path}.",
        sep="\n",
    )
    return summary


def _table(summary: dict, model_bytes: int, served_accuracy: float) -> str:
    """The summary for the terminal."""
    from export.parity import as_table

    rows = [
        ("Keras model", "model.keras", f"{model_bytes:,}", "", f"{summary['test_accuracy']:.4f}"),
        _row("SavedModel", summary["saved_model"], served_accuracy),
    ]
    rows += [_row(f"TFLite {name}", part, part["accuracy"]) for name, part in summary["tflite"].items()]
    return as_table(rows, ("artifact", "path", "bytes", "max |logit diff|", "test accuracy"))


def _row(name: str, part: dict, accuracy: float) -> tuple[str, ...]:
    return name, part["path"], f"{part['bytes']:,}", f"{part['max_abs_diff']:.2g}", f"{accuracy:.4f}"


def main(arguments: Sequence[str]) -> None:
    """`--workdir DIR`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m training.demo")
    cli.require_tensorflow()

    from training.loop.run import locked
    from training.loop.setup import report_interruption

    # A lock of its own, besides that of the training: the exports, too, are of one process.
    with report_interruption(), locked(pathlib.Path(parsed.workdir), ".demo.lock"):
        demo(parsed)


if __name__ == "__main__":
    cli.run(main)
