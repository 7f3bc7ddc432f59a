"""Batches of a tf.data service are those made here, in the same order, whatever happens to its workers."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from keras_vit import Preprocessing
from tests.support import assert_equal_weights
from training.data.pipeline import training_batches
from training.data.sources import array_split
from training.loop.devices import data_service
from training.loop.devices.data_service import served_batches
from training.recipes.pretrain import RECIPES

_RECIPE = dataclasses.replace(RECIPES["digits"], image_size=(4, 8), batch_size=5, mixup=0.2)
_PREPROCESSING = Preprocessing((4, 8), channels=1)


def running(workers: int) -> tuple:
    """(dispatcher, its workers) on this machine."""
    data = tf.data.experimental.service
    dispatcher = data.DispatchServer(data.DispatcherConfig(port=0))
    config = data.WorkerConfig(dispatcher.target.split("://")[1], heartbeat_interval_ms=100)
    return dispatcher, [data.WorkerServer(config) for _ in range(workers)]


def stop(worker: tf.data.experimental.service.WorkerServer) -> None:
    worker._stop()


def batches(**options) -> tf.data.Dataset:
    """Images of which each has its number as all its pixels, shifted and mixed."""
    images = np.broadcast_to(np.arange(23, dtype=np.uint8)[:, None, None, None], (23, 4, 8, 1))
    split = array_split(np.array(images), np.arange(23) % 3, tuple("abc"))
    return training_batches(split, _RECIPE, _PREPROCESSING, num_classes=3, seed=0, **options)


def assert_same(actual, first_step: int, num_steps: int, **options) -> None:
    """Each of the batches is that made here."""
    expected = batches(first_step=first_step, num_steps=num_steps, **options)
    for here, served in zip(expected, actual, strict=True):
        assert_equal_weights(here, served)


def test_two_workers_make_the_same_batches_in_the_same_order(recwarn):
    dispatcher, workers = running(2)
    part = (1, 5)
    assert_same(served_batches(dispatcher.target, batches, first_step=3, part=part).take(12), 3, 12, part=part)
    assert not [warning for warning in recwarn if "data service" in str(warning.message)]
    for worker in workers:
        stop(worker)


def test_the_batches_of_a_stopped_worker_are_made_here():
    dispatcher, workers = running(2)
    actual = iter(served_batches(dispatcher.target, batches, first_step=0))
    first = [next(actual) for _ in range(3)]
    stop(workers[0])
    assert_same([*first, *(next(actual) for _ in range(60))], 0, 63)
    stop(workers[1])


def test_without_workers_the_batches_are_made_here_and_it_says_so(monkeypatch):
    monkeypatch.setattr(data_service, "_PATIENCE", 0.2)
    dispatcher, _ = running(0)
    with pytest.warns(UserWarning, match=r"The data service at grpc://localhost:\d+ gave no batch for"):
        assert_same(served_batches(dispatcher.target, batches, first_step=0).take(4), 0, 4)


def test_an_error_of_the_workers_is_named_and_the_batches_are_made_here():
    gone = [True]

    def read(labels: np.ndarray) -> np.ndarray:
        if gone:
            gone.pop()
            raise FileNotFoundError("pictures/1.jpg")
        return labels

    def read_again(**options) -> tf.data.Dataset:
        def again(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return images, tf.ensure_shape(tf.numpy_function(read, [labels], tf.float32), labels.shape)

        return batches(**options).map(again)

    dispatcher, workers = running(1)
    with pytest.warns(UserWarning, match=r"The data service at .* failed \(.*pictures/1\.jpg"):
        assert_same(served_batches(dispatcher.target, read_again, first_step=0).take(4), 0, 4)
    stop(workers[0])
