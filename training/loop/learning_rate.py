"""The learning rate at a step: warm-up, decay and cooldown of a `Schedule`."""

import dataclasses
import math

import keras
from keras import ops

from training.recipes.recipe import Schedule


@keras.saving.register_keras_serializable("keras_vit_training")
class LearningRate(keras.optimizers.schedules.LearningRateSchedule):
    """A `Schedule` with its peak and number of steps, as a Keras learning rate schedule: step (from 0) -> float32."""

    def __init__(self, schedule: Schedule | dict, peak: float, num_steps: int):
        self.schedule = Schedule(**schedule) if isinstance(schedule, dict) else schedule
        self.peak = peak
        self.num_steps = num_steps

    def __call__(self, step):
        schedule, step = self.schedule, ops.cast(step, "float32")
        after_warmup = step - schedule.warmup_steps
        rate = self.peak * ops.ones_like(step)
        progress = ops.clip(after_warmup / max(self.num_steps - schedule.warmup_steps, 1), 0.0, 1.0)
        if schedule.decay == "cosine":
            rate = rate * 0.5 * (1.0 + ops.cos(math.pi * progress))
        elif schedule.decay == "linear":
            rate = schedule.linear_end + (rate - schedule.linear_end) * (1.0 - progress)
        elif schedule.decay == "polynomial":
            rate = rate * ops.power(1.0 - progress, 0.9)
        elif schedule.decay == "rsqrt":
            rate = rate / ops.sqrt(1.0 + ops.maximum(after_warmup, 0.0) / schedule.timescale)
        elif schedule.decay == "stair":
            for share in schedule.stairs:
                rate = ops.where(step > round(share * self.num_steps), 0.1 * rate, rate)
        if schedule.warmup_steps:
            rate = rate * ops.minimum(1.0, step / schedule.warmup_steps)
        if schedule.cooldown_steps:
            rate = rate * ops.clip((self.num_steps - step) / schedule.cooldown_steps, 0.0, 1.0)
        return rate

    def get_config(self):
        return {"schedule": dataclasses.asdict(self.schedule), "peak": self.peak, "num_steps": self.num_steps}
