"""Training on JAX: whether it was requested, and which options need it or are not supported there."""

import importlib.util
import os

from keras_vit.cli.options import option_name
from keras_vit.errors import UserError
from training.options.common import StrategyOptions, TrainingOptions

_ALL_DEVICES, _OF_TENSORFLOW = "JAX uses all devices of all hosts", "it is written for TensorFlow"
# Options and fields of recipes that JAX does not support: the values that it does, besides none and zero, and why.
_ON_JAX: dict[str, tuple[tuple, str]] = {
    "strategy": (("auto",), _ALL_DEVICES),
    "replicas": ((), _ALL_DEVICES),
    "tpu": ((StrategyOptions.tpu,), _ALL_DEVICES),
    "worker_timeout": ((StrategyOptions.worker_timeout,), "JAX waits a minute"),
    "precision": (("float32", "bfloat16"), "--precision bfloat16 needs no loss scaling"),
    "steps_per_execution": ((1,), "every step is one call already"),
    "xla": (("auto", "on"), "XLA compiles every step"),
    "data_service": ((), "it was tried on TensorFlow alone"),
    "inspect_every": ((), "keras-vit inspect reads the finished run"),
    "profile_steps": ((), "TensorFlow's profiler does not see JAX"),
    "dry_run": ((), _OF_TENSORFLOW),
    "target": (("classes",), _OF_TENSORFLOW),
    "teacher": ((), _OF_TENSORFLOW),
    "patch_sizes": ((), _OF_TENSORFLOW),
    "patch_dropout": ((), _OF_TENSORFLOW),
    "sharpness_radius": ((), _OF_TENSORFLOW),
}
_NEED_JAX = {"model_parallel": 1, "shard_weights": False}


def jax_requested() -> bool:
    """Whether the environment requests the JAX backend of Keras."""
    return os.environ.get("KERAS_BACKEND") == "jax"


def check_jax(options: TrainingOptions) -> None:
    """Raise UserError for the first option or recipe field that is not supported on JAX, or if JAX is missing."""
    parts = (options.devices, options.execution, options, options.recipe)
    given = {name: getattr(part, name) for part in parts for name in _ON_JAX if getattr(part, name, None)}
    if importlib.util.find_spec("jax") is None:
        raise UserError('KERAS_BACKEND=jax needs the package jax: pip install jax, or "jax[cuda12]" for NVIDIA GPUs.')
    for name, value in given.items():
        supported, reason = _ON_JAX[name]
        if value not in supported:
            raise UserError(
                f"{option_name(name)}{f' {value}' if supported else ''} is not supported with KERAS_BACKEND=jax "
                f"({reason}); leave it out, or set KERAS_BACKEND=tensorflow."
            )


def check_tensorflow(options: TrainingOptions) -> None:
    """Raise UserError for an option that needs JAX."""
    for name, default in _NEED_JAX.items():
        value = getattr(options, name)
        if value != default:
            typed = f"{option_name(name)}{'' if value is True else f' {value}'}"
            raise UserError(f"{typed} needs KERAS_BACKEND=jax; set it in the environment, or leave the option out.")
