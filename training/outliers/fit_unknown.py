"""Fit scores of unknown images to the features of training images, choose one by leaving out classes, calibrate it."""

import dataclasses
import json

import numpy as np
from sklearn.covariance import ledoit_wolf
from sklearn.metrics import roc_auc_score

from keras_vit import UserError
from keras_vit.files.atomic import write_text
from keras_vit.files.labels import check_classes
from keras_vit.files.tables import markdown_table
from keras_vit.run import Run
from keras_vit.scores import KINDS, UNKNOWN, UnknownKind, UnknownScorer, features_and_logits, threshold_of
from training.data.dataset import DataSet, Split
from training.data.known_images import check_evaluation_images
from training.evaluation.predictors import outputs
from training.features.extraction import check_finite
from training.options.evaluate import UnknownOptions

# Groups into which the classes are divided, each left out once, and training images that knn keeps.
_FOLDS, _BANK = 5, 2000
# By how much the AUROC of left-out classes may be smaller for a score that also sees images of another kind.
_HARDLY = 0.05
REPORT = "unknown.json"


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Features and logits of the images of a split."""

    features: np.ndarray
    """(n, D) float32."""
    logits: np.ndarray
    """(n, K) float32."""
    labels: np.ndarray
    """(n,)."""


def unknown(run: Run, source: DataSet, options: UnknownOptions) -> UnknownScorer:
    """Fit the score, write it into the run, and print how well it tells left-out classes.

    Raises UserError where run and data do not belong together.
    """
    if run.labels:
        check_classes(run.labels, source.labels)
    check_evaluation_images(run, options.source, source)
    rng = np.random.default_rng(options.seed)
    train = source.train
    if train.num_examples > options.images:
        train = train.take(np.sort(rng.choice(train.num_examples, options.images, replace=False)))
    fitted, held_out = (
        outputs_of(run, split, len(source.labels), options.batch_size) for split in (train, source.evaluation)
    )
    auroc = auroc_of_left_out_classes(fitted, held_out, len(source.labels), options.seed)
    best = max(KINDS, key=lambda each: auroc[each])
    # Left-out classes resemble the known ones, and favor logits. The distance separates images of another kind.
    combined_suffices = auroc["combined"] >= auroc[best] - _HARDLY
    kind: UnknownKind = options.kind or ("combined" if combined_suffices else best)
    scorer = fit_score(kind, fitted, options.seed)
    scores = np.asarray(scorer.score(held_out.features, held_out.logits))
    scorer = dataclasses.replace(
        scorer,
        threshold=threshold_of(scores, options.false_alarms),
        false_alarms=options.false_alarms,
        model_checksum=run.model_checksum,
        auroc=tuple(auroc[each] for each in KINDS),
    )
    assert run.directory is not None  # it is a run directory
    scorer.save(run.directory / UNKNOWN)
    report = {
        "kind": kind,
        "threshold": scorer.threshold,
        "false_alarms": options.false_alarms,
        "auroc_of_left_out_classes": auroc,
        "training_images": len(fitted.labels),
        "evaluation_images": len(held_out.labels),
    }
    write_text(run.directory / REPORT, json.dumps(report, indent=2) + "\n")
    rows = [[f"{each}{' (chosen)' * (each == kind)}", f"{auroc[each]:.4f}"] for each in KINDS]
    print(markdown_table(["score", "AUROC of left-out classes"], rows, num_text_columns=1))
    print(
        f"{run.directory / UNKNOWN}: images with a score above {scorer.threshold:.4g} are unknown; so are "
        f"{np.mean(scores > scorer.threshold):.1%} of the {len(scores):,} evaluation images."
    )
    return scorer


def outputs_of(run: Run, split: Split, num_classes: int, batch_size: int) -> Outputs:
    """Return the features and logits of every image of a split."""
    network = features_and_logits(run.model)

    def compute(images) -> np.ndarray:
        inside = network.predict_on_batch(images)
        return np.concatenate([inside["pre_logits"].astype(np.float32), inside["logits"].astype(np.float32)], axis=-1)

    values, labels = outputs(compute, split, batch_size, preprocessing=run.preprocessing, num_classes=num_classes)
    check_finite(values)
    width = network.output["pre_logits"].shape[-1]
    return Outputs(values[:, :width], values[:, width:], labels)


def auroc_of_left_out_classes(
    train: Outputs, evaluation: Outputs, num_classes: int, seed: int
) -> dict[UnknownKind, float]:
    """Return the mean AUROC with which each kind tells the evaluation images of left-out classes from the others.

    The classes are divided into at most five groups, each left out once: of the fit, and of the logits. The model has
    seen them in its training, so this compares the scores; it does not predict the AUROC of images of another kind.
    """
    folds = min(_FOLDS, num_classes)
    fold_of = np.random.default_rng(seed).permutation(num_classes) % folds
    found: dict[UnknownKind, list[float]] = {kind: [] for kind in KINDS}
    for fold in range(folds):
        known, is_left_out = fold_of[train.labels] != fold, fold_of[evaluation.labels] == fold
        if is_left_out.all() or not is_left_out.any() or not known.any():
            continue
        part = Outputs(train.features[known], train.logits[known][:, fold_of != fold], train.labels[known])
        logits = evaluation.logits[:, fold_of != fold]
        for kind in KINDS:
            scores = np.asarray(fit_score(kind, part, seed).score(evaluation.features, logits))
            found[kind].append(roc_auc_score(is_left_out, scores))
    if not found["knn"]:
        raise UserError("The score is chosen by leaving out classes, but the evaluation images are all of one class.")
    return {kind: float(np.mean(values)) for kind, values in found.items()}


def fit_score(kind: UnknownKind, train: Outputs, seed: int) -> UnknownScorer:
    """Return the score of a kind for the classes of these training images, without a threshold."""
    if kind == "knn":
        return UnknownScorer(kind, {"bank": _bank(train, seed)})
    if kind == "mahalanobis":
        return UnknownScorer(kind, _whitened(train))
    if kind == "combined":
        arrays = _whitened(train)
        parts = UnknownScorer("energy"), UnknownScorer("mahalanobis", arrays)
        found = [np.asarray(part.score(train.features, train.logits)) for part in parts]
        scales = [(scores.mean(), max(scores.std(), 1e-6)) for scores in found]
        return UnknownScorer(kind, {**arrays, "scales": np.array(scales, np.float32).ravel()})
    return UnknownScorer(kind)


def _bank(train: Outputs, seed: int) -> np.ndarray:
    """Return unit features of at most 2,000 training images, as evenly from the classes as these allow."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(train.labels))
    labels = train.labels[order]
    place = np.empty(len(labels), np.int64)  # of each image among those of its class
    for label in np.unique(labels):
        place[labels == label] = np.arange(np.sum(labels == label))
    chosen = order[np.argsort(place, kind="stable")[:_BANK]]
    features = train.features[np.sort(chosen)]
    return features / np.maximum(np.linalg.norm(features, axis=-1, keepdims=True), 1e-12)


def _whitened(train: Outputs) -> dict[str, np.ndarray]:
    """Return the centers of the classes where the shared covariance, shrunk by Ledoit and Wolf (2004), is 1."""
    classes, numbers = np.unique(train.labels, return_inverse=True)
    features = train.features.astype(np.float64)
    centers = np.stack([features[numbers == number].mean(axis=0) for number in range(len(classes))])
    covariance, _ = ledoit_wolf(features - centers[numbers], assume_centered=True)
    variances, directions = np.linalg.eigh(covariance)
    whitening = directions / np.sqrt(np.maximum(variances, 1e-10 * variances[-1] + 1e-30))
    mean = features.mean(axis=0)
    arrays = {"mean": mean, "whitening": whitening, "centers": (centers - mean) @ whitening}
    return {name: array.astype(np.float32) for name, array in arrays.items()}
