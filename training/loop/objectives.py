"""Objectives: the loss of each example and the sums for the metrics, from the outputs of a model."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from keras_vit import Preprocessing, ViTConfig, preprocessing_of
from training.recipes.dense import DenseRecipe, SegmentRecipe
from training.recipes.detect import DetectRecipe
from training.recipes.recipe import (
    COLOR_LEVELS,
    PATCH_CELLS,
    PIXEL_TARGETS,
    Loss,
    PretrainRecipe,
    PseudoLabelRecipe,
    Recipe,
    Target,
    num_patch_outputs,
)
from training.techniques.detection import BoxSetPrediction
from training.techniques.distillation import HardDistillation, SoftDistillation, check_student, open_teacher
from training.techniques.feature_distillation import FeatureDistillation, open_feature_teacher
from training.techniques.pseudo_labels import PseudoLabelLoss
from training.techniques.segmentation import MaskSetPrediction, PixelClasses
from training.techniques.self_distillation import SelfDistillation


class Classification:
    """Classes of each image, from logits (B, K).

    Args:
        loss: "softmax" cross-entropy, or "sigmoid" cross-entropy summed over the classes. "multi-label" is the same
            for images of several classes: its metric is the share of classes for which the model is right with the
            threshold 0.5, the binary accuracy of Keras.
        label_smoothing: probability mass taken from the label and spread over all classes.
        class_weights: factor (K,) of the loss of an image of each class, as `class_weight` of Keras' `fit`; an image of
            two mixed ones has their mean. The accuracy counts all images alike.
    """

    def __init__(self, loss: Loss = "softmax", label_smoothing: float = 0.0, class_weights: np.ndarray | None = None):
        self._loss, self._label_smoothing, self._class_weights = loss, label_smoothing, class_weights
        self.metrics = ("loss", "binary_accuracy" if loss == "multi-label" else "accuracy")
        self.metric_dtype = "float32" if loss == "multi-label" else "int32"  # shares or counts

    def measure(self, images, labels, outputs, weights) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return the weighted loss of each example (B,) and the sums of loss, correct predictions and weights."""
        logits = ops.cast(outputs, "float32")
        if self._loss == "softmax":
            losses = keras.losses.categorical_crossentropy(labels, logits, True, self._label_smoothing)
        else:
            smooth = labels * (1.0 - self._label_smoothing) + self._label_smoothing / labels.shape[-1]
            losses = ops.sum(ops.binary_crossentropy(smooth, logits, from_logits=True), axis=-1)
        if self._class_weights is not None:
            losses = losses * ops.sum(ops.cast(labels, "float32") * self._class_weights, axis=-1)
        if self._loss == "multi-label":
            right = ops.mean(ops.cast((logits > 0.0) == (labels > 0.5), "float32"), axis=-1)
        else:
            right = ops.cast(ops.argmax(logits, axis=-1) == ops.argmax(labels, axis=-1), "float32")
        return weights * losses, [ops.sum(x) for x in (weights * losses, weights * right, weights)]


