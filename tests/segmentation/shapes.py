"""Scenes with exact truth: shapes of some classes on a noisy ground, as a data set of instances or of classes."""

import numpy as np
import tensorflow as tf

from training.input.dataset import DataSet, Split
from training.input.dense import DenseBatches

LABELS = ("ground", "square", "disc", "cross")
SIDE, MOST = 48, 4
COLORS = np.array([[60, 60, 60], [200, 60, 60], [60, 200, 60], [60, 60, 200]], np.float32)


def scene(number: int, side: int = SIDE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Image (h, w, 3) uint8, classes (n,) int32 of its segments, the ground first, and segments (h, w) int32."""
    rng = np.random.default_rng(number)
    segments = np.zeros((side, side), np.int32)
    labels = [0]
    rows, columns = np.mgrid[:side, :side]
    for _ in range(int(rng.integers(1, MOST))):
        kind, radius = int(rng.integers(1, len(LABELS))), int(rng.integers(side // 8, side // 4))
        y, x = (rng.integers(radius, side - radius, 2)).tolist()
        down, across = np.abs(rows - y), np.abs(columns - x)
        inside = {
            1: np.maximum(down, across) < radius,
            2: down**2 + across**2 < radius**2,
            3: (np.minimum(down, across) < radius / 3) & (np.maximum(down, across) < radius),
        }[kind]
        segments[inside] = len(labels)
        labels.append(kind)
    classes = np.array(labels, np.int32)
    image = COLORS[classes[segments]] + rng.normal(0.0, 12.0, (side, side, 3))
    return np.clip(image, 0, 255).astype(np.uint8), classes, segments


def shapes(train: int = 24, evaluation: int = 8, *, semantic: bool = False, side: int = SIDE) -> DataSet:
    """A data set of scenes; with `semantic` the segments are the classes."""

    def split(first: int, count: int) -> Split:
        images, labels, segments = zip(*(scene(first + number, side) for number in range(count)), strict=True)
        if semantic:
            segments = [own[each] for own, each in zip(labels, segments, strict=True)]
            labels = [np.arange(len(LABELS), dtype=np.int32)] * count
        padded = np.stack([np.pad(own, (0, MOST - len(own)), constant_values=-1) for own in labels])
        held = tf.constant(np.stack(images)), tf.constant(padded), tf.constant(np.stack(segments))
        return Split(
            count,
            lambda index: (held[0][index], tf.constant(-1)),
            fingerprint=first * 1000 + count,
            target=lambda index: {"labels": held[1][index], "segments": held[2][index]},
        )

    return DataSet(LABELS, split(0, train), split(10_000, evaluation), batches=DenseBatches(MOST))
