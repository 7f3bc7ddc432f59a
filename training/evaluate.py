"""Measure a finished run on the evaluation images of a data set, every one of them once.

    python -m training.evaluate --run runs/mnist-notes --data tfds:mnist

writes evaluation.json, evaluation.md and confusion.png into the run directory, or into --output.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Annotated

import keras
import matplotlib.figure
import numpy as np
import sklearn.metrics
import tyro

from keras_vit import UserError, cli, preprocessing_of, run_directory
from training.data import evaluation_batches
from training.sources import DataArguments, Source, Split, bad_labels_named, open_source

# More classes than these are not legible as numbers in a confusion matrix.
_LEGIBLE_CLASSES = 30


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure a finished run on the evaluation images of a data set."""

    run: str
    """Run directory."""
    source: Annotated[DataArguments, tyro.conf.arg(name="")]
    batch_size: int = 256
    """Images per forward pass; does not change the numbers."""
    output: str | None = None
    """Directory of the report; default the run directory."""


def predict(model: keras.Model, split: Split, *, num_classes: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits (n, K) float32 and labels (n,) of every example of a split, in its order."""
    logits, labels = [], []
    batches = evaluation_batches(split, preprocessing_of(model), num_classes=num_classes, batch_size=batch_size)
    progress = keras.utils.Progbar(-(-split.num_examples // batch_size), unit_name="batch")
    with bad_labels_named():
        for images, one_hot in batches:
            logits.append(model.predict_on_batch(images))
            labels.append(np.argmax(one_hot, axis=-1))
            progress.add(1)
    return np.concatenate(logits), np.concatenate(labels)


def measure(logits: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict:
    """The numbers of the report from logits (n, K) and labels (n,), all by scikit-learn.

    Top-5 counts a label among the five highest logits, and is left out below six classes; log_loss is the mean
    negative log-likelihood in nats; precision, recall and F1 are per class.
    """
    classes, predicted = np.arange(len(names)), np.argmax(logits, axis=-1)
    probabilities = keras.ops.convert_to_numpy(keras.ops.softmax(logits.astype(np.float64)))
    precision, recall, f1, support = sklearn.metrics.precision_recall_fscore_support(
        labels, predicted, labels=classes, zero_division=0.0
    )
    metrics = {
        "num_examples": len(labels),
        "num_correct": int(np.sum(predicted == labels)),
        "accuracy": float(sklearn.metrics.accuracy_score(labels, predicted)),
        "log_loss": float(sklearn.metrics.log_loss(labels, probabilities, labels=classes)),
    }
    if len(names) > 5:
        metrics["top5_accuracy"] = float(sklearn.metrics.top_k_accuracy_score(labels, logits, k=5, labels=classes))
    metrics["classes"] = {
        name: {
            "num_examples": int(support[k]),
            "precision": float(precision[k]),
            "recall": float(recall[k]),
            "f1": float(f1[k]),
        }
        for k, name in enumerate(names)
    }
    metrics["confusion"] = sklearn.metrics.confusion_matrix(labels, predicted, labels=classes).tolist()
    return metrics


def evaluate(arguments: Arguments) -> dict:
    """Measure, write the report, and return its numbers."""
    if arguments.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1 image, but is {arguments.batch_size}.")
    model, names = run_directory.load(arguments.run)
    output = _report_directory(arguments)
    source = open_source(arguments.source)
    _check_classes(names, source)
    logits, labels = predict(model, source.evaluation, num_classes=len(names), batch_size=arguments.batch_size)
    metrics = measure(logits, labels, names)

    with run_directory.staged(output) as stage:
        numbers = json.dumps({"data": arguments.source.data, **metrics}, indent=2) + "\n"
        (stage / "evaluation.json").write_text(numbers, encoding="utf-8")
        (stage / "evaluation.md").write_text(_report(arguments, metrics), encoding="utf-8")
        _draw_confusion(np.array(metrics["confusion"]), names, stage / "confusion.png")
    print(
        f"Accuracy {metrics['accuracy']:.4f}: {metrics['num_correct']:,} of {metrics['num_examples']:,} images right, "
        f"log-loss {metrics['log_loss']:.4f}; report in {output / 'evaluation.md'}."
    )
    return metrics


def _report_directory(arguments: Arguments) -> pathlib.Path:
    """Where the report goes. Raises UserError for the directory of another run, which has a report of its own."""
    output = run_directory.check_output(arguments.output or arguments.run)
    if (output / run_directory.CONFIG).is_file() and not output.samefile(arguments.run):
        raise UserError(f"{output} is another run than {arguments.run}; give --output a directory of its own.")
    return output


def _check_classes(names: tuple[str, ...], source: Source) -> None:
    if source.labels != names:
        differing = sorted(set(names) ^ set(source.labels))
        raise UserError(
            f"The run tells apart {len(names)} classes and the data have {len(source.labels)}, of which "
            f"{', '.join(differing[:5]) or 'only the order'} differ; evaluate on data of the same classes."
        )


def _report(arguments: Arguments, metrics: dict) -> str:
    """The numbers as a page of Markdown."""
    totals = ("num_examples", "num_correct", "accuracy", "top5_accuracy", "log_loss")
    lines = [f"# {arguments.run} on {arguments.source.data}", "", "| measure | value |", "|---|---:|"]
    lines += [f"| {name} | {metrics[name]:.6g} |" for name in totals if name in metrics]
    lines += ["", "| class | images | precision | recall | F1 |", "|---|---:|---:|---:|---:|"]
    for name, row in metrics["classes"].items():
        scores = " | ".join(f"{row[score]:.4f}" for score in ("precision", "recall", "f1"))
        lines.append(f"| {name} | {row['num_examples']} | {scores} |")
    return "\n".join([*lines, "", "![confusion matrix](confusion.png)", ""])


def _draw_confusion(matrix: np.ndarray, names: Sequence[str], path: pathlib.Path) -> None:
    """Rows: what the image is; columns: what the model said. Shaded by share of the row."""
    legible = len(names) <= _LEGIBLE_CLASSES
    side = 2.5 + 0.45 * min(len(names), _LEGIBLE_CLASSES)
    figure = matplotlib.figure.Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    axes.imshow(share, cmap="Blues", vmin=0.0, vmax=1.0)
    axes.set(xlabel="predicted", ylabel="label", title="Confusion matrix: images")
    if legible:
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names)
        for (row, column), count in np.ndenumerate(matrix):
            colour = "white" if share[row, column] > 0.5 else "black"
            if count:
                axes.text(column, row, str(count), ha="center", va="center", color=colour, fontsize=8)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    evaluate(cli.parse(Arguments, arguments, prog="python -m training.evaluate"))


if __name__ == "__main__":
    cli.run(main)
