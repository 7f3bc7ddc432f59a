"""Building a model, and asking it what it is."""

import keras

from keras_vit.config import ViTConfig, model_config
from keras_vit.errors import UserError, nearest
from keras_vit.layers import AttentionProbabilities, ModelSpec
from keras_vit.preprocess import Preprocessing
from keras_vit.vit import vision_transformer


def build(
    model: str | ViTConfig,
    *,
    image_size: int | tuple[int, int] = 224,
    num_classes: int | None = 1000,
    channels: int = 3,
    preprocessing: Preprocessing | None = None,
    name: str | None = None,
) -> keras.Model:
    """Build a model with the official initial weights.

    Args:
        model: a name of `keras_vit.MODELS` or a configuration of your own.
        image_size: side of the images in pixels, or (height, width); a multiple of the patch.
        num_classes: width of the head; 0 or None gives the features (pre_logits) instead of logits.
        channels: of the images, 3 for RGB, 1 for grey.
        preprocessing: how a picture becomes an input, recorded in the model; image_size and channels are then its.
            Default: plain resize and [-1, 1], as vit_jax.
        name: of the keras.Model; default the model's name, or "vit" for a configuration.

    Returns:
        A functional keras.Model from images (B, height, width, channels), float in [-1, 1], to logits
        (B, num_classes). The softmax is left to the loss.
    """
    config = model_config(model)
    if preprocessing is None:
        size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        preprocessing = Preprocessing(size, channels)
    if num_classes is not None and num_classes < 0:
        raise UserError(f"num_classes must be positive, or 0 or None for features, but is {num_classes}.")
    if config.classifier == "none" and num_classes:
        raise UserError(
            f"A model with classifier 'none' ends with its tokens and has no head for {num_classes} classes; "
            "give num_classes=0, or another classifier."
        )
    default_name = model.replace("+", "_") if isinstance(model, str) else "vit"
    return vision_transformer(config, preprocessing, num_classes, name or default_name)


def config_of(model: keras.Model) -> ViTConfig:
    """The configuration that a model of ours, loaded from anywhere, was built from."""
    return ViTConfig(**_spec(model).model)


def preprocessing_of(model: keras.Model) -> Preprocessing:
    """How a picture becomes the input of this model; call it on a decoded image."""
    return Preprocessing(**_spec(model).preprocessing)


def _spec(model: keras.Model) -> ModelSpec:
    for layer in model.layers:
        if isinstance(layer, ModelSpec):
            return layer
    raise UserError(f"The model {model.name!r} was not built by keras_vit: it has no specification layer.")


def intermediates(model: keras.Model, names: list[str] | None = None) -> keras.Model:
    """A model with the same input and weights whose output is a dict of what happens inside.

    Names, in the order of the computation, and their shapes:
        "patch_embedding" (B, h, w, D); "embedded" (B, N, D), with class token and positions;
        "block_0" ... (B, N, D); "attention_0" ... (B, H, N, N), softmax probabilities of inference;
        "encoded" (B, N, D), after the last LayerNorm; "pre_logits" (B, D), what the head reads; "logits".

    Args:
        model: built by `keras_vit.build`, whatever happened to it since.
        names: those wanted; None gives all that the model has.
    """
    config = config_of(model)
    layers = {layer.name: layer for layer in model.layers}

    def output(*candidates: str):
        return next(layers[name].output for name in candidates if name in layers)

    def attention(block: int):
        projections = f"Transformer.encoderblock_{block}.MultiHeadDotProductAttention_1"
        return AttentionProbabilities(config.num_heads, name=f"attention_{block}")(
            output(f"{projections}.query"), output(f"{projections}.key")
        )

    available = {
        "patch_embedding": lambda: output("embedding"),
        "embedded": lambda: output("Transformer.posembed_input"),
    }
    for block in range(config.num_layers):
        available[f"block_{block}"] = lambda block=block: output(f"Transformer.encoderblock_{block}")
        available[f"attention_{block}"] = lambda block=block: attention(block)
    available["encoded"] = lambda: output("Transformer.encoder_norm")
    if config.classifier != "none":
        available["pre_logits"] = lambda: output("pre_logits", "pool", "Transformer.encoder_norm")
    if "head" in layers:
        available["logits"] = lambda: output("head")
    for name in names or ():
        if name not in available:
            raise UserError(
                f"The model has no intermediate {name!r}; the nearest names are {nearest(name, available)}."
            )
    outputs = {name: available[name]() for name in names or available}
    return keras.Model(model.input, outputs, name=f"{model.name}_intermediates")
