"""Compare a checkpoint's top-1 accuracy on ImageNet with the published one."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit.published import ACCURACY
from keras_vit.run import Run
from training.data.checks import split_folders
from training.data.dataset import Split
from training.data.sources import DataSet, open_source
from training.evaluation.evaluate import check_logits, class_order
from training.evaluation.metrics import share_interval
from training.evaluation.predictors import open_predictor
from training.options.common import DataOptions
from training.options.evaluate import InputOptions, VerifyOfficialOptions


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify_official`."""

    num_correct: int
    num_examples: int
    interval: tuple[float, float]
    """95 % interval of the accuracy, in percent."""
    published: float
    """Percent."""

    @property
    def agrees(self) -> bool:
        """Whether the published accuracy is in the interval."""
        return self.interval[0] <= self.published <= self.interval[1]


def verify_official(options: VerifyOfficialOptions) -> Verification:
    """Measure the checkpoint with the preprocessing of its published figure, and print a row of a table.

    It is downloaded if it is not in the cache. Of TFDS, the split validation is taken by default, since ImageNet's test
    images have no labels.

    Raises:
        UserError: for data with other classes than the checkpoint, and outputs that are not finite.
    """
    name, source = options.name, options.source
    published = ACCURACY[name]
    overrides = InputOptions(
        image_size=(published.pixels, published.pixels), resize=published.resize, crop_from=published.crop_from
    )
    predictor = open_predictor(Run.open(name, image_size=overrides.image_size), overrides, options.devices)
    if source.data.startswith("tfds:") and source.eval_split is None:
        source = dataclasses.replace(source, train_split="validation", eval_split="validation")
    dataset = open_source(source)
    order = class_order(predictor, dataset)
    correct, count = 0, 0
    for split in _splits(source, dataset):
        logits, labels = predictor.predict(split, options.batch_size)
        check_logits(logits)
        correct += int(np.sum(logits[:, order].argmax(axis=-1) == labels))
        count += len(labels)
    low, high = share_interval(correct, count)
    result = Verification(correct, count, (100.0 * low, 100.0 * high), published.top1)
    cells = (
        name,
        f"{published.pixels} px, {published.resize or 'its own resize'}",
        f"{count:,}",
        f"{100.0 * correct / count:.2f} % ({result.interval[0]:.2f} to {result.interval[1]:.2f})",
        f"{published.top1} %",
        published.source,
        f"keras_vit {keras_vit.__version__}, Keras {keras.__version__}, TensorFlow {tf.__version__}",
    )
    print(f"| {' | '.join(cells)} |")
    verdict, advice = "within", ""
    if not result.agrees:
        verdict = "outside"
        advice = (
            "; check that they are ImageNet's validation images, and that their classes are in the order of the "
            "WordNet ids"
        )
    print(f"The published {published.top1} % is {verdict} the 95 % interval of {count:,} images{advice}.")
    return result


def _splits(source: DataOptions, dataset: DataSet) -> tuple[Split, ...]:
    """The splits to measure: of a folder without splits of its own both, since one is a tenth of the images."""
    if source.kind == "folder" and split_folders(source.path) is None:
        return dataset.train, dataset.evaluation
    return (dataset.evaluation,)
