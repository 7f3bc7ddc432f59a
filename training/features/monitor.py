"""`keras-vit monitor`: make the summary of a run, compare new images with it, and report."""

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np

from keras_vit import UserError
from keras_vit.files.atomic import write_text
from keras_vit.files.npz import read_npz
from keras_vit.files.remote import to_path
from keras_vit.run import MONITOR, Run
from keras_vit.scores import features_and_logits
from training.data.sources import open_source
from training.features.drift import Drift, Summary, compare, read_summary, summarize
from training.features.extraction import Extractor, Listing, embed_all, listing_of_data, listing_of_files
from training.features.lookup import write_cards
from training.features.store import NO_SPLIT, Part
from training.options.common import DataOptions
from training.options.features import MonitorOptions

_SHOWN = 48  # images on the page


def monitor(run: Run, files: Sequence[str], options: MonitorOptions) -> bool:
    """Compare images with the summary of a run, which is made if there is none; return whether they differ.

    Raises UserError where the run has no summary, and does not know its data or gives images several classes.
    """
    summary, names = _summary_of(run, options), list[str]()
    if not options.images:
        return False
    if options.saved_features:
        values, probabilities = _saved(options.images[0], summary, len(run.labels))
    else:
        part, values, probabilities = _outputs(run, listing_of_files(files), NO_SPLIT, options.batch_size)
        names += part.paths
    drift = compare(summary, values, probabilities, options.false_alarms)
    sentences = _sentences(drift, summary, run.labels)
    print(*sentences, sep="\n")
    if options.metrics is not None:
        write_text(to_path(options.metrics), _metrics(drift, options.run))
    if options.output is not None and names:
        moved = [(names[k], "", drift.distances[k]) for k in np.argsort(-drift.distances)[:_SHOWN]]
        note = " ".join(
            [*sentences, "The number says how much further than usual an image is from the evaluation images."]
        )
        write_cards(to_path(options.output), "Monitor", "Most different images", moved, note)
        print(f"The most different images are in {options.output}.")
    return drift.is_alarm


def _sentences(drift: Drift, summary: Summary, names: Sequence[str]) -> list[str]:
    verdict = "Alarm: these images differ" if drift.is_alarm else "No alarm: these images do not differ significantly"
    expected, low, high = (100.0 * share for share in drift.accuracy)
    changes = [
        f"{names[label] if names else f'class {label}'} {then:.1%} before, {now:.1%} now"
        for label, (then, now) in drift.shares.items()
    ]
    return [
        f"{verdict} from the evaluation images ({len(drift.distances):,} images, p = {drift.p_value:.3f}).",
        f"Expected accuracy: {expected:.1f}% (95% interval {low:.1f} to {high:.1f}%); on the evaluation images it "
        f"was {100.0 * summary.correct.mean():.1f}%.",
        *([f"Predicted more or less often: {'; '.join(changes)}."] if changes else []),
    ]


def _metrics(drift: Drift, name: str) -> str:
    """Return a comparison in the text format of Prometheus."""
    label = name.replace("\\", "\\\\").replace('"', '\\"')
    values = {
        "drift_alarm": int(drift.is_alarm),
        "drift_p_value": drift.p_value,
        "expected_accuracy": drift.accuracy[0],
        "monitored_images": len(drift.distances),
    }
    return "".join(f'keras_vit_{key}{{run="{label}"}} {value:.6g}\n' for key, value in values.items())


def _summary_of(run: Run, options: MonitorOptions) -> Summary:
    """Return the summary of a run or export; make and write that of a run from its evaluation images."""
    places = [run.file(MONITOR), run.path / MONITOR, run.path / "assets.extra" / MONITOR]
    place = next((place for place in places if place is not None and place.is_file()), None)
    checksum = run.model_checksum if run.directory is not None else 0
    if place is not None and (options.images or run.directory is None):
        summary = read_summary(place)
        if checksum in (0, summary.model_checksum):
            return summary
    known = options.source.settings() if options.source.data else run.settings.get("source")
    if run.directory is None or run.is_multi_label or not isinstance(known, dict):
        raise UserError(
            f"{run.name} has no {MONITOR}; make it with keras-vit monitor, a run for images of one class each and its "
            "--data."
        )
    source = open_source(DataOptions.of_settings(known))
    part, values, probabilities = _outputs(run, listing_of_data(source), "test", options.batch_size)
    number_of = {name: number for number, name in enumerate(run.labels or source.labels)}
    labels = np.array([number_of.get(label or "", -1) for label in part.labels])
    summary, place = summarize(values, probabilities, labels, checksum), run.directory / MONITOR
    summary.save(place)
    print(f"{place}: a summary of {len(labels):,} evaluation images, for exports and keras-vit monitor.")
    return summary


def _outputs(run: Run, listing: Listing, split: str, batch_size: int) -> tuple[Part, np.ndarray, np.ndarray]:
    """Return the images that can be read, their features (n, D) and their probabilities (n, K)."""
    network = features_and_logits(run.model)
    parts = [network.output[name] for name in ("pre_logits", "logits")]
    model = keras.Model(network.input, keras.layers.Concatenate(dtype="float32")(parts))
    part = embed_all(listing, split, Extractor(model, run.preprocessing, "pre_logits", "", batch_size))
    values, logits = np.split(part.embeddings, [parts[0].shape[-1]], axis=1)
    return part, values, dataclasses.replace(run.scoring(), promise=None).probabilities(logits)


def _saved(path: str, summary: Summary, num_labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the features (n, D) and probabilities (n, K) that a program saved from a served model.

    num_labels: classes of the model; 0 if nothing names them.
    """
    arrays, width = read_npz(path), len(summary.mean)
    num_classes = num_labels or 1 + int(summary.predicted.max(initial=0))
    both = [arrays[name] for name in ("features", "probabilities") if name in arrays]
    are_right = all(array.ndim == 2 and array.dtype.kind == "f" and np.isfinite(array).all() for array in both)
    are_right = are_right and len(both) == 2 and len(both[0]) == len(both[1]) > 0 and both[0].shape[1] == width
    if are_right:
        probabilities = both[1].astype(np.float64)
        count = probabilities.shape[1]
        sums_to_1 = bool(np.all(probabilities >= 0.0) and np.allclose(probabilities.sum(axis=1), 1.0, atol=0.01))
        if sums_to_1 and (count == num_classes or (not num_labels and count > num_classes)):
            return both[0].astype(np.float32), probabilities
    raise UserError(
        f"{path} must have the arrays features (n, {width}) and probabilities (n, {num_labels or 'K'}), finite numbers "
        "of the same images, with probabilities that sum to 1 for each; are they those of another model, or logits?"
    )
