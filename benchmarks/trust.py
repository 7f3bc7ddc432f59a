"""Measure promises, label-next and monitor on frozen features of real images.

    python -m benchmarks.trust features --checkpoint dinov2 --data tfds:fashion_mnist --count 6000 --output fashion.npz
    python -m benchmarks.trust promises fashion.npz
    python -m benchmarks.trust label-next fashion.npz --methods random label-next
    python -m benchmarks.trust monitor fashion.npz

`features` writes the features of images, and of the last 600 of them changed in three grades: blurred, noisy, darker,
with less contrast, of fewer pixels, brighter. The others print tables. The head is a logistic regression (C = 0.1) of
the features.
"""

import argparse
import os
from collections.abc import Callable, Sequence

import numpy as np
import scipy.ndimage
import scipy.stats

SIZE = 112
GRADES = {
    "blur": (1.5, 3.0, 5.0), "noise": (10.0, 25.0, 50.0), "darker": (0.75, 0.5, 0.3),
    "contrast": (0.6, 0.35, 0.2), "pixel": (28, 19, 14), "brighter": (1.3, 1.7, 2.2),
}  # fmt: skip
METHODS = ("random", "label-next", "margin", "k-center")
_CORRUPTED = 600


def write_features(checkpoint: str, data: str, count: int, output: str) -> None:
    """Write the features of the first training images of a data set, of which the last are also corrupted."""
    import tensorflow as tf

    import keras_vit
    from keras_vit.run import Run
    from training.data.sources import open_source
    from training.features.extraction import feature_model
    from training.options.common import DataOptions

    run = Run.open(checkpoint, image_size=(SIZE, SIZE))
    network = tf.function(feature_model(run.model, "token"))
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    split = open_source(DataOptions(data, data_dir=os.environ.get("TFDS_DATA_DIR"))).train
    chosen = np.random.default_rng(0).permutation(split.num_examples)[:count]

    def image_of(index: int) -> np.ndarray:
        image, label = split.example(tf.constant(index, tf.int64), keras_vit.preprocessing_of(run.model))
        image = tf.image.resize(tf.repeat(image, 3 // image.shape[-1], -1), (SIZE, SIZE), "bicubic", antialias=True)
        return np.clip(image, 0.0, 255.0), int(label)

    def features(images: np.ndarray) -> np.ndarray:
        batches = np.array_split(images, range(100, len(images), 100))
        return np.concatenate([network((np.float32(batch) / 255.0 - mean) / deviation) for batch in batches])

    images, labels = map(np.array, zip(*map(image_of, chosen.tolist()), strict=True))
    arrays = {"features": features(images), "labels": labels}
    for kind, grades in GRADES.items():
        for number, grade in enumerate(grades):
            arrays[f"{kind}{number}"] = features(corrupted(images[-_CORRUPTED:], kind, grade))
    np.savez(output, **arrays)


def corrupted(images: np.ndarray, kind: str, grade: float) -> np.ndarray:
    """Return images (n, h, w, 3), 0 to 255, changed in one way."""
    import tensorflow as tf

    if kind == "blur":
        return scipy.ndimage.gaussian_filter(images, (0, grade, grade, 0), mode="nearest")
    if kind == "noise":
        return np.clip(images + np.random.default_rng(0).normal(0.0, grade, images.shape), 0.0, 255.0)
    if kind == "contrast":
        mean = images.mean(axis=(1, 2), keepdims=True)
        return mean + (images - mean) * grade
    if kind == "pixel":
        return tf.image.resize(tf.image.resize(images, (grade, grade), "area"), images.shape[1:3], "nearest").numpy()
    return np.clip(images * grade, 0.0, 255.0)


def head(values: np.ndarray, labels: np.ndarray, num_classes: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return probabilities (n, K) as a function of features."""
    from keras_vit.scores import softmax
    from training.features.active_learning import head_probabilities
    from training.features.probe import Features

    def probabilities(asked: np.ndarray) -> np.ndarray:
        classes, known = head_probabilities(Features(values, labels), asked)
        found = np.full((len(asked), num_classes), 1e-12)  # of a class that is not among these images
        found[:, classes] = np.maximum(known, 1e-12)
        return softmax(np.log(found).astype(np.float32))

    return probabilities


def promises(values: np.ndarray, labels: np.ndarray, draws: int = 1000) -> None:
    """Fit promises to images drawn with replacement from those outside of the head, and count which these break."""
    from training.evaluation.promises import _answer_threshold, _list_thresholds

    rng = np.random.default_rng(0)
    train, rest = np.split(rng.permutation(len(labels)), [len(labels) // 2])
    probabilities, truth = head(values[train], labels[train], labels.max() + 1)(values[rest]), labels[rest]
    highest, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == truth
    ranks = scipy.stats.rankdata(highest) / len(rest)  # which threshold is chosen depends on the order alone
    fits = [rng.integers(0, len(rest), len(rest) // 2) for _ in range(draws)]
    drawn = [ranks[fit] + rng.uniform(0.0, 1e-4, len(fit)) for fit in fits]  # of an image that is drawn twice, too
    print(f"accuracy {right.mean():.1%} of {len(rest):,} images, of which {len(fits[0]):,} are drawn {draws} times")
    bound = scipy.stats.binom.ppf(0.999, draws, 0.05)
    for wanted in (0.02, 0.05, 0.1):
        found = []
        for fit, confidence in zip(fits, drawn, strict=True):
            if (threshold := _answer_threshold(confidence, right[fit], wanted)) is not None:
                answered = ranks >= threshold
                error = np.mean(~right[answered])
                found.append((answered.mean(), error, error > wanted))
        share, error, broken = np.mean(found, axis=0) if found else (0.0, 0.0, 0.0)
        print(
            f"max-error {wanted}: possible in {len(found)} draws, answered {share:.1%}, errors {error:.2%}, broken in "
            f"{round(broken * len(found))} (at most {bound:.0f})"
        )
    for by_class in (False, True):
        for wanted in (0.9, 0.95):
            rows = []
            for fit in fits:
                listed = probabilities >= _list_thresholds(probabilities[fit], truth[fit], wanted, by_class)
                listed |= probabilities >= highest[:, None]
                own = listed[np.arange(len(truth)), truth]
                of_classes = [own[truth == label].mean() for label in np.unique(truth)]
                rows.append((own.mean(), listed.sum(axis=1).mean(), *of_classes))
            mean = np.mean(rows, axis=0)
            print(
                f"coverage {wanted}{' by class' * by_class}: {mean[0]:.2%}, {mean[1]:.2f} classes in the list, of the "
                f"classes {mean[2:].min():.1%} to {mean[2:].max():.1%}"
            )


def label_next(values: np.ndarray, labels: np.ndarray, names: Sequence[str], seeds: int = 10) -> None:
    """Compare the labels that methods need for the accuracy of random images."""
    from training.features.active_learning import choose, head_probabilities
    from training.features.lookup import unit_length
    from training.features.probe import Features

    every = Features(values, labels)
    num_classes = len(np.unique(labels))
    steps = [2, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    budgets = [step * num_classes for step in steps if step * num_classes < 0.7 * len(labels)]

    def random(known, free, count, rng):
        return rng.choice(free, count, replace=False)

    def ours(known, free, count, rng):
        return free[choose(every.take(known), values[free], count, seed=int(rng.integers(2**31))).rows]

    def margin(known, free, count, rng):
        if len(np.unique(labels[known])) < 2:
            return random(known, free, count, rng)
        ordered = np.sort(head_probabilities(every.take(known), values[free])[1], axis=1)
        return free[np.argsort(ordered[:, -1] - ordered[:, -2])[:count]]

    def centers(known, free, count, rng):
        units = unit_length(values - values.mean(axis=0))
        chosen = [] if len(known) else [int(rng.choice(free))]
        nearest = (units[free] @ units[[*known, *chosen]].T).max(axis=1)
        while len(chosen) < count:
            chosen.append(int(free[nearest.argmin()]))
            nearest = np.maximum(nearest, units[free] @ units[chosen[-1]])
        return np.array(chosen)

    # Each returns images to label, a number of those that are free, by those that are known.
    curves, methods = {}, dict(zip(METHODS, (random, ours, margin, centers), strict=True))
    for name in names:
        method, found = methods[name], []
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            pool, test = np.split(rng.permutation(len(labels)), [len(labels) - min(2000, len(labels) // 4)])
            known, row = np.zeros(0, np.int64), []
            for budget in budgets:
                known = np.concatenate([known, method(known, np.setdiff1d(pool, known), budget - len(known), rng)])
                classes, probabilities = head_probabilities(every.take(known), values[test])
                row.append(np.mean(classes[probabilities.argmax(axis=1)] == labels[test]))
            found.append(row)
        curves[name] = np.maximum.accumulate(np.mean(found, axis=0))
        saved = 1.0 - np.interp(curves["random"], curves[name], budgets, right=np.inf) / budgets
        shown = saved[np.array(budgets) >= 10 * num_classes]
        print(name, *(f"{100 * value:.1f}" for value in curves[name]))
        shares = " ".join(f"{value:.0%}" for value in shown)
        print(f"  {name} needs fewer labels than random by {shares} mean {shown.mean():.0%}")


def monitor(arrays: dict[str, np.ndarray], size: int = 100, windows: int = 200) -> None:
    """Count the alarms of windows without a change, and with corruptions and a new class; compare the accuracies."""
    from training.features.drift import compare, summarize

    values, labels = arrays["features"], arrays["labels"]
    whole, rng = len(labels) - _CORRUPTED, np.random.default_rng(0)
    train, kept, rest = np.split(rng.permutation(whole), [whole * 2 // 5, whole * 3 // 5])
    classify = head(values[train], labels[train], labels.max() + 1)
    summary = summarize(values[kept], classify(values[kept]), labels[kept])
    last, half = labels[-_CORRUPTED:], np.where(labels[rest] < (labels.max() + 1) // 2, 1.0, 0.15)
    shifted = rng.choice(rest, _CORRUPTED, False, p=half / half.sum())
    sets = {
        "same": (values[rest], labels[rest]),
        **{name: (arrays[name], last) for name in arrays if name[-1].isdigit()},
        "other shares of the classes": (values[shifted], labels[shifted]),
    }
    new = labels == labels.max()
    errors: dict[str, list[float]] = {}
    for name, (images, truth) in sets.items():
        probabilities, alarms, gaps, inside = classify(images), 0, [], 0
        for _ in range(windows if name == "same" else windows // 4):
            rows = rng.choice(len(truth), size, replace=False)
            drift = compare(summary, images[rows], probabilities[rows])
            accuracy = np.mean(probabilities[rows].argmax(axis=1) == truth[rows])
            alarms += drift.is_alarm
            gaps.append(drift.accuracy[0] - accuracy)
            inside += drift.accuracy[1] <= accuracy <= drift.accuracy[2]
        errors.setdefault(name.rstrip("0123456789"), []).append(abs(np.mean(gaps)))
        print(
            f"{name}: {alarms} alarms of {len(gaps)}, accuracy {np.mean(probabilities.argmax(axis=1) == truth):.1%}, "
            f"expected {100 * np.mean(gaps):+.1f} points, inside the interval {inside / len(gaps):.0%}"
        )
    for kinds in ([*GRADES][:3], [*GRADES][3:]):
        of_kinds = [error for kind in ("same", *kinds) for error in errors.get(kind, [])]
        print(f"mean error of the expected accuracy, {', '.join(kinds)}: {100 * np.mean(of_kinds):.1f} points")
    train, kept = train[~new[train]], kept[~new[kept]]
    classify = head(values[train], labels[train], labels.max() + 1)
    summary = summarize(values[kept], classify(values[kept]), labels[kept])
    for share in (0.05, 0.1, 0.2, 0.4):
        alarms, count = 0, int(share * size)
        for _ in range(windows // 4):
            rows = [rng.choice(rest[new[rest]], count, False), rng.choice(rest[~new[rest]], size - count, False)]
            window = values[np.concatenate(rows)]
            alarms += compare(summary, window, classify(window)).is_alarm
        print(f"a new class, {share:.0%} of the images: {alarms} alarms of {windows // 4}")


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("features", "promises", "label-next", "monitor"))
    parser.add_argument("file", nargs="?")
    parser.add_argument("--checkpoint")
    parser.add_argument("--data")
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--output")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    options = parser.parse_args()
    if options.what == "features":
        write_features(options.checkpoint, options.data, options.count, options.output)
        return
    arrays = dict(np.load(options.file))
    if options.what == "monitor":
        monitor(arrays)
    elif options.what == "promises":
        promises(arrays["features"], arrays["labels"])
    else:
        label_next(arrays["features"], arrays["labels"], options.methods)


if __name__ == "__main__":
    main()
