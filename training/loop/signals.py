"""SIGTERM and Ctrl-C: training finishes its step, saves a checkpoint, and exits with a code that says how to go on."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

from keras_vit import cli
from training.loop.devices.strategies import CONTINUE_LATER

# What Ctrl-C prints during training, and after it.
_STOPPING = b"\nStopping after this step, with a checkpoint saved; Ctrl-C again stops at once.\n"
_WRITING = b"\nTraining is complete; writing model.keras. Ctrl-C again stops at once.\n"


class TrainingInterrupted(Exception):
    """Training was interrupted by a signal; its checkpoint is saved."""


class StopSignals:
    """Whether SIGTERM or Ctrl-C asked this process to stop, while its signals are `handled`."""

    received = _training_complete = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Note signals instead of stopping; a second Ctrl-C stops at once.

        In another thread than the main one, where Python has no handlers, signals stay the caller's.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _) -> None:
        self.received = True  # only this: the signal may interrupt TensorFlow anywhere
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.write(2, _WRITING if self._training_complete else _STOPPING)  # print may be what was interrupted

    def training_complete(self) -> None:
        """Say that no step is left to stop after; what is left takes seconds, and the first signal changes nothing."""
        self._training_complete = True
        if self.received:
            print("Training was complete when it was asked to stop; writing model.keras.")


@contextlib.contextmanager
def report_interruption() -> Iterator[None]:
    """Exit with CONTINUE_LATER and one sentence when training was interrupted."""
    try:
        yield
    except TrainingInterrupted:
        everywhere = " on every worker" if "TF_CONFIG" in os.environ else ""
        command = cli.command_line()
        print(
            f"Training was interrupted and its checkpoint is saved; the same command{everywhere} continues: {command}",
            file=sys.stderr,
        )
        sys.exit(CONTINUE_LATER)
