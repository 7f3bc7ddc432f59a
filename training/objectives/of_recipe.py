"""The objective of a recipe."""

import numpy as np

from training.objectives.classification import Classification
from training.objectives.detection import BoxSetPrediction
from training.objectives.distillation import HardDistillation, SoftDistillation
from training.objectives.feature_distillation import FeatureDistillation
from training.objectives.flexible_patches import FlexiblePatches
from training.objectives.masked_patches import MaskedPatches
from training.objectives.objective import Objective
from training.objectives.patch_dropout import PatchDropout
from training.objectives.pseudo_labels import PseudoLabels
from training.objectives.segmentation import MaskSetPrediction, PixelClasses
from training.objectives.self_distillation import SelfDistillation
from training.recipes.recipe import Recipe

# The first that fits a recipe is its objective.
_OBJECTIVES: tuple[type[Objective], ...] = (
    MaskSetPrediction,
    PixelClasses,
    BoxSetPrediction,
    SelfDistillation,
    MaskedPatches,
    PseudoLabels,
    FeatureDistillation,
    HardDistillation,
    SoftDistillation,
    Classification,
)


def objective_of(recipe: Recipe, num_steps: int, seed: int = 0, class_weights: np.ndarray | None = None) -> Objective:
    """Return the objective of a run. class_weights: (K,), see `Classification`."""
    objective: Objective
    if class_weights is not None:
        objective = Classification(recipe.loss, recipe.label_smoothing, class_weights)
    else:
        objective = next(filter(None, (technique.of(recipe, num_steps) for technique in _OBJECTIVES)))
    if recipe.patch_dropout:
        return PatchDropout(recipe.patch_dropout, objective)
    if recipe.patch_sizes:
        return FlexiblePatches(recipe.patch_sizes, seed, objective)
    return objective
