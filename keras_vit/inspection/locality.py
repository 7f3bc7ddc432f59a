"""The paper's claims about trained models (arXiv 2010.11929, section 4.5) as numbers that can refute them."""

import numpy as np

from keras_vit.inspection.analysis import patch_distances


def neighbourhood(similarity: np.ndarray, grid: tuple[int, int]) -> dict[str, float]:
    """Whether "closer patches tend to have more similar position embeddings".

    Args:
        similarity: (N, N) of `position_similarity`.
        grid: rows and columns of patches.

    Returns:
        "own": share of the patches that are most similar to themselves. "adjacent": mean cosine of patches that share
        a side. "distant": mean cosine of patches further apart than half the largest distance.
    """
    distances = patch_distances(grid, (1.0, 1.0))
    own = similarity.argmax(axis=1) == np.arange(len(similarity))
    distant = distances > distances.max() / 2
    adjacent = np.isclose(distances, 1.0)
    return {
        "own": float(own.mean()),
        "adjacent": float(similarity[adjacent].mean()),
        "distant": float(similarity[distant].mean()),
    }


def weight_per_pixel(maps: np.ndarray, foreground: np.ndarray) -> tuple[float, float]:
    """Whether "the model attends to image regions that are semantically relevant for classification".

    The weight of a patch is spread evenly over its pixels, and that of an image sums to its number of pixels, so that
    even attention gives 1 everywhere.

    Args:
        maps: (n, h, w), not negative.
        foreground: (n, height, width), boolean, in every image some of it and some background; multiples of h and w.

    Returns:
        Mean weight of a pixel of the foreground, and of one of the background, each the mean over the images.
    """
    repeats = foreground.shape[1] // maps.shape[1], foreground.shape[2] // maps.shape[2]
    weights = maps / maps.mean(axis=(1, 2), keepdims=True)
    weights = weights.repeat(repeats[0], axis=1).repeat(repeats[1], axis=2)
    inside = (weights * foreground).sum(axis=(1, 2)) / foreground.sum(axis=(1, 2))
    outside = (weights * ~foreground).sum(axis=(1, 2)) / (~foreground).sum(axis=(1, 2))
    return float(inside.mean()), float(outside.mean())
