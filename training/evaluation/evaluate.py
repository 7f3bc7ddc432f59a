"""A model measured on the evaluation images of a data set, and the report: numbers, page and pictures."""

import json
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from keras_vit import UserError, run_directory
from keras_vit.files.atomic import staged
from keras_vit.files.npz import write_npz
from training.evaluation.classifiers import OUTPUT_NEEDED, Classifier, open_classifier
from training.evaluation.metrics import intervals, measure, measure_real, read_real_labels, softmax
from training.evaluation.plots import draw_confusion, draw_mistakes, draw_reliability, worst_mistakes
from training.input.sources import Source, open_source
from training.options.evaluate import EvaluateOptions

_TOTALS = (
    "num_examples", "num_correct", "accuracy", "top5_accuracy", "log_loss", "macro_precision", "macro_recall",
    "macro_f1", "ece",
)  # fmt: skip
_CONFUSIONS = 10  # pairs of classes in the report
_PICTURES = {
    "confusion.png": "confusion matrix",
    "reliability.png": "reliability diagram",
    "mistakes.png": "the worst mistakes",
}


def evaluate(arguments: EvaluateOptions) -> dict:
    """Measure, write the report, and return its numbers."""
    if arguments.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1 image, but is {arguments.batch_size}.")
    classifier = open_classifier(arguments.run, arguments.input, arguments.devices)
    output = _report_directory(arguments)
    source = open_source(arguments.source)
    names = _class_names(classifier, source)
    accepted = None
    if arguments.real_labels is not None:
        accepted = read_real_labels(arguments.real_labels, source.evaluation, len(names))
    logits, labels = classifier.predict(source.evaluation, arguments.batch_size)
    _check_finite(logits)
    metrics = measure(logits, labels, names) | {"intervals": intervals(logits, labels, names)}
    if accepted is not None:
        metrics["real_labels"] = measure_real(logits, labels, accepted)
    probabilities = softmax(logits)
    mistakes = worst_mistakes(probabilities, labels)
    metrics["worst_mistakes"] = [
        {
            "image": source.evaluation.name(int(index)),
            "label": names[labels[index]],
            "predicted": names[np.argmax(probabilities[index])],
            "label_probability": float(probabilities[index, labels[index]]),
            "predicted_probability": float(probabilities[index].max()),
        }
        for index in mistakes
    ]

    # The numbers first: they took the time, and no picture may cost them.
    with staged(output) as stage:
        told = {"model": arguments.run, "kind": classifier.kind, "data": arguments.source.data, **metrics}
        (stage / "evaluation.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        (stage / "evaluation.md").write_text(_report(arguments, classifier, metrics), encoding="utf-8")
        if arguments.save_predictions:
            write_npz(stage / "predictions.npz", {"logits": logits, "labels": labels.astype(np.int64)})
    drawings = {
        "confusion.png": lambda path: draw_confusion(np.array(metrics["confusion"]), names, path),
        "reliability.png": lambda path: draw_reliability(metrics["reliability"], metrics["ece"], path),
    }
    if len(mistakes):
        drawings["mistakes.png"] = lambda path: draw_mistakes(
            source.evaluation, mistakes, probabilities, labels, names, path
        )
    with staged(output) as stage:
        drawn = [name for name, draw in drawings.items() if _is_drawn(draw, stage / name)]
        (stage / "evaluation.md").write_text(_report(arguments, classifier, metrics, drawn), encoding="utf-8")
    for name in _PICTURES.keys() - set(drawn):
        (output / name).unlink(missing_ok=True)  # of an older report
    print(
        f"Accuracy {metrics['accuracy']:.4f}: {metrics['num_correct']:,} of {metrics['num_examples']:,} images right, "
        f"log-loss {metrics['log_loss']:.4f}; report in {output / 'evaluation.md'}."
    )
    return metrics


def _report_directory(arguments: EvaluateOptions) -> pathlib.Path:
    """Where the report goes. Raises UserError for the directory of another run, which has a report of its own."""
    is_run = (pathlib.Path(arguments.run) / run_directory.CONFIG).is_file()
    if arguments.output is None and not is_run:
        raise UserError(OUTPUT_NEEDED.format(arguments.run))
    output = run_directory.check_output(arguments.output or arguments.run)
    if (output / run_directory.CONFIG).is_file() and not (is_run and output.samefile(arguments.run)):
        raise UserError(f"{output} is another run than {arguments.run}; give --output a directory of its own.")
    return output


def _class_names(classifier: Classifier, source: Source) -> tuple[str, ...]:
    """Those of the data, of which the model must know that they are its own, or at least have as many."""
    if classifier.names is None and classifier.num_classes != len(source.labels):
        raise UserError(
            f"The model tells apart {classifier.num_classes} classes and the data have {len(source.labels)}; evaluate "
            "on data of the same classes."
        )
    if classifier.names not in (None, source.labels):
        differing = sorted(set(classifier.names) ^ set(source.labels))
        raise UserError(
            f"The run tells apart {len(classifier.names)} classes and the data have {len(source.labels)}, of which "
            f"{', '.join(differing[:5]) or 'only the order'} differ; evaluate on data of the same classes."
        )
    return source.labels


def _check_finite(logits: np.ndarray) -> None:
    """Raise UserError for what is no number; minus infinity is the logarithm of a probability of 0."""
    bad = int(np.sum(np.any(np.isnan(logits) | np.isposinf(logits), axis=-1) | np.all(np.isneginf(logits), axis=-1)))
    if bad:
        raise UserError(
            f"The model gives numbers that are not finite for {bad:,} of {len(logits):,} images; its weights are "
            "broken, or its numbers overflow."
        )


def _is_drawn(draw: Callable[[pathlib.Path], None], path: pathlib.Path) -> bool:
    """Draw a picture. Where that fails, whatever the reason, say so and leave nothing of it."""
    try:
        draw(path)
    except Exception as error:
        path.unlink(missing_ok=True)
        print(f"{path.name} could not be drawn ({type(error).__name__}: {' '.join(str(error).split())[:200]}).")
        return False
    return True


def _report(arguments: EvaluateOptions, classifier: Classifier, metrics: dict, pictures: Sequence[str] = ()) -> str:
    """The numbers as a page of Markdown, with pictures, given by their file names."""
    found = metrics["intervals"]
    lines = [
        f"# {arguments.run} on {arguments.source.data}",
        "",
        "| measure | value | 95 % interval |",
        "|---|---:|---:|",
    ]
    for name in _TOTALS:
        if name in metrics:
            lines.append(f"| {name} | {metrics[name]:.6g} | {_range(found.get(name))} |")
    if "real_labels" in metrics:
        real = metrics["real_labels"]
        lines += [
            "",
            f"With all accepted labels: accuracy {real['accuracy']:.6g}, {real['num_correct']} of "
            f"{real['num_examples']} images; {real['num_left_out']} without an accepted label are left out.",
        ]
    if classifier.names is None:
        lines += ["", "The model does not name its classes; they are taken to be those of the data, in their order."]
    lines += [
        "",
        "Intervals: 1,000 draws of the images with replacement (bootstrap, percentiles). ece: expected "
        "calibration error, 15 bins.",
        "",
        "| class | images | precision | recall | F1 | F1, 95 % interval |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in metrics["classes"].items():
        scores = " | ".join(f"{row[score]:.4f}" for score in ("precision", "recall", "f1"))
        lines.append(f"| {name} | {row['num_examples']} | {scores} | {_range(found['classes'][name]['f1'])} |")
    lines += ["", *_confusions(np.array(metrics["confusion"]), tuple(metrics["classes"]))]
    return "\n".join([*lines, *(f"![{_PICTURES[name]}]({name})\n" for name in pictures)])


def _range(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"


def _confusions(matrix: np.ndarray, names: Sequence[str]) -> list[str]:
    """The pairs of classes that are most often confused, as a table; nothing where there is no mistake."""
    wrong = matrix - np.diag(np.diag(matrix))
    pairs = [np.unravel_index(k, wrong.shape) for k in np.argsort(-wrong, axis=None, kind="stable")[:_CONFUSIONS]]
    rows = [f"| {names[row]} | {names[column]} | {wrong[row, column]} |" for row, column in pairs if wrong[row, column]]
    return ["| label | predicted | images |", "|---|---|---:|", *rows, ""] if rows else ["There is no mistake.", ""]
