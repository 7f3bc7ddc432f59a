"""Train a segmentation head, evaluate it, write the report and the SavedModel."""

import json
import pathlib
import sys
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
import tqdm

from keras_vit import UserError, preprocessing_of, run_directory
from keras_vit.files.atomic import staged
from keras_vit.files.remote import to_path
from keras_vit.files.tables import markdown_table
from keras_vit.runs import Run
from training.lock import locked
from training.loop import run as run_to_write
from training.options.checks import check_batch_size
from training.options.segment import TFDS, SegmentOptions
from training.segmentation.export import export_segmenter
from training.segmentation.head import segmenter
from training.segmentation.masks import open_scenes
from training.segmentation.scenes import IGNORED, Scenes, as_input
from training.segmentation.tfds_masks import open_tfds_scenes

# Names of the classes, training pairs, evaluation pairs.
SegmentationData = tuple[tuple[str, ...], Scenes, Scenes]


def open_data(options: SegmentOptions) -> SegmentationData:
    """Open what `--data` names. Raises UserError for images and masks that do not match."""
    if options.is_tfds:
        name = options.data.removeprefix(TFDS)
        return open_tfds_scenes(name, options.data_dir, options.train_split, options.eval_split)
    return open_scenes(options.data)


def segment(backbone: Run, data: SegmentationData, options: SegmentOptions) -> dict:
    """Train a head, unless the run is finished; evaluate and export it. Return the report.

    The report holds `mean_iou` and `pixel_accuracy`, on the pixels of the masks that are counted, at the masks' own
    size, and `iou` by class; None for a class that is in no mask.
    """
    labels, train, evaluation = data
    check_batch_size(options.batch_size, train.num_examples)
    run = run_to_write.RunDirectory(to_path(options.workdir))
    settings = {"command": "segment", **options.settings()}
    if evaluation.held_out:  # of a folder with other images, other pairs would be, which a finished run may know
        settings["images"] = {"train": train.num_examples, "evaluation": evaluation.num_examples}
    with locked(run.path):
        if not run.model_file.is_file():
            keras.utils.set_random_seed(options.seed)
            model = segmenter(backbone.model, options.blocks, len(labels))
            run.start(settings, labels)
            run.write_metrics([_fit(model, train, options)])
            run.save_model(model)
        run.start(settings, labels)
        model = run_directory.load_model(run.path)
        report = evaluate(model, evaluation, labels)
        _write_report(run.path, report, f"Segmentation: {backbone.name} on {options.data}")
        export_segmenter(model, evaluation, run.path / "saved_model" / "1", labels)
    return report


def _fit(model: keras.Model, train: Scenes, options: SegmentOptions) -> dict:
    """Train the head and return its last loss and pixel accuracy."""
    steps, batch_size = options.steps, options.batch_size
    schedule = keras.optimizers.schedules.CosineDecay(options.learning_rate, steps)
    model.compile(
        keras.optimizers.AdamW(schedule, weight_decay=1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
        weighted_metrics=["accuracy"],
    )
    print(f"{train.num_examples:,} training images, {steps:,} steps of {batch_size}.")
    batches = train.batches(preprocessing_of(model), batch_size, options.seed)
    verbose = 1 if sys.stdout.isatty() else 2
    history = model.fit(batches, steps_per_epoch=steps, shuffle=False, verbose=verbose).history
    found = {name: float(values[-1]) for name, values in history.items()}
    if not np.isfinite(found["loss"]):
        raise UserError("The loss is not finite; give a lower --learning-rate.")
    return {"epoch": 1, "step": steps, **found}


def evaluate(model: keras.Model, scenes: Scenes, labels: Sequence[str]) -> dict:
    """Return `mean_iou`, `pixel_accuracy` and `iou` by class; the logits are resized to the size of each mask."""
    confusion = np.zeros((len(labels), len(labels)), np.int64)  # class of the mask, predicted class
    preprocessing = preprocessing_of(model)
    for image, mask in tqdm.tqdm(scenes.in_order(), total=scenes.num_examples, unit="image", disable=None):
        logits, mask = model.predict_on_batch(as_input(image, preprocessing)[None]), mask.numpy()
        predicted = tf.argmax(tf.image.resize(logits, mask.shape)[0], axis=-1).numpy()  # (h, w)
        counted = mask != IGNORED
        np.add.at(confusion, (mask[counted], predicted[counted]), 1)
    hits, present = np.diag(confusion), confusion.sum(axis=1) > 0
    if not present.any():
        raise UserError("No pixel of the evaluation masks is counted; all are 255.")
    unions = confusion.sum(axis=0) + confusion.sum(axis=1) - hits
    iou = [float(hit / union) if there else None for hit, union, there in zip(hits, unions, present, strict=True)]
    return {
        "images": scenes.num_examples,
        "mean_iou": float(np.mean([value for value in iou if value is not None])),
        "pixel_accuracy": float(hits.sum() / confusion.sum()),
        "iou": dict(zip(labels, iou, strict=True)),
    }


def _write_report(folder: pathlib.Path, report: dict, title: str) -> None:
    rows = [(name, "–" if value is None else f"{value:.4f}") for name, value in report["iou"].items()]
    sentence = (
        f"Mean IoU {report['mean_iou']:.4f}, pixel accuracy {report['pixel_accuracy']:.4f} on {report['images']:,} "
        "evaluation images"
    )
    with staged(folder) as stage:
        (stage / "segmentation.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        page = [f"# {title}", "", f"{sentence}.", "", markdown_table(("class", "IoU"), rows), ""]
        (stage / "segmentation.md").write_text("\n".join(page), encoding="utf-8")
    print(f"{sentence}; report in {folder / 'segmentation.md'}.")
