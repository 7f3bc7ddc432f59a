"""Choose the weights that are trained: of adapters (LoRA), or of all layers but frozen ones.

LoRA: the kernels of a trained model stay as they are, and a product of two thin matrices is added to some of them.

"LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685). Its Table 4, on GPT-3: 91.7 % on MNLI-m with
4.7 million trained parameters, where fine-tuning all 175 billion reaches 89.5 %; on WikiSQL 73.4 % and 73.8 %. Its
Table 6, with adapters on query and value: 91.3 % on MNLI-m at rank 1, 91.6 % at rank 8. On images:
`benchmarks/logs/techniques.md`.
"""

from collections.abc import Sequence

import keras
import numpy as np

from keras_vit import UserError
from keras_vit.models.layers import TokenDense
from training.recipes.recipe import HEADS, Recipe


def choose_trained_weights(model: keras.Model, recipe: Recipe) -> None:
    """Add adapters, freeze layers and set the bias of the head. Raises UserError where the model has no such layers."""
    if recipe.lora:
        add_adapters(model, recipe.lora, recipe.lora_on)
    for name in recipe.freeze:
        layers = [layer for layer in model.layers if f"{layer.name}.".startswith(f"{name}.") and layer.weights]
        if not layers:
            known = ", ".join(layer.name for layer in model.layers if layer.weights)
            raise UserError(f"No layer to freeze is named {name!r} or {name + '.…'!r}; the layers are {known}.")
        for layer in layers:
            layer.trainable = False
    if not model.trainable_variables:
        raise UserError("All layers are frozen, so there is nothing to train; freeze fewer layers.")
    if recipe.head_bias:
        head = next(layer for layer in model.layers if layer.name in ("head", "resnet.head.conv2d"))
        head.bias.assign(np.full(head.bias.shape, recipe.head_bias))


def add_adapters(model: keras.Model, rank: int, names: Sequence[str]) -> None:
    """Add adapters to dense layers of a model; they and its heads are then all that is trained.

    The adapters are those of Keras (`Dense.enable_lora`), with a scale of 1, and initially change nothing. names: last
    parts of the names of layers, such as query, or encoderblock_0.MlpBlock_3.Dense_0.

    Raises UserError if a name is that of no dense layer, or if the rank is larger than a layer.
    """
    dense = [layer for layer in model.layers if isinstance(layer, TokenDense) and layer.name not in HEADS]
    for name in names:
        if not any(_is_named(layer, name) for layer in dense):
            known = ", ".join(dict.fromkeys(layer.name.rpartition(".")[2] for layer in dense)) or "none"
            raise UserError(f"--lora-on {name} is not a dense layer of this model; its dense layers are {known}.")
    adapted = [layer for layer in dense if any(_is_named(layer, name) for name in names)]
    for layer in adapted:
        if rank > min(layer.kernel.shape):
            inputs, outputs = layer.kernel.shape
            size = f"the layer {layer.name} of {inputs} inputs and {outputs} outputs"
            raise UserError(f"--lora {rank} is larger than {size}; give --lora {min(inputs, outputs)} or less.")
    for layer in model.layers:
        if layer.weights and layer not in adapted and layer.name not in HEADS:
            layer.trainable = False
    for layer in adapted:
        layer.enable_lora(rank)
        if layer.bias is not None:
            layer.bias.trainable = False


def _is_named(layer: keras.layers.Layer, name: str) -> bool:
    return f".{layer.name}".endswith(f".{name}")
