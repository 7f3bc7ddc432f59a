"""Write evaluation images of a data set to a file, for commands that do not use TensorFlow."""

import os

import numpy as np
import tensorflow as tf

from keras_vit.files.atomic import staged
from keras_vit.files.labels import LABELS, labels_text
from keras_vit.files.remote import output_folder
from keras_vit.images.samples import Samples
from keras_vit.run import SAMPLES
from training.data.pipeline import sample_name
from training.data.sources import bad_examples_reported, open_source
from training.options.common import DataOptions


def write_samples(source: DataOptions, output: str | os.PathLike, *, count: int = 128) -> None:
    """Write samples.npz with up to `count` evaluation images in shuffled order, and labels.txt."""
    directory = output_folder(output)
    dataset = open_source(source)
    split = dataset.evaluation
    chosen = np.random.default_rng(0).permutation(split.num_examples)[:count]
    with bad_examples_reported(dataset.train, dataset.evaluation):
        examples = [split.example(tf.constant(index, tf.int64)) for index in chosen]
    encoded = tuple(tf.io.encode_png(image).numpy() for image, _ in examples)
    with staged(directory) as stage:
        labels = np.array([int(label) for _, label in examples])
        names = tuple(sample_name(split, int(index)) for index in chosen)
        Samples(encoded, labels, names).save(stage / SAMPLES)
        (stage / LABELS).write_text(labels_text(dataset.labels), encoding="utf-8")
    print(f"{len(encoded)} images in {directory / SAMPLES}.")
