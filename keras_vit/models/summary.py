"""A table of the layers of a model with their whole names, which `keras.Model.summary` cuts off."""

import keras


def summary(model: keras.Model) -> None:
    """Print a row for each layer of a model: name, type, output shape and number of parameters.

    Any line is as long as the longest name needs, also in a narrow terminal.
    """
    rows = [("Layer", "Type", "Output shape", "Parameters")]
    for layer in model.layers:
        shapes = keras.tree.map_structure(lambda tensor: tensor.shape, layer.output)
        rows.append((layer.name, type(layer).__name__, str(shapes), f"{layer.count_params():,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *texts, number in rows:
        cells = [text.ljust(width) for text, width in zip(texts, widths, strict=False)]
        print("  ".join([*cells, number.rjust(widths[-1])]))
    trainable = sum(weight.size for weight in model.trainable_weights)
    print(f"{model.name}: {model.count_params():,} parameters, {trainable:,} of them trainable")
