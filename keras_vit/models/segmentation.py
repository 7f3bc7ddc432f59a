"""Segmentation by the plain encoder: queries join the last blocks, and each predicts a class and a mask.

Paper: "Your ViT is Secretly an Image Segmentation Model" (arXiv 2503.19108, EoMT). Agrees to float rounding with EoMT
and EoMT-DINOv3 of transformers.

Axes: B batch, Q queries, N tokens, D width, K classes, h and w rows and columns of the masks, H and W of the image.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit.errors import UserError
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.attention import MaskAttention
from keras_vit.models.config import LinearSegmentationConfig, SegmentationConfig, ViTConfig, check_blocks
from keras_vit.models.layers import CHANNELS_LAST, PACKAGE, Activation, InsertTokens, TokenDense
from keras_vit.models.vit import depth_rates, embedded_tokens, encoder_block, image_and_patches, position_adder

# Names of the layers with what is predicted before masked blocks; layers that wrap them keep the names.
_PREDICTION = "prediction_"
# Least probability of a pixel of a segment, and share of a mask above which it must be visible, as in transformers.
_MASK_THRESHOLD, LEAST_VISIBLE = 0.5, 0.8


def segmentation_network(
    config: ViTConfig, task: SegmentationConfig, preprocessing: Preprocessing, name: str
) -> keras.Model:
    """The model as a functional keras.Model: images (B, height, width, channels) in the model's range -> a dict.

    "class_logits" (B, Q, K + 1), the last for "no object"; "mask_logits" (B, h, w, Q), above 0 inside, with 2 **
    num_upscale_blocks as many rows and columns as the grid of patches. Called by `keras_vit.segmentation_model`.
    """
    if task.num_blocks > config.num_layers:
        raise UserError(
            f"The queries pass the last {task.num_blocks} blocks, but the model has {config.num_layers}; give a "
            "smaller num_blocks."
        )
    grid = config.grid(preprocessing.image_size)
    images, patches = image_and_patches(config, preprocessing, task)
    x = embedded_tokens(patches, config, position_adder(config, grid))
    last_norm = keras.layers.LayerNormalization(epsilon=config.layer_norm_epsilon, name="Transformer.encoder_norm")
    predict = _heads(config, task, grid)
    mask_attention = MaskAttention(task.num_blocks, grid, config.num_prefix_tokens, name="mask_attention")
    bias = None
    for layer, depth_rate in enumerate(depth_rates(config)):
        block = layer - (config.num_layers - task.num_blocks)
        if block == 0:
            x = InsertTokens(task.num_queries, 0, stddev=1.0, name="queries")(x)  # (B, Q + N, D)
        if block >= 0 and task.mask_attention:
            _, mask_logits = BlockPrediction(name=f"{_PREDICTION}{block}")(*predict(last_norm(x)))
            bias = mask_attention(mask_logits, bias, block=block)  # (B, 1, Q + N, Q + N)
        x = encoder_block(x, config, depth_rate, f"Transformer.encoderblock_{layer}", grid=grid, attention_bias=bias)
    class_logits, mask_logits = predict(last_norm(x))
    return keras.Model(images, {"class_logits": class_logits, "mask_logits": mask_logits}, name=name)


def linear_segmentation_network(
    config: ViTConfig, task: LinearSegmentationConfig, preprocessing: Preprocessing, name: str
) -> keras.Model:
    """The linear evaluation of DINOv2 (arXiv 2304.07193, section 7.4): images -> {"pixel_logits": (B, h, w, K)}.

    Batch normalization of the patch tokens of some blocks, then one linear layer; h and w are those of the patches.
    """
    count, grid = config.num_layers, config.grid(preprocessing.image_size)
    check_blocks(task.blocks, count)
    images, patches = image_and_patches(config, preprocessing, task)
    x = embedded_tokens(patches, config, position_adder(config, grid))
    last_norm = keras.layers.LayerNormalization(epsilon=config.layer_norm_epsilon, name="Transformer.encoder_norm")
    split = SplitQueries(0, config.num_prefix_tokens, grid, name="patch_features")
    chosen, features = {block % count for block in task.blocks}, []
    for layer, depth_rate in enumerate(depth_rates(config)):
        x = encoder_block(x, config, depth_rate, f"Transformer.encoderblock_{layer}", grid=grid)
        if layer in chosen:
            features.append(split(last_norm(x))[1])  # (B, h, w, D)
    x = features[0] if len(features) == 1 else keras.layers.Concatenate(name="features")(features)
    x = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name="segmentation_norm")(x)
    x = keras.layers.Conv2D(task.num_classes, 1, data_format=CHANNELS_LAST, dtype="float32", name="segmentation_head")(
        x
    )
    return keras.Model(images, {"pixel_logits": x}, name=name)


def _heads(config: ViTConfig, task: SegmentationConfig, grid: tuple[int, int]) -> Callable:
    """A function from the tokens behind the last LayerNorm to (class_logits, mask_logits); its layers are shared."""
    width, activation = config.hidden_size, task.gelu if task.gelu == "silu" else f"gelu_{task.gelu}"
    class_head = TokenDense(task.num_classes + 1, name="class_head", **_initializers(width))
    mask_head = [
        TokenDense(width, activation if number < 2 else None, name=f"mask_head.Dense_{number}", **_initializers(width))
        for number in range(3)
    ]
    split = SplitQueries(task.num_queries, config.num_prefix_tokens, grid, name="split_queries")
    upscaling: list[keras.layers.Layer] = []
    for number in range(task.num_upscale_blocks):
        upscaling += _upscale_block(width, task.gelu, f"upscale_{number}")
    product = MaskProduct(name="masks")

    def predict(tokens):
        queries, pixels = split(tokens)  # (B, Q, D), (B, rows, columns, D)
        class_logits = class_head(queries)  # (B, Q, K + 1)
        for layer in mask_head:
            queries = layer(queries)
        for layer in upscaling:
            pixels = layer(pixels)  # (B, h, w, D)
        return class_logits, product(pixels, queries)

    return predict


def _initializers(fan_in: int) -> dict[str, keras.Initializer]:
    """Those of torch, with which EoMT begins. With Glorot's, the first mask logits are more than twice as large."""
    kinds = ("kernel_initializer", "bias_initializer")
    return {kind: keras.initializers.RandomUniform(-(fan_in**-0.5), fan_in**-0.5) for kind in kinds}


