"""Train a model that segments, and measure it."""

import dataclasses

import keras

from keras_vit import UserError, preprocessing_of
from keras_vit.checkpoints.load import fill_from
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import LinearSegmentationConfig, SegmentationConfig
from keras_vit.run import Run
from training.data.dense import SceneBatches
from training.loop.build import encoder_of
from training.loop.plan import Setup
from training.loop.train import run_training
from training.options.dense import SegmentFitOptions
from training.segmentation.evaluation import evaluate, write_report
from training.segmentation.segmenter import open_segmenter

_HEAD = "segmentation_"


def fit(options: SegmentFitOptions, setup: Setup) -> Run:
    """Train, or continue, and measure on the evaluation images; return the finished run.

    Raises UserError if the checkpoint has no encoder that fits, and for what `run_training` refuses.
    """
    recipe, backbone = options.recipe, Run.open(options.checkpoint, image_size=options.recipe.image_size)
    batches = setup.source.batches
    assert isinstance(batches, SceneBatches)
    if recipe.head == "eomt" and batches.num_targets > recipe.num_queries:
        raise UserError(
            f"An image has up to {batches.num_targets} segments, but there are {recipe.num_queries} queries, each of "
            f"which finds one; give --num-queries {batches.num_targets} or more."
        )
    run = run_training(
        options,
        setup,
        lambda num_classes: segmenter_to_train(backbone, num_classes, batches.stuff, options),
        command="segment",
        recipe_name=recipe.head,
        checkpoint=options.checkpoint,
    )
    if not options.dry_run:
        segmenter = open_segmenter(Run.open(str(run.path)))
        write_report(evaluate(segmenter, setup.source.evaluation), run.path)
    return run


def segmenter_to_train(
    backbone: Run, num_classes: int, stuff: tuple[int, ...], options: SegmentFitOptions
) -> keras.Model:
    """The model at the start: the encoder of a checkpoint with a new head, or all that fits of a model that segments.

    With the linear head, nothing else is trained.
    """
    recipe, (model, config, own) = options.recipe, encoder_of(backbone)
    task: SegmentationConfig | LinearSegmentationConfig
    if recipe.head == "linear":
        task = LinearSegmentationConfig(num_classes, recipe.blocks)
    else:
        upscale = max(max(config.patch).bit_length() - 3, 0)  # masks of about a quarter of the image's sides
        stuff = stuff if options.task == "panoptic" else ()
        task = SegmentationConfig(
            num_classes, recipe.num_queries, recipe.num_blocks, upscale, True, task=options.task, stuff=stuff
        )
        if isinstance(own, SegmentationConfig):
            task = dataclasses.replace(task, num_upscale_blocks=own.num_upscale_blocks, gelu=own.gelu)
    images = preprocessing_of(model)
    started = Blueprint(config, recipe.preprocessing(images.channels, images), task=task).build()
    fill_from(started, model)
    for layer in started.layers if recipe.head == "linear" else ():
        layer.trainable = layer.name.startswith(_HEAD)
    return started
