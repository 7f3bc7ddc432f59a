"""Scenes with exact truth: shapes of some classes on a noisy ground, as a data set of instances or of classes."""

import json
import pathlib

import numpy as np
import PIL.Image
import tensorflow as tf
from pycocotools import mask as rle

from training.data.dataset import DataSet, Split
from training.data.dense import DenseBatches

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


def write_folder(root: pathlib.Path, count: int, *, objects: bool = False, first: int = 0) -> str:
    """images/ and masks/ with classes, or objects in 16 bits, and labels.txt; return --data."""
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        image, classes, segments = scene(number)
        values = np.where(classes > 0, 1000 * classes + np.arange(len(classes)), 0) if objects else classes
        PIL.Image.fromarray(image).save(root / "images" / f"{number:03d}.png")
        mask = values[segments].astype(np.uint16 if objects else np.uint8)
        PIL.Image.fromarray(mask).save(root / "masks" / f"{number:03d}.png")
    (root / "labels.txt").write_text("".join(f"{label}\n" for label in LABELS))
    return f"folder:{root}"


def write_coco(root: pathlib.Path, count: int, *, first: int = 0, name: str = "scenes.json") -> str:
    """Objects as run-length encodings, those of even ids uncompressed; return --data."""
    root.mkdir(parents=True, exist_ok=True)
    annotations: list[dict] = []
    for number in range(first, first + count):
        image, classes, segments = scene(number)
        PIL.Image.fromarray(image).save(root / f"{number:03d}.png")
        for place, label in enumerate(classes[1:].tolist(), 1):
            mask = segments == place
            if not mask.any():
                continue
            encoded = rle.encode(np.asfortranarray(mask, np.uint8))
            segmentation = {"size": [SIDE, SIDE], "counts": encoded["counts"].decode()}
            if len(annotations) % 2:
                edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.T.ravel().astype(int), [2]])))
                segmentation["counts"] = np.diff(np.concatenate([[0], edges])).tolist()
            annotations.append(
                {"id": len(annotations), "image_id": number, "category_id": 10 * label, "iscrowd": 0,
                 "bbox": list(rle.toBbox(encoded)), "segmentation": segmentation}
            )  # fmt: skip
    images = [
        {"id": n, "file_name": f"{n:03d}.png", "height": SIDE, "width": SIDE} for n in range(first, first + count)
    ]
    categories = [{"id": 10 * number, "name": label} for number, label in enumerate(LABELS) if number]
    (root / name).write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return f"coco:{root / name}"


def write_panoptic(root: pathlib.Path, count: int) -> str:
    """A panoptic.json with its PNGs, in which the ground is stuff; return --data."""
    (root / "panoptic").mkdir(parents=True, exist_ok=True)
    annotations = []
    for number in range(count):
        image, classes, segments = scene(number)
        PIL.Image.fromarray(image).save(root / f"{number:03d}.png")
        ids = 300 * (np.arange(len(classes)) + 1)
        colors = np.stack([ids[segments] % 256, ids[segments] // 256, 0 * segments], axis=-1).astype(np.uint8)
        PIL.Image.fromarray(colors).save(root / "panoptic" / f"{number:03d}.png")
        seen = np.unique(segments)
        infos = [{"id": int(ids[n]), "category_id": int(classes[n]) + 1, "iscrowd": 0} for n in seen]
        annotations.append({"image_id": number, "file_name": f"{number:03d}.png", "segments_info": infos})
    images = [{"id": number, "file_name": f"{number:03d}.png"} for number in range(count)]
    categories = [{"id": n + 1, "name": label, "isthing": int(n > 0)} for n, label in enumerate(LABELS)]
    (root / "panoptic.json").write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": categories})
    )
    return f"panoptic:{root / 'panoptic.json'}"


def write_voc(root: pathlib.Path, count: int, *, objects: bool = True) -> str:
    """Palette PNGs of classes and objects, with 255 on a border; return --data."""
    folders = ["JPEGImages", "SegmentationClass"] + (["SegmentationObject"] if objects else [])
    for name in folders:
        (root / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image, classes, segments = scene(number)
        PIL.Image.fromarray(image).save(root / "JPEGImages" / f"{number:03d}.jpg", quality=95)
        for name, values in zip(folders[1:], (classes[segments], segments), strict=False):
            values = values.astype(np.uint8)
            values[0] = 255
            mask = PIL.Image.fromarray(values, "P")
            mask.putpalette([value for value in range(256) for _ in range(3)])
            mask.save(root / name / f"{number:03d}.png")
    return f"voc:{root}"
