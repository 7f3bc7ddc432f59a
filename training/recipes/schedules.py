"""Learning rates over the steps of a run.

cosine and linear: vit_jax `utils.py`. stair: big_transfer `bit_hyperrule.py`. rsqrt: big_vision `utils.py`. The warm-up
multiplies the decayed value, and all but the stairs count their progress from its end.
"""

import dataclasses
import math
from typing import Literal

from keras_vit import UserError

Decay = Literal["cosine", "linear", "stair", "rsqrt", "constant"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the learning rate goes from its peak, whatever the peak and the number of steps."""

    decay: Decay = "cosine"
    """cosine: to 0. linear: to linear_end. stair: a tenth after each of stairs. rsqrt: 1 / sqrt(1 + step / timescale).
    constant: none."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from 0."""
    linear_end: float = 1e-5
    """Learning rate at the end of a linear decay."""
    stairs: tuple[float, ...] = ()
    """Shares of all steps after which a stair goes down; the step itself is still above."""
    timescale: int = 10_000
    """Steps after which rsqrt has fallen by the root of two."""
    cooldown_steps: int = 0
    """Last steps, in which the learning rate falls linearly to 0 on top of the decay."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stairs", tuple(self.stairs))
        if self.decay not in Decay.__args__:
            raise UserError(f"decay must be one of {', '.join(Decay.__args__)}, but is {self.decay!r}.")
        for field in ("warmup_steps", "cooldown_steps", "linear_end"):
            if not 0 <= getattr(self, field) < math.inf:
                raise UserError(f"{field} must not be negative, but is {getattr(self, field)}.")
        if self.timescale < 1:
            raise UserError(f"timescale must be at least 1 step, but is {self.timescale}.")
        if any(not 0.0 < share < 1.0 for share in self.stairs) or list(self.stairs) != sorted(self.stairs):
            raise UserError(f"stairs must be rising shares of all steps between 0 and 1, but are {self.stairs}.")