def _upscale_block(width: int, gelu: str, name: str) -> list[keras.layers.Layer]:
    """The layers that double rows and columns: (B, h, w, D) -> (B, 2 h, 2 w, D)."""
    return [
        keras.layers.Conv2DTranspose(
            width, 2, strides=2, data_format=CHANNELS_LAST, name=f"{name}.transposed", **_initializers(4 * width)
        ),
        Activation(gelu, name=f"{name}.gelu"),
        keras.layers.DepthwiseConv2D(
            3,
            padding="same",
            use_bias=False,
            data_format=CHANNELS_LAST,
            name=f"{name}.depthwise",
            depthwise_initializer=_initializers(9)["kernel_initializer"],
        ),
        keras.layers.LayerNormalization(epsilon=1e-6, name=f"{name}.norm"),
    ]


@keras.saving.register_keras_serializable(PACKAGE)
class SplitQueries(keras.layers.Layer):
    """Tokens (B, Q + prefix + patches, D) -> queries (B, Q, D) and the patches on their grid (B, rows, columns, D)."""

    def __init__(self, num_queries: int, num_prefix_tokens: int, grid: tuple[int, int], **kwargs):
        super().__init__(**kwargs)
        self.num_queries = num_queries
        self.num_prefix_tokens = num_prefix_tokens
        self.grid = tuple(grid)

    def call(self, tokens):
        patches = tokens[:, self.num_queries + self.num_prefix_tokens :]
        return tokens[:, : self.num_queries], ops.reshape(patches, (-1, *self.grid, tokens.shape[-1]))


