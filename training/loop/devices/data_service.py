"""Batches from the tf.data service, which makes them on other hosts: in the order and with the bits of those made here.

A batch is a function of its step alone. So the service is given the steps, each worker whichever is next, and the
batches are put back in order where they arrive. One that a stopped worker took with it is made here.
"""

import contextlib
import functools
import itertools
import queue
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# Batches that wait for an earlier one, before that is made here.
_EARLY = 32
# Seconds without any batch, before they are made here until the service gives some again.
_PATIENCE = 60.0
# Batches that each worker makes at the same time, and arrived ones that nobody asked for yet.
_AT_ONCE, _ARRIVED = 2, 2


def served_batches(
    address: str, batches: Callable[..., tf.data.Dataset], *, first_step: int, part: tuple[int, int] = (0, 1)
) -> tf.data.Dataset:
    """The endless batches of `batches`, made by the workers of the service at `address`, such as grpc://host:5050.

    batches: such as `training_batches`; see there for the other arguments.
    """

    def numbered(step: tf.Tensor) -> tf.data.Dataset:
        batch = batches(first_step=step, num_steps=1, part=part)
        return tf.data.Dataset.zip((tf.data.Dataset.from_tensors(step), batch))

    steps = tf.data.Dataset.range(first_step, tf.int64.max)
    data = steps.interleave(numbered, cycle_length=_AT_ONCE, num_parallel_calls=_AT_ONCE, deterministic=False)

    @tf.function
    def made_here(step: tf.Tensor) -> Any:
        return numbered(step).get_single_element()[1]

    in_order = functools.partial(_in_order, address, data, first_step, made_here)
    return tf.data.Dataset.from_generator(in_order, output_signature=data.element_spec[1]).prefetch(tf.data.AUTOTUNE)


def _in_order(
    address: str, data: tf.data.Dataset, first_step: int, made_here: Callable[[tf.Tensor], Any]
) -> Iterator[Any]:
    """Yield the batch of each step, from the service or, where it is late or fails, made here."""
    arrived: queue.Queue = queue.Queue(_ARRIVED)
    stopped = threading.Event()
    threading.Thread(target=_receive, args=(address, data, arrived, stopped), daemon=True).start()
    early: dict[int, Any] = {}
    patience = _PATIENCE
    try:
        for step in itertools.count(first_step):
            while step not in early and len(early) < _EARLY:
                try:
                    number, batch = arrived.get(timeout=patience)
                except queue.Empty:
                    if patience:
                        _warn(address, f"gave no batch for {_PATIENCE:.0f} seconds")
                    patience = 0.0
                    break
                if number is None:
                    _warn(address, f"failed ({batch})")
                    patience = 0.0
                elif number >= step:
                    early[number], patience = batch, _PATIENCE
            yield early.pop(step) if step in early else made_here(tf.constant(step, tf.int64))
    finally:
        stopped.set()


def _receive(address: str, data: tf.data.Dataset, arrived: queue.Queue, stopped: threading.Event) -> None:
    """Put what the service makes of `data`, (step, batch), into the queue; (None, reason) if it fails."""

    def put(item: tuple) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                arrived.put(item, timeout=0.2)
                return

    service = tf.data.experimental.service
    try:
        distributed = data.apply(service.distribute(service.ShardingPolicy.DYNAMIC, address))
        for step, batch in distributed:
            put((int(step), batch))
            if stopped.is_set():
                return
    except tf.errors.OpError as error:
        # The first line names the iterators of the worker, then what one of them says.
        put((None, re.sub(r".*Iterator::Root\S*: ", "", error.message.split("\n")[0])[:300]))


def _warn(address: str, what: str) -> None:
    warnings.warn(f"The data service at {address} {what}; until it gives some, batches are made here.", stacklevel=2)
