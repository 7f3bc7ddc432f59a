"""Find the nearest images of an index to other images or to a text, exactly or by a graph."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit import UserError
from keras_vit.cli.pages import render, thumbnail_address
from keras_vit.cli.progress import Progress
from keras_vit.errors import needed_package
from keras_vit.files.atomic import atomic_write, write_text
from keras_vit.files.remote import local_copy
from keras_vit.files.tables import markdown_table, write_csv
from keras_vit.images.decode import decode_with_pillow
from keras_vit.run import Run
from training.data.dataset import DataSet
from training.data.sources import open_source
from training.features.extraction import Extractor, embed_all, listing_of_files, open_extractor
from training.features.store import NO_SPLIT, FeatureIndex, Images, check_same_model
from training.options.common import DataOptions
from training.options.features import IndexKind, LookupOptions, SearchOptions, SimilarOptions

_BATCH = 16
_CHUNK, _NUMBERS_AT_ONCE = 2**16, 2**26  # rows of one matrix product, and scores in memory at once
# Of the graph: edges of each image, and how many candidates are followed when it is made and searched.
_EDGES, _EFFORT = 32, 128
_COMPARED = 100  # stored images whose neighbors are compared with the exact ones


@dataclasses.dataclass(frozen=True)
class Nearest:
    """The results for one image or text."""

    query: str
    cosines: np.ndarray
    """(k,), the largest first."""
    rows: np.ndarray
    """(k,), of the index."""
    images: Images


def similar(index: FeatureIndex, files: Sequence[str], options: SimilarOptions) -> None:
    """Find the images that are most similar to each file; print a table, and write the results."""
    extractor = _extractor(index, _run_of(index, options))
    part = embed_all(listing_of_files(files), NO_SPLIT, extractor)
    _report(index, part.paths, part.embeddings, options)


def search(index: FeatureIndex, options: SearchOptions) -> str:
    """Find the images that fit a text; print a table, write the results, and return the path of the best one."""
    run = _run_of(index, options)
    _extractor(index, run, "joint")
    ids = keras_vit.tokenizer(run.name)([options.text])
    embeddings = np.asarray(keras_vit.text_tower(run.name)(ids))
    return _report(index, [options.text], embeddings, options)[0].images.paths[0]


def _run_of(index: FeatureIndex, options: LookupOptions) -> Run:
    settings, name = index.description.settings, options.run or index.description.model
    size = settings.get("image_size")
    return Run.open(name, image_size=tuple(size) if size else None, num_heads=settings.get("num_heads"))


def _extractor(index: FeatureIndex, run: Run, features: IndexKind | None = None) -> Extractor:
    """Return the extractor of the features of an index. Raises UserError if the model, or the kind, is another one."""
    preprocessing = run.preprocessing
    if (resize := index.description.settings.get("resize")) is not None:
        preprocessing = preprocessing.with_resize(resize, None)
    extractor = open_extractor(run.model, preprocessing, features or index.description.features, _BATCH)
    check_same_model(index, extractor.fingerprint, extractor.features, run.name)
    return extractor


def _report(
    index: FeatureIndex, queries: Sequence[str], embeddings: np.ndarray, options: LookupOptions
) -> list[Nearest]:
    """Look up queries by their embeddings, print a table of each, write `--output`, and return the results."""
    units, count = unit_length(embeddings), min(options.neighbors, sum(index.counts.values()))
    if options.approximate:
        every = NeighborGraph(index).nearest(units, count)
    else:
        every = nearest_rows(unit_chunks(index), units, count)
    results = []
    for query, cosines, rows in zip(queries, *every, strict=True):
        kept = rows >= 0  # a graph may find fewer
        results.append(Nearest(query, cosines[kept], rows[kept], index.some(rows[kept].tolist())))
    for each in results:
        print(f"{each.query}:")
        table = zip(each.images.paths, each.images.labels, each.cosines, strict=True)
        cells = [[index.shown(path), label or "", f"{cosine:.4f}"] for path, label, cosine in table]
        print(markdown_table(("image", "label", "similarity"), cells, num_text_columns=2))
    if options.output is not None:
        with atomic_write(pathlib.Path(options.output)) as temporary:
            if options.output.endswith(".csv"):
                write_csv(temporary, _csv_rows(results), raw=options.raw)
            else:
                temporary.write_text(_page(index, results), encoding="utf-8")
        print(f"Results are in {options.output}.")
    return results


def _csv_rows(results: Sequence[Nearest]) -> Iterator[Sequence]:
    yield "query", "rank", "path", "label", "split", "digest", "similarity"
    for each in results:
        known = each.images.paths, each.images.labels, each.images.splits, each.images.digests
        for rank, (cosine, *of_image) in enumerate(zip(each.cosines, *known, strict=True), 1):
            yield each.query, rank, *of_image, f"{cosine:.6f}"


def _page(index: FeatureIndex, results: Sequence[Nearest]) -> str:
    thumbnails, queries = Thumbnails(index), []
    for each in results:
        known = each.images.paths, each.images.labels, each.images.splits
        cards = [
            _card(thumbnails.address(int(row), path, split), path, index.shown(path), label or "", cosine)
            for row, cosine, path, label, split in zip(each.rows, each.cosines, *known, strict=True)
        ]
        address = file_address(each.query) if pathlib.Path(each.query).is_file() else ""
        file = pathlib.PurePath(each.query).name
        queries.append({"name": each.query, "file": file, "address": address, "cards": cards})
    note = f"Similarity is the cosine of the features of {index.description.model}."
    return render("similar", title="Most similar images", queries=queries, note=note)


# Exact


def unit_length(values: np.ndarray) -> np.ndarray:
    """Return rows (n, D) float32 of length 1; a row of zeros stays one."""
    values = np.asarray(values, np.float32)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return values / np.where(lengths == 0.0, 1.0, lengths)


def unit_chunks(index: FeatureIndex) -> Iterator[np.ndarray]:
    """Yield the stored features with length 1, many rows at a time: (up to 65,536, D) float32."""
    parts: list[np.ndarray] = []
    for part in index.parts():
        parts.append(unit_length(part))
        if sum(map(len, parts)) + len(part) > _CHUNK:
            yield np.concatenate(parts)
            parts = []
    if parts:
        yield np.concatenate(parts)


def nearest_rows(chunks: Iterable[np.ndarray], queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows with the largest cosine, exact.

    Args:
        chunks: rows of length 1, (n_i, D) float32 each; numbered one after the other. A list of them stays in memory
            for many calls; of an iterator one is in memory at a time.
        queries: (q, D) of length 1.
        count: rows of each query, at most as many as there are.

    Returns:
        (cosines (q, count) float32, rows (q, count) int64), the largest first, of equal ones the first.
    """
    best, rows, begin = np.zeros((len(queries), 0), np.float32), np.zeros((len(queries), 0), np.int64), 0
    for chunk in chunks:
        step = max(_NUMBERS_AT_ONCE // max(len(chunk), 1), 1)
        largest = [_largest(queries[first : first + step], chunk, count) for first in range(0, len(queries), step)]
        best = np.concatenate([best, np.concatenate([scores for scores, _ in largest])], axis=1)
        rows = np.concatenate([rows, np.concatenate([places for _, places in largest]) + begin], axis=1)
        order = np.lexsort((rows, -best), axis=1)[:, :count]
        best, rows = np.take_along_axis(best, order, 1), np.take_along_axis(rows, order, 1)
        begin += len(chunk)
    return best, rows


def _largest(queries: np.ndarray, chunk: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    scores = queries @ chunk.T  # (q, n)
    if scores.shape[1] <= count:
        return scores, np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    places = np.argpartition(-scores, count - 1, axis=1)[:, :count]
    least = np.take_along_axis(scores, places, 1).min(axis=1, keepdims=True)
    for row in np.flatnonzero(np.count_nonzero(scores >= least, axis=1) > count):  # any of equal ones were taken
        places[row] = np.argsort(-scores[row], kind="stable")[:count]
    return np.take_along_axis(scores, places, 1), places


# Approximate


class NeighborGraph:
    """An index of FAISS (HNSW in float16) beside the features, for many millions of images."""

    def __init__(self, index: FeatureIndex) -> None:
        """Read the graph, or make and write it, and print its recall."""
        faiss = needed_package("faiss", "--approximate needs", "faiss-cpu")
        content = zlib.crc32("".join(index.images.digests).encode())
        name = f"graph-{index.description.fingerprint}-{content}"
        graph, recall = index.folder / f"{name}.faiss", index.folder / f"{name}.json"
        if graph.is_file() and recall.is_file():
            self._graph = faiss.read_index(str(local_copy(graph)))
            self.recall = float(json.loads(recall.read_text())["recall_at_10"])
        else:
            kind, metric = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
            self._graph = faiss.IndexHNSWSQ(index.description.width, kind, _EDGES, metric)
            self._fill(index)
            self.recall = self._measured(index)
            with atomic_write(graph) as temporary:
                faiss.write_index(self._graph, str(temporary))
            write_text(recall, json.dumps({"recall_at_10": self.recall, "compared": _COMPARED}) + "\n")
        print(f"Approximate: the graph finds {self.recall:.1%} of the 10 nearest images ({_COMPARED} compared).")

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the same as `nearest_rows`; -1 for a row that was not found."""
        self._graph.hnsw.efSearch = max(_EFFORT, count)
        return self._graph.search(np.ascontiguousarray(queries, np.float32), count)

    def _fill(self, index: FeatureIndex) -> None:
        self._graph.hnsw.efConstruction = _EFFORT
        with Progress("Making the graph", sum(index.description.splits.values())) as progress:
            for chunk in unit_chunks(index):
                if not self._graph.is_trained:
                    self._graph.train(chunk)
                self._graph.add(chunk)
                progress.update(len(chunk))

    def _measured(self, index: FeatureIndex) -> float:
        """Return the share of the true 10 nearest that the graph finds, for stored images at equal distances."""
        chosen = np.unique(np.linspace(0, self._graph.ntotal - 1, _COMPARED).astype(np.int64))
        queries, begin = [], 0
        for chunk in unit_chunks(index):
            queries.append(chunk[chosen[(chosen >= begin) & (chosen < begin + len(chunk))] - begin])
            begin += len(chunk)
        count = min(10, self._graph.ntotal)
        exact = nearest_rows(unit_chunks(index), np.concatenate(queries), count)[1]
        graphs = self.nearest(np.concatenate(queries), count)[1]
        return float(np.mean([len({*one} & {*two}) / count for one, two in zip(exact, graphs, strict=True)]))


_SIDE = 144  # longest side of a small image, in pixels


class Thumbnails:
    """Small images of an index, as addresses inside a page."""

    def __init__(self, index: FeatureIndex) -> None:
        self._index = index

    def address(self, row: int, path: str, name: str) -> str:
        """Return the address of the image of a row, with its path and split; "" where it cannot be read any more."""
        if pathlib.Path(path).is_file() or self._source is None:
            return file_address(path)
        splits = self._index.description.splits
        split = self._source.train if name == "train" else self._source.evaluation
        index = row - (splits["train"] if name == "test" else 0)
        if split.num_examples != splits[name]:
            return ""
        return thumbnail_address(split.example(tf.constant(index, tf.int64))[0].numpy(), _SIDE)

    @functools.cached_property
    def _source(self) -> DataSet | None:
        data = self._index.description.data
        if data is None or data["data"].startswith(("folder:", "csv:")):
            return None
        with contextlib.suppress(UserError):  # moved: the page has no images
            return open_source(DataOptions.of_settings(data))
        return None


def write_cards(
    page: pathlib.Path, title: str, heading: str, images: Iterable[tuple[str, str, float]], note: str
) -> None:
    """Write a page of images, each with a label and a number."""
    cards = [_card(file_address(path), path, path, label, value) for path, label, value in images]
    queries = [{"name": heading, "file": "", "address": "", "cards": cards}]
    write_text(page, render("similar", title=title, queries=queries, note=note))


def _card(address: str, path: str, name: str, label: str, cosine: float) -> dict[str, object]:
    return {"address": address, "file": pathlib.PurePath(path).name, "name": name, "label": label, "cosine": cosine}


def file_address(path: str) -> str:
    """Return the address of a small image of a file; "" where it cannot be read."""
    try:
        return thumbnail_address(decode_with_pillow(pathlib.Path(path).read_bytes(), upright=True), _SIDE)
    except Exception:  # any of Pillow's, of a file that was changed
        return ""
