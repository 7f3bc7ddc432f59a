"""The demo's training and its summary; `training/demo.py` adds the exports."""

import dataclasses
import json
import pathlib

from keras_vit.files.atomic import write_text
from keras_vit.files.keras_model import MODEL
from keras_vit.run import Run
from training.data.sources import digits
from training.evaluation.evaluate import evaluate
from training.evaluation.opening import open_run
from training.evaluation.predictors import open_predictor
from training.loop.pretrain import pretrain
from training.options.common import DataOptions, Execution
from training.options.evaluate import EvaluateOptions
from training.options.train import PretrainOptions
from training.recipes.pretrain import find_recipe

# Ten epochs: the run is so short that evaluating each epoch would take a noticeable part of its time.
_EVALUATE_EVERY = 440


@dataclasses.dataclass(frozen=True)
class Artifact:
    """An exported model."""

    path: pathlib.Path
    bytes: int
    max_abs_diff: float
    """Largest difference of a logit from the Keras model, on all test images."""
    accuracy: float
    """On all test images."""


def train_and_evaluate(workdir: str, seed: int) -> tuple[Run, float]:
    """Train on the digits, evaluate, and return the run and its test accuracy."""
    data = DataOptions("digits")
    run = pretrain(
        PretrainOptions(
            source=data,
            workdir=workdir,
            recipe=find_recipe("digits"),
            seed=seed,
            execution=Execution(evaluate_every=_EVALUATE_EVERY),
        ),
        "digits",
    )
    options = EvaluateOptions(workdir, data)
    predictor = open_predictor(open_run(options), options.input, options.devices)
    return run, evaluate(predictor, digits(), options)["accuracy"]


def write_summary(
    run: Run, parameters: int, test_accuracy: float, saved_model: Artifact, tflite: dict[str, Artifact]
) -> dict:
    """Write summary.json into the run directory and return it. Its paths are relative to the file."""

    def entry(artifact: Artifact) -> dict:
        path = str(artifact.path.relative_to(run.path))
        return {"path": path, "bytes": artifact.bytes, "max_abs_diff": artifact.max_abs_diff}

    summary = {
        "parameters": parameters,
        "test_accuracy": test_accuracy,
        "train_seconds": round(sum(epoch["seconds"] for epoch in run.metrics()), 1),
        "saved_model": entry(saved_model),
        "tflite": {name: entry(artifact) | {"accuracy": artifact.accuracy} for name, artifact in tflite.items()},
    }
    write_text(run.path / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def summary_rows(
    run: Run, test_accuracy: float, saved_model: Artifact, tflite: dict[str, Artifact]
) -> list[tuple[str, ...]]:
    """Return the table of the demo: a header, the Keras model, and its exports."""
    size = (run.path / MODEL).stat().st_size
    rows: list[tuple[str, ...]] = [
        ("artifact", "path", "bytes", "max |logit diff|", "test accuracy"),
        ("Keras model", MODEL, f"{size:,}", "", f"{test_accuracy:.4f}"),
    ]
    exports = {"SavedModel": saved_model, **{f"TFLite {name}": artifact for name, artifact in tflite.items()}}
    for name, artifact in exports.items():
        path = str(artifact.path.relative_to(run.path))
        rows.append((name, path, f"{artifact.bytes:,}", f"{artifact.max_abs_diff:.2g}", f"{artifact.accuracy:.4f}"))
    return rows
