"""The objective of a recipe."""

import numpy as np

from training.objectives.classification import Classification
from training.objectives.dense import BoxSetPrediction, MaskSetPrediction, PixelClasses
from training.objectives.distillation import FeatureDistillation, HardDistillation, SoftDistillation
from training.objectives.masked_patches import MaskedPatches
from training.objectives.objective import Objective
from training.objectives.patches import FlexiblePatches, PatchDropout
from training.objectives.pseudo_labels import PseudoLabels
from training.objectives.self_distillation import SelfDistillation
from training.recipes.dense import DetectRecipe, SegmentRecipe
from training.recipes.recipe import PretrainRecipe, PseudoLabelRecipe, Recipe


def objective_of(recipe: Recipe, num_steps: int, seed: int = 0, class_weights: np.ndarray | None = None) -> Objective:
    """Return the objective of a run. class_weights: (K,), see `Classification`."""
    objective = _technique(recipe, num_steps, class_weights)
    if recipe.patch_dropout:
        return PatchDropout(recipe.patch_dropout, objective)
    if recipe.patch_sizes:
        return FlexiblePatches(recipe.patch_sizes, seed, objective)
    return objective


def _technique(recipe: Recipe, num_steps: int, class_weights: np.ndarray | None) -> Objective:
    match recipe:
        case SegmentRecipe():
            return MaskSetPrediction(num_steps=num_steps) if recipe.head == "eomt" else PixelClasses()
        case DetectRecipe():
            return BoxSetPrediction()
        case PretrainRecipe(target="self-distillation"):
            return SelfDistillation(recipe, num_steps)
        case PretrainRecipe() if recipe.target != "classes":
            return MaskedPatches.of(recipe)
        case PseudoLabelRecipe():
            return PseudoLabels(recipe)
    if recipe.teacher is None:
        return Classification(recipe.loss, recipe.label_smoothing, class_weights)
    if recipe.distillation == "features":
        return FeatureDistillation(recipe.teacher)
    distillation = HardDistillation if recipe.distillation == "hard" else SoftDistillation
    return distillation(recipe.teacher, recipe.label_smoothing, recipe.temperature)