@keras.saving.register_keras_serializable(PACKAGE)
class MaskProduct(keras.layers.Layer):
    """Products of pixels (B, h, w, D) and queries (B, Q, D): (B, h, w, Q)."""

    def call(self, pixels, queries):
        _, rows, columns, width = pixels.shape
        flat = ops.reshape(pixels, (-1, rows * columns, width))
        masks = ops.matmul(flat, ops.transpose(queries, (0, 2, 1)))  # (B, h * w, Q)
        return ops.reshape(masks, (-1, rows, columns, queries.shape[1]))


@keras.saving.register_keras_serializable(PACKAGE)
class BlockPrediction(keras.layers.Layer):
    """Identity of class logits (B, Q, K + 1) and mask logits (B, h, w, Q): the predictions before a masked block."""

    def call(self, class_logits, mask_logits):
        return class_logits, mask_logits


def block_predictions(model: keras.Model) -> keras.Model:
    """The model with what it predicts before each block with mask attention, for a loss after each.

    Returns:
        A model of the same input and weights whose output is a dict of dicts of "class_logits" (B, Q, K + 1) and
        "mask_logits" (B, h, w, Q): under "prediction_0" ... those before the masked blocks, under "final" its own.
    """
    outputs = {
        layer.name: dict(zip(("class_logits", "mask_logits"), layer.output, strict=True))
        for layer in model.layers
        if layer.name.startswith(_PREDICTION)
    }
    return keras.Model(model.input, {**outputs, "final": model.output}, name=f"{model.name}_block_predictions")


# From the outputs of a model to label maps, masks and segments, as transformers' EomtImageProcessor makes them, but for
# a batch, for graphs, and for images that the preprocessing of the model has placed in its input.


def resize_maps(maps, size):
    """Maps (B, h, w, C) resized bilinearly to (B, height, width, C), without antialiasing; size: two integers."""
    return ops.image.resize(maps, size, interpolation="bilinear", data_format=CHANNELS_LAST)


def segment_outputs(
    outputs: Mapping[str, Any],
    task: SegmentationConfig | LinearSegmentationConfig,
    preprocessing: Preprocessing,
    original_size=None,
    *,
    threshold: float = 0.0,
    resize: Callable = resize_maps,
) -> dict[str, Any]:
    """Return label maps, masks or segments on images of one size.

    Args:
        outputs: of the model: "pixel_logits" (B, h, w, K), or "class_logits" (B, Q, K + 1) and "mask_logits" (B, h, w,
            Q).
        task: of the model.
        preprocessing: of the model, whose resize is stretch or pad.
        original_size: height and width of the images, seen upright, numbers or tensors; None for the maps of the
            model's input.
        threshold: least score of a segment of panoptic.
        resize: of maps, to sizes that are tensors where original_size is.

    Returns:
        For semantic, "label_map" (B, H, W) int32. For instance, "masks" (B, Q, H, W) bool, "classes" (B, Q) int32 and
        "scores" (B, Q). For panoptic, "segment_map" (B, H, W) int32, the number of the query, -1 for none, with
        "classes" and "scores" likewise.
    """

    def at_input(maps):
        maps = resize(ops.cast(maps, "float32"), preprocessing.image_size)
        if original_size is None:
            return maps
        rows, columns = shown_part(preprocessing, original_size)
        return maps[:, rows, columns]

    def in_image(maps):
        return maps if original_size is None else resize(maps, original_size)

    if isinstance(task, LinearSegmentationConfig):
        return {"label_map": _largest(in_image(at_input(outputs["pixel_logits"])))}
    probabilities = ops.softmax(ops.cast(outputs["class_logits"], "float32"), axis=-1)
    masks = at_input(outputs["mask_logits"])
    if task.task == "semantic":
        scores = ops.einsum("bhwq,bqk->bhwk", ops.sigmoid(masks), probabilities[..., :-1])
        return {"label_map": _largest(in_image(scores))}
    masks = in_image(masks)
    if task.task == "instance":
        return _instances(probabilities, masks)
    return _panoptic(probabilities, masks, task, threshold)


