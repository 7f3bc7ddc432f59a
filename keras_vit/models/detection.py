"""Open-vocabulary detection by the plain encoder: each patch predicts a box and an embedding of its class.

Papers: "Simple Open-Vocabulary Object Detection with Vision Transformers" (arXiv 2205.06230, OWL-ViT) and "Scaling
Open-Vocabulary Object Detection" (arXiv 2306.09683, OWLv2). Agrees to float rounding with OWL-ViT and OWLv2 of
transformers.

Boxes are (..., 4) as shares of the image, or in pixels.

Axes: B batch, N patches, D width, E width of the class embeddings, K classes.
"""

import keras
import numpy as np
from keras import ops

from keras_vit.errors import UserError
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.config import DetectionConfig, ViTConfig
from keras_vit.models.layers import PACKAGE, TokenDense, initial
from keras_vit.models.vit import encoder, image_and_patches, layer_norm

# Added to lengths before a division by them, and to shares of the image before a logarithm, by both originals.
_LENGTH_EPSILON, _SHARE_EPSILON = 1e-6, 1e-4
# Name of the layer with the embeddings of a detector's own classes.
CLASSES = "classes"
# Name of the layer that leaves out overlapping boxes, and the logit of these.
SUPPRESSION, SUPPRESSED = "suppress_overlaps", -30.0
_LOWEST = float(np.finfo(np.float32).min)


def detection_network(config: ViTConfig, task: DetectionConfig, preprocessing: Preprocessing, name: str) -> keras.Model:
    """The model as a functional keras.Model; see `keras_vit.detection_model`, which calls it."""
    grid = config.grid(preprocessing.image_size)
    images, x = image_and_patches(config, preprocessing, task)
    x = encoder(x, config, grid)  # (B, 1 + N, D)
    x = layer_norm(x, config.layer_norm_epsilon, "Transformer.encoder_norm")
    prefix = int(config.with_class_token) + config.num_registers
    if config.with_class_token:
        x = TimesClassToken(prefix, name="patch_features")(x)  # (B, N, D)
    elif prefix:
        x = keras.layers.Cropping1D((prefix, 0), name="patch_features")(x)
    x = layer_norm(x, config.layer_norm_epsilon, "detection_norm")
    boxes = BoxesOnGrid(grid, dtype="float32", name="boxes")(_head(x, 4, "box_head"))
    embeddings = TokenDense(task.embedding_size, name="class_head.Dense_0")(x)  # (B, N, E)
    embeddings, _, _ = ClassEmbeddings(name="class_head")(x, embeddings)
    outputs = {"boxes": boxes, "class_embeddings": embeddings}
    if task.objectness:
        # The backbone does not learn from the objectness (OWLv2).
        logits = _head(StopGradient(name="objectness_features")(x), 1, "objectness_head")
        outputs["objectness"] = keras.layers.Reshape((grid[0] * grid[1],), name="objectness")(logits)  # (B, N)
    return keras.Model(images, outputs, name=name)


def _head(x, units: int, name: str):
    """Three dense layers with GELU between them: (B, N, D) -> (B, N, units)."""
    for number in range(2):
        x = TokenDense(x.shape[-1], "gelu_erf", name=f"{name}.Dense_{number}")(x)
    return TokenDense(units, name=f"{name}.Dense_2")(x)


@keras.saving.register_keras_serializable(PACKAGE)
class TimesClassToken(keras.layers.Layer):
    """The patches, each multiplied by the class token, the first of the prefix: (B, prefix + N, D) -> (B, N, D)."""

    def __init__(self, prefix: int = 1, **kwargs):
        super().__init__(**kwargs)
        self.prefix = prefix

    def call(self, tokens):
        return tokens[:, self.prefix :] * tokens[:, :1]


@keras.saving.register_keras_serializable(PACKAGE)
class StopGradient(keras.layers.Layer):
    """Identity without a gradient."""

    def call(self, x):
        return ops.stop_gradient(x)


