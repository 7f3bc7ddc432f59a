"""Train a detector: a head on the encoder of a checkpoint, or a published detector further, for own classes."""

import math
import os
import time
import zlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_vit import DetectionConfig, preprocessing_of, with_classes
from keras_vit.checkpoints.load import fill_from
from keras_vit.cli.progress import duration
from keras_vit.files.keras_model import MODEL
from keras_vit.models.blueprint import Blueprint
from keras_vit.run import Run
from keras_vit.text.classes import classes_of_labels
from keras_vit.text.zero_shot import class_embeddings
from training.data.annotations.images import BoxedImage
from training.data.annotations.open_boxes import BoxData
from training.data.dataset import DataSet, ImageWarnings, Split, problems_of, report_bad, split_of_files
from training.data.dense import TILES, BoxBatches
from training.data.file_contents import FileContents
from training.data.image_folder import file_problem
from training.detection.detector import open_detector
from training.detection.evaluation import check_objects, evaluate
from training.loop.build import encoder_of
from training.loop.plan import Setup
from training.loop.train import run_training
from training.options.dense import DetectFitOptions
from training.recipes.dense import DetectRecipe

# Initial scale of the logits of a new head, and the share of patches that it takes for a class (as RetinaNet).
_SCALE, _PRIOR = 10.0, 0.01
# A training step takes about so many times a forward pass.
_STEP_OF_FORWARD = 3.0


def fit(options: DetectFitOptions, data: BoxData, setup: Setup) -> Run:
    """Train a detector, or continue, and measure it; return the finished run.

    Raises UserError if the checkpoint has no encoder, if nothing can be measured, and for what `run_training` refuses.
    """
    check_objects(data.evaluation)  # which are measured after the training
    backbone = Run.open(options.checkpoint, image_size=options.recipe.image_size)

    if not options.dry_run and not (options.directory / MODEL).is_file():
        _print_time(backbone.model, options.recipe, len(data.train))
    run = run_training(
        options,
        setup,
        lambda _: detector_to_train(backbone, data.labels, options),
        command="detect",
        recipe_name="detect",
        checkpoint=options.checkpoint,
    )
    if not options.dry_run:
        evaluate(open_detector(Run.open(str(run.path))), data.evaluation, data.kind, run.path)
    return run


def box_data_set(data: BoxData) -> DataSet:
    """Return the data set of images with boxes; `DenseBatches` describes their targets.

    Every image is decoded once. Raises UserError for those that cannot be.
    """
    files, contents, image_warnings = [str(image.file) for image in data.all], FileContents(), ImageWarnings()
    bad = problems_of(files, lambda file: file_problem(file, image_warnings, contents))
    report_bad(bad.items(), f"of {len(files)} images cannot be read", "repair them, or remove them and their boxes")
    most = max(1, *(len(image.targets[1]) for image in data.all))
    batches = BoxBatches(most * TILES**2, most)
    image_warnings.warn(f"{len(files):,} images")
    train, evaluation = (_split(images, contents) for images in (data.train, data.evaluation))
    return DataSet(data.labels, train, evaluation, held_out=not data.has_split, batches=batches)


def _split(images: Sequence[BoxedImage], contents: FileContents) -> Split:
    all_corners, all_classes = zip(*(image.targets for image in images), strict=True)
    corners, classes = tf.constant(np.concatenate(all_corners)), tf.constant(np.concatenate(all_classes))
    ends = tf.constant(np.cumsum([0, *map(len, all_classes)]))
    fingerprint = 0
    for image in images:
        parts = (os.fsencode(image.file.name), *(part.tobytes() for part in image.targets))
        fingerprint = zlib.crc32(b"|".join(parts), fingerprint)

    def target(index: tf.Tensor) -> dict[str, tf.Tensor]:
        begin, end = ends[index], ends[index + 1]
        return {"labels": classes[begin:end], "boxes": corners[begin:end]}

    files = [str(image.file) for image in images]
    return split_of_files(files, contents, fingerprint=fingerprint, target=target)


def detector_to_train(backbone: Run, labels: Sequence[str], options: DetectFitOptions) -> keras.Model:
    """The detector at the start: with a new head and random classes; of a detector with text tower, with its own.

    There the classes begin as the embeddings of their names.
    """
    recipe, (model, config, task) = options.recipe, encoder_of(backbone)
    preprocessing = recipe.preprocessing(preprocessing_of(model).channels, preprocessing_of(model))
    known = task if isinstance(task, DetectionConfig) else None
    if known is None:
        started = DetectionConfig(config.hidden_size)
        embeddings = np.random.default_rng(options.seed).normal(size=(len(labels), config.hidden_size))
    else:
        started, embeddings = known, class_embeddings(backbone.checkpoint, classes_of_labels(labels, options.templates))
    detector = Blueprint(config, preprocessing, task=started).build()
    fill_from(detector, model)
    if known is None:
        head = detector.get_layer("class_head")
        for kernel in (head.scale_kernel, head.shift_kernel):
            kernel.assign(np.zeros(kernel.shape))
        head.scale_bias.assign([_SCALE - 1.0])
        head.shift_bias.assign([math.log(_PRIOR / (1.0 - _PRIOR)) / _SCALE])
    return with_classes(detector, embeddings)


def _print_time(network: keras.Model, recipe: DetectRecipe, num_images: int) -> None:
    batch_size, steps = recipe.batch_size, recipe.num_steps(num_images)
    images = np.zeros((batch_size, *network.input_shape[1:]), np.float32)
    network.predict_on_batch(images)  # which traces
    begin = time.perf_counter()
    network.predict_on_batch(images)
    shown = duration(max(_STEP_OF_FORWARD * (time.perf_counter() - begin) * steps, 1.0))
    print(f"{steps:,} steps of {batch_size} images take about {shown} on this machine, without the evaluations.")
