"""A benchmark case: one task on one model, the same for all peers."""

import dataclasses
import io
import pathlib
import platform
from collections.abc import Callable
from typing import Literal

import numpy as np

Precision = Literal["float32", "bfloat16"]
Task = Literal["inference", "training"]
Device = Literal["cpu", "gpu"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A task on a model, with its sizes."""

    task: Task
    model: str
    """Official name."""
    batch: int
    """Images in a call or a training step."""
    size: int = 224
    """Height and width in pixels."""
    precision: Precision = "float32"
    threads: int = 2
    """Threads of each peer."""
    device: Device = "cpu"

    @property
    def title(self) -> str:
        """Heading of the table."""
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}"
        return f"{self.model}, {self.task}, batch {self.batch}, {self.size} px, {self.precision}{threads}"


NUM_CLASSES = 1000

Call = Callable[[], object]  # computes one batch or one training step, and alone is timed


def random_images(case: Case) -> np.ndarray:
    """A batch of images (B, h, w, 3) in [-1, 1)."""
    return np.random.default_rng(0).uniform(-1.0, 1.0, (case.batch, case.size, case.size, 3)).astype(np.float32)


def photographs(count: int) -> list[bytes]:
    """Smooth random images of 500x375 with noise. Compressed, they are as large as photographs (about 60 kB)."""
    from PIL import Image

    rng, files = np.random.default_rng(0), []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.float32)
        noisy = np.clip(smooth + rng.normal(0.0, 6.0, smooth.shape), 0.0, 255.0).astype(np.uint8)
        stream = io.BytesIO()
        Image.fromarray(noisy).save(stream, "JPEG", quality=90)
        files.append(stream.getvalue())
    return files


def set_tensorflow_threads(case: Case) -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(case.threads)
    tf.config.threading.set_inter_op_parallelism_threads(case.threads)


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())
