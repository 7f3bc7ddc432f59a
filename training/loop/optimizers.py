"""SGD with momentum, AdamW and Muon as in the papers.

Weight decay is decoupled, multiplied by the learning rate, and applied to kernels only ("How to train your ViT",
section 3.2; big_vision decays the leaves that match "kernel"). The gradients must already be summed over the replicas,
which `Trainer` does; Keras clips the gradients of each replica before it sums them, a different algorithm.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf
from keras import ops

from keras_vit import UserError
from training.recipes.recipe import HEADS, OptimizerKind, Schedule

_BLOCK = "Transformer.encoderblock_"
# Layers whose 2-D kernels are the first or the last of a model, which Muon leaves to Adam.
_FIRST_AND_LAST = ("embedding", "decoder_embedding", "mask_head", "class_head", "prototypes", *HEADS)
# First parts of the names of layers that follow the encoder, but are also used before its last blocks.
_AFTER_ENCODER = ("queries", "class_head", "mask_head", "upscale", "Transformer.encoder_norm")


class UpdateRule:
    """Computes a variable and its slots, variables of the optimizer, after a step."""

    slots: tuple[str, ...] = ("momentum",)
    # On TensorFlow, one operation that updates all by their handles, where Keras traces and runs twenty.
    fused: Callable[..., None] | None = None

    def new_values(self, value, gradient, learning_rate, step, *slots) -> tuple:
        """Return the new values of a variable and its slots, float32. step: number of earlier updates, int64."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Momentum(UpdateRule):
    """SGD with momentum, without Nesterov. The learning rate is that of the step for all gradients in the momentum.

    So it is in vit_jax, big_vision and PyTorch; in Keras each gradient keeps the rate of its own step.
    """

    momentum: float

    def new_values(self, value, gradient, learning_rate, step, *slots):
        momentum = self.momentum * slots[0] + gradient
        return value - learning_rate * momentum, momentum

    def fused(self, handles, gradient, learning_rate, step):
        var, accum = handles
        options = {"lr": learning_rate, "momentum": self.momentum}
        tf.raw_ops.ResourceApplyMomentum(var=var, accum=accum, grad=gradient, **options)


@dataclasses.dataclass(frozen=True)
class Adam(UpdateRule):
    """Adam. In float32, 1 - 0.999 and the bias correction have a relative error of 1.3e-5.

    Epsilon is added before the bias correction, as in TensorFlow and Keras (the "epsilon hat" of arXiv 1412.6980,
    section 2). In optax and PyTorch it is added behind it, which in the first steps is as if it were up to 30 times
    smaller, and enlarges the rounding errors that are the gradients of key biases.
    """

    beta_1: float
    beta_2: float
    epsilon: float
    slots = ("momentum", "velocity")

    def new_values(self, value, gradient, learning_rate, step, *slots):
        step = ops.cast(step + 1, "float32")
        rate = learning_rate * ops.sqrt(1.0 - ops.power(self.beta_2, step)) / (1.0 - ops.power(self.beta_1, step))
        momentum = slots[0] + (gradient - slots[0]) * (1.0 - self.beta_1)
        velocity = slots[1] + (ops.square(gradient) - slots[1]) * (1.0 - self.beta_2)
        return value - rate * momentum / (ops.sqrt(velocity) + self.epsilon), momentum, velocity

    def fused(self, handles, gradient, learning_rate, step):
        step, (var, m, v) = tf.cast(step + 1, tf.float32), handles
        powers = {"beta1_power": tf.pow(self.beta_1, step), "beta2_power": tf.pow(self.beta_2, step)}
        betas = {"beta1": self.beta_1, "beta2": self.beta_2, "epsilon": self.epsilon}
        tf.raw_ops.ResourceApplyAdam(var=var, m=m, v=v, lr=learning_rate, grad=gradient, **powers, **betas)


@dataclasses.dataclass(frozen=True)
class Muon(UpdateRule):
    """Nesterov's momentum, orthogonalized, of a matrix (https://kellerjordan.github.io/posts/muon).

    The update is scaled to a root mean square of 0.2, about that of Adam's, so that the learning rate and the weight
    decay of AdamW fit ("Muon is Scalable for LLM Training", arXiv 2502.16982, section 2.2). Query, key and value are
    matrices of their own here, as the source recommends; it does not divide them into heads.
    """

    momentum: float

    def new_values(self, value, gradient, learning_rate, step, *slots):
        momentum = self.momentum * slots[0] + gradient
        direction = orthogonalized(gradient + self.momentum * momentum)
        return value - learning_rate * (0.2 * math.sqrt(max(value.shape))) * direction, momentum


def orthogonalized(matrix):
    """Return about U V^T of the singular value decomposition U S V^T of a float32 matrix of shape (m, n).

    Five steps of the Newton-Schulz iteration with Keller Jordan's coefficients, which bring the singular values to
    about 0.7 to 1.2. In float32, where the original has bfloat16.
    """
    rows, columns = matrix.shape
    x = ops.transpose(matrix) if rows > columns else matrix
    x = x / (ops.sqrt(ops.sum(ops.square(x))) + 1e-7)
    for _ in range(5):
        gram = ops.matmul(x, ops.transpose(x))
        x = 3.4445 * x + ops.matmul(-4.7750 * gram + 2.0315 * ops.matmul(gram, gram), x)
    return ops.transpose(x) if rows > columns else x


