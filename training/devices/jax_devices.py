"""The devices of this host for training on JAX, with `keras.distribution`."""

import contextlib

import keras
import tensorflow as tf


class JaxDevices:
    """All GPUs or TPU chips of this host, else its CPU devices, in place of a strategy of tf.distribute.

    Creating it makes `keras.distribution.DataParallel` the distribution of this process: variables created afterwards
    are on all devices, and each device computes its rows of a batch. TensorFlow, which reads the data, leaves the GPUs.
    """

    def __init__(self):
        with contextlib.suppress(RuntimeError):  # TensorFlow is already initialized
            tf.config.set_visible_devices([], "GPU")
        devices = keras.distribution.list_devices()
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
        self.num_replicas_in_sync = len(devices)

    def scope(self) -> contextlib.AbstractContextManager:
        """Return a context that does nothing; `keras.distribution` needs none."""
        return contextlib.nullcontext()
