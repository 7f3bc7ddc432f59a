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
    for found, allowed in (
        (f"--strategy {devices.strategy}" if devices.strategy != "auto" else "", "JAX uses all devices of this host"),
        ("--replicas" if devices.replicas is not None else "", "JAX uses all devices of this host"),
        ("--tpu" if devices.tpu != StrategyOptions.tpu else "", "JAX uses all devices of this host"),
        (
            "--worker-timeout" if devices.worker_timeout != StrategyOptions.worker_timeout else "",
            "JAX uses all devices of this host",
        ),
        (
            "--precision float16" if execution.precision == "float16" else "",
            "--precision bfloat16 needs no loss scaling",
        ),
        ("--steps-per-execution" if execution.steps_per_execution > 1 else "", "every step is one call already"),
        ("--xla off" if execution.xla == "off" else "", "XLA compiles every step"),
        ("--data-service" if options.data_service is not None else "", "it was tried on TensorFlow alone"),
        ("--inspect-every" if execution.inspect_every else "", "keras-vit inspect reads the finished run"),
        ("--profile-steps" if execution.profile_steps else "", "TensorFlow's profiler does not see JAX"),
        ("--dry-run" if options.dry_run else "", "the dry run runs on TensorFlow"),
        (f"--target {target}" if target != "classes" else "", "its loss is written for TensorFlow"),
        ("--teacher" if recipe.teacher is not None else "", "its loss is written for TensorFlow"),
        ("--patch-sizes" if recipe.patch_sizes else "", "its training form is written for TensorFlow"),
        ("--patch-dropout" if recipe.patch_dropout else "", "its training form is written for TensorFlow"),
        ("--sharpness-radius" if recipe.sharpness_radius else "", "its gradient is written for TensorFlow"),
    ):
        if found:
            raise UserError(
                f"{found} is not supported with KERAS_BACKEND=jax ({allowed}); leave it out, or set "
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
