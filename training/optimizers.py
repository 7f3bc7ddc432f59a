"""SGD with momentum and AdamW as the papers mean them.

Weight decay is decoupled, times the learning rate, of kernels alone ("How to train your ViT", section 3.2; big_vision
decays the leaves that match "kernel"). Gradients are taken as summed over the replicas, which `Trainer` does: Keras
would clip each replica's own and sum what is left, another algorithm.
"""

import keras
import tensorflow as tf

from training.recipe import OptimizerKind


class _AsThePapers:
    """A decay and a share of the learning rate for each variable; gradients are summed already.

    The arithmetic is Keras', but by TensorFlow's one operation for it, where Keras has twenty to be traced and run. It
    rounds 1 - 0.999 in float32, 1.3e-5 off, as it does the power that the bias is corrected by.

    Leans on private names of Keras (`_all_reduce_sum_gradients`, `_var_key`, `_get_variable_index`, `_momentums`,
    `_velocities`); tests compare two replicas with one device, and the updates with those of Keras, and fail if it
    changes under them.
    """

    def rules(self, decay: dict, share: dict) -> None:
        """Decay and share of the learning rate by variable path; 0 and 1 where nothing is said."""
        self._decay, self._share = decay, share

    def build(self, variables):
        super().build(variables)
        self._path = {self._var_key(variable): variable.path for variable in variables}

    def update_step(self, gradient, variable, learning_rate):
        path = self._path[self._var_key(variable)]
        learning_rate = learning_rate * self._share.get(path, 1.0)
        if decay := self._decay.get(path, 0.0):
            self.assign_sub(variable, variable * (decay * learning_rate))
        self._update(variable, gradient, learning_rate, self._get_variable_index(variable))

    def _all_reduce_sum_gradients(self, grads_and_vars):
        return grads_and_vars


@keras.saving.register_keras_serializable("keras_vit_training")
class SGD(_AsThePapers, keras.optimizers.SGD):
    """Momentum, not Nesterov's."""

    def _update(self, variable, gradient, learning_rate, index: int) -> None:
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=self.momentums[index].value.handle,
            grad=gradient,
            lr=learning_rate,
            momentum=self.momentum,
        )


@keras.saving.register_keras_serializable("keras_vit_training")
class Adam(_AsThePapers, keras.optimizers.Adam):
    """Adam; with a decay it is AdamW."""

    def _update(self, variable, gradient, learning_rate, index: int) -> None:
        step = tf.cast(self.iterations.value + 1, tf.float32)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._momentums[index].value.handle,
            v=self._velocities[index].value.handle,
            beta1_power=tf.pow(self.beta_1, step),
            beta2_power=tf.pow(self.beta_2, step),
            beta1=self.beta_1,
            beta2=self.beta_2,
            epsilon=self.epsilon,
            lr=learning_rate,
            grad=gradient,
        )


def make_optimizer(
    kind: OptimizerKind,
    model: keras.Model,
    learning_rate,
    *,
    clip_norm: float | None,
    weight_decay: float = 0.0,
    layer_decay: float = 1.0,
) -> keras.optimizers.Optimizer:
    """The optimizer of a recipe, built for the model's trainable variables.

    Args:
        kind: "adamw" (0.9, 0.999, epsilon 1e-8) or "sgd" (momentum 0.9).
        learning_rate: a number or a schedule.
        clip_norm: largest global norm of the summed gradient.
        weight_decay: of kernels, times the learning rate, per step.
        layer_decay: each encoder block learns at this share of the rate of the next one (BEiT, arXiv 2106.08254).
    """
    if kind == "sgd":
        optimizer = SGD(learning_rate, momentum=0.9, global_clipnorm=clip_norm)
    else:
        optimizer = Adam(learning_rate, beta_1=0.9, beta_2=0.999, epsilon=1e-8, global_clipnorm=clip_norm)
    variables = model.trainable_variables
    kernels = {variable.path: weight_decay for variable in variables if variable.name == "kernel"}
    optimizer.rules(kernels, layer_shares(variables, layer_decay))
    optimizer.build(variables)
    return optimizer


def layer_shares(variables, layer_decay: float) -> dict[str, float]:
    """Share of the learning rate by path: 1 for what follows the encoder, less by layer_decay for each block below.

    What precedes the encoder (embedding, class token, positions, a stem) counts as one layer below the first block.
    """
    depths = {}
    for variable in variables:
        layer = variable.path.split("/")[0]
        if layer.startswith("Transformer.encoderblock_"):
            depths[variable.path] = int(layer.removeprefix("Transformer.encoderblock_").split(".")[0]) + 1
        elif layer.startswith(("Transformer.encoder_norm", "pre_logits", "head", "MAPHead", "pool")):
            depths[variable.path] = None
        else:
            depths[variable.path] = 0
    top = max((depth for depth in depths.values() if depth is not None), default=0) + 1
    return {path: layer_decay ** (top - (top if depth is None else depth)) for path, depth in depths.items()}
