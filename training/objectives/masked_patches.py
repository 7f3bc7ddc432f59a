"""Prediction of masked patches, or of the next patch.

The targets of "An Image is Worth 16x16 Words" (arXiv 2010.11929) appendix B.1.2 are:

* "patch-color": the mean color of the patch, 3 bits per channel, as one class (512 for RGB, 8 for grayscale);
* "patch-4x4": the mean colors of the patch downsampled to 4x4, as 16 classes, top row first;
* "patch-pixels": all pixels of the patch, row by row with the channels innermost, with the squared error.

"Masked Autoencoders Are Scalable Vision Learners" (arXiv 2111.06377) adds "patch-normalized-pixels": the same pixels
less their mean, divided by the root of their variance in the patch. The variance is that of a sample (n - 1), and 1e-6
is added to it, as in facebookresearch/mae `models_mae.py`. "next-patch" (AIM, arXiv 2401.08541) has the same targets
for the patches behind the prefix.

What the first paper leaves open follows vit-pytorch `mpp.py`: the mean is that of the preprocessed pixels, scaled to 0
to 1; its eight levels are equally wide, and an upper edge belongs to the next level, except 1; the class is red + 8
green + 64 blue. Pixels are predicted in the model's value range.
"""

from typing import Any

import numpy as np
from keras import ops

from keras_vit import Preprocessing, ViTConfig, preprocessing_of
from training.objectives.objective import Objective, sums_of
from training.recipes.recipe import COLOR_LEVELS, PATCH_CELLS, PIXEL_TARGETS, PretrainRecipe, Target, num_patch_outputs


class MaskedPatches(Objective):
    """Prediction of masked patches, from the outputs of `masked_patch_model`. patch: height and width in pixels."""

    without_remat = "Masked patch prediction"
    metric_dtype = "float32"  # shares, not counts

    def __init__(self, target: Target, patch: tuple[int, int], preprocessing: Preprocessing):
        self._target, self._patch, self._preprocessing = target, patch, preprocessing
        self.metrics = ("loss",) if target in PIXEL_TARGETS else ("loss", "accuracy")
        self.num_outputs = num_patch_outputs(target, patch, preprocessing.channels)
        self.uncounted = (f"the head of {self.num_outputs:,} outputs for each patch",)

    @classmethod
    def of(cls, recipe: PretrainRecipe) -> "MaskedPatches":
        assert isinstance(recipe.model, ViTConfig)  # checked by the recipe
        objective = cls(recipe.target, recipe.model.patch, recipe.preprocessing(recipe.channels))
        if recipe.target == "next-patch":
            objective.uncounted = ("the head of the next patch",)
        elif recipe.decoder_layers:
            objective.uncounted += ("the decoder, and that the encoder computes only the visible patches",)
        return objective

    def prepare(self, model):
        self._preprocessing = preprocessing_of(model)
        return model

    def targets(self, images: Any) -> Any:
        """Images (B, height, width, C) in the model's range -> classes (B, N, cells), or pixels (B, N, h * w * C).

        h and w are the sides of a patch; classes are int32, pixels float32.
        """
        height, width = self._patch
        batch, rows, columns, channels = images.shape
        grid = (rows // height, columns // width)
        shape = (-1 if batch is None else batch, grid[0], height, grid[1], width, channels)
        patches = ops.transpose(ops.reshape(images, shape), (0, 1, 3, 2, 4, 5))  # (B, rows, columns, h, w, C)
        patches = ops.reshape(patches, (shape[0], grid[0] * grid[1], height, width, channels))
        if self._target in PIXEL_TARGETS:
            pixels = ops.reshape(patches, (shape[0], grid[0] * grid[1], height * width * channels))
            return pixels if self._target == "patch-pixels" else _standardized(pixels)
        low, high = (np.array(end, np.float32) for end in self._preprocessing.channel_ranges())
        scaled = (patches - low) / (high - low)
        down, across = (_area_means(side, PATCH_CELLS[self._target]) for side in self._patch)
        means = ops.einsum("ah,bnhwc,dw->bnadc", down, scaled, across)  # (B, N, cells, cells, C)
        levels = ops.clip(ops.cast(ops.floor(means * COLOR_LEVELS), "int32"), 0, COLOR_LEVELS - 1)
        classes = ops.sum(levels * np.array([COLOR_LEVELS**channel for channel in range(channels)], np.int32), axis=-1)
        return ops.reshape(classes, (shape[0], grid[0] * grid[1], PATCH_CELLS[self._target] ** 2))

    def measure(self, images, labels, outputs, weights):
        """As `Objective.measure`; those of an image are means over the predictions for its corrupted patches."""
        predictions, targets = ops.cast(outputs["predictions"], "float32"), self.targets(images)
        if self._target in PIXEL_TARGETS:
            losses = ops.mean(ops.square(predictions - targets), axis=-1, keepdims=True)  # (B, N, 1)
            right = ops.zeros_like(losses)
        else:
            logits = ops.reshape(predictions, (*predictions.shape[:2], targets.shape[-1], -1))
            losses = ops.sparse_categorical_crossentropy(targets, logits, from_logits=True)  # (B, N, cells)
            right = ops.cast(ops.argmax(logits, axis=-1) == targets, "float32")
        corrupted = outputs["corrupted"]  # (B, N)
        count = ops.sum(corrupted, axis=1)
        means = (ops.sum(corrupted * ops.mean(x, axis=-1), axis=1) / count for x in (losses, right))
        return sums_of(*means, weights)


def _standardized(pixels):
    """(B, N, n) -> the same, with mean 0 and deviation 1 in each patch."""
    centered = pixels - ops.mean(pixels, axis=-1, keepdims=True)
    variance = ops.sum(ops.square(centered), axis=-1, keepdims=True) / (pixels.shape[-1] - 1)
    return centered / ops.sqrt(variance + 1e-6)


def _area_means(side: int, cells: int) -> np.ndarray:
    """Return (cells, side): the share of each pixel along a side in each of the cells that divide it."""
    edges = np.arange(cells + 1) * (side / cells)
    pixels = np.arange(side)
    covered = np.minimum(pixels + 1, edges[1:, None]) - np.maximum(pixels, edges[:-1, None])
    return (np.maximum(covered, 0.0) * (cells / side)).astype(np.float32)