def shown_part(preprocessing: Preprocessing, original_size) -> tuple[slice, slice]:
    """The rows and columns of a model's input that show the image. Raises UserError where it shows only a part."""
    if preprocessing.resize not in ("stretch", "pad") or preprocessing.crop_from is not None:
        raise UserError(
            f"Segments need whole images, but the preprocessing of this model is {preprocessing.resize!r} with a "
            "crop; train one with keras-vit segment fit."
        )
    static = all(isinstance(side, int | np.integer) for side in original_size)
    if static:
        places = preprocessing.placements([np.float64(side) for side in original_size], np)
        spans = [(int(place.before), int(place.before + place.resized)) for place in places]
    else:
        places = preprocessing.placements([ops.cast(side, "float64") for side in original_size], ops)
        spans = [(ops.cast(p.before, "int32"), ops.cast(p.before + p.resized, "int32")) for p in places]
    rows, columns = (slice(*span) for span in spans)
    return rows, columns


def _instances(probabilities, masks) -> dict[str, Any]:
    inside = masks > 0.0
    sums = ops.sum(ops.where(inside, ops.sigmoid(masks), 0.0), axis=(1, 2))
    mean = sums / (ops.sum(ops.cast(inside, "float32"), axis=(1, 2)) + 1e-6)
    classes = probabilities[..., :-1]
    scores = ops.max(classes, axis=-1) * mean
    return {"masks": ops.transpose(inside, (0, 3, 1, 2)), "classes": _largest(classes), "scores": scores}


def _panoptic(probabilities, masks, task: SegmentationConfig, threshold: float) -> dict[str, Any]:
    labels, scores = _largest(probabilities), ops.max(probabilities, axis=-1)  # (B, Q)
    queries, nothing = ops.arange(ops.shape(labels)[1], dtype="int32"), probabilities.shape[-1] - 1
    kept = ops.logical_and(labels != nothing, scores > threshold)
    inside = ops.sigmoid(masks)
    weighted = ops.where(kept[:, None, None], scores[:, None, None] * inside, -1.0)
    own = ops.logical_and(_largest(weighted)[..., None] == queries, kept[:, None, None])
    whole = ops.logical_and(inside >= _MASK_THRESHOLD, kept[:, None, None])
    visible = ops.logical_and(own, whole)
    areas = [ops.sum(ops.cast(each, "float32"), axis=(1, 2)) for each in (own, whole, visible)]
    valid = ops.logical_and(areas[2] > 0.0, areas[0] > LEAST_VISIBLE * areas[1])  # (B, Q)
    seen = ops.logical_and(visible, valid[:, None, None])
    # All masks of a class of stuff have the number of its first.
    same = ops.logical_and(labels[:, :, None] == labels[:, None], valid[:, None])  # (B, Q, Q)
    first = _largest(ops.cast(same, "float32"))
    is_stuff = ops.zeros_like(kept)
    for number in task.stuff:
        is_stuff = ops.logical_or(is_stuff, labels == number)
    numbers = ops.where(is_stuff, first, queries)
    segment_map = ops.max(ops.where(seen, numbers[:, None, None], -1), axis=-1)
    return {"segment_map": segment_map, "classes": labels, "scores": ops.where(valid, scores, 0.0)}


def _largest(scores):
    """The first place of the largest score; not by ops.argmax, which has operations that TFLite does not."""
    return ops.cast(ops.top_k(scores, 1)[1][..., 0], "int32")
