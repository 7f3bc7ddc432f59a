"""Distribution strategies: one device, several devices, several machines, a TPU. All setup of tf.distribute is here."""

import contextlib
import faulthandler
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_vit import UserError
from keras_vit.errors import explained, refuse_without_effect
from training.loop.devices.backend import has_tpu, may_be_slice
from training.loop.devices.cluster import met_workers, several_workers_started
from training.loop.devices.jax_devices import JaxDevices, connect_hosts, numbers_of_hosts
from training.options.common import StrategyKind, StrategyOptions

# Exit code of an interrupted run, by a signal or a lost worker: the same command continues it. EX_TEMPFAIL of
# sysexits.h.
CONTINUE_LATER = 75

_MULTI_WORKER = tf.distribute.MultiWorkerMirroredStrategy
# Errors that workers see when another one is gone or does not answer in time. Other failures raise them, too, so the
# message is checked as well.
_LOST_WORKER_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)
# The same in the only error of JAX, by the connections of Gloo (CPUs) and NCCL (GPUs). A TPU waits until its process is
# ended, see `connect_hosts`.
_LOST_HOST = re.compile("by peer|remote process", re.IGNORECASE)


def open_strategy(
    options: StrategyOptions, model_parallel: int = 1, *, shard_weights: bool = False
) -> tf.distribute.Strategy:
    """Create the strategy; once per process, before any computation. Raises UserError for missing devices.

    On JAX, return the devices of `keras.distribution` in its place, see `JaxDevices` for the other arguments.
    """
    if keras.backend.backend() == "jax":
        if several_workers_started():
            connect_hosts(*met_workers(options.worker_timeout), options.worker_timeout)
        elif may_be_slice():
            connect_hosts()
        return JaxDevices(model_parallel, shard_weights=shard_weights)
    gpus = tf.config.list_physical_devices("GPU")
    strategy = _detect(gpus) if options.strategy == "auto" else options.strategy
    refuse_without_effect(options, [(("replicas",), strategy == "mirrored", "--strategy mirrored")])
    if strategy == "mirrored":
        return tf.distribute.MirroredStrategy(_devices(options.replicas, gpus))
    if strategy == "multi-worker":
        return _multi_worker(options.worker_timeout)
    return _tpu(options.tpu) if strategy == "tpu" else tf.distribute.get_strategy()


def _detect(gpus: list) -> StrategyKind:
    """Return the strategy for this machine and environment."""
    if several_workers_started():
        return "multi-worker"
    if tf.config.list_physical_devices("TPU") or has_tpu() or "TPU_NAME" in os.environ:
        return "tpu"
    return "mirrored" if len(gpus) > 1 else "single"


def _devices(replicas: int | None, gpus: list) -> list[str]:
    if (replicas or 1) > len(gpus) and (gpus or replicas is None):
        advice = "give fewer --replicas" if gpus else "use --strategy single, or --replicas 2 to try it out"
        raise UserError(
            f"The strategy mirrored takes {replicas or 'GPUs'}, but this machine has {len(gpus)}; {advice}."
        )
    if gpus:
        return [f"GPU:{number}" for number in range(replicas or len(gpus))]
    assert replicas is not None
    cpu = tf.config.list_physical_devices("CPU")[0]
    with explained(
        f"The CPU cannot be split into {replicas} devices, because TensorFlow is already initialized.", RuntimeError
    ):
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    return [f"CPU:{number}" for number in range(replicas)]


def _tpu(name: str) -> tf.distribute.Strategy:
    with explained(
        lambda reason: (
            f"The TPU {name!r} cannot be reached ({reason}); give --tpu the name of one, run on a TPU VM "
            "with requirements-tpu.txt, or use another --strategy."
        ),
        *(ValueError, RuntimeError, OSError, tf.errors.OpError),
    ):
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)