@keras.saving.register_keras_serializable(PACKAGE)
class BoxesOnGrid(keras.layers.Layer):
    """The sigmoid of predictions (B, N, 4) and a bias: a box begins at the place and with the size of its patch."""

    def __init__(self, grid: tuple[int, int], **kwargs):
        super().__init__(**kwargs)
        self.grid = tuple(grid)

    def call(self, predictions):
        return ops.sigmoid(predictions + ops.convert_to_tensor(box_bias(self.grid), predictions.dtype))


def box_bias(grid: tuple[int, int]) -> np.ndarray:
    """Logits of the lower right corner x and y of each patch, and of its width and height: (N, 4) float32."""
    rows, columns = grid
    y, x = np.meshgrid(np.arange(1, rows + 1) / rows, np.arange(1, columns + 1) / columns, indexing="ij")
    shares = np.stack([x, y, np.full_like(x, 1 / columns), np.full_like(x, 1 / rows)], axis=-1).reshape(-1, 4)
    shares = shares.astype(np.float32)
    return np.log(shares + np.float32(_SHARE_EPSILON)) - np.log1p(-shares + np.float32(_SHARE_EPSILON))


@keras.saving.register_keras_serializable(PACKAGE)
class ClassEmbeddings(keras.layers.Layer):
    """Class embeddings of unit length, and the shift and scale of their logits, which depend on the patch.

    Call: features (B, N, D) and embeddings (B, N, E) -> embeddings (B, N, E), shift (B, N, 1), scale (B, N, 1).
    """

    def build(self, features_shape, embeddings_shape):
        for name in ("shift", "scale"):
            shape = (features_shape[-1], 1)
            setattr(
                self,
                f"{name}_kernel",
                self.add_weight(name=f"{name}_kernel", shape=shape, initializer=initial("glorot_uniform")),
            )
            setattr(self, f"{name}_bias", self.add_weight(name=f"{name}_bias", shape=(1,), initializer="zeros"))

    def call(self, features, embeddings):
        shift = ops.matmul(features, self.shift_kernel) + self.shift_bias
        scale = ops.elu(ops.matmul(features, self.scale_kernel) + self.scale_bias) + 1.0
        return unit_length(embeddings), shift, scale


def unit_length(embeddings):
    """Embeddings (..., E) divided by their lengths."""
    lengths = ops.sqrt(ops.sum(ops.square(embeddings), axis=-1, keepdims=True))
    return embeddings / (lengths + _LENGTH_EPSILON)


@keras.saving.register_keras_serializable(PACKAGE)
class ClassLogits(keras.layers.Layer):
    """Compare the embeddings of patches with those of classes.

    Call: class embeddings (B, N, E), shift and scale (B, N, 1), queries (B, K, E) or (K, E): those of texts or of
    patches of other images -> (B, N, K), logits of independent classes (sigmoid).
    """

    def call(self, embeddings, shift, scale, queries):
        queries = ops.swapaxes(ops.cast(unit_length(queries), embeddings.dtype), -1, -2)
        return (ops.matmul(embeddings, queries) + shift) * scale


@keras.saving.register_keras_serializable(PACKAGE)
class KnownClasses(keras.layers.Layer):
    """The embeddings of K classes, which are saved with the model: any tensor -> (K, E)."""

    def __init__(self, num_classes: int, embedding_size: int, **kwargs):
        super().__init__(**kwargs)
        self.num_classes = num_classes
        self.embedding_size = embedding_size

    def build(self, input_shape):
        shape = (self.num_classes, self.embedding_size)
        self.embeddings = self.add_weight(name="embeddings", shape=shape, initializer="glorot_uniform")

    def call(self, x):
        return ops.cast(self.embeddings, x.dtype)


