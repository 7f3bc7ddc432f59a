"""Training examples of uneven classes, repeated until all classes have as many."""

import numpy as np
import pytest
import tensorflow as tf

from keras_vit import UserError
from training.data.dataset import Split, balanced, typical_image
from training.data.sources import array_split

NAMES = ("a", "b", "c")


def images_of(labels: list[int], channels: int = 3) -> Split:
    """Images of one pixel, whose value is their number."""
    numbers = np.arange(len(labels), dtype=np.uint8)
    return array_split(np.repeat(numbers[:, None, None, None], channels, -1), np.array(labels), NAMES)


def test_all_classes_get_as_many_examples_as_the_largest_each_image_as_often_as_the_next():
    split = balanced(images_of([0, 0, 0, 0, 0, 1, 1, 2]))
    read = [split.example(tf.constant(index, tf.int64)) for index in range(split.num_examples)]
    assert [int(label) for _, label in read] == [0] * 5 + [1] * 5 + [2] * 5
    assert [int(image[0, 0, 0]) for image, _ in read] == [0, 1, 2, 3, 4, 5, 6, 5, 6, 5, 7, 7, 7, 7, 7]
    assert np.bincount(split.labels).tolist() == [5, 5, 5]


def test_labels_that_are_not_known_cannot_be_balanced():
    split = images_of([0, 1])
    with pytest.raises(UserError, match="--balance .* are not of digits, folder:PATH or csv:FILE"):
        balanced(Split(split.num_examples, split.read))


@pytest.mark.parametrize(("channels", "typical"), [(1, (1, False)), (2, (1, True)), (3, (3, False)), (4, (3, True))])
def test_images_are_gray_only_if_they_all_are_and_transparent_if_most_have_transparent_pixels(channels, typical):
    assert typical_image(images_of([0, 1, 2], channels))[1:] == typical


def test_an_alpha_that_is_opaque_throughout_is_no_transparency():
    images = np.full((3, 2, 2, 4), 255, np.uint8)
    assert not typical_image(array_split(images, np.arange(3), NAMES))[2]
    images[:2, 0, 0, 3] = 0
    assert typical_image(array_split(images, np.arange(3), NAMES))[2]
