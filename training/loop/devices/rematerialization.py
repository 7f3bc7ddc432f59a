"""Rematerialization: the activations inside an encoder block or residual unit are computed again for the gradient.

Only the outputs of the blocks stay in memory ("Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, with
one segment per block). `keras.RematScope` is for layers that are built in it, one by one, whose inputs all stay; and
dropout would draw another mask when it is computed again, behind the scope of the step's seeds.
"""

import re
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from keras_vit import UserError

_BLOCK = re.compile(r"Transformer\.encoderblock_\d+(\.column)?|(resnet\.)?block\d+\.unit\d+")


def check_segments(network: keras.Model) -> None:
    """Raises UserError for models that cannot be rematerialized.

    Batch normalization would update its statistics twice per batch; masked patches have an output that does not come
    from the blocks.
    """
    if isinstance(network.output, dict):
        raise UserError("Masked patch prediction does not support rematerialization; leave --remat out.")
    if any(isinstance(layer, keras.layers.BatchNormalization) for layer in network.layers):
        raise UserError("A model with batch normalization would count each batch twice; leave --remat out.")


def segments(network: keras.Model) -> list[keras.Model]:
    """Split a network into consecutive models, each ending with a block and the last with the head."""
    ends = [layer.output for layer in network.layers if _BLOCK.fullmatch(layer.name)]
    return [keras.Model(begin, end) for begin, end in zip([network.input, *ends], [*ends, network.output], strict=True)]


def rematerialized(
    parts: Sequence[keras.Model], values: Sequence[tuple[keras.Variable, tf.Tensor]]
) -> Callable[[tf.Tensor, bool], tf.Tensor]:
    """Return a function that calls all segments, with `values` in place of their variables.

    Each segment enters its own StatelessScope, because it is computed again after the caller's scope has ended.
    """

    def call(images: tf.Tensor, training: bool) -> tf.Tensor:
        outputs = images
        for part in parts:
            ids = {id(variable) for variable in part.variables}
            mapping = [(variable, value) for variable, value in values if id(variable) in ids]

            @tf.recompute_grad
            def segment(inputs, *states, part=part, mapping=mapping):
                with keras.StatelessScope(list(zip((variable for variable, _ in mapping), states, strict=True))):
                    return part(inputs, training=training)

            outputs = segment(outputs, *(value for _, value in mapping))
        return outputs

    return call