class MaskedPatches:
    """Prediction of masked patches, from the outputs of `masked_patch_model`.

    The three targets of "An Image is Worth 16x16 Words" (arXiv 2010.11929) appendix B.1.2 are:

    * "patch-color": the mean color of the patch, 3 bits per channel, as one class (512 for RGB, 8 for grayscale);
    * "patch-4x4": the mean colors of the patch downsampled to 4x4, as 16 classes, top row first;
    * "patch-pixels": all pixels of the patch, row by row with the channels innermost, with the squared error.

    "Masked Autoencoders Are Scalable Vision Learners" (arXiv 2111.06377) adds "patch-normalized-pixels": the same
    pixels less their mean, divided by the root of their variance in the patch. The variance is that of a sample
    (n - 1), and 1e-6 is added to it, as in facebookresearch/mae `models_mae.py`.

    The paper leaves details open; they follow a public implementation (vit-pytorch `mpp.py`): the mean is that of the
    preprocessed pixels, scaled to 0 to 1; its eight levels are equally wide, and an upper edge belongs to the next
    level, except 1; the class is red + 8 green + 64 blue. Pixels are predicted in the model's value range; the error is
    the mean over the pixels of a patch.
    """

    def __init__(self, target: Target, preprocessing: Preprocessing, patch: tuple[int, int]):
        self._target, self._preprocessing, self._patch = target, preprocessing, patch
        self.metrics = ("loss",) if target in PIXEL_TARGETS else ("loss", "accuracy")
        self.metric_dtype = "int32"

    @property
    def num_outputs(self) -> int:
        """Size of the prediction for a patch."""
        return num_patch_outputs(self._target, self._patch, self._preprocessing.channels)

    def targets(self, images: tf.Tensor) -> tf.Tensor:
        """Images (B, height, width, C) in the model's range -> classes (B, N, cells), or pixels (B, N, h * w * C).

        h and w are the sides of a patch; classes are int32, pixels float32.
        """
        height, width = self._patch
        batch, rows, columns, channels = images.shape
        grid = (rows // height, columns // width)
        shape = (-1 if batch is None else batch, grid[0], height, grid[1], width, channels)
        patches = tf.transpose(tf.reshape(images, shape), (0, 1, 3, 2, 4, 5))  # (B, rows, columns, h, w, C)
        patches = tf.reshape(patches, (shape[0], grid[0] * grid[1], height, width, channels))
        if self._target in PIXEL_TARGETS:
            pixels = tf.reshape(patches, (shape[0], grid[0] * grid[1], height * width * channels))
            return pixels if self._target == "patch-pixels" else _standardized(pixels)
        low, high = (tf.constant(end, tf.float32) for end in self._preprocessing.channel_ranges())
        scaled = (patches - low) / (high - low)
        down, across = (_area_means(side, PATCH_CELLS[self._target]) for side in self._patch)
        means = tf.einsum("ah,bnhwc,dw->bnadc", down, scaled, across)  # (B, N, cells, cells, C)
        levels = tf.clip_by_value(tf.cast(tf.floor(means * COLOR_LEVELS), tf.int32), 0, COLOR_LEVELS - 1)
        classes = tf.reduce_sum(levels * tf.constant([COLOR_LEVELS**channel for channel in range(channels)]), axis=-1)
        return tf.reshape(classes, (shape[0], grid[0] * grid[1], PATCH_CELLS[self._target] ** 2))

    def measure(self, images, labels, outputs, weights) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return the weighted loss of each example (B,), its mean over the predictions for corrupted patches; and the
        sums of loss, correct predictions and number of these predictions.
        """
        predictions, targets = tf.cast(outputs["predictions"], tf.float32), self.targets(images)
        if self._target in PIXEL_TARGETS:
            losses = tf.reduce_mean(tf.square(predictions - targets), axis=-1, keepdims=True)  # (B, N, 1)
            right = tf.zeros_like(losses)
        else:
            logits = tf.reshape(predictions, (*predictions.shape[:2], targets.shape[-1], -1))
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)  # (B, N, cells)
            right = tf.cast(tf.argmax(logits, axis=-1, output_type=tf.int32) == targets, tf.float32)
        corrupted = tf.broadcast_to(outputs["corrupted"][..., None], tf.shape(losses))
        counts = corrupted * weights[:, None, None]
        sums = [tf.reduce_sum(counts * x) for x in (losses, right, tf.ones_like(losses))]
        return tf.reduce_sum(counts * losses, axis=(1, 2)) / tf.reduce_sum(corrupted, axis=(1, 2)), sums


def _standardized(pixels: tf.Tensor) -> tf.Tensor:
    """(B, N, n) -> the same, with mean 0 and deviation 1 in each patch."""
    centered = pixels - tf.reduce_mean(pixels, axis=-1, keepdims=True)
    variance = tf.reduce_sum(tf.square(centered), axis=-1, keepdims=True) / (pixels.shape[-1] - 1)
    return centered / tf.sqrt(variance + 1e-6)


OfImages = (
    Classification
    | MaskedPatches
    | SelfDistillation
    | SoftDistillation
    | HardDistillation
    | FeatureDistillation
    | PseudoLabelLoss
)
# Of targets that are masks or boxes.
Dense = MaskSetPrediction | PixelClasses | BoxSetPrediction
Objective = OfImages | Dense


def uses_labels(recipe: Recipe) -> bool:
    """Whether the evaluation of a recipe compares with the classes of the images."""
    return not (isinstance(recipe, DenseRecipe) or (isinstance(recipe, PretrainRecipe) and recipe.learns_features))


def make_objective(recipe: Recipe, preprocessing: Preprocessing | None = None) -> Objective:
    """Return the objective of a recipe without a teacher; in the scope of the strategy.

    preprocessing: of the model; default that of a model which the recipe builds.
    """
    if isinstance(recipe, SegmentRecipe):
        return MaskSetPrediction() if recipe.head == "eomt" else PixelClasses()
    if isinstance(recipe, DetectRecipe):
        return BoxSetPrediction()
    if isinstance(recipe, PretrainRecipe) and recipe.target == "self-distillation":
        return SelfDistillation()
    if isinstance(recipe, PseudoLabelRecipe):
        return PseudoLabelLoss(recipe)
    if isinstance(recipe, PretrainRecipe) and recipe.target != "classes":
        assert isinstance(recipe.model, ViTConfig)  # checked by the recipe
        preprocessing = preprocessing or recipe.preprocessing(recipe.channels)
        return MaskedPatches(recipe.target, preprocessing, recipe.model.patch)
    return Classification(recipe.loss, recipe.label_smoothing)


def distillation_objective(
    recipe: Recipe, student: keras.Model
) -> SoftDistillation | HardDistillation | FeatureDistillation | None:
    """Return the objective of training with the recipe's teacher, which is loaded; None without a teacher."""
    if recipe.teacher is None:
        return None
    if recipe.distillation == "features":
        return FeatureDistillation(open_feature_teacher(recipe.teacher, preprocessing_of(student)), student)
    if recipe.distillation == "hard":
        check_student(student)
        return HardDistillation(open_teacher(recipe.teacher, student), recipe.label_smoothing)
    return SoftDistillation(open_teacher(recipe.teacher, student), recipe.temperature)


def _area_means(side: int, cells: int) -> np.ndarray:
    """Return (cells, side): the share of each pixel along a side in each of the cells that divide it."""
    edges = np.arange(cells + 1) * (side / cells)
    pixels = np.arange(side)
    covered = np.minimum(pixels + 1, edges[1:, None]) - np.maximum(pixels, edges[:-1, None])
    return (np.maximum(covered, 0.0) * (cells / side)).astype(np.float32)
