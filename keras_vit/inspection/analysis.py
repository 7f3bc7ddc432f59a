"""The papers' figures as numbers: NumPy in, NumPy out, float64, one definition each.

"An Image is Worth 16x16 Words" (arXiv 2010.11929), sections 4.5, D.7 and D.8, whose code was never published; what it
leaves open is decided as the snippet its authors passed on does (Keras example "Investigating Vision Transformer
representations"), and said below. `neighbourhood` and `weight_per_pixel` turn its claims about trained models (section
4.5) into numbers that can refute them.

Axes: B batch, L layers, H heads, T tokens with the class token, N = h * w patches (row by row), D width, C channels.
"""

from collections.abc import Iterable

import numpy as np

from keras_vit.models.weight_resizing import resampling_matrix


def principal_filters(kernel: np.ndarray, count: int = 28) -> np.ndarray:
    """Principal components of the filters that embed a patch (Figure 7, left).

    The D filters are the samples. Their mean is subtracted, which the paper leaves open. The sign is arbitrary: here
    the element of largest magnitude is positive.

    Args:
        kernel: (height, width, C, D), the convolution kernel of the patch embedding.
        count: components wanted.

    Returns:
        (count, height, width, C) by falling singular value, each of length 1; fewer where the kernel has fewer filters
        or numbers in a filter than that.
    """
    kernel = np.asarray(kernel, np.float64)
    filters = kernel.reshape(-1, kernel.shape[-1]).T  # (D, height * width * C)
    _, _, components = np.linalg.svd(filters - filters.mean(axis=0), full_matrices=False)
    components = components[:count]
    largest = np.take_along_axis(components, np.abs(components).argmax(axis=1, keepdims=True), axis=1)
    return (components * np.sign(largest)).reshape(-1, *kernel.shape[:3])


def root_filters(kernel: np.ndarray) -> np.ndarray:
    """Return the filters of a first convolution, as stored: (height, width, C, F) -> (F, height, width, C).

    For BiT and hybrids, whose embedding does not see the image. That the network standardizes each filter before use
    changes neither its pattern nor, scaled to its own range, its image.
    """
    return np.moveaxis(np.asarray(kernel, np.float64), -1, 0)


