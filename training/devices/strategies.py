"""Where a model is trained: one device, several, several machines, a TPU. All of tf.distribute's set-up is here."""

import contextlib
import faulthandler
import json
import os
import re
import sys
from collections.abc import Callable, Iterator

import tensorflow as tf

from keras_vit import UserError
from training.devices.rendezvous import wait_for_workers
from training.options.common import StrategyKind, StrategyOptions

# Exit code of a run that stopped before its end, by SIGTERM or because a worker was lost: the same command continues.
# sysexits.h calls it EX_TEMPFAIL.
CONTINUE_LATER = 75

_MULTI_WORKER = tf.distribute.MultiWorkerMirroredStrategy
# What workers see of one that is gone, or that does not answer within the time-out; other mistakes have these classes,
# too, so that the message counts as well.
_LOST = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)


def open_strategy(arguments: StrategyOptions) -> tf.distribute.Strategy:
    """The strategy asked for; once per process, before anything is computed. Raises UserError for absent devices."""
    kind = arguments.strategy
    gpus = tf.config.list_physical_devices("GPU")
    if kind == "auto":
        kind = _found(gpus)
    if arguments.replicas is not None and kind != "mirrored":
        raise UserError(f"--replicas means nothing to the strategy {kind}; give --strategy mirrored with it.")
    if kind == "mirrored":
        return tf.distribute.MirroredStrategy(_devices(arguments.replicas, gpus))
    if kind == "multi-worker":
        return _multi_worker(arguments.worker_timeout)
    return _tpu(arguments.tpu) if kind == "tpu" else tf.distribute.get_strategy()


def _found(gpus: list) -> StrategyKind:
    """What this machine and its environment offer."""
    if len(_workers()) > 1 or int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        return "multi-worker"
    if tf.config.list_physical_devices("TPU") or os.path.exists("/dev/accel0") or "TPU_NAME" in os.environ:
        return "tpu"
    return "mirrored" if len(gpus) > 1 else "single"


def _devices(replicas: int | None, gpus: list) -> list[str]:
    if gpus:
        if replicas is not None and replicas > len(gpus):
            raise UserError(f"{replicas} GPUs were asked for, but this machine has {len(gpus)}; give fewer --replicas.")
        return [f"GPU:{number}" for number in range(replicas or len(gpus))]
    if replicas is None:
        raise UserError(
            "This machine has no GPU for the strategy mirrored; use --strategy single, or give --replicas 2 to try it "
            "out on the CPU."
        )
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    except RuntimeError as error:
        raise UserError(f"The CPU could not be split into {replicas}: TensorFlow runs already.") from error
    return [f"CPU:{number}" for number in range(replicas)]


def _tpu(name: str) -> tf.distribute.Strategy:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"There is no TPU {name!r} to be reached ({type(error).__name__}: {reason}); give --tpu the name of one, "
            "run on a TPU VM with tensorflow-tpu, or use another --strategy."
        ) from error
    return tf.distribute.TPUStrategy(resolver)


def _workers() -> list[str]:
    """Addresses of the workers, the chief first, as TF_CONFIG names them; [] without it."""
    text = os.environ.get("TF_CONFIG")
    if not text:
        return []
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        workers = [*cluster.get("chief", ()), *cluster.get("worker", ())]
        if task["type"] not in ("chief", "worker") or not 0 <= int(task["index"]) < len(cluster[task["type"]]):
            raise KeyError("task")
        ports = [int(re.fullmatch(r".+:(\d+)", worker)[1]) for worker in workers]
        if not all(0 < port < 2**16 for port in ports):
            raise ValueError("port")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            'TF_CONFIG should be {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}, '
            f"but is {text[:200]!r}; mend it, or remove it to train on this machine alone."
        ) from error
    return workers


def _multi_worker(timeout: int) -> tf.distribute.Strategy:
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=timeout)
    if not _workers():
        if "SLURM_PROCID" not in os.environ:
            raise UserError(
                "The strategy multi-worker needs TF_CONFIG in the environment, or a SLURM job; `python -m "
                "training.launch --workers 2` starts workers on this machine, to try it out."
            )
        # 8888 is the resolver's own choice; one process per task, its GPUs those that SLURM shows it.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver()
        cluster = {kind: list(addresses) for kind, addresses in resolver.cluster_spec().as_dict().items()}
        task = {"type": resolver.task_type, "index": resolver.task_id}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    here = cluster[task["type"]][int(task["index"])]
    wait_for_workers(_workers(), here, timeout)
    # The constructor waits for all without end, deaf to Python's signals; they were there a moment ago.
    faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        return _MULTI_WORKER(communication_options=options)
    finally:
        faulthandler.cancel_dump_traceback_later()


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the one that writes."""
    resolver = strategy.cluster_resolver if isinstance(strategy, _MULTI_WORKER) else None
    if resolver is None or not resolver.task_type:
        return True
    return resolver.task_type == "chief" or (resolver.task_id == 0 and "chief" not in resolver.cluster_spec().as_dict())


def several_workers(strategy: tf.distribute.Strategy) -> bool:
    return isinstance(strategy, _MULTI_WORKER)


def distributed(strategy: tf.distribute.Strategy, batch_size: int, batches: Callable[..., tf.data.Dataset]):
    """Batches that each worker reads its rows of, and each replica computes its rows of, in the order of the whole.

    Args:
        strategy: of the model.
        batch_size: examples of a batch on all replicas; the replicas must divide it.
        batches: part (i, n) -> rows i * B / n to (i + 1) * B / n of every batch.
    """
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


def check_equal_on_workers(strategy: tf.distribute.Strategy, what: dict[str, int]) -> None:
    """Raises UserError in every worker when these numbers differ between workers."""
    if not several_workers(strategy):
        return
    names = list(what)
    here = tf.constant([[what[name] for name in names]], tf.int64)
    everywhere = tf.function(lambda: strategy.gather(strategy.run(lambda: tf.identity(here)), axis=0))().numpy()
    for name, values in zip(names, everywhere.T, strict=True):
        if len(set(values.tolist())) > 1:
            raise UserError(
                f"The workers differ in {name}; give all of them the same command, and a --workdir that all of them "
                "share."
            )


@contextlib.contextmanager
def report_lost_workers(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Ends the process with one sentence and CONTINUE_LATER when another worker is gone."""
    try:
        yield
    except _LOST as error:
        reason = _another_worker_named(strategy, error) if several_workers(strategy) else None
        if reason is None:
            raise
        print(
            f"A worker was lost or did not answer ({type(error).__name__}: {reason}); start all workers again with the "
            "same command, and they continue from the last state.",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        # Leaving in good order would wait for the lost one.
        os._exit(CONTINUE_LATER)


def _another_worker_named(strategy: tf.distribute.Strategy, error: tf.errors.OpError) -> str | None:
    """What an error says of another worker, or of its silence; None for any other, as of a kernel that fails here."""
    resolver = strategy.cluster_resolver
    here = (resolver.task_type, str(resolver.task_id))
    for line in error.message.splitlines():
        named = set(re.findall(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)", line)) - {here}
        late = isinstance(error, tf.errors.DeadlineExceededError) and "Collective " in line
        if named or late or "heartbeat" in line.lower():
            return " ".join(line.split())[:300]
    return None
