"""The settings of learning rate schedules; `training/loop/optimizers.py` computes them.

cosine and linear: vit_jax `utils.py`. stair: big_transfer `bit_hyperrule.py`. rsqrt: big_vision `utils.py`. The warm-up
multiplies the decayed value. All decays except stair count their progress from the end of the warm-up.
"""

import dataclasses
from typing import Annotated, Literal, get_args

from keras_vit import UserError
from keras_vit.cli.options import Count, Natural, NotNegative, Range, check_ranges
from keras_vit.errors import check_choice

Decay = Literal["cosine", "linear", "stair", "rsqrt", "polynomial", "constant"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Warm-up, decay and cooldown of the learning rate, independent of its peak and the number of steps."""

    decay: Decay = "cosine"
    """cosine: to 0. linear: to linear_end. stair: times 0.1 after each of stairs. rsqrt: by 1 / sqrt(1 + step /
    timescale). polynomial: to 0 by the power 0.9 of what is left. constant: no decay."""
    warmup_steps: Natural = 0
    """Steps over which the learning rate rises linearly from 0."""
    linear_end: NotNegative = 1e-5
    """Learning rate at the end of a linear decay."""
    stairs: tuple[Annotated[float, Range("(0, 1)")], ...] = ()
    """Fractions of all steps after which the learning rate drops; at that step it is still higher."""
    timescale: Count = 10_000
    """Steps after which rsqrt has decayed by the square root of two."""
    cooldown_steps: Natural = 0
    """Last steps, over which the learning rate additionally falls linearly to 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stairs", tuple(self.stairs))
        check_choice("decay", self.decay, get_args(Decay))
        check_ranges(self)
        if list(self.stairs) != sorted(self.stairs):
            raise UserError(f"stairs must be increasing fractions of all steps, but are {self.stairs}.")
        if self.decay == "stair" and not self.stairs:
            raise UserError("decay stair needs the stairs where the learning rate drops; give --stairs 0.3 0.6 0.9.")