def position_similarity(table: np.ndarray, num_prefix_tokens: int) -> np.ndarray:
    """Cosine of the angle between the position embeddings of every two patches (Figures 7, center, and 10).

    Args:
        table: (T, D) or (1, T, D), one row for each token.
        num_prefix_tokens: rows before the patches, which are left out: 1 with a class token. No mean is subtracted.

    Returns:
        (N, N), from -1 to 1; row r * w + c, reshaped to (h, w), is the tile of the patch in row r and column c.
    """
    table = np.asarray(table, np.float64)
    patches = table.reshape(-1, table.shape[-1])[num_prefix_tokens:]
    patches = patches / np.maximum(np.linalg.norm(patches, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return patches @ patches.T


def patch_distances(grid: tuple[int, int], patch_size: tuple[float, float]) -> np.ndarray:
    """Distance in pixels between the centers of every two patches: (N, N).

    Args:
        grid: h and w.
        patch_size: height and width in pixels.
    """
    centers = np.indices(grid).reshape(2, -1).T * np.asarray(patch_size, np.float64)  # (N, 2)
    return np.linalg.norm(centers[:, None] - centers, axis=-1)


def mean_attention_distance(
    probabilities: np.ndarray,
    grid: tuple[int, int],
    patch_size: tuple[float, float],
    num_prefix_tokens: int,
    *,
    renormalize: bool = False,
) -> np.ndarray:
    """Return how far from a patch its attention goes, on average over the patches (Figures 7, right, and 11; D.7).

    Args:
        probabilities: (..., T, T), rows of queries that sum to 1.
        grid: h and w.
        patch_size: height and width of a patch in pixels; of a hybrid, those of the image divided by the grid.
        num_prefix_tokens: tokens before the patches; their rows and columns are left out.
        renormalize: divide what is left of each row by its sum. The reference does not, and the paper is silent.

    Returns:
        (...) in pixels: of (B, H, T, T) one number for each image and head.
    """
    patches = np.asarray(probabilities)[..., num_prefix_tokens:, num_prefix_tokens:]  # (..., N, N)
    distances = patch_distances(grid, patch_size)
    per_query = np.einsum("...qk,qk->...q", patches, distances, dtype=np.float64)
    if renormalize:
        per_query = per_query / np.maximum(patches.sum(axis=-1, dtype=np.float64), np.finfo(np.float64).tiny)
    return per_query.mean(axis=-1)


def attention_rollout(attentions: Iterable[np.ndarray]) -> np.ndarray:
    """Return how much of each token of the input reaches each token after every layer (Abnar & Zuidema; D.8).

    Each layer's attention is averaged over its heads, half of it is mixed with half of the identity for the residual
    connection, rows are divided by their sum, and the product is taken with the later layer on the left.

    Args:
        attentions: of each layer in order, probabilities (..., H, T, T).

    Returns:
        (L, ..., T, T), after each layer; the last is the rollout. Every row sums to 1.
    """
    rollouts: list[np.ndarray] = []
    for probabilities in attentions:
        mean = np.mean(probabilities, axis=-3, dtype=np.float64)  # (..., T, T)
        layer = 0.5 * mean + 0.5 * np.eye(mean.shape[-1])
        layer /= layer.sum(axis=-1, keepdims=True)
        rollouts.append(layer @ rollouts[-1] if rollouts else layer)
    return np.stack(rollouts)


def attention_to_patches(
    matrix: np.ndarray, grid: tuple[int, int], num_prefix_tokens: int, has_class_token: bool | None = None
) -> np.ndarray:
    """Return the part of an attention or rollout matrix that leads from the output to the patches, as a map.

    The row of the class token without its own column, not renormalized. A model without one has no such row: the mean
    over all rows stands for it.

    Args:
        matrix: (..., T, T).
        grid: h and w.
        num_prefix_tokens: tokens before the patches, such as the class token and registers.
        has_class_token: whether the first of them is a class token; None if there is any.

    Returns:
        (..., h, w), not negative, summing to 1 at most.
    """
    matrix = np.asarray(matrix)
    if has_class_token is None:
        has_class_token = num_prefix_tokens > 0
    row = matrix[..., 0, :] if has_class_token else matrix.mean(axis=-2)
    return row[..., num_prefix_tokens:].reshape(*row.shape[:-1], *grid)


def unfold_axial(probabilities: np.ndarray, grid: tuple[int, int], axis: str) -> np.ndarray:
    """Attention along each row ("row") or column of the grid as attention between all patches.

    Args:
        probabilities: (B * h, H, w, w) of rows or (B * w, H, h, h) of columns.

    Returns:
        (B, H, N, N), zero between patches of different rows, or columns.
    """
    rows, columns = grid
    lines, along = (rows, columns) if axis == "row" else (columns, rows)
    folded = np.asarray(probabilities).reshape(-1, lines, probabilities.shape[1], along, along)
    blocks = np.einsum("blhqk,lm->bhlqmk", folded, np.eye(lines, dtype=folded.dtype))
    if axis == "column":  # (B, H, w, h, w, h) -> (B, H, h, w, h, w)
        blocks = blocks.transpose(0, 1, 3, 2, 5, 4)
    return blocks.reshape(*blocks.shape[:2], rows * columns, rows * columns)


def patch_tokens(tokens: np.ndarray, grid: tuple[int, int], num_prefix_tokens: int) -> np.ndarray:
    """Tokens (..., T, D) without those before the patches, on their grid: (..., h, w, D)."""
    patches = np.asarray(tokens)[..., num_prefix_tokens:, :]
    return patches.reshape(*patches.shape[:-2], *grid, patches.shape[-1])


def token_norms(features: np.ndarray) -> np.ndarray:
    """Euclidean length of the vector at each place of a feature map: (..., h, w, D) -> (..., h, w)."""
    return np.linalg.norm(np.asarray(features, np.float64), axis=-1)


def class_relevance(features: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """Grad-CAM (arXiv 1610.02391, equations 1 and 2): which places of a feature map raise the logit of a class.

    Args:
        features: (..., h, w, C).
        gradients: of the class's logit with respect to them, of the same shape.

    Returns:
        (..., h, w), the features weighted by their mean gradient over the map, summed over channels, cut off at 0.
    """
    weights = np.asarray(gradients, np.float64).mean(axis=(-3, -2), keepdims=True)
    return np.maximum((weights * features).sum(axis=-1), 0.0)


def neighbourhood(similarity: np.ndarray, grid: tuple[int, int]) -> dict[str, float]:
    """Measure whether "closer patches tend to have more similar position embeddings".

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
    """Measure whether "the model attends to image regions that are semantically relevant for classification".

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


def resize_map(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A map (h, w), divided by its maximum unless all are 0, resized to (height, width): bilinear, as cv2.resize."""
    values = np.asarray(values, np.float64)
    rows, columns = (resampling_matrix(old, new, "bilinear") for old, new in zip(values.shape, size, strict=True))
    return rows @ (values / (values.max() or 1.0)) @ columns.T
