"""What of a model its head reads at the class token alone.

A head behind the class token reads one token of N. In the last block keys and values are then needed of all tokens, but
the query, the mean of the values, the MLP and the norms only of the first one: 7 % of the products of a ViT-B/16 are for
the others. The outputs, and the gradients of all weights, are the same to float rounding. A model as it is built
computes all tokens all the same, for whoever looks into it; what is only asked for its outputs is cloned with less.
"""

import collections
from collections.abc import Callable, Collection

import keras

from keras_vit.attention import DotProductAttention
from keras_vit.layers import PoolTokens, TokenDense


def read_at_first_token(model: keras.Model) -> frozenset[str]:
    """Names of the layers whose outputs (B, N, D), N > 1, nothing reads but the first token of."""
    readers = collections.defaultdict(list)  # of each tensor: who is called with it, and with which others
    for operation in model.operations:
        for call in operation._inbound_nodes:  # Operation.input is that of the first call alone
            inputs = [id(tensor) for tensor in call.input_tensors]
            for tensor in inputs:
                readers[tensor].append((operation, inputs))
    outputs, names = {id(tensor) for tensor in model.outputs}, set()

    def first_alone(tensor: int, reader: keras.Operation, inputs: list[int]) -> bool:
        if isinstance(reader, PoolTokens):
            return reader.kind == "token"
        if isinstance(reader, DotProductAttention) and tensor in inputs[1:]:
            return False  # keys and values
        return reader.name in names

    for operation in reversed(model.operations):
        if _by_token(operation) and len(operation._inbound_nodes) == 1:
            shape, tensor = operation.output.shape, id(operation.output)
            several = len(shape) == 3 and shape[1] > 1 and tensor not in outputs
            if several and all(first_alone(tensor, *reader) for reader in readers[tensor]):
                names.add(operation.name)
    return frozenset(names)


def _by_token(operation: keras.Operation) -> bool:
    """Whether each token that it puts out is computed of the same token of its first input."""
    if isinstance(operation, DotProductAttention):
        return len(operation.input) == 3  # relative positions come with the query of all tokens
    return isinstance(operation, (TokenDense, keras.layers.LayerNormalization, keras.layers.Add, keras.layers.Dropout))


def calling_at_first_token(names: Collection[str]) -> Callable:
    """The `call_function` with which keras.models.clone_model computes the named layers for the first token alone."""

    def first(tokens):
        return tokens if tokens.shape[1] == 1 else tokens[:, :1]  # (B, 1, D)

    def call(layer, tokens, *others, **options):
        if layer.name in names:  # others are the keys and values of attention
            tokens = keras.tree.map_structure(first, tokens)
        return layer(tokens, *others, **options)

    return call
