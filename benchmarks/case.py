"""What is measured: one task on one model, the same for all who take part."""

import dataclasses
import json
from typing import Literal

Precision = Literal["float32", "bfloat16"]
Task = Literal["inference", "training"]
Device = Literal["cpu", "gpu"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A task, and how large."""

    task: Task
    model: str
    """Official name."""
    batch: int
    """Images of a call, or of a step."""
    size: int = 224
    """Height and width in pixels."""
    precision: Precision = "float32"
    threads: int = 2
    """That everyone is given."""
    device: Device = "cpu"

    @property
    def title(self) -> str:
        """In words, for a table."""
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}"
        return f"{self.model}, {self.task}, batch {self.batch}, {self.size} px, {self.precision}{threads}"

    def to_json(self) -> str:
        """For the command line of another process."""
        return json.dumps(dataclasses.asdict(self))


NUM_CLASSES = 1000