class SummedGradientOptimizer(keras.optimizers.Optimizer):
    """Clips and applies gradients that are summed over the replicas; each replica updates its own copy of a variable.

    Args:
        updates: of each variable: rule, weight decay (times the learning rate, per step), factor of the learning rate.
        clip_norm: maximum global norm of the summed gradient; None disables clipping.
    """

    def __init__(self, learning_rate, updates: Sequence[tuple[UpdateRule, float, float]], clip_norm: float | None):
        super().__init__(learning_rate)
        self._updates, self._clip_norm = tuple(updates), clip_norm

    def build(self, variables):
        super().build(variables)
        self._paths = [variable.path for variable in variables]
        self.slots = [
            [self.add_variable_from_reference(variable, name=name) for name in rule.slots]
            for variable, (rule, *_) in zip(variables, self._updates, strict=True)
        ]

    def apply(self, grads, trainable_variables=None):
        """Update the variables by dense gradients that are summed over the replicas, in a replica context.

        Raises ValueError for other variables than those that the optimizer was built for, in their order.
        """
        variables = trainable_variables or ()
        if [variable.path for variable in variables] != list(self._paths):
            raise ValueError("Give the trainable variables that the optimizer was built for, in their order.")
        gradients = [ops.convert_to_tensor(gradient) for gradient in grads]
        if self._clip_norm is not None:
            gradients = _clipped(gradients, self._clip_norm)
        learning_rate, step = ops.cast(self.learning_rate, "float32"), ops.convert_to_tensor(self.iterations.value)
        for variable, gradient, update, slots in zip(variables, gradients, self._updates, self.slots, strict=True):
            rule, decay, multiplier = update
            rate, changed = learning_rate * multiplier, (variable, *slots)
            if decay:
                value = ops.convert_to_tensor(variable.value)
                _assign(variable, value - value * (decay * rate))
            if rule.fused and keras.backend.backend() == "tensorflow":
                rule.fused([each.value.handle for each in changed], gradient, rate, step)
                continue
            value, *others = (ops.convert_to_tensor(each.value) for each in changed)
            for each, new in zip(changed, rule.new_values(value, gradient, rate, step, *others), strict=True):
                _assign(each, new)
        self.iterations.assign_add(1)


def _assign(variable: keras.Variable, value) -> None:
    """Assign to a variable, in a replica to its own copy."""
    if keras.backend.backend() == "tensorflow":
        tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)
    else:
        variable.assign(value)


def _clipped(gradients: list, norm: float) -> list:
    """Scale the gradients to a global norm of at most `norm`; all become NaN if their norm is not finite."""
    total = ops.sqrt(ops.sum(ops.stack([ops.sum(ops.square(gradient)) for gradient in gradients])))
    scale = norm * ops.minimum(1.0 / total, 1.0 / norm) + (total - total)
    return [gradient * scale for gradient in gradients]


def make_optimizer(
    name: OptimizerKind,
    model: keras.Model,
    learning_rate,
    *,
    clip_norm: float | None,
    weight_decay: float = 0.0,
    layer_decay: float = 1.0,
) -> keras.optimizers.Optimizer:
    """Create the optimizer of a recipe, built for the model's trainable variables.

    Args:
        name: "adamw" (0.9, 0.999, epsilon 1e-8), "sgd" (momentum 0.9) or "muon" (momentum 0.95, for the 2-D kernels
            between the embedding and the head, and Adam for all other variables).
        learning_rate: a number or a schedule.
        clip_norm: maximum global norm of the summed gradient.
        weight_decay: of kernels, times the learning rate, per step.
        layer_decay: ratio of the learning rate of each encoder block to that of the next (BEiT, arXiv 2106.08254).

    Raises UserError if Muon has no kernel to train.
    """
    base = Momentum(0.9) if name == "sgd" else Adam(0.9, 0.999, 1e-8)
    multipliers, updates = layer_lr_multipliers(model, layer_decay), list[tuple[UpdateRule, float, float]]()
    for variable in model.trainable_variables:
        is_kernel, layer = variable.name == "kernel", variable.path.split("/")[0]
        is_matrix = is_kernel and len(variable.shape) == 2 and min(variable.shape) > 1
        rule = Muon(0.95) if name == "muon" and is_matrix and layer not in _FIRST_AND_LAST else base
        updates.append((rule, weight_decay if is_kernel else 0.0, multipliers.get(variable.path, 1.0)))
    if name == "muon" and not any(isinstance(rule, Muon) for rule, *_ in updates):
        raise UserError("Muon trains the 2-D kernels of blocks, but here none is trained; give --optimizer adamw.")
    optimizer = SummedGradientOptimizer(learning_rate, updates, clip_norm)
    optimizer.build(model.trainable_variables)
    return optimizer


def layer_lr_multipliers(model: keras.Model, layer_decay: float) -> dict[str, float]:
    """Return the factor of the learning rate by path: 1 after the encoder, times layer_decay for each block below.

    Layers before the encoder (embedding, prefix tokens, positions, a stem) count as one layer below the first block.
    """
    names = [layer.name for layer in model.layers if layer.name.startswith(_BLOCK)]
    blocks = {name: int(name.removeprefix(_BLOCK).split(".")[0]) for name in names}
    top = max(blocks.values()) + 2 if blocks else 0
    multipliers: dict[str, float] = {}
    depth = 0
    for layer in model.layers:  # from the images to the outputs
        if layer.name in blocks:
            depth = blocks[layer.name] + 1
        elif depth or layer.name.startswith(_AFTER_ENCODER):
            depth = top
        multipliers |= {variable.path: layer_decay ** (top - depth) for variable in layer.trainable_variables}
    return multipliers


class LearningRate(keras.optimizers.schedules.LearningRateSchedule):
    """A `Schedule` with its peak and number of steps, as a Keras learning rate schedule: step (from 0) -> float32."""

    def __init__(self, schedule: Schedule, peak: float, num_steps: int):
        self.schedule, self.peak, self.num_steps = schedule, peak, num_steps

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
