"""Rematerialization: what is inside an encoder block or a residual unit is computed again for its gradient, not kept.

Between the blocks everything is kept, so that memory grows by the blocks' outputs alone ("Training Deep Nets with
Sublinear Memory Cost", arXiv 1604.06174, with a segment for each block).
"""

import re
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from keras_vit import UserError

_BLOCK = re.compile(r"Transformer\.encoderblock_\d+(\.column)?|(resnet\.)?block\d+\.unit\d+")


def check_segments(network: keras.Model) -> None:
    """Raises UserError for a model with batch normalization, whose statistics would see each batch twice, and for one
    of masked patches, which ends with something that no block passes on.
    """
    if isinstance(network.output, dict):
        raise UserError("The prediction of masked patches keeps what is inside the blocks; leave --remat out.")
    if any(isinstance(layer, keras.layers.BatchNormalization) for layer in network.layers):
        raise UserError("A model with batch normalization would count each batch twice; leave --remat out.")


def segments(network: keras.Model) -> list[keras.Model]:
    """Models of the same layers, one behind the other, each of which ends with a block; the last ends with the head."""
    ends = [layer.output for layer in network.layers if _BLOCK.fullmatch(layer.name)]
    return [keras.Model(begin, end) for begin, end in zip([network.input, *ends], [*ends, network.output], strict=True)]


def rematerialized(
    parts: Sequence[keras.Model], values: Sequence[tuple[keras.Variable, tf.Tensor]]
) -> Callable[[tf.Tensor], tf.Tensor]:
    """The call of the segments in a row; `values` are what variables of theirs shall be read as.

    Each segment enters its own StatelessScope, for its second computation comes when that of the caller is over.
    """

    def call(images: tf.Tensor, training: bool) -> tf.Tensor:
        outputs = images
        for part in parts:
            own = {id(variable) for variable in part.variables}
            mapping = [(variable, value) for variable, value in values if id(variable) in own]

            @tf.recompute_grad
            def segment(inputs, *given, part=part, mapping=mapping):
                with keras.StatelessScope(list(zip((variable for variable, _ in mapping), given, strict=True))):
                    return part(inputs, training=training)

            outputs = segment(outputs, *(value for _, value in mapping))
        return outputs

    return call
