"""Prepare the backend of Keras before it is imported."""

from keras_vit import cli
from training.loop.devices.jax_options import check_jax, check_tensorflow, jax_requested
from training.loop.devices.tpu import prepare_tpu
from training.options.common import TrainingOptions


def prepare_backend(options: TrainingOptions) -> None:
    """Refuse what the backend of Keras does not support, and prepare the environment for it, before it is imported."""
    if jax_requested():
        check_jax(options)
    else:
        check_tensorflow(options)
        prepare_tpu(options.devices)
        cli.require_tensorflow()
