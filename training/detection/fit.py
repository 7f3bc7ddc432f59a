"""Train a detector: a head on the encoder of a checkpoint, or a published detector further, for own classes."""

import math
import time
from collections.abc import Sequence

import keras
import numpy as np

import keras_vit
from keras_vit import DetectionConfig, UserError, ViTConfig, preprocessing_of, with_classes
from keras_vit.checkpoints.load import check_unchanged, fill_from
from keras_vit.files.keras_model import MODEL
from keras_vit.models.config import TaskConfig
from keras_vit.models.tasks import build_task, task_of
from keras_vit.run import Run
from keras_vit.text.classes import classes_of_labels
from keras_vit.text.zero_shot import class_embeddings
from training.data.annotations.boxes import BoxData
from training.detection.detector import open_detector
from training.detection.evaluation import evaluate
from training.loop.setup import Setup
from training.loop.train import run_training
from training.options.detect import DetectFitOptions
from training.recipes.detect import DetectRecipe

# Initial scale of the logits of a new head, and the share of patches that it takes for a class (as RetinaNet).
_SCALE, _PRIOR = 10.0, 0.01
# A training step takes about so many times a forward pass.
_STEP_OF_FORWARD = 3.0


def fit(options: DetectFitOptions, data: BoxData, setup: Setup) -> Run:
    """Train a detector, or continue, and measure it; return the finished run.

    Raises UserError if the checkpoint has no encoder for a detector, and for what `run_training` refuses.
    """
    backbone = Run.open(options.checkpoint, image_size=options.recipe.image_size)

    def make_model(num_classes: int) -> keras.Model:
        return detector_to_train(backbone, data.labels, options)

    if not options.dry_run and not (options.directory / MODEL).is_file():
        _print_time(backbone.model, options.recipe, len(data.train))
    run = run_training(
        options, setup, make_model, command="detect", recipe_name="detect", checkpoint=options.checkpoint
    )
    if not options.dry_run:
        detector = open_detector(Run.open(str(run.path)))
        evaluate(detector, data.evaluation, data.kind, run.path)
    return run


def detector_to_train(backbone: Run, labels: Sequence[str], options: DetectFitOptions) -> keras.Model:
    """The detector at the start: with a new head and random classes; of a detector with text tower, with its own.

    There the classes begin as the embeddings of their names.
    """
    model, recipe = backbone.model, options.recipe
    check_unchanged(model, "give the model from before the change")
    config, task = keras_vit.config_of(model), task_of(model)
    if not isinstance(config, ViTConfig) or (task is not None and not isinstance(task, DetectionConfig)):
        raise UserError(f"{backbone.name} has no encoder for a detector; give a Vision Transformer, or OWL-ViT.")
    preprocessing = recipe.preprocessing(preprocessing_of(model).channels, preprocessing_of(model))
    if task is None:
        started: TaskConfig = DetectionConfig(config.hidden_size)
        embeddings = np.random.default_rng(options.seed).normal(size=(len(labels), config.hidden_size))
    else:
        started, embeddings = task, class_embeddings(backbone.checkpoint, classes_of_labels(labels, options.templates))
    detector = build_task(config, started, preprocessing)
    fill_from(detector, model)
    if task is None:
        head = detector.get_layer("class_head")
        for kernel in (head.scale_kernel, head.shift_kernel):
            kernel.assign(np.zeros(kernel.shape))
        head.scale_bias.assign([_SCALE - 1.0])
        head.shift_bias.assign([math.log(_PRIOR / (1.0 - _PRIOR)) / _SCALE])
    return with_classes(detector, embeddings)


def _print_time(network: keras.Model, recipe: DetectRecipe, num_pictures: int) -> None:
    """Say before the training about how long it takes here, from the time of one forward pass."""
    batch_size, steps = recipe.batch_size, recipe.num_steps(num_pictures)
    images = np.zeros((batch_size, *network.input_shape[1:]), np.float32)
    network.predict_on_batch(images)  # which traces
    begin = time.perf_counter()
    network.predict_on_batch(images)
    minutes = _STEP_OF_FORWARD * (time.perf_counter() - begin) * steps / 60
    shown = f"{max(minutes, 1):.0f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"
    print(f"About {shown} on this machine for {steps:,} steps of {batch_size} pictures, without the evaluations.")
