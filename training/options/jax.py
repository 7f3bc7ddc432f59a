"""Training on JAX: whether it was requested, and which options need it or are not supported there."""

import importlib.util
import os

from keras_vit import UserError
from training.options.common import StrategyOptions, TrainingOptions
from training.recipes.recipe import PretrainRecipe, Recipe


def jax_requested() -> bool:
    """Whether the environment requests the JAX backend of Keras."""
    return os.environ.get("KERAS_BACKEND") == "jax"


def check_jax(options: TrainingOptions, recipe: Recipe) -> None:
    """Raises UserError for the first option or recipe field that is not supported on JAX, or if JAX is missing."""
    if importlib.util.find_spec("jax") is None:
        raise UserError(
            'KERAS_BACKEND=jax needs the package jax; pip install jax, or "jax[cuda12]" for NVIDIA GPUs, or set '
            "KERAS_BACKEND=tensorflow."
        )
    devices, execution = options.devices, options.execution
    target = recipe.target if isinstance(recipe, PretrainRecipe) else "classes"
    all_devices, of_tensorflow = "JAX uses all devices of all hosts", "it is written for TensorFlow"
    for option, is_set, reason in (
        (f"--strategy {devices.strategy}", devices.strategy != "auto", all_devices),
        ("--replicas", devices.replicas is not None, all_devices),
        ("--tpu", devices.tpu != StrategyOptions.tpu, all_devices),
        ("--worker-timeout", devices.worker_timeout != StrategyOptions.worker_timeout, "JAX waits a minute"),
        ("--precision float16", execution.precision == "float16", "--precision bfloat16 needs no loss scaling"),
        ("--steps-per-execution", execution.steps_per_execution > 1, "every step is one call already"),
        ("--xla off", execution.xla == "off", "XLA compiles every step"),
        ("--data-service", options.data_service is not None, "it was tried on TensorFlow alone"),
        ("--inspect-every", execution.inspect_every, "keras-vit inspect reads the finished run"),
        ("--profile-steps", execution.profile_steps, "TensorFlow's profiler does not see JAX"),
        ("--dry-run", options.dry_run, of_tensorflow),
        (f"--target {target}", target != "classes", of_tensorflow),
        ("--teacher", recipe.teacher is not None, of_tensorflow),
        ("--patch-sizes", recipe.patch_sizes, of_tensorflow),
        ("--patch-dropout", recipe.patch_dropout, of_tensorflow),
        ("--sharpness-radius", recipe.sharpness_radius, of_tensorflow),
    ):
        if is_set:
            raise UserError(
                f"{option} is not supported with KERAS_BACKEND=jax ({reason}); leave it out, or set "
                "KERAS_BACKEND=tensorflow."
            )


def check_tensorflow(options: TrainingOptions) -> None:
    """Raises UserError for an option that needs JAX."""
    for found in (
        f"--model-parallel {options.model_parallel}" if options.model_parallel > 1 else "",
        "--shard-weights" if options.shard_weights else "",
    ):
        if found:
            raise UserError(f"{found} needs KERAS_BACKEND=jax; set it in the environment, or leave the option out.")
