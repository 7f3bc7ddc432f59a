"""Choose the weights that are trained: of adapters (LoRA), or of all layers but frozen ones.

"LoRA: Low-Rank Adaptation of Large Language Models" (arXiv 2106.09685): the kernels of a trained model stay as they
are, and a product of two thin matrices is added to some of them. On GPT-3 (its Table 4), 4.7 million trained parameters
reach 91.7 % on MNLI-m, and all 175 billion 89.5 %. On images: `benchmarks/logs/techniques.md`.
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
    parts of the names of layers, such as query, or encoderblock_0.MlpBlock_3.Dense_0. Raises UserError if a name is
    that of no dense layer.
    """
    dense = [layer for layer in model.layers if isinstance(layer, TokenDense) and layer.name not in HEADS]
    adapted = []
    for name in names:
        named = [layer for layer in dense if f".{layer.name}".endswith(f".{name}")]
        if not named:
            known = ", ".join(dict.fromkeys(layer.name.rpartition(".")[2] for layer in dense)) or "none"
            raise UserError(f"--lora-on {name} is not a dense layer of this model; its dense layers are {known}.")
        adapted += [layer for layer in named if layer not in adapted]
    for layer in model.layers:
        if layer.weights and layer not in adapted and layer.name not in HEADS:
            layer.trainable = False
    for layer in adapted:
        layer.enable_lora(rank)
        if layer.bias is not None:
            layer.bias.trainable = False