@keras.saving.register_keras_serializable(PACKAGE)
class SuppressOverlaps(keras.layers.Layer):
    """Greedy non-maximum suppression: the logits of a box that overlaps a more likely one become at most -30.

    Call: class logits (B, N, K) and boxes (B, N, 4), center x and y, width and height -> class logits (B, N, K). The
    likelihood of a box is that of its most likely class. As the post-processing of OWL-ViT for example images.

    Args:
        max_overlap: IoU above which two boxes are one object.
    """

    def __init__(self, max_overlap: float, **kwargs):
        super().__init__(**kwargs)
        self.max_overlap = max_overlap

    def call(self, logits, boxes):
        corners, places = to_corners(ops.cast(boxes, "float32")), np.arange(boxes.shape[1], dtype=np.int32)
        scores = ops.max(ops.cast(logits, "float32"), axis=-1)  # (B, N)

        def is_left(left, kept):
            return ops.any(left > _LOWEST)

        def take_best(left, kept):
            # The first of the most likely boxes; LiteRT lacks a part of Keras's argmax.
            is_likeliest = ops.logical_and(left == ops.max(left, axis=-1, keepdims=True), left > _LOWEST)
            first = ops.min(ops.where(is_likeliest, places, len(places)), axis=-1, keepdims=True)
            is_best = places[None] == first
            box = ops.sum(corners * ops.cast(is_best, corners.dtype)[..., None], axis=1, keepdims=True)  # (B, 1, 4)
            iou, _ = box_iou(box, corners)
            is_same = ops.logical_or(iou > self.max_overlap, is_best)
            return ops.where(is_same, _LOWEST, left), ops.logical_or(kept, is_best)

        _, kept = ops.while_loop(is_left, take_best, (scores, scores < _LOWEST))
        return ops.where(kept[..., None], logits, ops.minimum(logits, SUPPRESSED))


def max_overlap_of(model: keras.Model) -> float | None:
    """The `max_overlap` of `with_classes`."""
    layer = next((layer for layer in model.layers if layer.name == SUPPRESSION), None)
    return None if layer is None else layer.max_overlap


def with_classes(model: keras.Model, embeddings, max_overlap: float | None = None) -> keras.Model:
    """A detector with classes: its output has also "class_logits" (B, N, K), of independent classes (sigmoid).

    Args:
        model: of `keras_vit.detection_model` or `keras_vit.from_checkpoint`; its weights are shared.
        embeddings: (K, E), of texts or of patches of example images (`keras_vit.query_embeddings`), of any length. They
            become a trainable weight of the layer "classes".
        max_overlap: IoU above which the logits of the less likely of two boxes become at most -30, as usual for example
            images; None keeps all boxes. It is part of the model, and of its exports.
    """
    parts = _class_head(model)
    embeddings = np.asarray(keras.ops.convert_to_numpy(embeddings), np.float32)
    embeddings = embeddings.reshape(len(embeddings), parts[0].shape[-1])
    classes = KnownClasses(*embeddings.shape, name=CLASSES)
    queries = classes(parts[0])
    classes.embeddings.assign(embeddings)
    logits = ClassLogits(dtype="float32", name="class_logits")(*parts, queries)
    if max_overlap is not None:
        suppress = SuppressOverlaps(max_overlap, dtype="float32", name=SUPPRESSION)
        logits = suppress(logits, model.output["boxes"])
    return keras.Model(model.input, {**model.output, "class_logits": logits}, name=model.name)


def with_queries(model: keras.Model) -> keras.Model:
    """A detector with the embeddings of classes as a second input.

    Args:
        model: of `keras_vit.detection_model` or `keras_vit.from_checkpoint`; its weights are shared.

    Returns:
        A model of the inputs {"image": (B, height, width, channels), "queries": (B, K, E)}, whose output has also
        "class_logits" (B, N, K), of independent classes (sigmoid). A query of zeros stands for none: its logits are the
        least of float32, as in the original.
    """
    parts = _class_head(model)
    queries = keras.Input((None, parts[0].shape[-1]), name="queries")
    logits = ClassLogits(dtype="float32", name="class_logits")(*parts, queries)
    logits = MaskQueries(dtype="float32", name="masked_class_logits")(logits, queries)
    outputs = {**model.output, "class_logits": logits}
    return keras.Model({"image": model.input, "queries": queries}, outputs, name=model.name)


@keras.saving.register_keras_serializable(PACKAGE)
class MaskQueries(keras.layers.Layer):
    """Logits (B, N, K) with the least number where the query of (B, K, E) is of zeros."""

    def call(self, logits, queries):
        present = ops.any(queries != 0, axis=-1)[:, None]  # (B, 1, K)
        return ops.where(present, logits, _LOWEST)


