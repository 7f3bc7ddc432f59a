"""Training on JAX: whether it was requested, and which options need it or are not supported there."""

import importlib.util
import os

from keras_vit.errors import refuse_first
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
    """Raises UserError for the first option or recipe field that is not supported on JAX, or if JAX is missing."""
    parts = (options.devices, options.execution, options, options.recipe)
    given = {name: getattr(part, name) for part in parts for name in _ON_JAX if getattr(part, name, None)}
    missing = (
        importlib.util.find_spec("jax") is None,
        'KERAS_BACKEND=jax needs the package jax; pip install jax, or "jax[cuda12]" for NVIDIA GPUs, or set '
        "KERAS_BACKEND=tensorflow.",
    )
    unsupported = (
        (
            value not in _ON_JAX[name][0],
            f"--{name.replace('_', '-')}{f' {value}' if _ON_JAX[name][0] else ''} is not supported with "
            f"KERAS_BACKEND=jax ({_ON_JAX[name][1]}); leave it out, or set KERAS_BACKEND=tensorflow.",
        )
        for name, value in given.items()
    )
    refuse_first([missing, *unsupported])


def check_tensorflow(options: TrainingOptions) -> None:
    """Raises UserError for an option that needs JAX."""
    for name, default in _NEED_JAX.items():
        value = getattr(options, name)
        typed = f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
        sentence = f"{typed} needs KERAS_BACKEND=jax; set it in the environment, or leave the option out."
        refuse_first([(value != default, sentence)])