def _multi_worker(timeout: int) -> tf.distribute.Strategy:
    met_workers(timeout)
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=timeout)
    # The constructor waits for all workers without a timeout and blocks Python's signals.
    faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        return _MULTI_WORKER(communication_options=options)
    finally:
        faulthandler.cancel_dump_traceback_later()


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process writes the files."""
    if isinstance(strategy, JaxDevices):
        return strategy.host == 0
    resolver = strategy.cluster_resolver if isinstance(strategy, _MULTI_WORKER) else None
    if resolver is None or not resolver.task_type:
        return True
    return resolver.task_type == "chief" or (resolver.task_id == 0 and "chief" not in resolver.cluster_spec().as_dict())


def several_workers(strategy: tf.distribute.Strategy) -> bool:
    return strategy.num_hosts > 1 if isinstance(strategy, JaxDevices) else isinstance(strategy, _MULTI_WORKER)


def on_this_host(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager:
    """Return a context whose new variables are of this worker alone, for a model that the others need not have."""
    return strategy.on_this_host() if isinstance(strategy, JaxDevices) else contextlib.nullcontext()


def distributed(strategy: tf.distribute.Strategy, batch_size: int, batches: Callable[..., tf.data.Dataset]):
    """Distribute batches: each worker reads its rows of every batch, and each replica computes its rows, in order.

    Args:
        batch_size: examples per batch on all replicas; a multiple of the number of replicas.
        batches: part (i, n) -> rows i * B / n to (i + 1) * B / n of every batch.
    """
    if isinstance(strategy, JaxDevices):
        return batches(part=(strategy.host, strategy.num_hosts))
    if strategy.num_replicas_in_sync == 1 and not several_workers(strategy):
        return batches(part=(0, 1))
    rows = batch_size // strategy.num_replicas_in_sync

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        part = (context.input_pipeline_id, context.num_input_pipelines)
        data = batches(part=part).rebatch(rows, drop_remainder=True)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return data.with_options(options).prefetch(tf.data.AUTOTUNE)

    return strategy.distribute_datasets_from_function(of_worker)


def check_equal_on_workers(strategy: tf.distribute.Strategy, values: dict[str, int]) -> None:
    """Raises UserError in every worker if these numbers, by description, differ between workers."""
    if not several_workers(strategy):
        return
    if isinstance(strategy, JaxDevices):
        gathered = numbers_of_hosts(list(values.values()))
    else:
        here = tf.constant([list(values.values())], tf.int64)
        gathered = tf.function(lambda: strategy.gather(strategy.run(lambda: tf.identity(here)), axis=0))().numpy()
    for name, column in zip(values, gathered.T, strict=True):
        if len(set(column.tolist())) > 1:
            raise UserError(
                f"The workers differ in {name}; give all of them the same command, and a --workdir that they share."
            )


@contextlib.contextmanager
def report_lost_workers(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Exit with CONTINUE_LATER and one sentence when another worker is lost."""
    errors: tuple[type[Exception], ...] = _LOST_WORKER_ERRORS
    if keras.backend.backend() == "jax":
        import jax

        errors = (jax.errors.JaxRuntimeError,)
    try:
        yield
    except errors as error:
        reason = _another_worker_named(strategy, error) if several_workers(strategy) else None
        if reason is None:
            raise
        print(
            f"A worker was lost or did not answer ({type(error).__name__}: {reason}); start all workers again with the "
            "same command, and they continue from the last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        # A regular exit would wait for the lost worker.
        os._exit(CONTINUE_LATER)


def _another_worker_named(strategy: tf.distribute.Strategy, error: Any) -> str | None:
    """Return the line of an error that names another worker or a timeout; None for errors of this worker."""
    if isinstance(strategy, JaxDevices):
        return next((line[:300] for line in str(error).splitlines() if _LOST_HOST.search(line)), None)
    resolver = strategy.cluster_resolver
    here = (resolver.task_type, str(resolver.task_id))
    for line in error.message.splitlines():
        named = set(re.findall(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)", line)) - {here}
        late = isinstance(error, tf.errors.DeadlineExceededError) and "Collective " in line
        if named or late or "heartbeat" in line.lower():
            return " ".join(line.split())[:300]
    return None
