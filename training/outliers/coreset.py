"""A small part of many vectors that covers them: greedy k-center selection, as in PatchCore (arXiv 2106.08265)."""

import numpy as np
from sklearn.random_projection import SparseRandomProjection, johnson_lindenstrauss_min_dim

from keras_vit.cli.progress import tracked

# Distortion of distances by the random projection, as in PatchCore's code and anomalib.
_EPSILON = 0.9


def k_center(vectors: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Indices (count,) of vectors (n, D): at random the first, then always the one farthest from all before it.

    The distances are those of a sparse random projection, where that has fewer dimensions.
    """
    if johnson_lindenstrauss_min_dim(len(vectors), eps=_EPSILON) < vectors.shape[1]:
        vectors = SparseRandomProjection(eps=_EPSILON, random_state=seed).fit_transform(vectors)
    vectors = np.ascontiguousarray(vectors, np.float32)
    squares = np.sum(np.square(vectors), axis=-1)
    chosen = [int(np.random.default_rng(seed).integers(len(vectors)))]
    distances = np.full(len(vectors), np.inf, np.float32)
    for _ in tracked(range(1, count), "Choosing patches", unit="patches"):
        last = chosen[-1]
        np.minimum(distances, squares + squares[last] - 2.0 * (vectors @ vectors[last]), out=distances)
        distances[last] = -np.inf
        chosen.append(int(np.argmax(distances)))
    return np.array(chosen)
