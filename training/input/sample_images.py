"""Some evaluation images of a data set, written for commands without TensorFlow."""

import numpy as np
import tensorflow as tf

from keras_vit import UserError, run_directory
from keras_vit.files.atomic import staged
from keras_vit.files.labels import labels_text
from keras_vit.run_directory import Samples
from training.input.sources import bad_examples_reported, open_source
from training.options.data import SamplesOptions


def write_samples(arguments: SamplesOptions) -> None:
    """Write both files."""
    if arguments.count < 1:
        raise UserError(f"--count must be at least 1 image, but is {arguments.count}.")
    output = run_directory.check_output(arguments.output)
    source = open_source(arguments.source)
    split = source.evaluation
    chosen = np.random.default_rng(0).permutation(split.num_examples)[: arguments.count]
    with bad_examples_reported(source.train, source.evaluation):
        examples = [split.example(tf.constant(index, tf.int64)) for index in chosen]
    encoded = tuple(tf.io.encode_png(image).numpy() for image, _ in examples)
    with staged(output) as stage:
        Samples(encoded, np.array([int(label) for _, label in examples])).save(stage / run_directory.SAMPLES)
        (stage / run_directory.LABELS).write_text(labels_text(source.labels), encoding="utf-8")
    print(f"{len(encoded)} images in {output / run_directory.SAMPLES}.")
