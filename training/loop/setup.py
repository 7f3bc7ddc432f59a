"""Open the devices and the data of a training run."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from keras_vit import UserError
from keras_vit.files.remote import is_remote
from training.data.sources import DataSet, open_source
from training.loop.devices.jax_devices import JaxDevices
from training.loop.devices.strategies import open_strategy
from training.options.common import TrainingOptions


@dataclasses.dataclass(frozen=True)
class Setup:
    """The data and devices of a run."""

    source: DataSet
    strategy: tf.distribute.Strategy


def open_setup(options: TrainingOptions, open_data: Callable[[], DataSet] | None = None) -> Setup:
    """Open the devices, then the data: reading images needs devices.

    open_data: for data that are no classes of images. Default: `open_source`.

    Raises UserError for what is wrong, and for such data on several hosts with JAX.
    """
    if not options.workdir.isprintable():
        raise UserError(
            "--workdir takes a directory or an address such as gs://bucket/run, in printable characters, "
            f"but was given {options.workdir!r}; give one such as runs/mine."
        )
    if is_remote(options.workdir):
        options.directory.mkdir(parents=True, exist_ok=True)  # raises what is wrong before all the work
    strategy = open_strategy(options.devices, options.model_parallel, shard_weights=options.shard_weights)
    if open_data is not None and isinstance(strategy, JaxDevices) and strategy.num_hosts > 1:
        raise UserError("Training with masks or boxes on JAX takes one host; start the command on one alone.")
    return Setup(open_data() if open_data else open_source(options.source, multi_label=True), strategy)