def query_embeddings(model: keras.Model, images, boxes=None) -> tuple[np.ndarray, np.ndarray]:
    """The embeddings of objects on example images, to look for with `with_queries` or `with_classes`.

    Of the patches whose predicted box fits the given one nearly best (at least 80% of the best overlap), the one least
    like the mean of the image is taken, as in OWL-ViT. Without boxes that is the box of the whole image; OWLv2 takes
    the patch that is most likely an object.

    Args:
        model: a detector, without further inputs.
        images: (B, height, width, channels), preprocessed.
        boxes: (B, 4), of the object on each image: center x and y, width and height as shares of the model's input.

    Returns:
        (embeddings (B, E), numbers of the patches (B,)).
    """
    _class_head(model)
    inner = {"embeddings": model.get_layer("class_head.Dense_0").output, "boxes": model.output["boxes"]}
    if "objectness" in model.output:
        inner["objectness"] = model.output["objectness"]
    outputs = {name: ops.convert_to_numpy(x) for name, x in keras.Model(model.input, inner)(images).items()}
    embeddings = np.asarray(outputs["embeddings"], np.float32)
    if boxes is None and "objectness" in outputs:
        best = outputs["objectness"].argmax(axis=-1)
        return embeddings[np.arange(len(best)), best], best
    if boxes is None:
        boxes = np.tile([0.5, 0.5, 1.0, 1.0], (len(embeddings), 1))
    boxes = np.asarray(boxes, np.float32)
    if boxes.shape != (len(embeddings), 4):  # transposed ones would be reordered without a word
        raise UserError(f"boxes must be (images, 4), one for each image, but are {boxes.shape}.")
    shares = box_iou(
        to_corners(ops.convert_to_tensor(outputs["boxes"])), to_corners(ops.convert_to_tensor(boxes[:, None]))
    )
    ious, generalized = (ops.convert_to_numpy(share) for share in shares)  # (B, N)
    ious = np.where((ious == 0.0).all(axis=-1, keepdims=True), generalized, ious)
    likeness = np.einsum("be,bne->bn", embeddings.mean(axis=1), embeddings)
    fits = ious >= ious.max(axis=-1, keepdims=True) * 0.8
    # If all overlaps are below 0, none can reach 80% of the best.
    fits |= ious == ious.max(axis=-1, keepdims=True)
    best = np.where(fits, likeness, np.inf).argmin(axis=-1)
    return embeddings[np.arange(len(best)), best], best


def _class_head(model: keras.Model) -> list:
    """Class embeddings, shift and scale of a detector."""
    layer = next((layer for layer in model.layers if isinstance(layer, ClassEmbeddings)), None)
    if layer is None:
        raise UserError(f"The model {model.name!r} does not detect by class embeddings; take OWL-ViT or OWLv2.")
    return list(layer.output)


def to_corners(boxes):
    """Center x and y, width and height (..., 4) -> left, top, right, bottom (..., 4)."""
    x, y, width, height = (boxes[..., i] for i in range(4))
    return ops.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=-1)


def box_iou(corners, others):
    """(intersection over union, generalized IoU) of boxes (..., 4) as corners, which are broadcast against each other.

    Generalized IoU (arXiv 1902.09630), in (-1, 1]: IoU less the share of the smallest enclosing box that neither of the
    two covers. Boxes without area give 0 instead of a division by 0.
    """
    shared = _box_area(ops.maximum(corners[..., :2], others[..., :2]), ops.minimum(corners[..., 2:], others[..., 2:]))
    union = _box_area(corners[..., :2], corners[..., 2:]) + _box_area(others[..., :2], others[..., 2:]) - shared
    around = _box_area(ops.minimum(corners[..., :2], others[..., :2]), ops.maximum(corners[..., 2:], others[..., 2:]))
    iou = _share(shared, union)
    return iou, iou - _share(around - union, around)


def _box_area(first, last):
    sides = ops.maximum(last - first, 0.0)
    return sides[..., 0] * sides[..., 1]


def _share(part, whole):
    return ops.where(whole > 0.0, part / ops.where(whole > 0.0, whole, 1.0), 0.0)
