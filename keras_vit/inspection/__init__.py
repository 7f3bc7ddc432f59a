"""Inspect a model: the figures of the ViT paper for any model, as arrays, plots and an HTML report.

    keras-vit inspect --run runs/mnist-small --output inside

`inspect` computes an `InspectionResult` for a model and some images. `write` saves its plots, its arrays and the report
index.html to a directory. The functions of `analysis` define each figure on NumPy arrays.
"""

from typing import TYPE_CHECKING, Literal, get_args

from keras_vit.lazy_imports import public_names

Figure = Literal["filters", "positions", "distance", "rollout", "attention", "norms", "relevance", "queries"]
FIGURES: tuple[Figure, ...] = get_args(Figure)

if TYPE_CHECKING:
    from keras_vit.images.files import Image, decode, read_images
    from keras_vit.inspection.analysis import (
        attention_rollout,
        attention_to_patches,
        class_relevance,
        mean_attention_distance,
        neighbourhood,
        patch_distances,
        patch_tokens,
        position_similarity,
        principal_filters,
        resize_map,
        root_filters,
        token_norms,
        unfold_axial,
        weight_per_pixel,
    )
    from keras_vit.inspection.compute import InspectionResult, available_figures, features_and_gradients, inspect
    from keras_vit.inspection.report import write
else:
    __getattr__, __dir__ = public_names(globals())

__all__ = [
    "FIGURES", "Image", "InspectionResult", "attention_rollout", "attention_to_patches", "available_figures",
    "class_relevance", "decode", "features_and_gradients", "inspect", "mean_attention_distance", "neighbourhood",
    "patch_distances", "patch_tokens", "position_similarity", "principal_filters", "read_images", "resize_map",
    "root_filters", "token_norms", "unfold_axial", "weight_per_pixel", "write",
]  # fmt: skip
