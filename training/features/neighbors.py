"""The nearest of stored features by the cosine: exact by matrix products, or approximate by a graph."""

import json
import zlib
from collections.abc import Iterable, Iterator

import numpy as np

from keras_vit import UserError
from keras_vit.cli.progress import Progress
from keras_vit.errors import needed_package
from keras_vit.files.atomic import atomic_write, write_text
from keras_vit.files.remote import is_remote
from training.features.store import FeatureIndex

# Rows of one matrix product.
_CHUNK = 2**16
# Scores in memory at once.
_NUMBERS_AT_ONCE = 2**26
# Of the graph: edges of each picture, and how many candidates are followed when it is made and searched.
_EDGES, _EFFORT = 32, 128
# Stored pictures whose neighbors are compared with the exact ones.
_COMPARED = 100


def unit_length(values: np.ndarray) -> np.ndarray:
    """Rows (n, D) float32 of length 1; a row of zeros stays one."""
    values = np.asarray(values, np.float32)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return values / np.where(lengths == 0.0, 1.0, lengths)


def unit_chunks(index: FeatureIndex) -> Iterator[np.ndarray]:
    """The stored features with length 1, many rows at a time: (up to 65,536, D) float32."""
    parts: list[np.ndarray] = []
    for part in index.parts():
        parts.append(unit_length(part))
        if sum(map(len, parts)) + len(part) > _CHUNK:
            yield np.concatenate(parts)
            parts = []
    if parts:
        yield np.concatenate(parts)


def nearest_rows(chunks: Iterable[np.ndarray], queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows with the largest cosine, exact.

    Args:
        chunks: rows of length 1, (n_i, D) float32 each; numbered one after the other. A list of them stays in memory
            for many calls; of an iterator one is in memory at a time.
        queries: (q, D) of length 1.
        count: rows of each query, at most as many as there are.

    Returns:
        (cosines (q, count) float32, rows (q, count) int64), the largest first, of equal ones the first.
    """
    best = np.zeros((len(queries), 0), np.float32)
    rows = np.zeros((len(queries), 0), np.int64)
    begin = 0
    for chunk in chunks:
        step = max(_NUMBERS_AT_ONCE // max(len(chunk), 1), 1)
        found = [_largest(queries[first : first + step], chunk, count) for first in range(0, len(queries), step)]
        best = np.concatenate([best, np.concatenate([scores for scores, _ in found])], axis=1)
        rows = np.concatenate([rows, np.concatenate([places for _, places in found]) + begin], axis=1)
        order = np.lexsort((rows, -best), axis=1)[:, :count]
        best, rows = np.take_along_axis(best, order, 1), np.take_along_axis(rows, order, 1)
        begin += len(chunk)
    return best, rows


def _largest(queries: np.ndarray, chunk: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    scores = queries @ chunk.T  # (q, n)
    if scores.shape[1] <= count:
        return scores, np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    places = np.argpartition(-scores, count - 1, axis=1)[:, :count]
    return np.take_along_axis(scores, places, 1), places


class NeighborGraph:
    """An index of FAISS (HNSW in float16) beside the features, for many millions of pictures."""

    def __init__(self, index: FeatureIndex) -> None:
        """Read the graph, or make and write it, and print its recall."""
        if is_remote(index.folder):
            raise UserError(f"--approximate keeps its graph beside the features, but {index.folder} is in a bucket.")
        faiss = needed_package("faiss", "--approximate needs", "faiss-cpu")
        content = zlib.crc32("".join(index.pictures.digests).encode())
        name = f"graph-{index.description.fingerprint}-{content}"
        graph, recall = index.folder / f"{name}.faiss", index.folder / f"{name}.json"
        if graph.is_file() and recall.is_file():
            self._graph = faiss.read_index(str(graph))
            self.recall = float(json.loads(recall.read_text())["recall_at_10"])
        else:
            self._graph = _made(faiss, index)
            self.recall = self._measured(index)
            with atomic_write(graph) as temporary:
                faiss.write_index(self._graph, str(temporary))
            write_text(recall, json.dumps({"recall_at_10": self.recall, "compared": _COMPARED}) + "\n")
        print(f"Approximate: the graph finds {self.recall:.1%} of the 10 nearest pictures ({_COMPARED} compared).")

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """As the function `nearest_rows`; -1 for a row that was not found."""
        self._graph.hnsw.efSearch = max(_EFFORT, count)
        return self._graph.search(np.ascontiguousarray(queries, np.float32), count)

    def _measured(self, index: FeatureIndex) -> float:
        """The share of the true 10 nearest that the graph finds, for stored pictures at equal distances."""
        chosen = np.unique(np.linspace(0, self._graph.ntotal - 1, _COMPARED).astype(np.int64))
        queries, begin = [], 0
        for chunk in unit_chunks(index):
            queries.append(chunk[chosen[(chosen >= begin) & (chosen < begin + len(chunk))] - begin])
            begin += len(chunk)
        count = min(10, self._graph.ntotal)
        exact = nearest_rows(unit_chunks(index), np.concatenate(queries), count)[1]
        found = self.nearest(np.concatenate(queries), count)[1]
        return float(np.mean([len({*one} & {*two}) / count for one, two in zip(exact, found, strict=True)]))


def _made(faiss, index: FeatureIndex):
    graph = faiss.IndexHNSWSQ(
        index.description.width, faiss.ScalarQuantizer.QT_fp16, _EDGES, faiss.METRIC_INNER_PRODUCT
    )
    graph.hnsw.efConstruction = _EFFORT
    total = sum(index.description.splits.values())
    with Progress("Making the graph", total) as progress:
        for chunk in unit_chunks(index):
            if not graph.is_trained:
                graph.train(chunk)
            graph.add(chunk)
            progress.update(len(chunk))
    return graph
