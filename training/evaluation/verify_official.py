"""Compare a checkpoint's top-1 accuracy on ImageNet with the published one."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit.published import ACCURACY
from keras_vit.run import Run
from training.data.checks import split_folders
from training.data.sources import open_source
from training.evaluation.evaluate import check_logits, class_order
from training.evaluation.metrics import share_interval
from training.evaluation.predictors import open_predictor
from training.options.evaluate import InputOptions, VerifyOfficialOptions


def verify_official(options: VerifyOfficialOptions) -> None:
    """Measure the checkpoint with the preprocessing of its published figure, and print a row of a table and a verdict.

    It is downloaded if it is not in the cache. Of TFDS, the split validation is taken by default, since ImageNet's test
    images have no labels. Raises UserError for data with other classes than the checkpoint, and outputs that are not
    finite.
    """
    name, source, published = options.name, options.source, ACCURACY[options.name]
    size = (published.pixels, published.pixels)
    overrides = InputOptions(image_size=size, resize=published.resize, crop_from=published.crop_from)
    predictor = open_predictor(Run.open(name, image_size=size), overrides, options.devices)
    if source.data.startswith("tfds:") and source.eval_split is None:
        source = dataclasses.replace(source, train_split="validation", eval_split="validation")
    dataset = open_source(source)
    order = class_order(predictor, dataset)
    correct, count, splits = 0, 0, [dataset.evaluation]
    if source.kind == "folder" and split_folders(source.path) is None:  # of which the evaluation images are a tenth
        splits.append(dataset.train)
    for split in splits:
        logits, labels = predictor.predict(split, options.batch_size)
        check_logits(logits)
        correct += int(np.sum(np.take(logits, order, axis=1).argmax(axis=-1) == labels))
        count += len(labels)
    low, high = (100.0 * end for end in share_interval(correct, count))
    cells = (
        name,
        f"{published.pixels} px, {published.resize or 'its own resize'}",
        f"{count:,}",
        f"{100.0 * correct / count:.2f} % ({low:.2f} to {high:.2f})",
        f"{published.top1} %",
        published.source,
        f"keras_vit {keras_vit.__version__}, Keras {keras.__version__}, TensorFlow {tf.__version__}",
    )
    print(f"| {' | '.join(cells)} |")
    verdict, advice = "within", ""
    if not low <= published.top1 <= high:
        verdict = "outside"
        advice = (
            "; check that they are ImageNet's validation images, and that their classes are in the order of the "
            "WordNet ids"
        )
    print(f"The published {published.top1} % is {verdict} the 95 % interval of {count:,} images{advice}.")
